"""ZeroGPU: `gpu` marks what needs the GPU that a Space borrows for the length of a call; elsewhere it does nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

try:
    # Has to come before anything touches CUDA. In a checkout a folder has the same name and no GPU in it.
    from spaces import GPU
except ImportError:
    GPU = None

#: Whether calls marked with `gpu` run in a process of their own, so that what they change stays there.
ON_ZERO = GPU is not None and os.environ.get("SPACES_ZERO_GPU", "").lower() in ("1", "true")


def gpu(seconds: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator of a function or generator that runs models for up to `seconds`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        return function if GPU is None else GPU(duration=seconds)(function)

    return decorate


__all__ = ["ON_ZERO", "gpu"]
