"""Whole calibrations from folders: plans, resumption, locks, bad data and bad luck."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import time
import weakref
from pathlib import Path

import pytest
import torch
from calibration_jobs import (
    LENGTH,
    forkserver,
    interrupted_run,
    job_arguments,
    make_job,
    random_texts,
    relative_error,
    run_command_in_child,
    run_in_child,
    wait_for,
    weights_of,
    word_tokenizer,
    write_jsonl,
    write_pair,
)
from models import tiny_model
from transformers import AutoModelForCausalLM

from kvbridge_hf.calibration.driver import fit_mapper
from kvbridge_hf.calibration.interruption import FolderLock
from kvbridge_hf.calibration.run import run_calibration
from kvbridge_hf.errors import CalibrationError, FitConfigError
from kvbridge_hf.modeling_kvbridge import KVBridgeMapper


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair"))


def run(job, **more):
    return run_calibration(job, progress=False, say=lambda text: None, **more)


def sequences_of(job) -> list[torch.Tensor]:
    """The job's sequences, tokenized here."""
    lines = Path(job.data.datasets[0].name).read_text(encoding="utf-8").splitlines()
    tokenizer = word_tokenizer()
    return [torch.tensor([tokenizer(json.loads(line)["text"])["input_ids"][:LENGTH]]) for line in lines]


def direct_fit(job) -> KVBridgeMapper:
    """The same mapper from models and tokens in memory, one sequence at a time."""
    models = [AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32) for name in (job.source, job.target)]
    return fit_mapper(*models, sequences_of(job), job.fit, progress=False)


SETTINGS = [
    {"support": "full_head"},
    {"support": "head_local", "weighting": "sensitivity", "token_stride": 2},
    {"metric": "query", "lambda_search": True, "num_sinks": 2},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=["full-head", "sensitivity", "query-metric"])
def test_all_plans_give_the_mapper_of_a_fit_in_memory(pair, tmp_path, settings):
    plans = {"a": {}, "b": {"target_blocks": 3}, "c": {}}
    expected = direct_fit(make_job(pair, tmp_path / "none", **settings))
    weights = {name: parameter.detach() for name, parameter in expected.named_parameters()}
    for plan, more in plans.items():
        summary = run(make_job(pair, tmp_path / plan, plan=plan, **more, **settings))
        mapper = KVBridgeMapper.from_pretrained(tmp_path / plan)
        assert mapper.config.selected_layers == expected.config.selected_layers == summary["selected_layers"]
        assert mapper.config.head_assignment == expected.config.head_assignment
        assert relative_error(weights_of(tmp_path / plan), weights) < 1e-6
        for name in ("r2", "heldout_r2"):
            for kind in ("keys", "values"):
                assert mapper.config.fit[name][kind] == pytest.approx(expected.config.fit[name][kind], abs=1e-6)
        assert mapper.config.fit["tokens"] == expected.config.fit["tokens"] == summary["tokens"]
        assert mapper.config.fit["dataset"]["sequences"] == 30
        if settings.get("weighting") == "sensitivity":
            assert len(mapper.config.fit["sensitivity_uniform_share"]) == 5
        assert mapper.config.target_geometry == expected.config.target_geometry
        left = {path.name for path in (tmp_path / plan / ".calibration").iterdir()}
        assert left == {"bad_sequences.json", "data", "identity.json", "lock", "summary.json"}


def test_methods_that_need_everything_at_once_run_too_and_refuse_blocks(pair, tmp_path):
    settings = {"method": "low_rank", "rank": 4, "metric": "query"}
    with pytest.raises(FitConfigError, match="low_rank.* all target layers at once: use --plan a"):
        run(make_job(pair, tmp_path / "b", plan="b", **settings))
    with pytest.raises(FitConfigError, match="mlp.* one process and --plan a"):
        run(make_job(pair, tmp_path / "b", plan="c", method="mlp"))
    expected = direct_fit(make_job(pair, tmp_path / "none", **settings))
    weights = {name: parameter.detach() for name, parameter in expected.named_parameters()}
    for plan in ("a", "c"):
        run(make_job(pair, tmp_path / plan, plan=plan, **settings))
        assert relative_error(weights_of(tmp_path / plan), weights) < 1e-6
        config = KVBridgeMapper.from_pretrained(tmp_path / plan).config
        assert config.selected_layers == expected.config.selected_layers


def test_a_fit_holds_the_moments_of_one_target_layer_at_a_time(pair, tmp_path, monkeypatch):
    """Those of all layers would be far more than any plan counts on."""
    from kvbridge_hf.mappers import ridge

    fit_layer, held, alive = ridge.fit_layer, [], []

    def watched(*arguments):
        alive.append(sum(reference() is not None for reference in held))
        fit = fit_layer(*arguments)
        held.append(weakref.ref(fit.moments.gram))
        return fit

    monkeypatch.setattr(ridge, "fit_layer", watched)
    run(make_job(pair, tmp_path / "out", selection="greedy"))
    assert alive == [0] * 5


# ---- stopped and resumed --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def children():
    return forkserver()


