"""The study of methods: its rows are valid, and its tables and plots are a function of the stored results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvbridge_hf import HandoffPolicy
from kvbridge_hf.mappers.config import FitConfig

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import study_methods
    import study_report

    yield study_methods, study_report
    for name in ("study_methods", "study_report"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("quick", [True, False])
def test_rows_are_valid_and_differ(scripts, quick):
    cases = scripts[0].cases(4, 6, quick)
    assert len({(case.group, case.name) for case in cases}) == len(cases)
    for case in cases:
        config = FitConfig.from_dict(json.loads(json.dumps(case.fit)))
        assert config.top_k is None or config.top_k <= 4
        HandoffPolicy(**case.policy)
    assert {case.name for case in cases if case.group == "preset"} >= {"paper", "cachebridge", "kvlrelay", "default"}


def result(group, name, accuracy, kl, cost, seed=0):
    def interval(value):
        return {"estimate": value, "low": value - 0.1, "high": value + 0.1}

    def condition(right):
        own = {metric: interval(right) for metric in ("accuracy", "nll", "top1", "answer_kl")}
        return {**own, "kl": interval(kl), "attention_cosine": {"mean": 0.9, "min": 0.8}}

    gap = (accuracy - 0.2) / 0.6
    report = {
        "data": {
            "questions": 8,
            "contexts": 4,
            "context_tokens": 50.0,
            "documents": 4,
            "prefix_tokens": 60.0,
            "chance": 0.1,
        },
        "bootstrap": {"confidence": 0.95, "num_resamples": 100, "seed": 0},
        "conditions": {
            "handoff": condition(accuracy),
            "target": condition(0.8),
            "source": condition(0.2),
            "no_context": condition(0.1),
            "native_only": condition(0.15),
        },
        "headline": {
            "gap_recovered": interval(gap),
            "retention": interval(accuracy / 0.8),
            "floor_normalised_retention": interval((accuracy - 0.1) / 0.7),
        },
        "cost": {"share_of_prefill": cost},
    }
    right = round(8 * accuracy)
    items = {"correct": [1] * right + [0] * (8 - right), "kl": [kl, kl + 0.01, kl - 0.01, kl], "answer_kl": [kl] * 8}
    return {
        **{"pair": "s-to-m", "group": group, "name": name, "seed": seed, "split": "test", "items": items},
        **{"report": report, "fit_seconds": 1.0, "bytes": 4096},
    }


def test_tables_and_plots_regenerate_from_the_results(scripts, tmp_path):
    pytest.importorskip("matplotlib")
    results = [
        result("preset", "paper", 0.25, 0.4, 0.1),
        result("preset", "default", 0.75, 0.1, 0.2),
        result("fraction", "0", 0.25, 0.3, 0.05),
        result("fraction", "0.1", 0.75, 0.2, 0.15),
        result("fraction", "1", 0.8, 0.0, 1.05),
        result("choice", "random", 0.5, 0.3, 0.15),
    ]
    written = []
    for folder, entries in ((tmp_path / "a", results), (tmp_path / "b", json.loads(json.dumps(results[::-1])))):
        folder.mkdir()
        scripts[1].write(entries, folder, quick=True)
        written.append({path.name: path.read_bytes() for path in sorted(folder.rglob("*.*")) if path.is_file()})
    assert written[0].keys() == written[1].keys() and len(written[0]) == 3
    assert written[0] == written[1]
    text = written[0]["methods.md"].decode()
    assert "| default | 20.0 % | 75.0 % [65.0, 85.0] | 91.7 %" in text
    assert "| default - paper | -0.3000 [-0.3000, -0.3000] | 50.0 % [" in text
    scripts[1].write(results, tmp_path / "a", quick=True)
    assert (tmp_path / "a" / "methods.md").read_text() == text
