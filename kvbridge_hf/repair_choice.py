"""Which tokens of a handed-over cache to repair: a score for each token, and the best of them within a budget.

    question          tokens around those that the question repeats, rare ones first (needs no model)
    source_attention  where the source looks when it reads the question
    target_attention  where the target looks when it reads the question on the mapped cache (and reads it again after)
    surprise          tokens that the source did not expect
    sensitivity       tokens that the source's own later tokens attend to
    recency           the last tokens
    random            the control
    learned           small heads on the source's cache, fitted to where the target looks (`repair_scorer.py`)

Several can be joined by `+`; each is then scaled to a maximum of 1.

A token alone tells little: "Rome" has to know whose home it is. So scores that point at single tokens are spread over
the tokens around them, and what is recomputed are short runs of text, in which the target works out by itself who
stands before whom.
"""

from __future__ import annotations

import torch
from torch.nn import functional

CHOICES = (
    "question",
    "source_attention",
    "target_attention",
    "surprise",
    "sensitivity",
    "recency",
    "random",
    "learned",
)

# Tokens of a piece of text where it is not known what ends a sentence.
PIECE = 8


def without_learned(choice: str) -> str:
    """The choice of a mapper that has no scorer: the other ways, or else by the question."""
    return "+".join(way for way in choice.split("+") if way != "learned") or "question"


def neighbourhood(scores: torch.Tensor, before: int, after: int) -> torch.Tensor:
    """Give every token the sum of the scores near it, less the farther they are.

    A score reaches `before` tokens back and `after` tokens ahead of its token, falling linearly.

    Args:
        scores: `(batch, tokens)`.
    """
    tokens = scores.shape[1]
    spread = scores.clone()
    for distance in range(1, min(max(before, after), tokens - 1) + 1):
        if distance <= after:
            spread[:, distance:] += scores[:, :-distance] * (1 - distance / (after + 1))
        if distance <= before:
            spread[:, :-distance] += scores[:, distance:] * (1 - distance / (before + 1))
    return spread


def question_scores(
    input_ids: torch.Tensor,
    valid: torch.Tensor,
    question_ids: torch.Tensor,
    question_valid: torch.Tensor,
    *,
    before: int = 6,
    after: int = 8,
    hops: int = 1,
    hop_weight: float = 0.5,
) -> torch.Tensor:
    """Score tokens by the question's words near them.

    A word of the question weighs `log(n / c)^2`, where it stands `c` times among `n` tokens; what stands everywhere
    so counts for little, and the names of a question for much. With two hops the words near the first finds are looked
    for too ("the friend of Laura is Paula", so Paula).

    Args:
        input_ids, valid: `(batch, tokens)`, the tokens that may be repaired.
        question_ids, question_valid: `(batch, question tokens)`.
        before, after: how far a word reaches, see [`neighbourhood`].
        hops: 1 or 2.
        hop_weight: of the second hop, the first one being 1.

    Returns:
        `(batch, tokens)`, float32.
    """
    same = (input_ids[:, :, None] == input_ids[:, None, :]) & valid[:, None, :]
    counts = same.sum(-1).clamp(min=1)
    weight = torch.log(valid.sum(-1, keepdim=True).clamp(min=1) / counts).clamp(min=0).square()
    asked = ((input_ids[:, :, None] == question_ids[:, None, :]) & question_valid[:, None, :]).any(-1) & valid
    scores = neighbourhood(weight * asked, before, after)
    for _ in range(hops - 1):
        found = scores * weight * ~asked * valid
        # The best find of each word counts, wherever the word stands.
        best = torch.where(same, found[:, None, :], 0.0).amax(-1)
        best = best / best.amax(-1, keepdim=True).clamp(min=1e-9) * (weight * asked).amax(-1, keepdim=True)
        scores = scores + hop_weight * neighbourhood(torch.where(valid & ~asked, best, 0.0), before, after)
    return scores.masked_fill(~valid, 0)


def segments_of(input_ids: torch.Tensor, valid: torch.Tensor, boundaries: torch.Tensor) -> torch.Tensor:
    """Number of the segment (sentence, line) of each token, `(batch, tokens)`; a boundary ends its segment.

    Where no boundaries are known, pieces of [`PIECE`] of a row's own tokens.
    """
    if boundaries.numel() == 0:
        return (valid.long().cumsum(-1) - 1).clamp(min=0) // PIECE
    ends = torch.isin(input_ids, boundaries.to(input_ids.device)) & valid
    return functional.pad(ends[:, :-1].long(), (1, 0)).cumsum(-1)


def pool_segments(scores: torch.Tensor, segments: torch.Tensor, *, carry: float = 0.1) -> torch.Tensor:
    """Give all tokens of a segment the sum of its scores, and the next segment a share of it.

    The next one often speaks of the same ("He has six coins").

    Args:
        scores: `(batch, tokens)`, zero where a token tells nothing.
        segments: from [`segments_of`].
        carry: that share.
    """
    count = int(segments.max()) + 1 if segments.numel() else 0
    totals = scores.new_zeros(scores.shape[0], count + 1).scatter_add_(1, segments, scores)
    totals[:, 1:] += carry * totals[:, :-1].clone()
    return totals.gather(1, segments)


