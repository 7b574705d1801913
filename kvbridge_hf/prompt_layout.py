"""Which column of a prompt comes from which column of the source's cache.

Columns are what tensors have, tokens are what a sequence has: padding (left, right, or in the middle) takes columns
and no position. Everything here follows from masks alone; a token's position is its rank among its row's real tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import CacheMismatchError
from .rotary import positions_from_mask


@dataclass(frozen=True)
class PromptLayout:
    """The part of a prompt that can be handed over, and where the source holds it.

    Args:
        num_columns: first columns of the prompt that a handed-over cache covers; the target runs the others.
        valid: `(batch, num_columns)`, bool; False where a column is padding.
        position_ids: `(batch, num_columns)`, long; 0 at padding before the first token.
        source_columns: `(batch, num_columns)`, long; the source's column for each column, or None when they agree.
        source_stop: first columns of the source's cache that are needed.
        prompt_tokens, covered_tokens: real tokens in the whole prompt and in the covered columns, all rows together.
    """

    num_columns: int
    valid: torch.Tensor
    position_ids: torch.Tensor
    source_columns: torch.Tensor | None
    source_stop: int
    prompt_tokens: int
    covered_tokens: int


def layout(prompt_mask: torch.Tensor, source_mask: torch.Tensor | None, num_native_suffix: int) -> PromptLayout:
    """Lay out a prompt over what the source has read.

    The target continues at one column for all rows, so the covered part ends before the first column whose token some
    row's source has not read.

    Args:
        prompt_mask: `(batch, columns)`; nonzero where a token stands.
        source_mask: `(batch, source columns)`, the same for the source's cache, its tokens being the first tokens of
            the prompt; None when the source reads the prompt as it stands.
        num_native_suffix: last columns that are left to the target in any case.

    Raises:
        CacheMismatchError: the two masks have different numbers of rows.
    """
    mask = prompt_mask.bool()
    batch, columns = mask.shape
    positions = positions_from_mask(mask)
    stop = max(columns - num_native_suffix, 0)
    source_columns = None
    source_stop = stop
    if source_mask is not None:
        source_mask = source_mask.bool().to(mask.device)
        if source_mask.shape[0] != batch:
            raise CacheMismatchError(
                f"The source cache has {source_mask.shape[0]} rows and the prompt {batch}. Pass the cache of exactly "
                "these prompts, one row each."
            )
        read = source_mask.sum(-1, keepdim=True)
        covered = (~mask | (positions < read)).long()
        stop = min(stop, int(covered.cumprod(-1).sum(-1).min()))
        width = source_mask.shape[1]
        if width < stop or not torch.equal(source_mask[:, :stop], mask[:, :stop]):
            source_columns = token_columns(source_mask, positions[:, :stop])
            source_stop = width
        else:
            source_stop = stop
    return PromptLayout(
        num_columns=stop,
        valid=mask[:, :stop],
        position_ids=positions[:, :stop],
        source_columns=source_columns,
        source_stop=source_stop,
        prompt_tokens=int(mask.sum()),
        covered_tokens=int(mask[:, :stop].sum()),
    )


def in_source_columns(input_ids: torch.Tensor, mask: torch.Tensor, source_mask: torch.Tensor) -> torch.Tensor:
    """A prompt's ids in the columns in which the source holds them; 0 at padding.

    Args:
        input_ids, mask: `(batch, columns)`, the prompt's.
        source_mask: `(batch, source columns)`, bool. Tokens that the source holds beyond the prompt get any id.

    Returns:
        `(batch, source columns)`, on the ids' device.
    """
    read = source_mask.to(input_ids.device)
    return input_ids.gather(1, token_columns(mask.to(input_ids.device), positions_from_mask(read))) * read


def token_columns(mask: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
    """The column in which the token of each rank stands, for ranks `(batch, anything)` counted from 0 in every row.

    A rank beyond a row's tokens gives a column of padding; one beyond its columns that of the last such.
    """
    order = torch.argsort((~mask).long(), dim=-1, stable=True)
    return order.gather(-1, ranks.clamp(max=mask.shape[1] - 1))


def last_columns(mask: torch.Tensor, count: int) -> torch.Tensor:
    """Columns of each row's last `count` tokens in their order, `(batch, count)`; padding in front of fewer."""
    return _padding_first(mask)[:, max(mask.shape[1] - count, 0) :]


def left_aligned(mask: torch.Tensor) -> torch.Tensor | None:
    """Column order that moves every row's padding to its left, `(batch, columns)`; None when no row ends in padding.

    `ids.gather(1, order)` keeps the order of a row's tokens. A causal LM continues from the last column, so a batch
    that was padded on the right has to be turned before it can be continued.
    """
    mask = mask.bool()
    if bool(mask[:, -1].all()):
        return None
    return _padding_first(mask)


def _padding_first(mask: torch.Tensor) -> torch.Tensor:
    return torch.argsort(mask.long(), dim=-1, stable=True)


def fit_mask(mask: torch.Tensor, length: int) -> torch.Tensor:
    """The mask under which a source read the beginning of a prompt or, where its cache is longer, the prompt and more.

    Args:
        mask: `(batch, columns)`, the prompt's.
        length: columns of the source's cache.
    """
    further = length - mask.shape[1]
    if further <= 0:
        return mask[:, :length]
    return torch.cat([mask, mask.new_ones(mask.shape[0], further)], dim=1)


__all__ = ["PromptLayout", "fit_mask", "in_source_columns", "last_columns", "layout", "left_aligned", "token_columns"]
