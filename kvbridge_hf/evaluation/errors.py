"""The one error of the evaluation package."""

from __future__ import annotations

from ..errors import KVBridgeError


class EvaluationError(KVBridgeError, ValueError):
    """The data or the settings of a judgement make the number that was asked for meaningless."""
