"""Letting a model read tokens into a cache."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from .cache_argument import cache_kwargs, output_cache
from .cache_kvbridge import NativePrefix
from .errors import GenerateArgumentError
from .rotary import positions_from_mask


def prompt_mask(input_ids: torch.Tensor | None, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Mask of a prompt, `(batch, columns)`, bool.

    Raises:
        GenerateArgumentError: ids and mask are not two matrices of one shape.
    """
    shape = None if input_ids is None else tuple(input_ids.shape)
    if shape is None or len(shape) != 2 or (attention_mask is not None and tuple(attention_mask.shape) != shape):
        raise GenerateArgumentError(
            "input_ids and attention_mask must both be (batch, columns) and cover the whole prompt, got shapes "
            f"{shape} and {None if attention_mask is None else tuple(attention_mask.shape)}."
        )
    assert input_ids is not None
    if attention_mask is None:
        return torch.ones_like(input_ids, dtype=torch.bool)
    return attention_mask.to(input_ids.device).bool()


def read_columns(
    model: PreTrainedModel, input_ids: torch.Tensor, mask: torch.Tensor, cache: Cache | None = None
) -> Cache:
    """Let a model read columns (after those that `cache` holds; mask and ids cover both) and return its cache."""
    past = 0 if cache is None else int(cache.get_seq_length())
    kwargs: dict[str, Any] = {} if cache is None else cache_kwargs(cache)
    if getattr(model, "_supports_logits_to_keep", lambda: False)():
        kwargs["logits_to_keep"] = 1
    output = model(
        input_ids=input_ids[:, past:].to(model.device),
        attention_mask=None if bool(mask.all()) else mask.long().to(model.device),
        position_ids=positions_from_mask(mask)[:, past:].to(model.device),
        use_cache=True,
        return_dict=True,
        **kwargs,
    )
    return output_cache(output)


def read_first_tokens(
    model: PreTrainedModel, input_ids: torch.Tensor, mask: torch.Tensor, num_tokens: int
) -> NativePrefix:
    """Let the target read each row's first `num_tokens` tokens, wherever its padding stands."""
    # The first real tokens of each row side by side; a row that has fewer is filled up with padding.
    order = torch.argsort((~mask).long(), dim=-1, stable=True)[:, :num_tokens]
    cache = read_columns(model, input_ids.gather(1, order.to(input_ids.device)), mask.gather(1, order))
    layers: list[Any] = cache.layers
    return NativePrefix([layer.keys for layer in layers], [layer.values for layer in layers])


__all__ = ["prompt_mask", "read_columns", "read_first_tokens"]
