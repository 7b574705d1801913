"""Repair: the target recomputes some tokens of a handed-over cache itself, all layers in one pass.

A mapped cache is right on average and wrong where it matters. Recomputing a few tokens mends them at a known price:
the chosen tokens are run through the whole target, each at its own position; in every layer their new keys and values
take their columns before anything attends, so that a chosen token sees mapped tokens and repaired ones before it, both
as they will stand in the cache. With every token chosen this is the target's own prefill.

The one pass over scattered tokens is that of CacheBlend (Yao et al., arXiv:2405.16444), there between caches of one
model. Which tokens to choose stands in `repair_choice.py`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from .cache_argument import cache_kwargs
from .config_facts import text_config
from .errors import CacheMismatchError, UnsupportedModelError
from .native_layers import Reached
from .rotary import positions_from_mask

# Implementations that take an additive mask for each query. Flash attention knows a causal mask and padding only.
IMPLEMENTATIONS = ("eager", "sdpa")


class _OverwritingLayer(DynamicLayer):
    """Puts the states of the chosen tokens in their columns of another layer and shows all of that layer.

    `before` is a layer whose first `num_before` columns stand in front and stay as they are.
    """

    def __init__(
        self,
        layer: Any,
        places: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        before: Any,
        num_before: int,
        is_last: bool,
    ):
        super().__init__()
        self.layer, self.places = layer, places
        self.before, self.num_before = before, num_before
        self.is_last, self.is_initialized = is_last, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys = self._overwrite(self.layer.keys, key_states)
        values = self._overwrite(self.layer.values, value_states)
        self.layer.keys, self.layer.values = keys, values
        if self.is_last:
            raise Reached
        return self._shown("keys", keys).to(key_states), self._shown("values", values).to(value_states)

    def get_seq_length(self) -> int:
        return self.num_before + int(self.layer.get_seq_length())

    def _shown(self, kind: str, states: torch.Tensor) -> torch.Tensor:
        if self.num_before == 0:
            return states
        return torch.cat([getattr(self.before, kind)[:, :, : self.num_before].to(states), states], dim=2)

    def _overwrite(self, held: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        rows, columns, slots = (index.to(held.device) for index in self.places)
        # Out of place: a handed-over layer may share its tensors with a copy of the cache.
        picked = new.to(held).transpose(1, 2)[rows, slots]
        return held.transpose(1, 2).index_put((rows, columns), picked).transpose(1, 2)


class _OverwritingCache(Cache):
    """The layers of a cache so; the forward is left at the last one of `num_layers`, None: it runs whole."""

    def __init__(
        self,
        cache: Any,
        places: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        before: Any,
        num_before: int,
        num_layers: int | None,
    ):
        in_front = [None] * len(cache.layers) if before is None else before.layers
        super().__init__(
            layers=[
                _OverwritingLayer(layer, places, front, num_before, index + 1 == num_layers)
                for index, (layer, front) in enumerate(zip(cache.layers, in_front, strict=True))
            ]
        )


def recompute(
    target_model: PreTrainedModel,
    cache: Cache,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    chosen: torch.Tensor,
    *,
    before: Cache | None = None,
    num_layers: int | None = None,
) -> int:
    """Recompute the chosen tokens of a cache in place; gradients pass.

    Args:
        target_model: the model that the cache is for, with eager or SDPA attention.
        cache: a dynamic cache of `columns` columns, mapped or native: the first ones, or those after `before`.
        input_ids: `(batch, columns before and in the cache, or more)`.
        attention_mask: of the same shape; zero at padding. None where there is none.
        chosen: `(batch, columns)`, bool; padding is never chosen.
        before: a cache of the columns in front, which is read and not changed.
        num_layers: only so many of the lowest layers are recomputed, and the others stay as they are; all by default.

    Returns:
        The number of tokens recomputed, all rows together.

    Raises:
        UnsupportedModelError: the model's attention takes no mask of its own for each query.
        CacheMismatchError: the shapes do not agree, or the cache is no dynamic one.
    """
    columns = int(cache.get_seq_length())
    start = 0 if before is None else int(before.get_seq_length())
    _check(target_model, cache, input_ids, chosen, start, columns)
    device = target_model.device
    valid = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    valid = valid[:, : start + columns].bool().to(device)
    chosen = chosen.to(device) & valid[:, start:]
    width = int(chosen.sum(1).max()) if chosen.numel() else 0
    if width == 0:
        return 0
    # The chosen columns of each row in their order; a row with fewer is filled up, and those states are dropped.
    order = torch.argsort((~chosen).long(), dim=1, stable=True)[:, :width]
    kept = chosen.gather(1, order)
    rows, slots = kept.nonzero(as_tuple=True)
    places = (rows, order[rows, slots], slots)
    place = torch.arange(start + columns, device=device)
    # A slot that is dropped sees the whole row, as a query that sees nothing gives NaN.
    seen = valid[:, None, :] & ((place <= start + order[:, :, None]) | ~kept[:, :, None])
    dtype = target_model.dtype
    mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, torch.finfo(dtype).min)
    kwargs: dict[str, Any] = cache_kwargs(_OverwritingCache(cache, places, before, start, num_layers))
    if getattr(target_model, "_supports_logits_to_keep", lambda: False)():
        kwargs["logits_to_keep"] = 1
    with suppress(Reached):
        target_model(
            input_ids=input_ids.to(device).gather(1, start + order),
            attention_mask=mask[:, None],
            position_ids=positions_from_mask(valid.long()).gather(1, start + order),
            use_cache=True,
            return_dict=True,
            **kwargs,
        )
    return int(chosen.sum())


#: [`recompute`] without gradients: a handoff's way.
repair = torch.no_grad()(recompute)


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """Why a model's attention cannot take part in a repair; None where it can."""
    implementation = text_config(model.config)._attn_implementation or "eager"
    if implementation in IMPLEMENTATIONS:
        return None
    return (
        f"Repair gives every recomputed token a mask of its own, which attn_implementation={implementation!r} does "
        f"not take. Load the target with one of {IMPLEMENTATIONS}, or set HandoffPolicy(native_fraction=0)."
    )


def _check(
    model: PreTrainedModel, cache: Cache, input_ids: torch.Tensor, chosen: torch.Tensor, start: int, columns: int
) -> None:
    if (reason := unsupported_reason(model)) is not None:
        raise UnsupportedModelError(reason)
    if any(not isinstance(layer, DynamicLayer) or hasattr(layer, "_quantized_keys") for layer in cache.layers):
        kinds = sorted({type(layer).__name__ for layer in cache.layers})
        raise CacheMismatchError(f"Only a dynamic cache can be repaired, this one has layers of {kinds}.")
    if tuple(chosen.shape) != (input_ids.shape[0], columns) or input_ids.shape[1] < start + columns:
        raise CacheMismatchError(
            f"chosen has shape {tuple(chosen.shape)} and input_ids {tuple(input_ids.shape)}; the cache has {columns} "
            f"columns after {start}. Pass the tokens of all these columns, and a flag for each of the cache's."
        )


__all__ = ["recompute", "repair", "unsupported_reason"]
