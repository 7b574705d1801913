"""Rows of tokens side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def pad(
    rows: Sequence[Any], *, side: str = "left", fill: int = 0, width: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of token ids (lists, arrays or tensors) as `(batch, width)` ids and a mask, both long, on the CPU.

    Args:
        rows: of any lengths.
        side: on which the padding stands, `"left"` or `"right"`.
        fill: id of the padding.
        width: the longest row's by default.
    """
    width = max(map(len, rows), default=0) if width is None else width
    ids = torch.full((len(rows), width), fill, dtype=torch.long)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    for row, tokens in enumerate(rows):
        columns = slice(width - len(tokens), width) if side == "left" else slice(0, len(tokens))
        ids[row, columns] = torch.as_tensor(tokens, dtype=torch.long)
        mask[row, columns] = 1
    return ids, mask


__all__ = ["pad"]
