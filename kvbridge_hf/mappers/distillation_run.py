"""One training run through `transformers.Trainer`; its checkpoints are whole or not there, and belong to this run."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from torch.utils.data import Dataset, SequentialSampler
from transformers import Trainer, TrainingArguments

from ..errors import CalibrationError
from ..fingerprint import model_fingerprint
from .distillation_config import DistillationConfig
from .preconditioning import plain_state

RUN_FILE, SEARCH_FILE, BEST_FILE, BEST_STATE = "run.json", "learning_rates.json", "best.json", "best.pt"
# Files whose code decides what a run computes.
CODE = (
    "distillation.py",
    "distillation_data.py",
    "distillation_run.py",
    "functional.py",
    "learning_rate.py",
    "preconditioning.py",
)


@dataclass
class Run:
    """What a run measured on validation.

    Attributes:
        best_kl, best_step: Of the best state measured; the start is not among them.
        best_state: The mapper's tensors then, None where nothing was measured.
        last_kl: After the last step.
        curve: `(step, KL)` of every measurement.
    """

    best_kl: float = float("inf")
    best_step: int = 0
    best_state: dict[str, torch.Tensor] | None = None
    last_kl: float = float("inf")
    curve: list[tuple[int, float]] = field(default_factory=list)

    def note(self, step: int, kl: float, mapper: nn.Module) -> None:
        self.curve = [point for point in self.curve if point[0] != step] + [(step, kl)]
        self.last_kl = kl
        if kl < self.best_kl:
            self.best_kl, self.best_step = kl, step
            self.best_state = plain_state(mapper)

    def summary(self) -> dict[str, Any]:
        return {"kl": self.best_kl, "step": self.best_step, "curve": [list(point) for point in self.curve]}


class MapperTrainer(Trainer):
    """Trains a [`~mappers.distillation.Student`]: steps in their order, our own validation, atomic checkpoints."""

    def __init__(self, *args: Any, mapper: Any, folder: Path, validate: Callable[[], float], run: Run, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.mapper, self.folder, self.validate, self.run = mapper, folder, validate, run
        self._staging: str | None = None

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with torch.no_grad():
            kl = self.validate()
        self.run.note(self.state.global_step, kl, self.mapper)
        metrics = {"eval_kl": kl}
        self.log(metrics)
        return metrics

    def _get_output_dir(self, trial: Any) -> str:
        return self._staging or super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # Written beside and renamed: a crash leaves the checkpoint before or this one, never half of it.
        final = self.folder / f"checkpoint-{self.state.global_step}"
        self._staging = tempfile.mkdtemp(prefix=".checkpoint-", dir=self.folder)
        try:
            super()._save_checkpoint(model, trial)
            written = Path(self._staging) / final.name
            torch.save(self.run.best_state, written / BEST_STATE)
            facts = {name: getattr(self.run, name) for name in ("best_kl", "best_step", "last_kl", "curve")}
            (written / BEST_FILE).write_text(json.dumps(facts), encoding="utf-8")
            if final.exists():
                shutil.rmtree(final)
            os.replace(written, final)
        finally:
            shutil.rmtree(self._staging, ignore_errors=True)
            self._staging = None
        for old in _checkpoints(self.folder)[:-2]:
            shutil.rmtree(old, ignore_errors=True)


def train_run(
    student: nn.Module,
    batches: Dataset,
    validate: Callable[[], float],
    *,
    config: DistillationConfig,
    rate: float,
    steps: int,
    evaluations: int,
    seed: int,
    folder: Path | None = None,
    progress: bool = True,
) -> Run:
    """Train a student for some steps.

    Args:
        student: Its `mapper` is trained in place.
        batches: One item a step.
        validate: KL of the mapper as it stands.
        config: Warmup and clipping.
        rate: Peak learning rate.
        steps: Optimizer steps.
        evaluations: How often to measure; the last step is always measured.
        seed: Of the run.
        folder: For checkpoints, one at every measurement; goes on from the newest one there.
    """
    run = Run()
    device = next(student.parameters()).device
    every = max(1, -(-steps // evaluations))
    with _scratch(folder) as output, _global_seeds():
        arguments = TrainingArguments(
            output_dir=str(output),
            max_steps=steps,
            per_device_train_batch_size=1,
            learning_rate=rate,
            warmup_steps=int(config.warmup_fraction * steps),
            lr_scheduler_type="cosine",
            weight_decay=0.0,
            max_grad_norm=config.max_grad_norm,
            eval_strategy="steps",
            eval_steps=every,
            save_strategy="no" if folder is None else "steps",
            save_steps=every,
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            label_names=[],
            dataloader_pin_memory=False,
            use_cpu=device.type == "cpu",
            seed=seed,
            # An item is a function of its step: none needs to be drawn again to get to a later one.
            ignore_data_skip=False,
        )
        arguments._n_gpu = min(arguments.n_gpu, 1)
        trainer = MapperTrainer(
            model=student,
            args=arguments,
            train_dataset=batches,
            eval_dataset=batches,
            data_collator=_only_item,
            mapper=student.mapper,
            folder=output,
            validate=validate,
            run=run,
        )
        for name in ("PrinterCallback", "ProgressCallback"):
            trainer.pop_callback(getattr(transformers.trainer_callback, name))
        newest = None if folder is None else next(reversed(_checkpoints(folder)), None)
        if newest is not None:
            facts = json.loads((newest / BEST_FILE).read_text(encoding="utf-8"))
            run.best_kl, run.best_step, run.last_kl = facts["best_kl"], facts["best_step"], facts["last_kl"]
            run.curve = [(int(step), float(kl)) for step, kl in facts["curve"]]
            run.best_state = torch.load(newest / BEST_STATE, weights_only=True)
        if newest is None or int(newest.name.rpartition("-")[2]) < steps:
            trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
        if not run.curve or run.curve[-1][0] != steps:
            run.note(steps, validate(), student.mapper)  # type: ignore[arg-type]
    return run


def _only_item(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return items[0]


def _checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    found = [path for path in folder.glob("checkpoint-*") if (path / BEST_FILE).is_file()]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


@contextmanager
def _scratch(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="kvbridge-") as path:
        yield Path(path)


@contextmanager
def _global_seeds() -> Iterator[None]:
    """Trainer seeds everything; put it back afterwards (torch's own state is the caller's `fork_rng`)."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


