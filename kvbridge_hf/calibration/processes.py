"""Several processes as one: moments merged in place, work divided, messages from the main process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from ..errors import CalibrationError, KVBridgeError
from .moments import Moments
from .statistics import COUNTS, CalibrationStatistics, Statistics

T = TypeVar("T")
# Bytes of a tensor that are added up at once.
REDUCE_BYTES = 64 * 1024**2


class Processes:
    """What a calibration needs of the processes it runs in.

    Args:
        accelerator: Knows them.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.index, self.count = accelerator.process_index, accelerator.num_processes

    @property
    def is_main(self) -> bool:
        return self.index == 0

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    def wait(self) -> None:
        if self.count > 1:
            self.accelerator.wait_for_everyone()

    def sum_(self, tensor: torch.Tensor) -> None:
        """Add up a contiguous tensor over all processes, in place, a piece at a time."""
        if self.count == 1:
            return
        flat = tensor.view(-1)
        for piece in flat.split(max(1, REDUCE_BYTES // tensor.element_size())):
            piece.copy_(self.accelerator.reduce(piece.to(self.device), reduction="sum").to(piece.device))

    def gather(self, value: T) -> list[T]:
        """The value of every process, small and picklable, in all of them."""
        return [value] if self.count == 1 else gather_object([value])

    def on_main(self, function: Callable[[], T]) -> T:
        """Call a function in the main process; all get its (picklable) result, or its error."""
        if self.count == 1:
            return function()
        outcome: list[Any] = [None, None]
        error: Exception | None = None
        if self.is_main:
            try:
                outcome[0] = function()
            except Exception as raised:  # the others must not wait for a result that never comes
                error, outcome[1] = raised, str(raised) or type(raised).__name__
        broadcast_object_list(outcome)
        if error is not None:
            raise error
        if outcome[1] is not None:
            raise CalibrationError(f"The main process stopped: {outcome[1]}")
        return outcome[0]  # type: ignore[no-any-return]

    def together(self, function: Callable[[], T]) -> T:
        """Call a function without collectives in every process; an error in one is an error in all."""
        result, error = None, None
        try:
            result = function()
        except (KVBridgeError, OSError) as raised:
            error = raised
        messages = self.gather(None if error is None else str(error))
        if error is not None:
            raise error
        for process, message in enumerate(messages):
            if message is not None:
                raise CalibrationError(f"Process {process} stopped: {message}")
        return result  # type: ignore[return-value]

    def share(self, items: list[T]) -> list[T]:
        """This process's part of a list: consecutive items, as many as the others' or one more."""
        return divide(items, self.count)[self.index]


def divide(items: list[T], parts: int) -> list[list[T]]:
    """Cut a list into consecutive parts whose lengths differ by at most one."""
    size, rest = divmod(len(items), parts)
    bounds = [part * size + min(part, rest) for part in range(parts + 1)]
    return [items[start:stop] for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]


@torch.no_grad()
def merge_moments(moments: Moments, processes: Processes) -> None:
    """Merge the moments of all processes, in place and in all of them.

    Chan, Golub and LeVeque (1979), eq. 2.1, for any number of sets: the means first, then every process takes its
    centred sums about the common means and all are added up. No process holds another one's moments.
    """
    if processes.count == 1:
        return
    total, total_sq = moments.weight.clone(), moments.weight_sq.clone()
    processes.sum_(total)
    processes.sum_(total_sq)
    share = torch.where(total > 0, moments.weight / total, torch.zeros_like(total)).unsqueeze(-1)
    steps = []
    for mean in (moments.x_mean, moments.y_mean):
        common = share * mean
        processes.sum_(common)
        steps.append(mean - common)
        mean.copy_(common)
    x_step, y_step = steps
    weighted = moments.weight.unsqueeze(-1) * x_step
    for system in range(len(total)):
        moments.gram[system].addr_(weighted[system], x_step[system])
        moments.cross[system].addr_(weighted[system], y_step[system])
    moments.power.add_(moments.weight.unsqueeze(-1) * y_step.square())
    for tensor in (moments.gram, moments.cross, moments.power):
        processes.sum_(tensor)
    moments.weight.copy_(total)
    moments.weight_sq.copy_(total_sq)


def merge_statistics(statistics: CalibrationStatistics, processes: Processes) -> None:
    """Merge the statistics of all processes, in place and in all of them."""
    parts: list[Statistics] = [statistics.train, statistics.heldout]
    facts = processes.gather(([part.tokens for part in parts], statistics.info))
    for place, part in enumerate(parts):
        merge_moments(part.moments, processes)
        part.tokens = sum(tokens[place] for tokens, _ in facts)
    for name in COUNTS:
        statistics.info[name] = sum(info[name] for _, info in facts)
    statistics.info["max_positions"] = max(info["max_positions"] for _, info in facts)


__all__ = ["Processes", "divide", "merge_moments", "merge_statistics"]
