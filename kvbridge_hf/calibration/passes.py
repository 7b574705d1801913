"""One pass over the sequences: batches go into an accumulator whose state is saved now and then.

A pass goes on where its last saved state stands. Sequences that give NaN or Inf are left out and counted up to a
limit; when memory runs out the batch is halved.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from accelerate.utils import find_executable_batch_size

from ..errors import ArtifactError, CalibrationError
from .interruption import StopRequest
from .progress import Progress
from .sequences import SequenceStore
from .storage import load_into, save_folder
from .traces import Batch, NonFiniteError

logger = logging.getLogger(__name__)

INDEX_NAME = "state.json"
FORMAT = 1


class Accumulator(Protocol):
    """Takes batches; all that it remembers of them stands in its tensors and facts."""

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """The tensors themselves, in named sets."""

    def facts(self) -> dict[str, Any]:
        """The rest, as JSON types."""

    def restore(self, facts: dict[str, Any]) -> None:
        """Take over facts; the tensors were overwritten in place."""

    def reset(self) -> None:
        """Forget everything."""

    def read(self, batch: Batch) -> Any:
        """Run the models. Changes nothing, so it may fail."""

    def add(self, batch: Batch, found: Any) -> None:
        """Add what `read` gave for the batch."""


@dataclass
class PassSettings:
    """How passes are run.

    Attributes:
        batch_size (`int`): Sequences of one forward.
        checkpoint_every (`int`): Batches between two saved states.
        max_bad_sequences (`int`): Sequences with NaN or Inf that are left out, before it becomes an error.
        stop (`StopRequest`): Asked after every batch.
        on_batch: Called with the tokens of every batch, and with True for those of a state that was loaded.
    """

    batch_size: int = 8
    checkpoint_every: int = 50
    max_bad_sequences: int = 10
    stop: StopRequest = field(default_factory=StopRequest)
    on_batch: Callable[[int, bool], None] = lambda tokens, loaded: None


@dataclass
class Pass:
    """A pass of one process.

    Args:
        name: For messages.
        accumulator: Takes the batches.
        store: The sequences.
        numbers: Which of them, in this order.
        folder: Of the saved state; None where the accumulator keeps its own.
        settings: How.
    """

    name: str
    accumulator: Accumulator
    store: SequenceStore
    numbers: np.ndarray
    folder: Path | None
    settings: PassSettings
    position: int = 0
    bad: list[dict[str, Any]] = field(default_factory=list)
    _torn: bool = False
    _unsaved: int = 0

    def run(self) -> list[dict[str, Any]]:
        """Read what is left to read and save the final state.

        Returns:
            The sequences left out because of NaN or Inf: number and message of each.

        Raises:
            Interrupted: asked to; the state is saved.
            CalibrationError: too many bad sequences, or not even one sequence fits into memory.
        """
        if self._load():
            return self.bad
        arguments: dict[str, Any] = {"starting_batch_size": self.settings.batch_size}
        size = self.settings.batch_size

        def halve() -> int:
            nonlocal size
            size //= 2
            logger.warning("Out of memory in the pass for %s; going on with batches of %d sequences.", self.name, size)
            return size

        if "reduce_batch_size_fn" in inspect.signature(find_executable_batch_size).parameters:
            arguments["reduce_batch_size_fn"] = halve
        try:
            find_executable_batch_size(**arguments)(self._go)()
        except RuntimeError as error:
            if "No executable batch size" not in str(error):
                raise
            raise CalibrationError(
                f"Memory does not suffice for one sequence in the pass for {self.name}. Use a smaller "
                "--sequence-length, a larger --token-stride, or another --plan."
            ) from error
        self._save(done=True)
        return self.bad

    def _go(self, batch_size: int) -> None:
        if self._torn:  # memory ran out in the middle of an update
            self._torn = False
            if not self._load(again=True):
                self.accumulator.reset()
                self.position, self.bad = 0, []
        while self.position < len(self.numbers):
            numbers = self.numbers[self.position : self.position + batch_size]
            self._add(self.store.batch(numbers))
            self.position += len(numbers)
            self._unsaved += 1
            self.settings.on_batch(int(self.store.lengths[numbers].sum()), False)
            if self.settings.stop.requested or self._unsaved >= self.settings.checkpoint_every:
                self._save()
            self.settings.stop.check()

    def _add(self, batch: Batch) -> None:
        bad: list[dict[str, Any]] = []
        while len(batch.input_ids):
            try:
                found = self.accumulator.read(batch)
                break
            except NonFiniteError as error:
                numbers = [int(number) for number in batch.numbers[error.rows]]
                bad += [{"number": number, "message": str(error)} for number in numbers]
                if len(self.bad) + len(bad) > self.settings.max_bad_sequences:
                    raise CalibrationError(
                        f"{len(self.bad) + len(bad)} sequences gave NaN or Inf, more than --max-bad-sequences="
                        f"{self.settings.max_bad_sequences}. The last: {error}"
                    ) from error
                logger.warning("Left out sequences %s: %s", ", ".join(map(str, numbers)), error)
                batch = batch.select(~error.rows)
        if len(batch.input_ids):
            self._torn = True
            self.accumulator.add(batch, found)
            self._torn = False
        self.bad += bad

    def _save(self, done: bool = False) -> None:
        self._unsaved = 0
        if self.folder is None:
            return
        facts = {
            "format": FORMAT,
            "position": self.position,
            "done": done,
            "bad": self.bad,
            "accumulator": self.accumulator.facts(),
        }
        save_folder(self.folder, INDEX_NAME, {**self.accumulator.tensors(), "rng": _rng()}, facts)

    def _load(self, again: bool = False) -> bool:
        """Take over the saved state; whether the pass is complete (or, `again`, whether there was a state)."""
        if self.folder is None:
            return again
        if not (self.folder / INDEX_NAME).exists():
            return False
        rng = _rng()
        try:
            facts = load_into(self.folder, INDEX_NAME, {**self.accumulator.tensors(), "rng": rng})
            position, bad, done = facts["position"], facts["bad"], facts["done"]
            self.accumulator.restore(facts["accumulator"])
        except (ArtifactError, KeyError, TypeError) as error:
            logger.warning("The saved state of the pass for %s cannot be used, it starts anew: %s", self.name, error)
            self.accumulator.reset()
            return False
        torch.set_rng_state(rng["torch"])
        self.position, self.bad = position, bad
        if not again:
            self.settings.on_batch(int(self.store.lengths[self.numbers[:position]].sum()), True)
        return True if again else bool(done)


@dataclass
class PassRunner:
    """Runs the passes of one process over its share of the sequences.

    Attributes:
        store (`SequenceStore`): The sequences.
        numbers (`np.ndarray`): This process's share, in the order in which it reads them.
        settings (`PassSettings`): How.
        progress (`Progress`): Told of every pass.
        bad (`dict[int, str]`): Sequences left out so far: number -> message.
    """

    store: SequenceStore
    numbers: np.ndarray
    settings: PassSettings
    progress: Progress
    bad: dict[int, str] = field(default_factory=dict)

    def run(self, name: str, accumulator: Accumulator, folder: Path | None, numbers: np.ndarray | None = None) -> None:
        """Run a pass; see [`Pass`]."""
        numbers = self.numbers if numbers is None else numbers
        self.progress.start(name, int(self.store.lengths[numbers].sum()))
        try:
            bad = Pass(name, accumulator, self.store, numbers, folder, self.settings).run()
        finally:
            self.progress.stop()
        self.bad.update({entry["number"]: entry["message"] for entry in bad})


def _rng() -> dict[str, torch.Tensor]:
    return {"torch": torch.get_rng_state()}


__all__ = ["Accumulator", "Pass", "PassRunner", "PassSettings"]
