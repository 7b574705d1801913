"""A tiny pair, its tokenizer and texts on disk, and jobs over them, for the calibration tests."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from kvbridge_hf.calibration.data import DataConfig
from kvbridge_hf.calibration.documents import with_defaults
from kvbridge_hf.calibration.job import CalibrationJob
from kvbridge_hf.mappers.config import FitConfig
from kvbridge_hf.modeling_kvbridge import KVBridgeMapper

WORDS = 90
LENGTH = 24


def word_tokenizer(**special: Any) -> PreTrainedTokenizerFast:
    """One token a word: `w0` to `w89` behind the special tokens."""
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{number}": number + 3 for number in range(WORDS)}}
    core = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    core.pre_tokenizer = Whitespace()
    roles = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", **special}
    return PreTrainedTokenizerFast(tokenizer_object=core, **roles)


def random_texts(count: int, seed: int = 0, shortest: int = 8, longest: int = 40) -> list[str]:
    draw = random.Random(seed)
    lengths = [draw.randint(shortest, longest) for _ in range(count)]
    return [" ".join(f"w{draw.randrange(WORDS)}" for _ in range(length)) for length in lengths]


def write_jsonl(path: Path, values: list[Any], column: str = "text") -> Path:
    path.write_text("".join(json.dumps({column: value}) + "\n" for value in values), encoding="utf-8")
    return path


def write_pair(folder: Path) -> Path:
    """Folders `source` (Qwen 3, 2 layers) and `target` (Llama, 5 layers), and `texts.jsonl`."""
    for name, (arch, layers) in {"source": ("qwen3", 2), "target": ("llama", 5)}.items():
        model = tiny_model(arch, num_layers=layers, seed=layers)
        model.save_pretrained(folder / name)
        word_tokenizer().save_pretrained(folder / name)
    write_jsonl(folder / "texts.jsonl", random_texts(30))
    return folder


def make_job(pair: Path, output: Path, **overrides: Any) -> CalibrationJob:
    """A job over the pair; `overrides` are fields of the job, of its data or of its fit."""
    data: dict[str, Any] = {"num_sequences": 30, "sequence_length": LENGTH}
    data.update({name: overrides.pop(name) for name in DataConfig.__dataclass_fields__ if name in overrides})
    datasets = data.pop("datasets", [str(pair / "texts.jsonl")])
    fit: dict[str, Any] = {"top_k": 2, "ridge_lambda": 0.1}
    names = [name for name in FitConfig.__dataclass_fields__ if name in overrides and name != "dtype"]
    fit.update({name: overrides.pop(name) for name in names})
    settings: dict[str, Any] = {"source": str(pair / "source"), "target": str(pair / "target"), "batch_size": 4}
    settings.update(overrides)
    return CalibrationJob(
        output=output, data=DataConfig(with_defaults(datasets), **data), fit=FitConfig(**fit), **settings
    )


def job_arguments(job: CalibrationJob, *more: str) -> list[str]:
    """The job as arguments of `kvbridge fit`."""
    return [
        *("--source", job.source, "--target", job.target, "--output", str(job.output)),
        *("--dataset", job.data.datasets[0].name, "--num-sequences", str(job.data.num_sequences)),
        *("--sequence-length", str(job.data.sequence_length), "--batch-size", str(job.batch_size)),
        *("--plan", job.plan, "--checkpoint-every", str(job.checkpoint_every)),
        # Every field, so that what a preset says does not matter.
        *(part for name, value in job.fit.to_dict().items() for part in ("--set", f"{name}={json.dumps(value)}")),
        *more,
    ]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    mapper = KVBridgeMapper.from_pretrained(folder)
    return {name: parameter.detach() for name, parameter in mapper.named_parameters()}


def relative_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest over the tensors of the error's norm by the tensor's."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - tensor).norm() / tensor.norm()) for name, tensor in expected.items())


def slow_down(seconds: float, marker: Path | None = None) -> None:
    """Make every batch of this process take longer, so that there is a middle to be stopped in.

    `marker` with the process's number behind it is a file that is there from the first batch on.
    """
    from kvbridge_hf.calibration import passes

    add = passes.Pass._add

    def slow_add(self: Any, batch: Any) -> None:
        if marker is not None:
            marker.with_name(f"{marker.name}-{os.getpid()}").touch()
        time.sleep(seconds)
        add(self, batch)

    passes.Pass._add = slow_add  # type: ignore[method-assign]


def run_in_child(job: CalibrationJob, seconds: float) -> None:
    """Target of a child process."""
    from kvbridge_hf.calibration.run import run_calibration

    torch.set_num_threads(1)
    slow_down(seconds)
    run_calibration(job, progress=False, say=lambda text: None)


def run_command_in_child(
    arguments: list[str],
    seconds: float,
    rank: int = 0,
    count: int = 1,
    port: int = 0,
    marker: Path | None = None,
) -> None:
    """Target of a child process: `kvbridge fit` with its exit code, as one of several that meet over gloo."""
    from kvbridge_hf.cli import main

    torch.set_num_threads(1)
    slow_down(seconds, marker)
    if count > 1:  # what a launcher sets
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(count),
            LOCAL_WORLD_SIZE=str(count),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
    raise SystemExit(main(["fit", *arguments]))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def forkserver() -> Any:
    """A context whose children start with the imports done."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvbridge_hf.calibration.run", "kvbridge_hf.cli", "calibration_jobs"])
    return context


def wait_for(condition: Callable[[], Any], seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def interrupted_run(job: CalibrationJob, monkeypatch: Any, after: int) -> None:
    """Start a job and stop it after some batches, as a crash does: without a last state."""
    from kvbridge_hf.calibration import passes
    from kvbridge_hf.calibration.run import run_calibration

    count = 0
    add = passes.Pass._add

    def crash(self: Any, batch: Any) -> None:
        nonlocal count
        count += 1
        if count > after:
            raise MemoryError("crash")
        add(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(passes.Pass, "_add", crash)
        with pytest.raises(MemoryError):
            run_calibration(job, progress=False, say=lambda text: None)
