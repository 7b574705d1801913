"""Two ways to one answer, side by side: the target reads the prompt itself, or takes over what the source has read."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from machine import Job, whole_machine
from pairs import Pair
from prompts import encode, explain
from transformers import Cache, StoppingCriteriaList

from kvbridge_hf import HandoffReport
from kvbridge_hf.prompt_reading import read_columns

#: Seconds between two looks at the streams.
TICK = 0.06
#: Seconds that a token stays alone on the page where "reading speed" is on.
READING_PAUSE = 0.04


@dataclass(frozen=True)
class Settings:
    """How to generate; the same for both panes.

    Args:
        temperature: 0 for greedy decoding.
        source_has_read: the source's cache is there when the clock starts, as after a turn of the source; otherwise
            its reading counts.
        readable: pause after each token (the times do not see it).
    """

    max_new_tokens: int = 48
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    source_has_read: bool = True
    readable: bool = True

    def for_generate(self) -> dict[str, Any]:
        settings: dict[str, Any] = {"max_new_tokens": int(self.max_new_tokens), "do_sample": self.temperature > 0}
        if self.temperature > 0:
            settings |= {"temperature": float(self.temperature), "top_p": float(self.top_p), "top_k": 0}
        return settings


@dataclass(frozen=True)
class Lane:
    """One pane at one moment."""

    text: str
    tokens: tuple[int, ...]
    first_token: float | None
    tokens_per_second: float | None
    done: bool
    error: str | None = None
    report: HandoffReport | None = None


@dataclass(frozen=True)
class Snapshot:
    """Both panes at one moment.

    Args:
        source_seconds: how long the source read; None while that is not known.
        source_counted: whether that is part of the handoff's times.
    """

    native: Lane
    handoff: Lane
    source_seconds: float | None
    source_counted: bool
    prompt_tokens: int
    stopped: bool

    @property
    def done(self) -> bool:
        return self.native.done and self.handoff.done


class Race:
    """One prompt on its two ways. `run()` yields snapshots until both panes are done.

    Raises (on construction):
        Unsuitable: the prompt cannot be used.
    """

    def __init__(self, pair: Pair, prompt: str, settings: Settings, stop: threading.Event | None = None):
        self.pair, self.settings = pair, settings
        self.stop = threading.Event() if stop is None else stop
        self.input_ids = encode(pair, prompt, settings.max_new_tokens)
        self.source_cache: Cache | None = None
        self.source_seconds: float | None = None
        pause = READING_PAUSE if settings.readable else 0.0
        self.native_job = Job(self._native, seed=settings.seed, stop=self.stop, pause=pause)
        self.handoff_job = Job(self._handoff, seed=settings.seed, stop=self.stop, pause=pause)

    def run(self) -> Iterator[Snapshot]:
        """Stream both panes. Closing the iterator ends both."""
        try:
            if self.settings.source_has_read:
                with whole_machine(self.stop):
                    started = time.perf_counter()
                    self.source_cache = self._read_by_source()
                    self.source_seconds = time.perf_counter() - started
            self.native_job.start()
            self.handoff_job.start()
            while not (self.native_job.done and self.handoff_job.done):
                yield self.snapshot()
                time.sleep(TICK)
            yield self.snapshot()
        except BaseException:
            self.stop.set()
            raise

    def snapshot(self) -> Snapshot:
        return Snapshot(
            self._lane(self.native_job),
            self._lane(self.handoff_job),
            self.source_seconds,
            not self.settings.source_has_read,
            self.input_ids.shape[1],
            self.stop.is_set(),
        )

    @torch.no_grad()
    def _read_by_source(self) -> Cache:
        ids = self.input_ids.to(self.pair.source.device)
        cache = read_columns(self.pair.source, ids, torch.ones_like(ids, dtype=torch.bool))
        if ids.is_cuda:
            torch.cuda.synchronize(ids.device)
        return cache

    def _arguments(self, job: Job) -> dict[str, Any]:
        return {
            "input_ids": self.input_ids,
            "attention_mask": torch.ones_like(self.input_ids),
            "streamer": job.streamer,
            "stopping_criteria": StoppingCriteriaList([job.criterion]),
            "return_dict_in_generate": True,
            **self.settings.for_generate(),
        }

    def _native(self, job: Job) -> None:
        self.pair.target.generate(**self._arguments(job))

    def _handoff(self, job: Job) -> HandoffReport | None:
        if self.source_cache is None:
            started = job.took()
            self.source_cache = self._read_by_source()
            self.source_seconds = job.took() - started
        output = self.pair.target.generate(
            **self._arguments(job), bridge=self.pair.bridge, source_cache=self.source_cache
        )
        return output.handoff_report

    def _lane(self, job: Job) -> Lane:
        done, tokens = job.done, list(job.tokens)
        return Lane(
            self.pair.tokenizer.decode(tokens, skip_special_tokens=True),
            tuple(tokens),
            job.first_token,
            job.tokens_per_second,
            done,
            explain(job.error) if done and job.error is not None else None,
            job.result if done and isinstance(job.result, HandoffReport) else None,
        )


__all__ = ["Lane", "Race", "Settings", "Snapshot"]
