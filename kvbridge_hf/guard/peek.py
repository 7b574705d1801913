"""Running a few tokens on top of a cache without changing it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ..cache_argument import cache_kwargs


class _PeekLayer(DynamicLayer):
    """Shows the columns of other layers, side by side, and forgets what is appended.

    Only one layer's keys and values are ever copied at a time, so a peek on a long cache costs one layer of memory.
    """

    def __init__(self, parts: Sequence[tuple[Any, int]], valid: torch.Tensor | None):
        super().__init__()
        self._padding = None if valid is None else ~valid[:, None, :, None]
        self._parts = [(layer, stop) for layer, stop in parts if stop > 0]
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return sum(stop for _, stop in self._parts)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._with("keys", key_states), self._with("values", value_states)

    def _with(self, kind: str, new: torch.Tensor) -> torch.Tensor:
        held = [getattr(layer, kind)[:, :, :stop].to(new) for layer, stop in self._parts]
        if self._padding is not None:
            # A mask hides what stands there, but an attention weight of zero times NaN is NaN.
            held = [states.masked_fill(self._padding.to(states.device), 0) for states in held]
        return torch.cat([*held, new], dim=-2)


def peek(*parts: tuple[Any, int], valid: torch.Tensor | None = None) -> Cache:
    """A cache that shows the first `stop` columns of each `(cache, stop)` in turn, and keeps nothing new.

    With `valid` `(batch, stop)`, for a single part, columns that are not valid are shown as zeros.
    """
    layers = zip(*([(layer, stop) for layer in cache.layers] for cache, stop in parts), strict=True)
    return Cache(layers=[_PeekLayer(layer, valid) for layer in layers])


def run_columns(
    model: PreTrainedModel,
    cache: Cache,
    input_ids: torch.Tensor,
    mask: torch.Tensor,
    position_ids: torch.Tensor,
    keep: int,
) -> torch.Tensor:
    """Read columns on top of a cache.

    Args:
        input_ids: `(batch, new columns)`.
        mask: `(batch, cached + new columns)`, bool.
        position_ids: `(batch, new columns)`.
        keep: last columns whose logits are wanted.

    Returns:
        Log-probabilities `(batch, keep, vocab)`, float32.
    """
    kwargs: dict[str, Any] = cache_kwargs(cache)
    if getattr(model, "_supports_logits_to_keep", lambda: False)():
        kwargs["logits_to_keep"] = keep
    output = model(
        input_ids=input_ids.to(model.device),
        attention_mask=None if bool(mask.all()) else mask.long().to(model.device),
        position_ids=position_ids.to(model.device),
        use_cache=True,
        return_dict=True,
        **kwargs,
    )
    return output.logits[:, -keep:].float().log_softmax(-1)


__all__ = ["peek", "run_columns"]
