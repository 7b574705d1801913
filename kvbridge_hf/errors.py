"""Every error the library raises on purpose.

All of them derive from [`KVBridgeError`], so one `except` clause catches them, and from the builtin a Python user
would expect for the kind (`ValueError`, `OSError`). A message says what was wrong, the value seen and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class KVBridgeError(Exception):
    """Base class of all errors of this library."""


class PairMismatchError(KVBridgeError, ValueError):
    """Source and target do not fit together.

    Args:
        message (`str`): What to tell the user.
        reasons (sequence of `PairReason`, *optional*): The single reasons, as `check_pair` found them.
    """

    def __init__(self, message: str, reasons: Sequence[Any] = ()):
        super().__init__(message)
        self.reasons = tuple(reasons)


class UnsupportedModelError(KVBridgeError, ValueError):
    """One model has a cache that cannot be handed over, whatever the other model is."""


class FingerprintError(KVBridgeError, ValueError):
    """A mapper met another checkpoint, revision or tokenizer than the one it was fitted for."""


class ModelNotFoundError(KVBridgeError, OSError):
    """A name is neither a folder, a config file, a known model nor a repository that can be reached."""


class ArtifactError(KVBridgeError, OSError):
    """A saved mapper is damaged or malformed."""


class CacheMismatchError(KVBridgeError, ValueError):
    """A source cache does not fit the tokens, the mask or the model it is said to belong to."""


class CalibrationError(KVBridgeError, ValueError):
    """Calibration data or settings cannot give a usable mapper."""


class FitConfigError(CalibrationError):
    """A fit setting is out of range, or two settings exclude each other."""


class GenerateArgumentError(KVBridgeError, ValueError):
    """`generate(bridge=...)` was called with arguments that cannot work together."""


class HandoffRejected(KVBridgeError):
    """A gate rejected a handoff and the policy asked for an error instead of a fallback.

    Args:
        message (`str`): What to tell the user.
        report (`HandoffReport`, *optional*): The report of the rejected handoff.
    """

    def __init__(self, message: str, report: Any = None):
        super().__init__(message)
        self.report = report


__all__ = [
    "ArtifactError",
    "CacheMismatchError",
    "CalibrationError",
    "FingerprintError",
    "FitConfigError",
    "GenerateArgumentError",
    "HandoffRejected",
    "KVBridgeError",
    "ModelNotFoundError",
    "PairMismatchError",
    "UnsupportedModelError",
]
