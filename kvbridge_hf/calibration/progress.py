"""What a calibration shows while it runs: one bar on the main process, and numbers for a tracker."""

from __future__ import annotations

import time
from typing import Any

from tqdm.auto import tqdm

from .processes import Processes

# Seconds between two entries for a tracker.
LOG_SECONDS = 10.0


class Progress:
    """Bars with tokens per second and the time left; nothing where the output is no terminal.

    Args:
        processes: Only the main one shows anything.
        show: False for no bar at all.
        report: Send numbers to the accelerator's trackers.
    """

    def __init__(self, processes: Processes, show: bool = True, report: bool = False):
        self.processes, self.show, self.report = processes, show, report
        self.seconds: dict[str, float] = {}
        self._bar: Any = None
        self._tokens, self._logged, self._step = 0, 0.0, 0

    def start(self, name: str, tokens: int) -> None:
        """A pass begins, over so many tokens in this process."""
        disable = True if not (self.show and self.processes.is_main) else None
        self._bar = tqdm(total=tokens, desc=name, unit="tok", unit_scale=True, disable=disable)
        self._name, self._tokens, self._started = name, 0, time.monotonic()

    def batch(self, tokens: int, loaded: bool) -> None:
        """A batch is done, or was done before this run."""
        if loaded:
            self._bar.initial = tokens  # tokens per second are those of this run
            self._bar.n = tokens
            self._bar.refresh()
            return
        self._bar.update(tokens)
        self._tokens += tokens
        self._step += 1
        now = time.monotonic()
        if self.report and now - self._logged > LOG_SECONDS:
            self._logged = now
            rate = self._tokens / max(now - self._started, 1e-9)
            self.processes.accelerator.log({f"{self._name}/tokens_per_second": rate}, step=self._step)

    def stop(self) -> None:
        self._bar.close()
        self.note(self._name, self._started)

    def note(self, name: str, started: float) -> None:
        """Add the time since `started` to a part of the run."""
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started


__all__ = ["Progress"]
