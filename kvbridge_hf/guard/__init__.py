"""Gates that can reject a handoff, shadow runs, events, and the calibration of thresholds.

`settings`, `gates`, `shadow` and `events` stand below the bridge, which asks them; `calibrate` and `tuning` stand
above it and are imported when they are asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .settings import Gates, Shadow

_LAZY = {"calibrate_gates": "calibrate", "tune_gate": "tuning"}

if TYPE_CHECKING:
    from .calibrate import calibrate_gates
    from .tuning import tune_gate


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Gates", "Shadow", "calibrate_gates", "tune_gate"]
