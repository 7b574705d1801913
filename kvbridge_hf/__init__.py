"""Hand a conversation from one language model to another by mapping its KV cache.

Importing this package makes `generate()` of every Transformers model understand `bridge=`. What is not needed for that
is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import generate_hook
from .cache_kvbridge import BridgedCache, BridgedLayer
from .configuration_kvbridge import KVBridgeConfig
from .errors import KVBridgeError
from .generation_kvbridge import KVBridge
from .geometry import KVGeometry, check_pair
from .guard.settings import Gates, Shadow
from .handoff import HandoffFallbackWarning, HandoffPolicy, HandoffReport
from .modeling_kvbridge import KVBridgeMapper

__version__ = "0.1.0.dev0"

generate_hook.install()

# name -> module that has it
_LAZY = {
    "FitConfig": "mappers.config",
    "HandoffSession": "session",
    "fit_mapper": "calibration.driver",
}

if TYPE_CHECKING:
    from .calibration.driver import fit_mapper
    from .mappers.config import FitConfig
    from .session import HandoffSession


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])


__all__ = [
    "BridgedCache",
    "BridgedLayer",
    "FitConfig",
    "Gates",
    "HandoffFallbackWarning",
    "HandoffPolicy",
    "HandoffReport",
    "HandoffSession",
    "KVBridge",
    "KVBridgeConfig",
    "KVBridgeError",
    "KVBridgeMapper",
    "KVGeometry",
    "Shadow",
    "check_pair",
    "fit_mapper",
]
