"""What a session knows about each of its models: its cache, and where the columns of that cache come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from .errors import GenerateArgumentError
from .handoff import HandoffReport

ON_GATE = "on gate"


@dataclass(frozen=True)
class Span:
    """Tokens `start` to `stop` of a model's cache. `origin` is the model they were mapped from, None if read
    natively."""

    start: int
    stop: int
    origin: str | None = None


@dataclass
class SwitchReport:
    """How a model was brought up to date.

    Args:
        target: the model.
        source: the model whose cache was mapped; None where the target read everything itself.
        status: `"ok"`, or `"fallback"` when a handoff was rejected or failed and the target read the tokens itself.
        reason: why.
        tokens_kept: tokens that the model held before and keeps.
        tokens_mapped, tokens_native: of the others, all but the conversation's last token, which gives the first
            logits.
        tokens_history: tokens of the conversation.
        tokens_repaired: tokens handed over in earlier turns that the target recomputed for the question of this one.
        resync: whether the target read its mapped tokens again.
        seconds: by the host's clock.
        handoff: the report of the handoff, if there was one.
    """

    target: str
    source: str | None = None
    status: str = "ok"
    reason: str | None = None
    tokens_kept: int = 0
    tokens_mapped: int = 0
    tokens_native: int = 0
    tokens_history: int = 0
    tokens_repaired: int = 0
    resync: bool = False
    seconds: float = 0.0
    handoff: HandoffReport | None = None


@dataclass
class ModelState:
    """A model's cache of the first tokens of the conversation, and where its columns come from."""

    cache: Cache | None = None
    spans: list[Span] = field(default_factory=list)
    switches: int = 0

    @property
    def length(self) -> int:
        return 0 if self.cache is None else int(self.cache.get_seq_length())

    @property
    def first_mapped(self) -> int | None:
        return next((span.start for span in self.spans if span.origin is not None), None)

    def crop(self, length: int) -> None:
        """Forget the columns from `length` on."""
        surplus = self.length - length
        if surplus <= 0:
            return
        assert self.cache is not None
        if length <= 0:
            self.cache, self.spans = None, []
            return
        self.cache.crop(-surplus)
        self.spans = [replace(span, stop=min(span.stop, length)) for span in self.spans if span.start < length]

    def grow(self, stop: int, origin: str | None) -> None:
        """Note where the columns up to `stop` come from."""
        start = self.spans[-1].stop if self.spans else 0
        if stop <= start:
            return
        if self.spans and self.spans[-1].origin == origin:
            start = self.spans.pop().start
        self.spans.append(Span(start, stop, origin))


def layer_states(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a dynamic layer."""
    return layer.keys, layer.values


def share_cache(cache: Cache | None) -> DynamicCache | None:
    """A dynamic cache of the same tensors. Growing or cropping one of the two does not reach the other."""
    if cache is None:
        return None
    shared = DynamicCache()
    for layer in cache.layers:
        keys, values = layer_states(layer)
        copied = DynamicLayer()
        copied.lazy_initialization(keys, values)
        copied.keys, copied.values = keys, values
        shared.layers.append(copied)
    return shared


def parse_resync(resync: str) -> int:
    """N of `"every N"`, 0 for the other policies."""
    words = resync.split() if isinstance(resync, str) else []
    if resync in ("never", ON_GATE):
        return 0
    if len(words) == 2 and words[0] == "every" and words[1].isdecimal() and int(words[1]) > 0:
        return int(words[1])
    raise GenerateArgumentError(f"resync must be 'never', 'every N' (N of 1 or more) or 'on gate', got {resync!r}.")


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    for place, (left, right) in enumerate(zip(first, second, strict=False)):
        if left != right:
            return place
    return min(len(first), len(second))


__all__ = [
    "ON_GATE",
    "ModelState",
    "Span",
    "SwitchReport",
    "common_prefix",
    "layer_states",
    "parse_resync",
    "share_cache",
]
