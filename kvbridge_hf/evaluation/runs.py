"""One way to run a model on top of a cache, used by everything that is judged.

A *prefix* is what the source has read and hands over (a document, a conversation); the *suffix* is what the target
reads itself (a question, the continuation to be scored). A batch holds its prefixes in one block of columns, padded on
the left, and its suffixes in a second block. Padding may so stand in the middle of a row; positions come from the mask
(`cumsum - 1`), so it takes no position, and nothing attends to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from ..cache_argument import cache_kwargs
from ..rotary import positions_from_mask
from .errors import EvaluationError


@dataclass
class Batch:
    """Prefixes to be handed over and what is read and scored on top of them.

    Attributes:
        prefix_ids, prefix_mask: `(prefixes, columns)`, padded on the left.
        rows: `(rows,)`, the prefix of every row; several rows (questions) may share a prefix.
        suffix_ids, suffix_mask: `(rows, suffix columns)`, what the model reads after the prefix.
        floor_ids, floor_mask: `(rows, 0 or more)`, what stands before the suffix where there is no context.
        keep: number of last columns whose logits count.
        valid: `(rows, keep)` bool, those of them that are no padding.
        items: index of each row's document or question in the data.
    """

    prefix_ids: torch.Tensor
    prefix_mask: torch.Tensor
    rows: torch.Tensor
    suffix_ids: torch.Tensor
    suffix_mask: torch.Tensor
    floor_ids: torch.Tensor
    floor_mask: torch.Tensor
    keep: int
    valid: torch.Tensor
    items: list[int]

    @property
    def num_prefixes(self) -> int:
        return self.prefix_ids.shape[0]

    @property
    def first_rows(self) -> torch.Tensor:
        """`(prefixes,)`, a row that has each prefix."""
        return torch.stack([(self.rows == prefix).nonzero()[0, 0] for prefix in range(self.num_prefixes)])

    @property
    def other_prefix(self) -> torch.Tensor:
        """`(prefixes,)`, for each prefix another one of the batch, for the mismatched control."""
        return torch.arange(self.num_prefixes).roll(1)


def run(
    model: PreTrainedModel,
    cache: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    *,
    keep: int = 1,
    position_ids: torch.Tensor | None = None,
) -> Any:
    """Reads the columns that the cache does not hold yet.

    Args:
        model: a causal LM.
        cache: holds the first columns (it grows by the others), or None for an empty one.
        input_ids, attention_mask: `(batch, columns)`, cached columns included.
        keep: number of last columns whose logits are wanted.
        position_ids: `(batch, columns)`, where they are not those of the mask.

    Returns:
        The model's output; `.logits` is `(batch, keep, vocab)`.

    Raises:
        EvaluationError: the cache already holds every column, so that there is nothing to read logits from.
    """
    held = 0 if cache is None else int(cache.get_seq_length())
    if held >= input_ids.shape[1]:
        raise EvaluationError(
            f"The cache holds {held} columns and the input has {input_ids.shape[1]}; a handoff must leave at least "
            "the last token to the target."
        )
    device = model.device
    attention_mask = attention_mask.to(device)
    positions = positions_from_mask(attention_mask) if position_ids is None else position_ids.to(device)
    return model(
        input_ids=input_ids[:, held:].to(device),
        attention_mask=attention_mask,
        position_ids=positions[:, held:],
        use_cache=True,
        logits_to_keep=keep,
        **({} if cache is None else cache_kwargs(cache)),
    )


def prefill(
    model: PreTrainedModel, batch: Batch, stop: int, *, mask: torch.Tensor | None = None
) -> DynamicCache | None:
    """The model's own cache of the first `stop` columns of the prefixes; None where that is no column.

    `mask` hides more columns than the padding, which leaves the positions as they are.
    """
    if stop < 1:
        return None
    positions = positions_from_mask(batch.prefix_mask)[:, :stop]
    mask = (batch.prefix_mask if mask is None else mask)[:, :stop]
    cache = DynamicCache()
    run(model, cache, batch.prefix_ids[:, :stop], mask, position_ids=positions)
    return cache


@dataclass
class Reading:
    """What a model made of the suffixes.

    Attributes:
        logits: `(rows, keep, vocab)`.
        cache: the cache of all columns, prefix and suffix.
        mask: `(rows, columns)`, what the model could see.
        position_mask: `(rows, columns)`, whose `cumsum - 1` are the positions.
    """

    logits: torch.Tensor
    cache: Any
    mask: torch.Tensor
    position_mask: torch.Tensor


def read_suffix(
    model: PreTrainedModel,
    cache: Any,
    batch: Batch,
    *,
    prefix_mask: torch.Tensor | None = None,
    position_mask: torch.Tensor | None = None,
) -> Reading:
    """Reads the rest of the prefixes and the suffixes on top of a cache that has one row a row of the batch.

    Args:
        prefix_mask: `(rows, prefix columns)`, what may be seen of the prefix; default: all that is no padding.
        position_mask: `(rows, prefix columns)`, what takes a position; default: `prefix_mask`.
    """
    prefix_mask = batch.prefix_mask[batch.rows] if prefix_mask is None else prefix_mask
    position_mask = prefix_mask if position_mask is None else position_mask
    ids = torch.cat([batch.prefix_ids[batch.rows], batch.suffix_ids], dim=1)
    mask = torch.cat([prefix_mask, batch.suffix_mask], dim=1)
    position_mask = torch.cat([position_mask, batch.suffix_mask], dim=1)
    cache = DynamicCache() if cache is None else cache
    output = run(model, cache, ids, mask, keep=batch.keep, position_ids=positions_from_mask(position_mask))
    return Reading(output.logits, cache, mask, position_mask)


def read_without_context(model: PreTrainedModel, batch: Batch) -> Reading:
    """Reads the suffixes with nothing before them (but the batch's floor column)."""
    ids = torch.cat([batch.floor_ids, batch.suffix_ids], dim=1)
    mask = torch.cat([batch.floor_mask, batch.suffix_mask], dim=1)
    cache = DynamicCache()
    output = run(model, cache, ids, mask, keep=batch.keep)
    return Reading(output.logits, cache, mask, mask)


def cache_entries(cache: Any, stop: int | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values `(batch, kv_heads, columns, head_dim)` of each layer, cut to the first `stop` columns.

    A lazily mapped cache must have been through a forward before.
    """
    return [(layer.keys[:, :, :stop], layer.values[:, :, :stop]) for layer in cache.layers]


def cache_from_entries(
    entries: Sequence[tuple[torch.Tensor, torch.Tensor]], rows: torch.Tensor | None = None
) -> DynamicCache:
    """A new dynamic cache of these keys and values, with rows picked (and repeated) as `rows` says."""
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(entries):
        if rows is not None:
            keys, values = keys.index_select(0, rows.to(keys.device)), values.index_select(0, rows.to(values.device))
        cache.update(keys, values, layer)
    return cache
