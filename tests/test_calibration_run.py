"""Whole calibrations from folders: plans, resumption, locks, bad data and bad luck."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from calibration_jobs import (
    LENGTH,
    job_arguments,
    make_job,
    random_texts,
    relative_error,
    run_command_in_child,
    run_in_child,
    weights_of,
    word_tokenizer,
    write_jsonl,
    write_pair,
)
from models import tiny_model
from transformers import AutoModelForCausalLM

from kvbridge_hf.calibration.content_store import ContentStore
from kvbridge_hf.calibration.driver import fit_mapper
from kvbridge_hf.calibration.interruption import FolderLock
from kvbridge_hf.calibration.run import run_calibration
from kvbridge_hf.calibration.traces import TracedModel
from kvbridge_hf.cli import main
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
]


@pytest.mark.parametrize("settings", SETTINGS, ids=["full-head", "sensitivity"])
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
    with pytest.raises(FitConfigError, match="low_rank.* one process and --plan a"):
        run(make_job(pair, tmp_path / "b", plan="b", **settings))
    job = make_job(pair, tmp_path / "a", **settings)
    run(job)
    expected = direct_fit(job)
    weights = {name: parameter.detach() for name, parameter in expected.named_parameters()}
    found = weights_of(tmp_path / "a")
    assert found.keys() == weights.keys()
    assert KVBridgeMapper.from_pretrained(tmp_path / "a").config.selected_layers == expected.config.selected_layers


# ---- stopped and resumed --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def children():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvbridge_hf.calibration.run", "kvbridge_hf.cli", "calibration_jobs"])
    return context


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


def wait_for(condition, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def test_ctrl_c_saves_the_state_and_exits_with_130(pair, tmp_path, children):
    run(make_job(pair, tmp_path / "whole"))
    job = make_job(pair, tmp_path / "stopped", batch_size=4)
    child = children.Process(target=run_command_in_child, args=(job_arguments(job), 0.3))
    child.start()
    wait_for(lambda: (job.state_folder / "data" / "data.json").exists())
    time.sleep(0.5)
    os.kill(child.pid, signal.SIGINT)
    child.join(60)
    assert child.exitcode == 130
    states = list(job.state_folder.glob("process-00000/statistics-*/state.json"))
    assert len(states) == 1
    position = json.loads(states[0].read_text())["position"]
    assert 0 < position < 30
    run(job)
    assert relative_error(weights_of(job.output), weights_of(tmp_path / "whole")) == 0


def interrupted_run(job, monkeypatch, after: int) -> None:
    """Start a job and stop it after some batches, as a crash does: without a last state."""
    from kvbridge_hf.calibration import passes

    count = 0
    add = passes.Pass._add

    def crash(self, batch):
        nonlocal count
        count += 1
        if count > after:
            raise MemoryError("crash")
        add(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(passes.Pass, "_add", crash)
        with pytest.raises(MemoryError):
            run(job)


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
    facts = json.loads(good)
    facts["libraries"]["torch"] = "1"
    identity.write_text(json.dumps(facts))
    with pytest.raises(CalibrationError, match=r"libraries\.torch: '1' -> '2'"):
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


def test_a_damaged_shard_is_named_and_computed_again(pair, tmp_path, monkeypatch, caplog):
    run(make_job(pair, tmp_path / "whole"))
    job = make_job(pair, tmp_path / "out", plan="c", checkpoint_every=1)
    interrupted_run(job, monkeypatch, 10)  # 8 batches of the source, 2 of the target
    shards = sorted(job.state_folder.glob("process-00000/content/shard-*.safetensors"))
    assert len(shards) == 8
    damaged = bytearray(shards[5].read_bytes())
    damaged[-40] ^= 4
    shards[5].write_bytes(damaged)
    before = {path.name: path.stat().st_mtime_ns for path in shards if path != shards[5]}
    interrupted_run(job, monkeypatch, 2)  # the one shard, and one more batch of the target
    assert {name: (shards[0].parent / name).stat().st_mtime_ns for name in before} == before
    with caplog.at_level(logging.WARNING):
        run(job)
    assert relative_error(weights_of(job.output), weights_of(tmp_path / "whole")) < 1e-6


def test_a_shard_damaged_while_it_is_read_stops_the_run(pair, tmp_path, caplog):
    store = ContentStore(tmp_path)
    for first in (0, 2):
        store.write(torch.rand(2, 5, 2, 4), torch.rand(2, 5, 2, 4), [(first, 3), (first + 1, 2)], [])
    (tmp_path / store.shards[1].file).write_bytes(b"")
    (tmp_path / "index.jsonl").open("a").write('{"file": "shard-cut-off')
    again = ContentStore(tmp_path)
    assert len(again.shards) == 2
    with caplog.at_level(logging.WARNING):
        assert again.drop_damaged() == [store.shards[1].file]
    assert store.shards[1].file in caplog.text
    assert again.missing([0, 1, 2, 3]).tolist() == [2, 3]
    assert ContentStore(tmp_path).missing([0, 1, 2, 3]).tolist() == [2, 3]


# ---- bad data, bad luck ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["a", "c"])
@pytest.mark.parametrize("role", ["source", "target"])
def test_sequences_with_nan_are_left_out_and_counted(pair, tmp_path, plan, role, caplog):
    texts = [text.replace("w7 ", "w8 ") for text in random_texts(30, longest=20)]
    texts = [text.replace(" w7", " w8") for text in texts]
    broken = tmp_path / role
    model = AutoModelForCausalLM.from_pretrained(pair / role)
    with torch.no_grad():
        model.model.embed_tokens.weight[7 + 3] = float("inf")
    model.save_pretrained(broken)
    word_tokenizer().save_pretrained(broken)
    bad = {4, 11}
    spoilt = [text.replace(" ", " w7 ", 1) if number in bad else text for number, text in enumerate(texts)]
    clean = [text for number, text in enumerate(texts) if number not in bad]
    settings = {"plan": plan, "weighting": "sensitivity", "support": "head_local"}
    job = make_job(
        pair,
        tmp_path / "out",
        datasets=[str(write_jsonl(tmp_path / "spoilt.jsonl", spoilt))],
        **{role: str(broken)},
        **settings,
    )
    with caplog.at_level(logging.WARNING):
        summary = run(job)
    assert summary["bad_sequences"] == sorted(bad)
    # Token 1 is a sink; what it does to the tokens behind it shows from the next layer on.
    assert f"Left out sequences 11, 4: The {role}'s keys of layer 1 are NaN or Inf in sequence 11" in caplog.text
    clean_data = [str(write_jsonl(tmp_path / "clean.jsonl", clean))]
    run(make_job(pair, tmp_path / "clean", datasets=clean_data, **{role: str(broken)}, **settings))
    assert relative_error(weights_of(tmp_path / "out"), weights_of(tmp_path / "clean")) < 1e-6
    job.output, job.max_bad_sequences = tmp_path / "strict", 1
    with pytest.raises(CalibrationError, match="2 sequences gave NaN or Inf, more than --max-bad-sequences=1"):
        run(job)


@pytest.mark.parametrize("torn", [False, True])
def test_out_of_memory_halves_the_batch_and_says_so(pair, tmp_path, monkeypatch, caplog, torn):
    run(make_job(pair, tmp_path / "whole"))
    from kvbridge_hf.calibration.statistics import Statistics

    forward, update, updates = TracedModel.forward, Statistics.update, []

    def starved(self, batch):
        if not torn and len(batch.input_ids) > 2 and self.role == "target":
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(self, batch)

    def torn_update(self, trace, weights=None):
        updates.append(1)
        if torn and len(updates) == 5:
            self.moments[:1].update(torch.rand(1, 3, self.layout.features), torch.rand(1, 3, self.layout.outputs))
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        update(self, trace, weights)

    monkeypatch.setattr(TracedModel, "forward", starved)
    monkeypatch.setattr(Statistics, "update", torn_update)
    with caplog.at_level(logging.WARNING):
        run(make_job(pair, tmp_path / "starved", checkpoint_every=2))
    assert caplog.text.count("Out of memory") == 1 and "batches of 2 sequences" in caplog.text
    assert relative_error(weights_of(tmp_path / "starved"), weights_of(tmp_path / "whole")) < 1e-6


def test_memory_for_not_even_one_sequence_is_an_error(pair, tmp_path, monkeypatch):
    def starved(self, batch):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(TracedModel, "forward", starved)
    with pytest.raises(CalibrationError, match="not suffice for one sequence"):
        run(make_job(pair, tmp_path / "out"))


def test_a_full_disk_is_named_and_leaves_the_old_state(pair, tmp_path, monkeypatch):
    job = make_job(pair, tmp_path / "out", checkpoint_every=1)
    interrupted_run(job, monkeypatch, 3)
    from kvbridge_hf.calibration import storage

    def full(tensors, path):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "save_file", full)
        with pytest.raises(CalibrationError, match="disk of .* is full.*run the same command again"):
            run(job)
    assert not list(job.state_folder.rglob("*.tmp"))
    run(job)
    run(make_job(pair, tmp_path / "whole"))
    assert relative_error(weights_of(job.output), weights_of(tmp_path / "whole")) == 0


def test_wrong_arguments_are_answered_in_one_line(pair, tmp_path, capsys):
    base = job_arguments(make_job(pair, tmp_path / "out"))
    for more, message in (
        (["--memory-budget", "much"], "no size"),
        (["--memory-budget", "1KiB", "--plan", "auto"], "No plan fits into"),
        (["--set", "layer_budget"], "NAME=VALUE"),
        (["--plan", "d"], "auto, a, b or c"),
        (["--text-column", "body"], "no column 'body' in line 1 of texts.jsonl; it has 'text'"),
        (["--tokenizer", str(tmp_path / "none")], "no tokenizer"),
    ):
        assert main(["fit", *base, *more]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
    (tmp_path / "file").write_text("")
    assert main(["fit", *job_arguments(make_job(pair, tmp_path / "file"))]) == 2
