"""What a mapper reads in a handoff: the source's content and, where its method asks for it, the target's own part."""

from __future__ import annotations

from typing import Any

import torch

from .errors import GenerateArgumentError
from .handoff import HandoffReport
from .modeling_kvbridge import MapperMethod, SourceContent
from .prompt_layout import PromptLayout, in_source_columns
from .rotary import ContentRotary, positions_from_mask
from .target_extras import read_extras


def read_content(
    method: MapperMethod,
    view: Any,
    rotary: ContentRotary,
    source_mask: torch.Tensor,
    plan: PromptLayout,
    start: int,
    *,
    target: Any,
    target_rotary: ContentRotary,
    input_ids: torch.Tensor | None,
    mask: torch.Tensor,
    report: HandoffReport,
) -> tuple[SourceContent, torch.Tensor | None]:
    """The content from which columns `start` to `plan.num_columns` of a prompt are mapped.

    Args:
        method: of the mapper. One that looks at earlier tokens gets them all, whatever part of its result is wanted.
        view: the source's cache.
        rotary: the source's.
        source_mask: `(batch, plan.source_stop)`, bool.
        plan: where the source holds the prompt.
        start: columns of the prompt that the target holds already.
        target, target_rotary: for what the method requires of the target.
        input_ids, mask: `(batch, columns)`, the prompt's.
        report: takes the time.

    Returns:
        The content, and the column of it for each mapped one, `(batch, plan.num_columns - start)`; None where they
        agree.

    Raises:
        GenerateArgumentError: the method requires something of the target and there are no `input_ids`.
    """
    stop = plan.source_stop
    first = start if plan.source_columns is None and method.tokenwise else 0
    columns = None if plan.source_columns is None else plan.source_columns[:, start:]
    if columns is None and first < start:
        columns = torch.arange(start, plan.num_columns, device=mask.device).expand(mask.shape[0], -1)
    extras = None
    if method.requires:
        if input_ids is None:
            raise GenerateArgumentError(
                f"A mapper of method {method.name!r} reads {', '.join(method.requires)} of the prompt's tokens "
                "from the target and needs input_ids; a source cache alone will not do."
            )
        with report.timed("target_extras"):
            ids, read = in_source_columns(input_ids, mask, source_mask), source_mask.to(input_ids.device)
            extras = read_extras(method.requires, target, target_rotary, ids[:, first:stop], read[:, first:stop])
    positions = positions_from_mask(source_mask)
    content = SourceContent.from_cache(view, rotary, positions, source_mask, start=first, stop=stop, extras=extras)
    return content, columns


__all__ = ["read_content"]
