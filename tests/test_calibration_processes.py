"""Several processes make the mapper that one makes: real `accelerate launch` jobs on the CPU, over gloo."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from calibration_jobs import job_arguments, make_job, relative_error, weights_of, write_pair

from kvbridge_hf.calibration.moments import Moments
from kvbridge_hf.calibration.processes import Processes, divide, merge_moments
from kvbridge_hf.calibration.run import run_calibration
from kvbridge_hf.modeling_kvbridge import KVBridgeMapper

SCRIPT = Path(__file__).parent.parent / "scripts" / "calibrate.py"


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair"))


def launch(job, processes: int, *more: str) -> subprocess.Popen:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The launcher starts several processes only when it is told of several GPUs; without one they meet over gloo.
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(processes)]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += ["--main_process_port", str(port), str(SCRIPT)]
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


def assert_same_mapper(folder: Path, expected: Path) -> None:
    mappers = [KVBridgeMapper.from_pretrained(path) for path in (folder, expected)]
    configs = [mapper.config for mapper in mappers]
    assert configs[0].selected_layers == configs[1].selected_layers
    assert configs[0].head_assignment == configs[1].head_assignment
    for name in ("tokens", "heldout_tokens", "sequences", "heldout_sequences", "input_tokens"):
        assert configs[0].fit[name] == configs[1].fit[name]
    for kind in ("keys", "values"):
        assert configs[0].fit["heldout_r2"][kind] == pytest.approx(configs[1].fit["heldout_r2"][kind], abs=1e-6)
    assert relative_error(weights_of(folder), weights_of(expected)) < 1e-6


def test_four_processes_of_which_one_has_no_batch_give_the_same_mapper(pair, tmp_path):
    settings = {"batch_size": 12, "weighting": "sensitivity", "support": "head_local"}  # batches of 12, 12 and 6
    run_calibration(make_job(pair, tmp_path / "one", **settings), progress=False, say=lambda text: None)
    output = finish(launch(make_job(pair, tmp_path / "four", **settings), 4))
    assert "processes: 4" in output and output.count("Mapper in") == 1
    assert_same_mapper(tmp_path / "four", tmp_path / "one")


def test_two_processes_killed_at_random_moments_go_on_to_the_same_mapper(pair, tmp_path):
    run_calibration(make_job(pair, tmp_path / "one"), progress=False, say=lambda text: None)
    job = make_job(pair, tmp_path / "two", batch_size=1, checkpoint_every=1, plan="c")
    draw = random.Random(0)
    for _ in range(2):
        process = launch(job, 2)
        end = time.monotonic() + 300
        while not list(job.state_folder.glob("process-*/*")) and process.poll() is None:
            assert time.monotonic() < end
            time.sleep(0.02)
        time.sleep(draw.uniform(0, 1))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    finish(launch(job, 2))
    assert_same_mapper(job.output, tmp_path / "one")


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
