"""What a handoff makes of text that is known: likelihoods of the prompt's last tokens.

The target runs the last tokens of a prompt on top of the mapped prefix anyway. Each of them is known, so its
probability under the handed-over cache costs nothing, and the source's probability of the same token says how
surprising the text is by itself. A handoff under which known text is surprising will not continue it well either.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# More columns say little more and cost a row of logits each.
MAX_SCORED_COLUMNS = 64


@dataclass(frozen=True)
class SuffixScores:
    """Scores of each row's known suffix tokens, all `(batch,)`, float32 on the CPU; NaN where a row has none.

    Args:
        tokens: how many tokens were scored.
        nll: mean negative log-likelihood of them under the handed-over cache, nats a token.
        source_nll: the source's, or None where it is not known.
        divergence: mean KL(source || target) of the next-token distributions at these columns, nats.
        reverse_divergence: mean KL(target || source) there: how much the target expects that the source rules out.
            The other direction is ruled by single tokens to which the target gives nearly no probability.
        drift: how far mapped tokens moved when the target recomputed them, see [`RepairDrift`]; None without repair.
    """

    tokens: torch.Tensor
    nll: torch.Tensor
    source_nll: torch.Tensor | None = None
    divergence: torch.Tensor | None = None
    reverse_divergence: torch.Tensor | None = None
    drift: torch.Tensor | None = None

    @property
    def excess(self) -> torch.Tensor | None:
        """`nll - source_nll`: how much more surprising the text is to the target than to the source."""
        return None if self.source_nll is None else self.nll - self.source_nll


def scored_columns(mask: torch.Tensor, start: int) -> tuple[int, torch.Tensor]:
    """Columns whose next token is known and that the target reads itself.

    Args:
        mask: `(batch, columns)`, bool, of the whole prompt.
        start: first column that the target reads itself.

    Returns:
        The first scored column, and `(batch, scored)` bool: whether the column and the next one are real tokens.
    """
    last = mask.shape[1] - 1
    first = max(start, last - MAX_SCORED_COLUMNS)
    return first, mask[:, first:last] & mask[:, first + 1 :]


def score_suffix(
    log_probs: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor, source_log_probs: torch.Tensor | None = None
) -> SuffixScores:
    """Score known tokens.

    Args:
        log_probs: `(batch, scored, vocab)`, the target's with the handed-over cache.
        labels: `(batch, scored)`, the token that follows each column.
        valid: `(batch, scored)`, bool.
        source_log_probs: the source's; where the vocabularies are padded differently, the shorter one counts.
    """
    labels, valid = labels.to(log_probs.device), valid.to(log_probs.device)
    count = valid.sum(1)

    def mean(values: torch.Tensor) -> torch.Tensor:
        # 0 / 0 is NaN: a row without scored tokens has no score.
        return (torch.where(valid, values, 0.0).sum(1) / count).cpu()

    nll = mean(-log_probs.gather(-1, labels[..., None])[..., 0])
    if source_log_probs is None:
        return SuffixScores(count.cpu(), nll)
    source = source_log_probs.to(log_probs.device)
    source_nll = mean(-source.gather(-1, labels[..., None])[..., 0])
    if source.shape[-1] != log_probs.shape[-1]:
        size = min(source.shape[-1], log_probs.shape[-1])
        source, log_probs = source[..., :size].log_softmax(-1), log_probs[..., :size].log_softmax(-1)
    both = (mean(divergence(first, second)) for first, second in ((source, log_probs), (log_probs, source)))
    return SuffixScores(count.cpu(), nll, source_nll, *both)


def divergence(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """KL(first || second) in nats of log-probabilities `(..., vocab)`; `(...)`."""
    terms = torch.where(first > -torch.inf, first.exp() * (first - second), 0.0)
    return terms.sum(-1).clamp_min(0.0)


__all__ = ["MAX_SCORED_COLUMNS", "SuffixScores", "divergence", "score_suffix", "scored_columns"]