class RunFolder:
    """A folder of runs that knows what it was begun with."""

    def __init__(self, path: Path):
        self.path = path

    def claim(
        self,
        settings: dict[str, Any],
        training: list[torch.Tensor],
        validating: list[torch.Tensor],
        mapper: nn.Module,
        source_model: Any,
        target_model: Any,
    ) -> None:
        """Write down what is to be run, or check that it is what the folder was begun with.

        Raises:
            CalibrationError: names what differs.
        """
        here = Path(__file__).parent
        mine = {
            "settings": settings,
            "data": _digest([*training, torch.tensor([-1]), *validating]),
            "start": _digest([tensor for _, tensor in sorted(mapper.state_dict().items())]),
            "native parts": [
                getattr(mapper.config, name) for name in ("num_sinks", "num_native_suffix", "native_layers")
            ],
            "source": _plain(model_fingerprint(source_model)),
            "target": _plain(model_fingerprint(target_model)),
            "code": hashlib.sha256(b"".join((here / name).read_bytes() for name in CODE)).hexdigest(),
            "libraries": {"torch": torch.__version__, "transformers": transformers.__version__},
        }
        self.path.mkdir(parents=True, exist_ok=True)
        file = self.path / RUN_FILE
        if file.exists():
            theirs = json.loads(file.read_text(encoding="utf-8"))
            mine = json.loads(json.dumps(mine))
            changed = [name for name in mine if theirs.get(name) != mine[name]]
            if changed:
                raise CalibrationError(
                    f"{self.path} was begun with other {', '.join(changed)} than this run has. Going on would mix two "
                    "runs; use another output_dir, or delete this one."
                )
            return
        _write_json(file, mine)

    def read_search(self) -> dict[float, float]:
        """Losses that a search has measured."""
        file = self.path / SEARCH_FILE
        return {float(rate): float(loss) for rate, loss in json.loads(file.read_text())} if file.exists() else {}

    def write_search(self, measured: dict[float, float]) -> None:
        _write_json(self.path / SEARCH_FILE, [[rate, loss] for rate, loss in measured.items()])


def _plain(fingerprint: dict[str, Any]) -> dict[str, Any]:
    # A folder may move between runs; what counts is what lies in it.
    return {name: value for name, value in fingerprint.items() if name not in ("name_or_path", "revision")}


def _digest(tensors: list[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
        digest.update((plain.double() if plain.is_floating_point() else plain).numpy().tobytes())
    return digest.hexdigest()


def _write_json(file: Path, value: Any) -> None:
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".json-")
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=2)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, file)


__all__ = ["MapperTrainer", "Run", "RunFolder", "train_run"]