def segment_question_scores(
    input_ids: torch.Tensor,
    valid: torch.Tensor,
    question_ids: torch.Tensor,
    question_valid: torch.Tensor,
    segments: torch.Tensor,
    *,
    carry: float = 0.1,
    hops: int = 1,
    hop_weight: float = 0.5,
) -> torch.Tensor:
    """As [`question_scores`], by whole segments: each gets what the question's words in it weigh, every word once.

    A word weighs `log(n / c)^2`, where it stands in `c` of the `n` segments.
    """
    same, weight, first, asked = _segment_words(input_ids, valid, question_ids, question_valid, segments)
    scores = pool_segments(weight * (asked & first), segments, carry=carry)
    for _ in range(hops - 1):
        found = torch.where(same, (scores * valid * ~asked)[:, None, :], 0.0).amax(-1)
        found = found / scores.amax(-1, keepdim=True).clamp(min=1e-9)
        scores = scores + hop_weight * pool_segments(found.square() * weight * (first & ~asked), segments, carry=0.0)
    return scores.masked_fill(~valid, 0)


def segment_word_scores(
    input_ids: torch.Tensor,
    valid: torch.Tensor,
    question_ids: torch.Tensor,
    question_valid: torch.Tensor,
    segments: torch.Tensor,
) -> torch.Tensor:
    """What the question's words in each segment weigh, as in [`segment_question_scores`], at most 1 in a row.

    Returns:
        `(batch, segments)`, float32.
    """
    _, weight, first, asked = _segment_words(input_ids, valid, question_ids, question_valid, segments)
    count = int(segments.max()) + 1
    totals = weight.new_zeros(len(weight), count).scatter_add_(1, segments, weight * (asked & first))
    return totals / totals.amax(-1, keepdim=True).clamp(min=1e-9)


def _segment_words(
    input_ids: torch.Tensor,
    valid: torch.Tensor,
    question_ids: torch.Tensor,
    question_valid: torch.Tensor,
    segments: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Which tokens are the same word, what a word weighs, whether a token is its segment's first of it, and asked."""
    tokens = input_ids.shape[1]
    same = (input_ids[:, :, None] == input_ids[:, None, :]) & valid[:, None, :]
    # A token counts where no earlier one of its segment is the same word.
    together = segments[:, :, None] == segments[:, None, :]
    earlier = torch.ones(tokens, tokens, dtype=torch.bool, device=input_ids.device).tril(-1)
    first = ~(same & together & earlier).any(-1) & valid
    counts = (same & first[:, None, :]).sum(-1).clamp(min=1)
    # Padding behind a row's last segment makes no segment of its own.
    number = segments.masked_fill(~valid, 0).amax(-1, keepdim=True) + 1
    weight = torch.log((number + 1) / counts).clamp(min=0).square()
    asked = ((input_ids[:, :, None] == question_ids[:, None, :]) & question_valid[:, None, :]).any(-1) & valid
    return same, weight, first, asked


def random_scores(valid: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """The same numbers for the same length of a row, whatever stands beside it."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(valid.shape[1], generator=generator).to(valid.device)
    return numbers[(valid.long().cumsum(-1) - 1).clamp(min=0)]


def recency_scores(valid: torch.Tensor) -> torch.Tensor:
    """Later tokens score higher."""
    return valid.long().cumsum(-1).float()


def surprise_scores(logits: torch.Tensor, input_ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Loss of each token in nats under a model's `(batch, tokens, vocab)` logits; the first token has 0."""
    losses = functional.cross_entropy(logits[:, :-1].float().mT, input_ids[:, 1:], reduction="none")
    return functional.pad(losses, (1, 0)) * valid * functional.pad(valid[:, :-1], (1, 0)).float()


def attention_scores(attention: torch.Tensor, valid: torch.Tensor, *, before: int = 6, after: int = 2) -> torch.Tensor:
    """Where a question's tokens look, spread over the tokens around.

    The most that any head of any layer gives to a token counts: a head that looks something up gives most of its
    attention to one token, and a mean over heads would drown it.

    Args:
        attention: `(batch, layers * heads, question tokens, tokens)`; zero for question tokens that are padding.
        valid: `(batch, tokens)`.
    """
    return neighbourhood((attention.amax(1).sum(1) * valid).float(), before, after).masked_fill(~valid, 0)


def combine(*scores: torch.Tensor) -> torch.Tensor:
    """Sum of scores, each scaled to a maximum of 1 in its row."""
    return sum(score / score.amax(-1, keepdim=True).clamp(min=1e-9) for score in scores)  # type: ignore[return-value]


def choose(scores: torch.Tensor, eligible: torch.Tensor, fraction: float) -> torch.Tensor:
    """The best-scored tokens of each row.

    Args:
        scores, eligible: `(batch, tokens)`; only eligible tokens are chosen.
        fraction: share of a row's eligible tokens, rounded up, so that 1 is all of them and 0 none.

    Returns:
        `(batch, tokens)`, bool.
    """
    budget = torch.ceil(eligible.sum(-1, keepdim=True) * fraction - 1e-6).long()
    order = scores.masked_fill(~eligible, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    return (rank < budget) & eligible


__all__ = [
    "CHOICES",
    "attention_scores",
    "choose",
    "combine",
    "neighbourhood",
    "pool_segments",
    "question_scores",
    "random_scores",
    "recency_scores",
    "segment_question_scores",
    "segment_word_scores",
    "segments_of",
    "surprise_scores",
    "without_learned",
]
