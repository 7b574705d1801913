"""The study of methods: its rows are valid, and its tables and plots are a function of the stored results."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvbridge_hf import HandoffPolicy
from kvbridge_hf.mappers.config import FitConfig

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import study_methods
    import study_report
    import study_rows

    yield study_rows, study_report, study_methods
    for name in ("study_methods", "study_report", "study_rows", "study_plots", "study_pair", "lookup_texts"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("quick", [True, False])
def test_rows_are_valid_and_differ(scripts, quick):
    cases = scripts[0].cases(4, 6, quick)
    assert len({(case.group, case.name) for case in cases}) == len(cases)
    for case in cases:
        config = FitConfig.from_dict(json.loads(json.dumps(case.fit)))
        assert config.top_k is None or config.top_k <= 4
        HandoffPolicy(**case.policy)
    chunked = {group for groups in scripts[0].CHUNKS for group in groups}
    assert {case.group for case in cases} <= chunked and set(scripts[1].TITLES) == chunked
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
            "gap": interval(0.6),
            "gap_recovered": interval(gap),
            "retention": interval(accuracy / 0.8),
            "floor_normalised_retention": interval((accuracy - 0.1) / 0.7),
        },
        "cost": {"share_of_prefill": cost},
    }
    right = round(8 * accuracy)
    items = {"correct": [1] * right + [0] * (8 - right), "kl": [kl, kl + 0.01, kl - 0.01, kl]}
    items |= {"tokens": [32] * 4, "contexts": [0, 0, 1, 1, 2, 2, 3, 3]}
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
        result("calibration", "15", 0.25, 0.3, 0.05),
        result("length", "fast, 128 tokens", 0.25, 0.35, 0.05),
        result("length", "fast, 256 tokens", 0.25, 0.45, 0.05),
        result("preset", "default", 0.5, 0.2, 0.2, seed=1),
    ]
    written = []
    for folder, entries in ((tmp_path / "a", results), (tmp_path / "b", json.loads(json.dumps(results[::-1])))):
        folder.mkdir()
        scripts[1].write(entries, folder, quick=True)
        written.append({path.name: path.read_bytes() for path in sorted(folder.rglob("*.*")) if path.is_file()})
    assert written[0].keys() == written[1].keys() and len(written[0]) == 4
    assert written[0] == written[1]
    text = written[0]["methods.md"].decode()
    assert "| default | 20.0 % | 75.0 % [65.0, 85.0] | 91.7 %" in text
    # Over two seeds: KL 0.1 and 0.2, three quarters and half of the questions right.
    assert "| default - paper | -0.2500 [-0.2500, -0.2500] | 37.5 % [" in text
    assert "| default | 2 | 0.1500 ± 0.0500 | 62.5 ± 12.5 |" in text
    assert "| s-to-m, default | 0.1500 | 0.4000 (paper) | 0.38 |" in text
    scripts[1].write(results, tmp_path / "a", quick=True)
    assert (tmp_path / "a" / "methods.md").read_text() == text


def test_a_gap_that_is_none_is_not_recovered_and_the_front_is_the_best_at_its_cost(scripts):
    clear, doubtful = result("preset", "default", 0.75, 0.1, 0.2), result("preset", "paper", 0.25, 0.4, 0.1)
    doubtful["report"]["headline"]["gap"] = {"estimate": 0.05, "low": -0.02, "high": 0.1}
    assert scripts[1].gap(clear)["estimate"] == pytest.approx(0.55 / 0.6) and scripts[1].gap(doubtful) is None
    dearer = result("preset", "quality", 0.7, 0.1, 0.3)
    assert scripts[1].front_of([clear, doubtful, dearer]) == {"default", "paper"}


def test_a_second_run_gives_the_same_and_does_nothing_twice(scripts, tmp_path, monkeypatch, capsys):
    small = ["--pairs", "l-to-s", "--groups", "sinks", "--rows", "0", "4", "--questions", "6", "--documents", "3"]
    given = ["--output", str(tmp_path), "--texts", "12", *small]
    command = [sys.executable, str(SCRIPTS / "study_methods.py"), *given]
    first = subprocess.run(command, capture_output=True, text=True, timeout=300)
    drawn = importlib.util.find_spec("matplotlib") is not None
    assert first.returncode == (0 if drawn else 1), first.stderr
    assert drawn or "need matplotlib" in first.stderr  # the results are there all the same
    path = tmp_path / "methods.json"
    stored = json.loads(path.read_text())
    assert len(stored) == 2 and first.stdout.count("sinks") == 2

    def run(*more):
        threads = torch.get_num_threads()
        monkeypatch.setattr(sys, "argv", ["study_methods.py", *given, *more])
        try:
            scripts[2].main()
        except SystemExit as ended:
            return ended.code, capsys.readouterr().out
        finally:
            torch.set_num_threads(threads)
        return 0, capsys.readouterr().out

    code, told = run()
    assert "sinks" not in told and (code == 0 or not drawn) and json.loads(path.read_text()) == stored
    code, told = run("--again", "2")
    assert code == 0 and told.count("same ") == 2
    for entry in stored.values():
        entry["digest"] = "another"
    path.write_text(json.dumps(stored))
    code, told = run("--again", "1")
    assert code == 1 and "DIFFERS" in told
