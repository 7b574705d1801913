"""How far the target strays when it goes on from a handed-over cache, token by token and head by head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from machine import whole_machine
from pairs import Pair
from prompts import pieces
from transformers import Cache

from kvbridge_hf import Gates, HandoffPolicy, KVBridge
from kvbridge_hf.errors import UnsupportedModelError
from kvbridge_hf.evaluation.controls import leave_last_column
from kvbridge_hf.evaluation.fidelity import (
    AttentionOutputs,
    CosineSums,
    kl_divergence,
    log_probs,
    top1_agreement,
)
from kvbridge_hf.evaluation.runs import run


@dataclass(frozen=True)
class TokenScore:
    """One generated token: what the target thought of its place with its own cache and with the other one.

    Args:
        kl: KL(own || handed-over) of the two next-token distributions, in nats.
        agree: both give the same token the highest probability.
        own, other: that token's text, for each.
        probability: of the token that was written, with the target's own cache.
    """

    text: str
    kl: float
    agree: bool
    own: str
    other: str
    probability: float


@dataclass(frozen=True)
class Judgement:
    """Scores of an answer.

    Args:
        cosines: `[layer][head]`, cosine of what each attention head read, mean over the answer's tokens; None for a
            model whose heads are not known.
    """

    tokens: list[TokenScore]
    cosines: list[list[float]] | None
    why_no_cosines: str | None = None

    @property
    def mean_kl(self) -> float:
        return sum(token.kl for token in self.tokens) / len(self.tokens)

    @property
    def agreement(self) -> float:
        return sum(token.agree for token in self.tokens) / len(self.tokens)


def without_gates(bridge: KVBridge) -> HandoffPolicy:
    """The bridge's policy with every gate off: what the map itself is worth."""
    return replace(bridge.policy, gates=Gates.off(), on_failure="error", shadow=None, on_event=None)


@torch.no_grad()
def judge_answer(
    pair: Pair,
    input_ids: torch.Tensor,
    answer: Sequence[int],
    source_cache: Cache | None = None,
    *,
    bridge: KVBridge | None = None,
    policy: HandoffPolicy | None = None,
    attention: bool = True,
) -> Judgement:
    """Read one answer twice, on the target's own cache of the prompt and on a handed-over one, and compare.

    Args:
        input_ids: `(1, tokens)`, the prompt.
        answer: tokens that were generated after it.
        source_cache: the source's cache of the prompt; it reads it again otherwise.
        bridge: another bridge than the pair's.
        policy: of the handoff; the bridge's own, with its gates, by default.
        attention: compare attention outputs too.

    Raises:
        ValueError: the answer is empty.
    """
    if not answer:
        raise ValueError("There is no answer to judge.")
    bridge = pair.bridge if bridge is None else bridge
    target, count, columns = pair.target, len(answer), input_ids.shape[1]
    # The last token's own successor is not judged, so it is not read.
    ids = torch.cat([input_ids, torch.tensor([list(answer[:-1])], dtype=torch.long, device=input_ids.device)], dim=1)
    mask = torch.ones_like(ids)
    sums, why = CosineSums(), None
    with whole_machine():
        cache = bridge.handoff(
            input_ids,
            source_cache=source_cache,
            target_model=target,
            policy=bridge.policy if policy is None else policy,
        )
        leave_last_column(cache, columns)
        if attention:
            try:
                own_logits, own_read = _read(target, None, ids, mask, count)
                other_logits, other_read = _read(target, cache, ids, mask, count)
                sums.add(own_read, other_read, torch.ones(1, count, dtype=torch.bool))
            except UnsupportedModelError as error:
                attention, why = False, str(error)
        if not attention:
            own_logits = run(target, None, ids, mask, keep=count).logits
            other_logits = run(target, cache, ids, mask, keep=count).logits
    own, other = log_probs(own_logits[0]), log_probs(other_logits[0])
    kl, agree = kl_divergence(own, other), top1_agreement(own, other)
    written = torch.tensor(list(answer), device=own.device)
    probability = own.gather(-1, written[:, None])[:, 0].exp()

    def text_of(token: Any) -> str:
        return pair.tokenizer.decode([int(token)]).strip() or "␣"

    tokens = [
        TokenScore(text, float(kl[i]), bool(agree[i]), text_of(own[i].argmax()), text_of(other[i].argmax()), float(p))
        for i, (text, p) in enumerate(zip(pieces(pair.tokenizer, list(answer)), probability, strict=True))
    ]
    cosines = None if sums.total is None else (sums.total / sums.count).tolist()
    return Judgement(tokens, cosines, why)


def _read(
    target: Any, cache: Cache | None, ids: torch.Tensor, mask: torch.Tensor, keep: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    with AttentionOutputs(target, keep_last=keep) as recorded:
        logits = run(target, cache, ids, mask, keep=keep).logits
    return logits, recorded.outputs


__all__ = ["Judgement", "TokenScore", "judge_answer", "without_gates"]
