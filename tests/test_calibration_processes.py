"""Several processes make the mapper that one makes: real `accelerate launch` jobs on the CPU, over gloo."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from calibration_jobs import (
    forkserver,
    free_port,
    job_arguments,
    make_job,
    relative_error,
    run_command_in_child,
    wait_for,
    weights_of,
    write_pair,
)

from kvbridge_hf import bundled
from kvbridge_hf.calibration.moments import Moments
from kvbridge_hf.calibration.processes import Processes, divide, merge_moments
from kvbridge_hf.calibration.run import run_calibration
from kvbridge_hf.modeling_kvbridge import KVBridgeMapper

SCRIPT = Path(__file__).parent.parent / "scripts" / "calibrate.py"


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def children():
    return forkserver()


def start_children(context, job, count: int, seconds: float = 0.0, marker: Path | None = None) -> list:
    """`kvbridge fit` in processes that meet over gloo, without the launcher and its imports."""
    port = free_port()
    arguments = job_arguments(job)
    started = [
        context.Process(target=run_command_in_child, args=(arguments, seconds, rank, count, port, marker))
        for rank in range(count)
    ]
    for child in started:
        child.start()
    return started


def launch(job, processes: int, *more: str) -> subprocess.Popen:
    # The launcher starts several processes only when it is told of several GPUs; without one they meet over gloo.
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(processes)]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += ["--main_process_port", str(free_port()), str(SCRIPT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parent.parent), environment.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [*command, *job_arguments(job, *more)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that the launcher and its workers can be killed together
    )


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return output


def run(job):
    return run_calibration(job, progress=False, say=lambda text: None)


def assert_same_mapper(folder: Path, expected: Path) -> None:
    mappers = [KVBridgeMapper.from_pretrained(path) for path in (folder, expected)]
    configs = [mapper.config for mapper in mappers]
    assert configs[0].selected_layers == configs[1].selected_layers
    assert configs[0].head_assignment == configs[1].head_assignment
    assert configs[0].method_config == configs[1].method_config
    for name in ("tokens", "heldout_tokens", "sequences", "heldout_sequences", "input_tokens"):
        assert configs[0].fit[name] == configs[1].fit[name]
    for kind in ("keys", "values"):
        assert configs[0].fit["heldout_r2"][kind] == pytest.approx(configs[1].fit["heldout_r2"][kind], abs=1e-6)
    assert relative_error(weights_of(folder), weights_of(expected)) < 1e-6


# Batches of 12, 12 and 6 sequences: of two processes one has 18 and one 12, of four one has none.
SETTINGS = {
    "greedy and sensitivity": {"selection": "greedy", "weighting": "sensitivity", "support": "head_local"},
    "fitted heads and query metric": {
        "head_assignment": "fitted",
        "support": "head_local",
        "metric": "query",
        "plan": "c",
    },
    "low rank under a budget": {
        "method": "low_rank",
        "rank_budget": 0.6,
        "metric": "query",
        "weighting": "sensitivity",
    },
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_however_the_sequences_are_shared_the_mapper_is_the_same(pair, tmp_path, children, settings):
    settings = {"batch_size": 12, "num_sinks": 2, **settings}
    run(make_job(pair, tmp_path / "1", **settings))
    for count in (2, 4):
        started = start_children(children, make_job(pair, tmp_path / str(count), **settings), count)
        for child in started:
            child.join(300)
        assert [child.exitcode for child in started] == [0] * count
        assert json.loads((tmp_path / f"{count}/.calibration/summary.json").read_text())["processes"] == count
        assert_same_mapper(tmp_path / str(count), tmp_path / "1")


def test_methods_that_train_on_the_data_ask_for_one_process(pair, tmp_path, children):
    started = start_children(children, make_job(pair, tmp_path / "out", method="mlp", plan="a"), 2)
    for child in started:
        child.join(300)
    assert [child.exitcode for child in started] == [2, 2]
    assert not (tmp_path / "out" / "config.json").exists()


def test_ctrl_c_stops_every_process_with_its_state_saved(pair, tmp_path, children):
    run(make_job(pair, tmp_path / "whole"))
    job = make_job(pair, tmp_path / "stopped", batch_size=2)
    started = start_children(children, job, 2, seconds=0.3, marker=tmp_path / "reading")
    wait_for(lambda: len(list(tmp_path.glob("reading-*"))) == 2)
    for child in started:
        os.kill(child.pid, signal.SIGINT)
    for child in started:
        child.join(300)
    assert [child.exitcode for child in started] == [130, 130]
    states = sorted(job.state_folder.glob("process-*/statistics-*/state.json"))
    positions = [json.loads(state.read_text())["position"] for state in states]
    assert len(positions) == 2 and all(0 < position < 15 for position in positions)
    assert not (job.output / "config.json").exists()
    for child in start_children(children, job, 2):
        child.join(300)
        assert child.exitcode == 0
    assert_same_mapper(job.output, tmp_path / "whole")


# ---- the launcher, and the trained pair -----------------------------------------------------------------------------


def tinytown_job(output: Path, **overrides):
    """The bundled pair on a few of its own texts: sequences of 40 tokens, in batches of 5, 5, 5 and 3 by default."""
    models = {role: str(bundled.model_path(f"tinytown-{size}")) for role, size in (("source", "s"), ("target", "m"))}
    settings = {"num_sequences": 18, "sequence_length": 40, "batch_size": 5, "top_k": 2, "seed": 1}
    settings.update(weighting="sensitivity", selection="greedy", support="head_local", ridge_lambda=1.0)
    texts = output.parent / "texts.jsonl"
    lines = bundled.text_path("train").read_text(encoding="utf-8").splitlines()[:18]
    texts.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return make_job(output, output, datasets=[str(texts)], **{**models, **settings, **overrides})


@pytest.fixture(scope="module")
def tinytown_mapper(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tinytown") / "mapper"
    run(tinytown_job(folder))
    return folder


def test_launched_on_four_processes_of_which_one_has_nothing_to_read(tmp_path, tinytown_mapper):
    run(tinytown_job(tmp_path / "one", batch_size=6))  # batches of 6, 6 and 6
    assert_same_mapper(tmp_path / "one", tinytown_mapper)
    output = finish(launch(tinytown_job(tmp_path / "four", batch_size=6), 4))
    assert "processes: 4" in output and output.count("Mapper in") == 1
    assert_same_mapper(tmp_path / "four", tinytown_mapper)


def test_launched_and_killed_at_random_moments_a_run_goes_on_to_the_same_mapper(tmp_path, tinytown_mapper):
    job = tinytown_job(tmp_path / "two", batch_size=1, checkpoint_every=1, plan="c")
    draw = random.Random(0)
    for _ in range(3):
        process = launch(job, 2)
        wait_for(lambda process=process: any(job.state_folder.glob("process-*/*")) or process.poll() is not None)
        time.sleep(draw.uniform(0, 1.5))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    finish(launch(job, 2))
    assert_same_mapper(job.output, tinytown_mapper)


def test_launched_and_stopped_with_ctrl_c_a_run_goes_on_to_the_same_mapper(tmp_path, tinytown_mapper):
    job = tinytown_job(tmp_path / "two", batch_size=1, checkpoint_every=1)
    process = launch(job, 2)
    wait_for(lambda: any(job.state_folder.glob("process-*/*/state.json")) or process.poll() is not None)
    # A terminal tells the launcher and its workers alike. The launcher ends with an exit code of its own.
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=300)
    assert process.returncode != 0, output
    assert not (job.output / "config.json").exists()
    states = sorted(job.state_folder.glob("process-*/*/state.json"))
    assert states, output
    finish(launch(job, 2))
    assert_same_mapper(job.output, tinytown_mapper)


# ---- the merge, without processes -----------------------------------------------------------------------------------


class Together:
    """Stands in for the processes: adds up what each of several moments has at the same call."""

    count = 2

    def __init__(self, sums: list[torch.Tensor]):
        self.sums = sums

    def sum_(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self.sums.pop(0))


def test_merging_in_place_is_the_moments_of_all_tokens():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 60, 5, generator=generator, dtype=torch.float64) + 30
    y = torch.randn(2, 60, 3, generator=generator, dtype=torch.float64) - 7
    shares = [slice(0, 41), slice(41, 60), slice(60, 60)]
    parts = []
    for share in shares:
        parts.append(Moments.zeros(2, 5, 3))
        parts[-1].update(x[:, share], y[:, share])
    # Two rounds: the first records what every process would add, the second adds.
    recorded: list[list[torch.Tensor]] = []

    class Recorder:
        count = 2

        def __init__(self, known: list[torch.Tensor]):
            self.known, self.seen = list(known), []

        def sum_(self, tensor: torch.Tensor) -> None:
            self.seen.append(tensor.clone())
            if self.known:
                tensor.copy_(self.known.pop(0))

    known: list[torch.Tensor] = []
    for _ in range(7):  # one more sum is known after each round
        recorded = []
        for part in parts:
            recorder = Recorder(known)
            merge_moments(part.clone(), recorder)
            recorded.append(recorder.seen)
        known.append(torch.stack([seen[len(known)] for seen in recorded]).sum(dim=0))
    merged = parts[1].clone()
    merge_moments(merged, Together(list(known)))
    for system in range(2):
        xs, ys = x[system], y[system]
        torch.testing.assert_close(merged.x_mean[system], xs.mean(dim=0))
        centred, others = xs - xs.mean(dim=0), ys - ys.mean(dim=0)
        torch.testing.assert_close(merged.gram[system], centred.T @ centred, rtol=1e-12, atol=1e-10)
        torch.testing.assert_close(merged.cross[system], centred.T @ others, rtol=1e-12, atol=1e-10)
        torch.testing.assert_close(merged.power[system], others.square().sum(dim=0), rtol=1e-12, atol=1e-10)
    assert merged.weight.tolist() == [60, 60]


def test_work_is_divided_in_order_and_evenly():
    for count, parts in ((5, 4), (2, 4), (8, 4), (0, 3)):
        shares = divide(list(range(count)), parts)
        assert len(shares) == parts and [item for share in shares for item in share] == list(range(count))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_an_error_in_the_main_process_is_one_in_all(monkeypatch):
    class Accelerator:
        process_index, num_processes = 1, 2

    processes = Processes(Accelerator())
    monkeypatch.setattr(
        "kvbridge_hf.calibration.processes.broadcast_object_list",
        lambda outcome: outcome.__setitem__(slice(None), [None, "the disk is full"]),
    )
    with pytest.raises(Exception, match="main process stopped: the disk is full"):
        processes.on_main(lambda: None)
