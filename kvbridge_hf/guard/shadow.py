"""Shadow runs: some handoffs are compared with what the target's own prefill would have given."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from ..rotary import positions_from_mask
from .gates import Handed
from .likelihood import MAX_SCORED_COLUMNS, SuffixScores, divergence
from .peek import peek, run_columns


@torch.no_grad()
def compare_with_own(target: PreTrainedModel, cache: Cache, handed: Handed) -> dict[str, torch.Tensor] | None:
    """Next-token distributions of the target with the handed-over cache against those with its own.

    Compared are the columns that the target reads itself (at most 64): the native suffix, and the last column, which
    gives the first new token.

    Returns:
        `kl`, `kl_last`, `top1` (each `(batch,)`) and `columns`; None where no column is left to the target.
    """
    ids, mask = handed.input_ids, handed.mask
    if ids is None or handed.stop >= handed.columns:
        return None
    positions = positions_from_mask(mask)
    keep = min(handed.columns - handed.stop, MAX_SCORED_COLUMNS)
    parts = [(cache, handed.stop - handed.start)]
    if handed.target_cache is not None:
        parts.insert(0, (handed.target_cache, handed.start))
    columns = slice(handed.stop, handed.columns)
    handed_over = run_columns(target, peek(*parts), ids[:, columns], mask, positions[:, columns], keep)
    own = run_columns(target, DynamicCache(), ids, mask, positions, keep)
    valid = mask[:, -keep:].to(own.device)
    count = valid.sum(-1)

    def mean(values: torch.Tensor) -> torch.Tensor:
        return (torch.where(valid, values, 0.0).sum(-1) / count).cpu()

    kl = divergence(own, handed_over)
    last = torch.where(valid, torch.arange(keep, device=own.device), -1).amax(-1, keepdim=True)
    kl_last = kl.gather(-1, last.clamp(min=0))[:, 0].cpu()
    top1 = (own.argmax(-1) == handed_over.argmax(-1)).float()
    return {"kl": mean(kl), "kl_last": kl_last, "top1": mean(top1), "columns": count.cpu()}


def shadow_rows(
    compared: dict[str, torch.Tensor], scores: SuffixScores | None, score: torch.Tensor | None
) -> list[dict[str, Any]]:
    """`rows` of a shadow event."""
    rows = []
    for row in range(len(compared["kl"])):
        entry: dict[str, Any] = {name: float(compared[name][row]) for name in ("kl", "kl_last", "top1")}
        entry["columns"] = int(compared["columns"][row])
        for name in ("nll", "source_nll", "excess", "divergence", "reverse_divergence", "drift"):
            values = None if scores is None else getattr(scores, name)
            entry[name] = None if values is None else float(values[row])
        entry["score"] = None if score is None else float(score[row])
        rows.append(entry)
    return rows


__all__ = ["compare_with_own", "shadow_rows"]
