"""The order in which a mapped cache is judged before the target starts."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from transformers import PreTrainedModel

from ..cache_kvbridge import BridgedCache
from ..errors import HandoffRejected
from .events import emit, make_event
from .gates import Handed, HandoffGate, suffix_scores
from .likelihood import SuffixScores
from .settings import Shadow
from .shadow import compare_with_own, shadow_rows


@torch.no_grad()
def judge(
    gate: HandoffGate,
    cache: BridgedCache,
    handed: Handed,
    source: PreTrainedModel,
    target: PreTrainedModel,
    policy: Any,
    request_id: str | None = None,
) -> None:
    """Ask every gate that looks at the mapped cache, and run the shadow where the request is chosen.

    Where the likelihood gate runs and nothing stands in front of the handed-over columns, `cache` afterwards holds the
    columns that the target read for it, all but the prompt's last.

    Raises:
        HandoffRejected: a gate rejected. A chosen request is compared before, so that shadow records hold rejected
            handoffs too.
    """
    shadowed = is_shadowed(policy.shadow, request_id, handed)
    if not gate.wants_mapped and not shadowed:
        return
    report = gate.report
    for layer in cache.layers:
        layer.map()
        gate.check_time()
    scores: SuffixScores | None = None
    rejection: HandoffRejected | None = None
    try:
        gate.check_mapped(cache, handed)
    except HandoffRejected as error:
        if not shadowed:
            raise
        rejection = error
    wants_suffix = gate.wants("suffix_likelihood") and rejection is None
    if wants_suffix or shadowed:
        with report.timed("suffix"):
            keep = wants_suffix and handed.target_cache is None
            scores = suffix_scores(target, source, cache, handed, keep_columns=keep)
    try:
        if wants_suffix:
            gate.check_suffix(scores)
            gate.check_time()
        if rejection is None:
            gate.check_accept(cache)
    except HandoffRejected as error:
        rejection = error
    if shadowed:
        _record(gate, cache, handed, target, policy, request_id, scores, rejection is not None)
    if rejection is not None:
        raise rejection


def is_shadowed(shadow: Shadow | None, request_id: str | None, handed: Handed) -> bool:
    """Whether a request is chosen; without an id, its tokens decide, so that a retry decides alike."""
    if shadow is None or handed.input_ids is None:
        return False
    if request_id is not None:
        return shadow.selects(request_id)
    digest = hashlib.sha256()
    for row, mask in zip(handed.input_ids.cpu(), handed.mask.cpu(), strict=True):
        digest.update(row[mask].numpy().astype("<i8").tobytes() + b"\0")
    return shadow.selects(digest.digest())


def _record(
    gate: HandoffGate,
    cache: BridgedCache,
    handed: Handed,
    target: PreTrainedModel,
    policy: Any,
    request_id: str | None,
    scores: SuffixScores | None,
    rejected: bool,
) -> None:
    with gate.report.timed("shadow"):
        compared = compare_with_own(target, cache, handed)
    if compared is None:
        return
    score = None if scores is None else gate.suffix_score(scores)
    emit(
        make_event("shadow", request_id, rejected=rejected, rows=shadow_rows(compared, scores, score)), policy.on_event
    )


__all__ = ["is_shadowed", "judge"]
