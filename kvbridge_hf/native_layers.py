"""The target's own lowest layers: exact keys and values of all tokens from a forward that stops half-way.

The layers 0 to n-1 of a network need nothing of what stands above them. Layer 0 needs no attention at all: its keys
and values follow from the embeddings. For n layers the price is n-1 whole layers and the projections of one.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from .cache_argument import cache_kwargs
from .errors import GenerateArgumentError
from .rotary import positions_from_mask


class Reached(Exception):
    """Unwinds the forward when the last wanted layer has its keys and values."""


class _StoppingLayer(DynamicLayer):
    def update(self, *args: Any, **kwargs: Any) -> Any:
        super().update(*args, **kwargs)
        raise Reached


@torch.no_grad()
def read_native_layers(
    model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, num_layers: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys (rotated) and values of the first `num_layers` layers, as the model itself computes them.

    Args:
        model: a causal LM. It must run in this process as it is: the forward is left half-way, by an exception from
            the cache, so offloading hooks and compiled graphs are not for this.
        input_ids, attention_mask: `(batch, tokens)`.
        num_layers: between 1 and the model's.

    Returns:
        One pair `(batch, kv_heads, tokens, head_dim)` a layer.
    """
    total = model.config.get_text_config(decoder=True).num_hidden_layers
    if not 1 <= num_layers <= total:
        raise GenerateArgumentError(f"native_layers must be between 1 and {total} here, got {num_layers}.")
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    mask = mask.long().to(model.device)
    cache = DynamicCache()
    layers: list[Any] = [*(DynamicLayer() for _ in range(num_layers - 1)), _StoppingLayer()]
    cache.layers = layers
    with suppress(Reached):
        model(
            input_ids=input_ids.to(model.device),
            attention_mask=mask,
            position_ids=positions_from_mask(mask),
            use_cache=True,
            **cache_kwargs(cache),
        )
    return [(layer.keys, layer.values) for layer in layers]


__all__ = ["Reached", "read_native_layers"]
