"""Scores of one condition on one batch, and their assembly over batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from .documents import DocumentBatch
from .fidelity import (
    AttentionOutputs,
    CosineSums,
    kl_divergence,
    log_probs,
    negative_log_likelihood,
    top1_agreement,
)
from .questions import QuestionBatch, choice_log_likelihoods
from .runs import Batch, Reading


@dataclass
class Own:
    """The target with its own cache on one batch, what every other condition is compared with.

    Attributes:
        log_probs: `(rows, keep, vocab)`.
        attention: attention outputs of each layer, see [`AttentionOutputs`].
        entries: keys and values of each layer for all columns of the prefixes but the last, one row a prefix.
        reading: what the target made of the suffixes, until it has been scored.
    """

    log_probs: torch.Tensor
    attention: list[torch.Tensor] | None
    entries: list[tuple[torch.Tensor, torch.Tensor]]
    reading: Reading | None

    @property
    def num_bytes(self) -> int:
        tensors = [self.log_probs, *(self.attention or []), *(t for pair in self.entries for t in pair)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass
class BatchScores:
    """Scores of the rows of one batch."""

    rows: dict[str, np.ndarray]
    cosine: CosineSums | None


@dataclass
class Scores:
    """One condition on one suite.

    Attributes:
        items: arrays `(items,)`. Of documents, means over the continuation: `kl`, `nll` (nats a token), `top1`,
            `tokens`. Of questions, at the answer's place: `kl`, `top1`, `nll` (nats of the right choice), `choice`,
            `correct`.
        cosine: attention-output cosines (see [`CosineSums.result`]), None for the source and where they are not asked
            for.
    """

    items: dict[str, np.ndarray]
    cosine: dict[str, Any] | None


def score_batch(
    model: PreTrainedModel, batch: Batch, own: Own, read: Callable[[], Reading], *, attention: bool
) -> tuple[BatchScores, Reading]:
    """Runs a condition on a batch and compares it with the target on its own cache.

    Args:
        model: the model that reads.
        batch: a [`DocumentBatch`] or a [`QuestionBatch`].
        own: the target's own results on this batch.
        read: does the reading, or hands over one done before, which then is the target's own.
        attention: whether to compare attention outputs; the model must be the target.
    """
    cosine = None
    if attention and own.attention is not None:
        with AttentionOutputs(model, batch.keep) as recorder:
            reading = read()
        cosine = CosineSums()
        recorded = recorder.outputs[0].numel() > 0
        cosine.add(own.attention, recorder.outputs if recorded else own.attention, batch.valid)
    else:
        reading = read()
    scored = log_probs(reading.logits).to(own.log_probs.device)
    valid = batch.valid.to(scored.device)
    weight = valid.double() / valid.sum(1, keepdim=True)

    def row_mean(values: torch.Tensor) -> np.ndarray:
        # Padding may hold anything.
        return torch.where(valid, values.double(), 0.0).mul(weight).sum(1).cpu().numpy()

    rows = {
        "kl": row_mean(kl_divergence(own.log_probs, scored)),
        "top1": row_mean(top1_agreement(own.log_probs, scored)),
    }
    if isinstance(batch, DocumentBatch):
        rows["nll"] = row_mean(negative_log_likelihood(scored, batch.labels.to(scored.device)))
        rows["tokens"] = batch.valid.sum(1).numpy()
    elif isinstance(batch, QuestionBatch):
        choices = choice_log_likelihoods(model, reading, batch.questions)
        answers = [question.answer for question in batch.questions]
        rows["choice"] = np.array([int(values.argmax()) for values in choices])
        rows["nll"] = np.array([-values[answer] for values, answer in zip(choices, answers, strict=True)])
        rows["correct"] = (rows["choice"] == np.array(answers)).astype(np.float64)
    return BatchScores(rows, cosine), reading


def gather(batches: Sequence[Any], parts: Sequence[BatchScores]) -> Scores:
    """Puts the rows of all batches at the places of their documents or questions."""
    places = np.concatenate([np.array(batch.items) for batch in batches])
    items = {}
    for name in parts[0].rows:
        column = np.concatenate([part.rows[name] for part in parts])
        items[name] = np.empty_like(column)
        items[name][places] = column
    cosine = None
    if all(part.cosine is not None for part in parts):
        sums = CosineSums()
        for part in parts:
            assert part.cosine is not None
            sums.merge(part.cosine)
        cosine = sums.result()
    return Scores(items, cosine)
