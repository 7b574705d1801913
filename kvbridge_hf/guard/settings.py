"""What the gates of a handoff check (`Gates`), and which handoffs are also run the target's way (`Shadow`)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import GenerateArgumentError

POSITION_RANGE = ("ignore", "warn", "refuse")


@dataclass(frozen=True)
class Gates:
    """Checks of a handoff, each of which can reject it.

    The calibrated gates (`mapped_finite`, `magnitude`, `suffix_likelihood`) need every layer mapped before the target
    starts. None switches them on where the mapper carries calibrated defaults (see [`calibrate_gates`]), and leaves
    mapping lazy where it does not.

    Args:
        max_batch_size: rows of a batch.
        min_tokens: a batch whose longest row is shorter is read by the target itself, as that is faster.
        max_tokens: tokens of the longest row.
        position_range: what to do beyond the context length seen in calibration: `"ignore"`, `"warn"` (once, and a
            note in each report) or `"refuse"`.
        source_finite: the source's cache holds no NaN and no infinity where tokens stand.
        mapped_finite: neither does the mapped one.
        magnitude: the norms of mapped keys and values stay in each layer's calibrated range.
        max_outside: the share of a row's tokens that may leave that range in the worst layer; None takes the mapper's
            own.
        suffix_likelihood: what the target expects at the prompt's last tokens is as near to what the source expects
            there, and what it recomputes is as near to what was mapped, as in calibration.
        max_suffix_score: the score (see [`SuffixModel`]) above which it is not; None takes the mapper's own. 1 is the
            calibrated threshold.
        max_nll, max_excess: limits of the same gate in nats a token, which need no calibration: mean negative
            log-likelihood of the suffix, and how far it exceeds the source's.
        latency_budget: seconds, by the host's clock, that a handoff may take until the target starts. It is asked
            after each part and each mapped layer; what is used up by then is lost, so keep it near the target's own
            prefill.
        accept: `accept(cache, report)`, called last, before the target starts. False or a text (the reason) rejects.
    """

    max_batch_size: int | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    position_range: str = "warn"
    source_finite: bool = True
    mapped_finite: bool | None = None
    magnitude: bool | None = None
    max_outside: float | None = None
    suffix_likelihood: bool | None = None
    max_suffix_score: float | None = None
    max_nll: float | None = None
    max_excess: float | None = None
    latency_budget: float | None = None
    accept: Callable[[Any, Any], Any] | None = None

    def __post_init__(self) -> None:
        if self.position_range not in POSITION_RANGE:
            raise GenerateArgumentError(
                f"position_range must be one of {POSITION_RANGE}, got {self.position_range!r}."
            )
        for name in ("max_batch_size", "min_tokens", "max_tokens"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise GenerateArgumentError(f"{name} must be a positive integer or None, got {value!r}.")
        for name in ("max_outside", "max_suffix_score", "max_nll", "max_excess", "latency_budget"):
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value)
            ):
                raise GenerateArgumentError(f"{name} must be a number or None, got {value!r}.")
        if self.accept is not None and not callable(self.accept):
            raise GenerateArgumentError(f"accept must be callable as accept(cache, report), got {self.accept!r}.")

    @classmethod
    def off(cls) -> Gates:
        """No check at all: what a judgement of the map itself wants."""
        return cls(
            position_range="ignore",
            source_finite=False,
            mapped_finite=False,
            magnitude=False,
            suffix_likelihood=False,
        )

    @property
    def has_limits(self) -> bool:
        """Whether the likelihood gate has limits of its own."""
        return self.max_nll is not None or self.max_excess is not None


@dataclass(frozen=True)
class Shadow:
    """Which handoffs are compared with the target's own prefill (which they then cost on top).

    Args:
        share: share of the requests, 0 to 1.
        salt: another salt chooses other requests.
    """

    share: float
    salt: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, (int, float)) or not 0 <= self.share <= 1:
            raise GenerateArgumentError(f"Shadow.share must be between 0 and 1, got {self.share!r}.")

    def selects(self, request_id: str | bytes) -> bool:
        """Whether a request is chosen: a function of its id and the salt alone, so a retry decides alike."""
        digest = hashlib.sha256(self.salt.encode() + b"\0")
        digest.update(request_id.encode() if isinstance(request_id, str) else request_id)
        return int.from_bytes(digest.digest()[:8], "big") < self.share * 2**64


#: Names under which gates stand in a report, in the order in which they are asked.
GATE_NAMES = (
    "max_batch_size",
    "min_tokens",
    "max_tokens",
    "position_range",
    "source_finite",
    "latency_budget",
    "mapped_finite",
    "magnitude",
    "suffix_likelihood",
    "accept",
)

__all__ = ["GATE_NAMES", "Gates", "Shadow"]
