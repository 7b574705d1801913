"""Taking turns on one machine: generations that stream side by side and are timed as if each ran alone.

Every generation runs in a thread of its own and holds the machine from one token to the next. Then it hands it on,
first come, first served: the two panes of a race so alternate token by token, and several visitors share the machine
the same way. A generation's clock runs only while it holds the machine, and it finds the random numbers where it left
them, so neither the other pane nor another visitor changes its times or its samples.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer


class FairLock:
    """A lock that is given to those who wait in the order in which they came."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._held = False

    def acquire(self) -> None:
        with self._guard:
            if not self._held:
                self._held = True
                return
            turn = threading.Event()
            self._waiting.append(turn)
        turn.wait()

    def release(self) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._held = False

    def __enter__(self) -> FairLock:
        self.acquire()
        return self

    def __exit__(self, *_: Any) -> None:
        self.release()


#: The one machine of this process: whoever runs a model holds it.
MACHINE = FairLock()


class Stopped(Exception):
    """A run was stopped before it came to its end."""


class Job:
    """One generation in a thread of its own.

    ```python
    job = Job(lambda job: model.generate(**inputs, streamer=job.streamer, stopping_criteria=[job.criterion]), seed=0)
    job.start()
    while not job.done: show(job.tokens)
    ```

    Args:
        work: called with the job in its thread; its result is kept in `result`, what it raises in `error`.
        seed: of the random numbers that it draws.
        stop: ends the generation after its current token once it is set.
        pause: seconds to wait after each token without the machine, so that eyes can follow; not counted as time.

    Attributes:
        tokens: what was generated so far.
        first_token: seconds from the start of the work to the first token; None before it.
        seconds: seconds of work until the latest token.
    """

    def __init__(
        self,
        work: Callable[[Job], Any],
        *,
        seed: int = 0,
        stop: threading.Event | None = None,
        pause: float = 0.0,
        lock: FairLock = MACHINE,
    ):
        self.work, self.pause, self.lock = work, pause, lock
        self.stop = threading.Event() if stop is None else stop
        self.tokens: list[int] = []
        self.first_token: float | None = None
        self.seconds = 0.0
        self.result: Any = None
        self.error: BaseException | None = None
        self.streamer: BaseStreamer = _TokenCollector(self)
        self.criterion: StoppingCriteria = _TurnTaker(self)
        self._random = _seeded(seed)
        self._worked, self._since = 0.0, 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> Job:
        self._thread.start()
        return self

    @property
    def done(self) -> bool:
        return self._thread.ident is not None and not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join()

    @property
    def tokens_per_second(self) -> float | None:
        """Speed of the tokens after the first; None before there are two."""
        if self.first_token is None or len(self.tokens) < 2 or self.seconds <= self.first_token:
            return None
        return (len(self.tokens) - 1) / (self.seconds - self.first_token)

    def took(self) -> float:
        """Seconds of work so far, waiting not counted; to be asked from within the work."""
        return self._worked + time.perf_counter() - self._since

    def _run(self) -> None:
        self._take()
        try:
            if not self.stop.is_set():
                self.result = self.work(self)
        except BaseException as error:
            # Its frames would keep caches alive for as long as the message is shown.
            self.error = error.with_traceback(None)
        finally:
            self._give()

    def _take(self) -> None:
        self.lock.acquire()
        self._outside = _random_state()
        _set_random_state(self._random)
        self._since = time.perf_counter()

    def _give(self) -> None:
        self._worked = self.took()
        self._random = _random_state()
        _set_random_state(self._outside)
        self.lock.release()

    def collect(self, tokens: list[int]) -> None:
        """Called by the streamer with new tokens."""
        self.seconds = self.took()
        if self.first_token is None:
            self.first_token = self.seconds
        self.tokens.extend(tokens)

    def next_turn(self) -> bool:
        """Hand the machine on and wait for the next turn; True where the generation is to end."""
        self._give()
        if self.pause > 0:
            self.stop.wait(self.pause)
        self._take()
        return self.stop.is_set()


class _TokenCollector(BaseStreamer):
    def __init__(self, job: Job):
        self.job, self.seen_prompt = job, False

    def put(self, value: torch.Tensor) -> None:
        # The first that `generate` puts is the prompt.
        if self.seen_prompt:
            self.job.collect(value.flatten().tolist())
        self.seen_prompt = True

    def end(self) -> None:
        pass


class _TurnTaker(StoppingCriteria):
    def __init__(self, job: Job):
        self.job = job

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        ends = self.job.next_turn()
        return torch.full((input_ids.shape[0],), ends, device=input_ids.device, dtype=torch.bool)


def _random_state() -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return states + list(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else states


def _set_random_state(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])


def _seeded(seed: int) -> list[torch.Tensor]:
    states = [torch.Generator().manual_seed(seed).get_state()]
    if torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            states.append(torch.Generator(f"cuda:{device}").manual_seed(seed).get_state())
    return states


@contextmanager
def whole_machine(stop: threading.Event | None = None) -> Iterator[None]:
    """Hold the machine for a piece of work that is not a generation.

    Raises:
        Stopped: `stop` was set while waiting for it.
    """
    with MACHINE:
        if stop is not None and stop.is_set():
            raise Stopped
        yield


__all__ = ["MACHINE", "FairLock", "Job", "Stopped", "whole_machine"]
