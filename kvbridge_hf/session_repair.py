"""Repair of what a session's model was handed over in earlier turns, for the question that is asked now.

A handoff repairs the tokens that it maps, chosen by the question of its turn. What a later question asks for stands
among tokens that were mapped turns ago, and nothing would look at them again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from .handoff import HandoffPolicy
from .handoff_repair import scores_by_question
from .repair import repair, unsupported_reason
from .repair_choice import choose
from .session_state import Span


@torch.no_grad()
def repair_history(
    target: PreTrainedModel,
    cache: Cache,
    input_ids: torch.Tensor,
    spans: Iterable[Span],
    config: Any,
    policy: HandoffPolicy,
    num_suffix: int,
) -> int:
    """Let a model recompute, in place, the mapped tokens of its cache that the conversation's last tokens ask for.

    Args:
        target: the model.
        cache: its cache of the conversation's first tokens.
        input_ids: `(1, tokens)`, the whole conversation.
        spans: where the cache's columns come from.
        config: of the mapper that hands over now.
        policy: the session's; it and the config say which share of the mapped tokens is recomputed.
        num_suffix: last tokens that the model reads itself; they are the question, together with the policy's
            `question_tokens`.

    Returns:
        Tokens recomputed. None are where tokens are not chosen by the question (or by a scorer, which would need the
        source's cache of all that was said; here the question's words choose then).
    """
    fraction, choice = policy.wanted("native_fraction", config), policy.wanted("repair", config)
    if fraction == 0 or not {"question", "learned"} & set(choice.split("+")) or unsupported_reason(target) is not None:
        return 0
    held = int(cache.get_seq_length())
    mapped = torch.zeros(1, held, dtype=torch.bool)
    for span in spans:
        mapped[:, span.start : span.stop] = span.origin is not None
    ids, mask = input_ids.cpu(), torch.ones_like(input_ids, dtype=torch.bool, device="cpu")
    boundaries = torch.tensor(config.boundary_tokens, dtype=torch.long)
    count = max(num_suffix, policy.question_tokens)
    chosen = choose(scores_by_question(ids, mask, slice(held), count, boundaries), mapped, fraction)
    return repair(target, cache, ids, mask, chosen, num_layers=policy.wanted("repair_layers", config))


__all__ = ["repair_history"]
