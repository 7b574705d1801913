"""What a handoff was asked to do (`HandoffPolicy`) and what it did (`HandoffReport`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from .errors import GenerateArgumentError
from .guard.settings import Gates, Shadow
from .repair_choice import CHOICES

ON_FAILURE = ("error", "prefill")


class HandoffFallbackWarning(UserWarning):
    """A handoff was given up and the target read the prompt itself."""


@dataclass(frozen=True)
class HandoffPolicy:
    """How a bridge hands over.

    Args:
        on_failure: `"error"` raises when the pair or the source's cache does not fit; `"prefill"` lets the target read
            the prompt itself, with `status="fallback"` in the report and a warning once per reason. In that case every
            layer is mapped before the target starts, so that a failing map is noticed in time.
        num_sinks: first tokens that the target reads itself; None takes the mapper's own number.
        num_native_suffix: last columns of a prompt that the target runs on top of the mapped prefix; None takes the
            mapper's own number. `generate` needs at least one for its first logits, and gets it.
        native_fraction: share of the mapped tokens that the target computes itself after all, on top of the map (0:
            the map alone, 1: the target's own prefill); None takes the mapper's own number.
        repair: how these tokens are chosen, see [`kvbridge_hf.repair_choice`]; None takes the mapper's own way.
        question_tokens: last tokens of a prompt that count as its question for that choice, at least; where the cache
            covers less of the prompt, all that it does not cover. Count the closing words of a chat template in.
        native_layers: lowest layers that the target computes itself for all tokens; None takes the mapper's number.
        repair_layers: lowest layers in which the chosen tokens are recomputed; above them they stay mapped, and the
            price falls with them. None takes the mapper's number; as many as the target has, or more, means all.
        gates: what is checked, see [`Gates`].
        on_rejection: what a gate's no leads to. `"prefill"`: the target reads the prompt itself, as with `on_failure`
            (where there are no tokens to read, the exception is raised). `"error"` raises [`HandoffRejected`].
        shadow: which requests are also run the target's own way and compared, see [`Shadow`].
        on_event: called with every event, see [`kvbridge_hf.guard.events`].
    """

    on_failure: str = "error"
    num_sinks: int | None = None
    num_native_suffix: int | None = None
    native_fraction: float | None = None
    repair: str | None = None
    question_tokens: int = 8
    native_layers: int | None = None
    repair_layers: int | None = None
    gates: Gates = field(default_factory=Gates)
    on_rejection: str = "prefill"
    shadow: Shadow | None = None
    on_event: Callable[[dict[str, Any]], Any] | None = None

    def __post_init__(self) -> None:
        for name in ("on_failure", "on_rejection"):
            if getattr(self, name) not in ON_FAILURE:
                raise GenerateArgumentError(f"{name} must be one of {ON_FAILURE}, got {getattr(self, name)!r}.")
        for name, kind in (("gates", Gates), ("shadow", (Shadow, type(None)))):
            if not isinstance(getattr(self, name), kind):
                raise GenerateArgumentError(
                    f"{name} must be a {name.capitalize()} object (Gates.off() checks nothing), got "
                    f"{getattr(self, name)!r}."
                )
        check_native_fraction(self.native_fraction)
        check_repair(self.repair)
        for name in ("num_sinks", "num_native_suffix", "native_layers", "question_tokens"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise GenerateArgumentError(f"{name} must be a non-negative integer or None, got {value!r}.")
        if self.repair_layers is not None and (not isinstance(self.repair_layers, int) or self.repair_layers < 1):
            raise GenerateArgumentError(
                f"repair_layers must be a positive integer or None, got {self.repair_layers!r}."
            )

    def wanted(self, name: str, config: Any) -> Any:
        """The policy's own `num_sinks`, `repair`, ... or, where that is None, what a mapper's config recommends."""
        own = getattr(self, name)
        return getattr(config, name) if own is None else own


def check_native_fraction(fraction: Any) -> None:
    """Raise GenerateArgumentError unless it is None or a share between 0 and 1."""
    if fraction is None:
        return
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
        raise GenerateArgumentError(
            f"native_fraction must lie between 0 (the map alone) and 1 (the target's prefill), got {fraction!r}."
        )


def check_repair(repair: Any) -> None:
    """Raise GenerateArgumentError unless it is None or names ways to choose, joined by `+`."""
    if repair is None:
        return
    if not isinstance(repair, str) or not set(repair.split("+")) <= set(CHOICES):
        raise GenerateArgumentError(f"repair must be one of {CHOICES}, or several joined by '+', got {repair!r}.")


@dataclass
class HandoffReport:
    """What one handoff did. Token counts are real tokens of all rows together.

    Args:
        status: `"ok"`, or `"fallback"` when the target read the prompt itself.
        reason: why it fell back.
        gate: name of the gate that rejected.
        tokens_mapped: prompt tokens whose keys and values come from the source.
        tokens_native: all other prompt tokens: first ones (`num_sinks`), those the source has not read, the suffix.
        tokens_repaired: those of them that were mapped first and then recomputed (`native_fraction`).
        native_layers: lowest layers that the target computed itself for all tokens.
        repair_layers: lowest layers in which tokens were recomputed; None where in all, or none were.
        times: seconds of each part, by the host's clock: `source_prefill`, `native_prefix`, `map` (grows as layers are
            mapped), `native_layers`, `repair_choice`, `repair`, `own_prefill` (fallback of [`KVBridge.handoff`]). On
            an accelerator work may still be queued when a part ends; measure latency around the whole call.
        gates: what each gate saw.
        notes: what a reader should know and no gate judges, such as unused columns of the source's cache.
    """

    status: str = "ok"
    reason: str | None = None
    gate: str | None = None
    tokens_mapped: int = 0
    tokens_native: int = 0
    tokens_repaired: int = 0
    native_layers: int = 0
    repair_layers: int | None = None
    times: dict[str, float] = field(default_factory=dict)
    gates: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def add_time(self, part: str, seconds: float) -> None:
        """Add to a part's time; several threads may map layers."""
        with self._lock:
            self.times[part] = self.times.get(part, 0.0) + seconds

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time of the `with` block to a part."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add_time(part, time.perf_counter() - started)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> HandoffReport:
        return HandoffReport(**asdict(self))

    def __reduce__(self) -> Any:
        return _rebuild, (asdict(self),)


def _rebuild(fields: dict[str, Any]) -> HandoffReport:
    return HandoffReport(**fields)


__all__ = ["HandoffFallbackWarning", "HandoffPolicy", "HandoffReport"]