@pytest.mark.parametrize("plan", ["a", "c"])
def test_killed_at_random_moments_a_run_ends_with_the_same_bits(pair, tmp_path, children, plan):
    settings = {"plan": plan, "weighting": "sensitivity", "support": "head_local", "batch_size": 2}
    run(make_job(pair, tmp_path / "whole", **settings))
    job = make_job(pair, tmp_path / "killed", checkpoint_every=2, **settings)
    draw = random.Random(plan)
    state = job.state_folder / "process-00000"
    for _ in range(4):
        child = children.Process(target=run_in_child, args=(job, 0.1))
        child.start()
        wait_for(lambda child=child: state.exists() or not child.is_alive())
        time.sleep(draw.uniform(0, 2.0))
        child.kill()
        child.join()
        assert not (job.output / "config.json").exists() or child.exitcode == 0
    run(job)
    expected = weights_of(tmp_path / "whole")
    for name, tensor in weights_of(tmp_path / "killed").items():
        assert torch.equal(tensor, expected[name])


def test_ctrl_c_saves_the_state_and_exits_with_130(pair, tmp_path, children):
    run(make_job(pair, tmp_path / "whole"))
    job = make_job(pair, tmp_path / "stopped", batch_size=4)
    marker = tmp_path / "reading"
    child = children.Process(target=run_command_in_child, args=(job_arguments(job), 0.3, 0, 1, 0, marker))
    child.start()
    wait_for(lambda: any(tmp_path.glob("reading-*")))
    os.kill(child.pid, signal.SIGINT)
    child.join(60)
    assert child.exitcode == 130
    states = list(job.state_folder.glob("process-00000/statistics-*/state.json"))
    assert len(states) == 1
    position = json.loads(states[0].read_text())["position"]
    assert 0 < position < 30
    run(job)
    assert relative_error(weights_of(job.output), weights_of(tmp_path / "whole")) == 0


def test_what_changed_is_named_and_a_run_does_not_go_on(pair, tmp_path, monkeypatch):
    data = write_jsonl(tmp_path / "texts.jsonl", random_texts(30))
    job = make_job(pair, tmp_path / "out", datasets=[str(data)], checkpoint_every=1)
    interrupted_run(job, monkeypatch, 3)
    identity = job.state_folder / "identity.json"
    good = identity.read_text()

    with pytest.raises(CalibrationError, match=r"settings\.fit\.token_stride: 1 -> 2"):
        run(make_job(pair, job.output, datasets=[str(data)], token_stride=2))
    with pytest.raises(CalibrationError, match=r"settings\.batch_size: 4 -> 8"):
        run(make_job(pair, job.output, datasets=[str(data)], batch_size=8))
    data.write_text(data.read_text() + json.dumps({"text": "w1 w2 w3"}) + "\n")
    with pytest.raises(CalibrationError, match="datasets"):
        run(job)
    write_jsonl(data, random_texts(30))
    for name, before, message in (
        ("libraries", {"torch": "1"}, r"libraries\.torch: '1' -> '2'"),
        ("tokenizer", "another", "tokenizer: 'another' -> "),
    ):
        facts = json.loads(good)
        facts[name] = {**facts[name], **before} if isinstance(before, dict) else before
        identity.write_text(json.dumps(facts))
        with pytest.raises(CalibrationError, match=message):
            run(job)
    identity.write_text(good)

    other = tmp_path / "source"
    model = tiny_model("qwen3", num_layers=2, seed=2)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight += 0.1
    model.save_pretrained(other)
    word_tokenizer().save_pretrained(other)
    facts = json.loads(good)
    facts["settings"]["source"] = str(other)
    identity.write_text(json.dumps(facts))
    changed = make_job(pair, job.output, datasets=[str(data)], source=str(other))
    with pytest.raises(CalibrationError, match=r"source\.kv_projections"):
        run(changed)
    identity.write_text(good)
    run(make_job(pair, job.output, datasets=[str(data)], checkpoint_every=7))  # how often it saves is its own business
    run(make_job(pair, job.output, datasets=[str(data)], token_stride=2, restart=True))
    assert KVBridgeMapper.from_pretrained(job.output).config.fit["token_stride"] == 2


def test_a_finished_run_is_not_repeated_and_a_damaged_state_is(pair, tmp_path, monkeypatch, caplog):
    job = make_job(pair, tmp_path / "out", checkpoint_every=1)
    interrupted_run(job, monkeypatch, 4)
    (state,) = job.state_folder.glob("process-00000/statistics-*/train-*.safetensors")
    damaged = bytearray(state.read_bytes())
    damaged[-3] ^= 1
    state.write_bytes(damaged)
    with caplog.at_level(logging.WARNING):
        first = run(job)
    assert state.name in caplog.text and "starts anew" in caplog.text
    run(make_job(pair, tmp_path / "whole"))
    assert relative_error(weights_of(job.output), weights_of(tmp_path / "whole")) == 0
    said = []
    assert run_calibration(job, progress=False, say=said.append) == first
    assert "--restart" in said[-1]


def test_a_second_run_on_the_folder_stops(pair, tmp_path):
    job = make_job(pair, tmp_path / "out")
    job.state_folder.mkdir(parents=True)
    with FolderLock(job.state_folder / "lock"):
        with pytest.raises(CalibrationError, match=rf"process {os.getpid()} .* is working in .*out"):
            run(job)
    run(job)
