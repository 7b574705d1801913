"""Latency of the four ways to the first logits.

    target_prefill           the target reads the prompt itself
    handoff                  the source's cache is there: map it, and let the target read the rest
    source_prefill_handoff   the source reads the prompt first
    target_cache             the target's own cache is there, as if it had read the prompt before

Each is timed from the call to the first logits being there (the device is synchronised), so the map, its copies and
the target's first forward are all inside. The paths take turns, so that a machine that slows down slows all of them.
What a path starts from (a cache, a copy of it) is made outside the time.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Cache, PreTrainedModel

from .controls import OwnCache, leave_last_column
from .errors import EvaluationError
from .runs import run

PATHS = ("target_prefill", "handoff", "source_prefill_handoff", "target_cache")


@dataclass(frozen=True)
class LatencyStats:
    """Milliseconds of one path.

    Attributes:
        median, p95, p99, mean: of the repeats.
        cv: coefficient of variation, standard deviation (n - 1) over mean; above some 0.1 the machine was not quiet.
        repeats: number of timed calls. p99 of fewer than 100 is close to the slowest call.
    """

    median: float
    p95: float
    p99: float
    mean: float
    cv: float
    repeats: int

    @classmethod
    def of(cls, milliseconds: Any) -> LatencyStats:
        """Statistics of a list of times; percentiles are numpy's linear ones."""
        times = np.asarray(milliseconds, dtype=np.float64)
        if times.size == 0:
            raise EvaluationError("No times were taken; repeats must be at least 1.")
        spread = times.std(ddof=1) if times.size > 1 else 0.0
        median, p95, p99 = np.percentile(times, [50, 95, 99])
        mean = times.mean()
        return cls(float(median), float(p95), float(p99), float(mean), float(spread / mean), int(times.size))

    def to_dict(self) -> dict[str, float | int]:
        return dict(vars(self))


def time_paths(
    paths: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]],
    *,
    warmup: int = 3,
    repeats: int = 20,
    synchronize: Callable[[], None] = lambda: None,
) -> dict[str, LatencyStats]:
    """Times several paths in turns.

    Args:
        paths: name -> (prepare, call): `call(prepare())` is the path, `prepare` runs outside the time.
        warmup: rounds that are not counted.
        repeats: rounds that are.
        synchronize: waits until the device is done.
    """
    if repeats < 1 or warmup < 0:
        raise EvaluationError(f"repeats must be at least 1 and warmup at least 0, got {repeats} and {warmup}.")
    times: dict[str, list[float]] = {name: [] for name in paths}
    collecting = gc.isenabled()
    try:
        for turn in range(warmup + repeats):
            # The collector strikes at random; it runs between the rounds and not inside a path.
            gc.collect()
            gc.disable()
            for name, (prepare, call) in paths.items():
                start_from = prepare()
                synchronize()
                start = time.perf_counter()
                call(start_from)
                synchronize()
                if turn >= warmup:
                    times[name].append((time.perf_counter() - start) * 1e3)
            if collecting:
                gc.enable()
    finally:
        if collecting:
            gc.enable()
    return {name: LatencyStats.of(values) for name, values in times.items()}


@torch.no_grad()
def measure_latency(
    source_model: PreTrainedModel,
    target_model: PreTrainedModel,
    handoff: Callable[..., Cache | None],
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    warmup: int = 3,
    repeats: int = 20,
) -> dict[str, Any]:
    """Times the four paths for one prompt (or batch).

    Args:
        source_model, target_model: the pair.
        handoff: called as `handoff(input_ids, attention_mask, source_cache=...)`, a [`BridgeHandoff`] for one; a
            handoff that takes no source cache cannot be timed.
        input_ids, attention_mask: `(batch, tokens)`, at least two tokens.
        warmup, repeats: rounds.

    Returns:
        `paths`: name -> statistics in milliseconds, in the order of `PATHS`; `settings`: tokens, batch, repeats,
        devices, dtypes and threads; `speedup`: median of the target's prefill over the medians of the handoff paths.

    Raises:
        EvaluationError: the prompt is too short.
    """
    if input_ids.shape[1] < 2:
        raise EvaluationError(f"A prompt of {input_ids.shape[1]} tokens has nothing to hand over; give at least two.")
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    devices = {source_model.device, target_model.device}

    def synchronize() -> None:
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def first_logits(cache: Cache | None) -> torch.Tensor:
        leave_last_column(cache, input_ids.shape[1])
        return run(target_model, cache, input_ids, mask).logits

    def read_by_source() -> Cache:
        cache = OwnCache(source_model, num_native_suffix=0)(input_ids, mask)
        assert cache is not None
        return cache

    own_cache = OwnCache(target_model)(input_ids, mask)
    source_cache = read_by_source()

    def nothing() -> None:
        return None

    paths: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "target_prefill": (nothing, lambda _: first_logits(None)),
        # A handoff reads the source's cache and does not write to it, so no copy is needed.
        "handoff": (
            nothing,
            lambda _: first_logits(handoff(input_ids, mask, source_cache=source_cache)),
        ),
        "source_prefill_handoff": (
            nothing,
            lambda _: first_logits(handoff(input_ids, mask, source_cache=read_by_source())),
        ),
        # The forward lengthens the cache, so each call gets its own copy.
        "target_cache": (lambda: copy.deepcopy(own_cache), first_logits),
    }
    stats = time_paths(paths, warmup=warmup, repeats=repeats, synchronize=synchronize)
    prefill = stats["target_prefill"].median
    return {
        "paths": {name: stats[name].to_dict() for name in PATHS},
        "speedup": {name: prefill / stats[name].median for name in ("handoff", "source_prefill_handoff")},
        "settings": {
            "tokens": int(input_ids.shape[1]),
            "batch": int(input_ids.shape[0]),
            "warmup": warmup,
            "repeats": repeats,
            "device": sorted({str(device) for device in devices}),
            "dtype": [str(model.dtype).removeprefix("torch.") for model in (source_model, target_model)],
            "threads": torch.get_num_threads(),
        },
    }
