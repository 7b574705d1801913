"""Where a model looks when it reads some tokens on top of a cache."""

from __future__ import annotations

import copy
import threading
import weakref
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from .cache_argument import cache_kwargs
from .errors import UnsupportedModelError
from .rotary import positions_from_mask

_twins: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _eager_twin(model: Any) -> Any:
    """The same model with eager attention, which alone gives its weights.

    Other modules around the same parameters: the model itself is not switched over, as another thread may be using it.
    """
    with _lock:
        twin = _twins.get(model)
        tensors = [*model.parameters(), *model.buffers()]
        if twin is None or any(mine is not theirs for mine, theirs in zip(tensors, twin[1], strict=True)):
            shared = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
            shared.set_attn_implementation("eager")
            twin = _twins[model] = (shared, tensors)
        return twin[0]


@torch.no_grad()
def attention_to_prefix(
    model: PreTrainedModel, cache: Cache, input_ids: torch.Tensor, attention_mask: torch.Tensor
) -> torch.Tensor:
    """Attention of the columns that a cache does not hold to those that it holds.

    Args:
        model: the model that reads.
        cache: of the first columns. It grows by the others; give a copy where that is not wanted.
        input_ids, attention_mask: `(batch, columns)`, those in the cache included.

    Returns:
        `(batch, layers * heads, columns read, columns held)`, float32, zero where a padded column reads.

    Raises:
        UnsupportedModelError: the model gives no attention weights.
    """
    held = int(cache.get_seq_length())
    mask = attention_mask.to(model.device)
    output = _eager_twin(model)(
        input_ids=input_ids[:, held:].to(model.device),
        attention_mask=mask,
        position_ids=positions_from_mask(mask)[:, held:],
        use_cache=True,
        output_attentions=True,
        return_dict=True,
        **cache_kwargs(cache),
    )
    attentions = getattr(output, "attentions", None)
    if not attentions or any(layer is None for layer in attentions):
        raise UnsupportedModelError(
            f"{type(model).__name__} gives no attention weights. Choose tokens to repair by 'question', which needs "
            "none."
        )
    weights = torch.cat([layer.to(attentions[0].device)[..., :held].float() for layer in attentions], dim=1)
    return weights * mask[:, None, held:, None].to(weights.device)


__all__ = ["attention_to_prefix"]
