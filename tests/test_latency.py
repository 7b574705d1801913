"""What is timed and how it is summarised; never how fast anything is."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
import torch
from models import tiny_model

from kvbridge_hf.evaluation.controls import OwnCache, UnmappedHandoff
from kvbridge_hf.evaluation.errors import EvaluationError
from kvbridge_hf.evaluation.latency import PATHS, LatencyStats, measure_latency, time_paths


def test_statistics_of_known_times():
    stats = LatencyStats.of(range(1, 101))
    assert (stats.median, stats.repeats, stats.mean) == (50.5, 100, 50.5)
    assert stats.p95 == pytest.approx(95.05) and stats.p99 == pytest.approx(99.01)
    assert stats.cv == pytest.approx(np.std(range(1, 101), ddof=1) / 50.5)
    assert LatencyStats.of([2.0]).cv == 0.0
    with pytest.raises(EvaluationError):
        LatencyStats.of([])


def test_only_the_call_is_timed_and_paths_take_turns(monkeypatch):
    clock, order = [0.0], []

    def spend(seconds, name):
        clock[0] += seconds
        order.append(name)

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    paths = {
        "a": (lambda: spend(100.0, "prepare a") or "state", lambda state: spend(0.005, f"a of {state}")),
        "b": (lambda: spend(100.0, "prepare b"), lambda _: spend(0.002, "b")),
    }
    stats = time_paths(paths, warmup=1, repeats=2, synchronize=lambda: spend(0.001, "sync"))
    # The device is waited for before the clock starts and before it stops.
    assert stats["a"].median == pytest.approx(6.0) and stats["b"].median == pytest.approx(3.0)
    assert stats["a"].repeats == 2
    assert order == ["prepare a", "sync", "a of state", "sync", "prepare b", "sync", "b", "sync"] * 3


@pytest.mark.parametrize(("warmup", "repeats"), [(0, 0), (-1, 3)])
def test_wrong_rounds_are_refused(warmup, repeats):
    with pytest.raises(EvaluationError, match="repeats"):
        time_paths({}, warmup=warmup, repeats=repeats)


class Recording:
    """A handoff that reads its source cache and keeps what it was given."""

    def __init__(self, target):
        self.target, self.seen = target, []

    def __call__(self, input_ids, attention_mask, source_cache=None):
        self.seen.append((source_cache.get_seq_length(), source_cache))
        return OwnCache(self.target)(input_ids, attention_mask)


def test_the_four_paths():
    source, target = tiny_model("qwen3", num_layers=2), tiny_model("llama", seed=1)
    handoff = Recording(target)
    ids = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(0))
    result = measure_latency(source, target, handoff, ids, warmup=1, repeats=3)
    assert tuple(result["paths"]) == PATHS
    assert PATHS == ("target_prefill", "handoff", "source_prefill_handoff", "target_cache")
    for stats in result["paths"].values():
        assert set(stats) == {"median", "p95", "p99", "mean", "cv", "repeats"}
        assert 0 < stats["median"] <= stats["p95"] <= stats["p99"] and stats["repeats"] == 3
    json.dumps(result, allow_nan=False)
    assert result["settings"]["tokens"] == 9 and result["settings"]["batch"] == 2
    # Every handoff found all nine columns; one path reads them anew each time, the other reuses one cache.
    assert [length for length, _ in handoff.seen] == [9] * 8
    existing = {id(cache) for _, cache in handoff.seen[0::2]}
    fresh = [cache for _, cache in handoff.seen[1::2]]
    assert len(existing) == 1 and len({id(cache) for cache in fresh}) == 4


def test_a_prompt_needs_two_tokens_and_the_last_column_is_left():
    model = tiny_model("llama")
    with pytest.raises(EvaluationError, match="at least two"):
        measure_latency(model, model, UnmappedHandoff(model, model), torch.ones(1, 1, dtype=torch.long))

    def whole(input_ids, attention_mask, source_cache=None):
        return OwnCache(model, num_native_suffix=0)(input_ids, attention_mask)

    result = measure_latency(model, model, whole, torch.arange(3, 8)[None], warmup=0, repeats=1)
    assert result["paths"]["handoff"]["median"] > 0
