"""Fits the heads that choose what to repair (`kvbridge_hf.repair_scorer`) to where the target looks.

What is wanted of a choice is the sentences that the target needs for its answer. On its own cache the target shows
them: the head that looks the answer up gives most of its attention to one token. So for each question in texts with
questions (lookups) a sentence's label is the most attention that any head of the target gives to a token of it from
the question's last token, squared and scaled to a sum of 1, and the heads are trained by cross-entropy against it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..attention_reading import attention_to_prefix
from ..errors import CalibrationError
from ..mappers.distillation_data import Lookup, split_lookups
from ..prompt_reading import read_columns
from ..repair_choice import segment_word_scores, segments_of
from ..repair_scorer import RepairScorer, default_layers, query_features, scorer_features
from ..rotary import ContentRotary


@dataclass
class _Asked:
    """A text and its questions: features, and labels `(questions, segments)`."""

    tokens: torch.Tensor
    queries: torch.Tensor
    segments: torch.Tensor
    words: torch.Tensor
    labels: torch.Tensor
    eligible: torch.Tensor


def fit_repair_scorer(
    mapper: Any,
    source_model: PreTrainedModel,
    target_model: PreTrainedModel,
    lookups: Iterable[Any],
    *,
    heads: int = 2,
    rank: int = 32,
    window: int = 6,
    epochs: int = 24,
    learning_rate: float = 3e-3,
    weight_decay: float = 0.05,
    dropout: float = 0.1,
    heldout_fraction: float = 0.1,
    seed: int = 0,
) -> dict[str, Any]:
    """Give a mapper a learned choice of what to repair, and make it the mapper's own (`config.repair = "learned"`).

    Args:
        mapper: of the pair; changed in place.
        source_model, target_model: the pair, in eval mode.
        lookups: texts with questions about them, as [`~mappers.distillation.distill`] takes them.
        heads, rank, window: of the scorer; `6 * heads * rank * kv_width` weights for each source layer read.
        epochs, learning_rate, weight_decay, dropout: of its training with AdamW; the epoch with the best held-out loss
            is kept.
        heldout_fraction: share of the texts kept out of it, by a hash of the text.
        seed: of start, order and dropout.

    Returns:
        What then stands in `mapper.config.repair_scorer`: the settings, `texts`, `questions`, `heldout_questions`,
        `heldout_loss` (nats, before and after).

    Raises:
        CalibrationError: there are no questions to train or to validate on.
        UnsupportedModelError: the target gives no attention weights.
    """
    layers = default_layers(mapper.config.source_geometry["num_layers"])
    settings: dict[str, Any] = {"layers": layers, "heads": heads, "rank": rank, "window": window}
    training, heldout = split_lookups(lookups, heldout_fraction, seed)
    boundaries = torch.tensor(mapper.config.boundary_tokens, dtype=torch.long)
    read = _Reader(source_model, target_model, settings, boundaries, mapper.config.num_sinks)
    items, checks = ([one for lookup in part if (one := read(lookup)) is not None] for part in (training, heldout))
    if not items or not checks:
        raise CalibrationError(
            f"Of {len(training)} lookups to train and {len(heldout)} to validate on, {len(items)} and {len(checks)} "
            "have a question about two sentences or more. Pass more texts with questions."
        )
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        scorer, losses = _train(
            RepairScorer(settings, mapper.config.source_geometry),
            items,
            checks,
            epochs=epochs,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            dropout=dropout,
        )
    counts = [sum(len(item.queries) for item in part) for part in (items, checks)]
    settings |= {"texts": len(items), "questions": counts[0], "heldout_questions": counts[1], "heldout_loss": losses}
    mapper.config.repair_scorer = settings
    mapper.config.repair = "learned"
    mapper.repair_scorer = scorer.to(mapper.device).eval().requires_grad_(False)
    return settings


class _Reader:
    """Lets both models read a lookup."""

    def __init__(self, source: Any, target: Any, settings: dict[str, Any], boundaries: torch.Tensor, num_sinks: int):
        self.source, self.target = source, target
        self.layers, self.window = settings["layers"], settings["window"]
        self.boundaries, self.num_sinks = boundaries, num_sinks
        self.rotary = ContentRotary.from_model(source)

    @torch.no_grad()
    def __call__(self, lookup: Lookup) -> _Asked | None:
        boundary, device = lookup.boundary, torch.device("cpu")
        ids = lookup.ids[None]
        mask = torch.ones_like(ids)
        positions = torch.arange(ids.shape[1])[None]
        cache: Any = read_columns(self.source, ids, mask.bool())
        features = scorer_features(cache.layers, self.rotary, positions, self.layers)[0].float().to(device)
        asked = _questions(lookup)
        if not asked:
            return None
        own = read_columns(self.target, ids[:, :boundary], mask[:, :boundary].bool())
        looks = attention_to_prefix(self.target, own, ids, mask)[0].amax(0).to(device)  # (questions' tokens, boundary)

        valid = torch.ones(1, boundary, dtype=torch.bool)
        segments = segments_of(ids[:, :boundary], valid, self.boundaries)
        count = int(segments.max()) + 1
        eligible = torch.arange(boundary) >= self.num_sinks
        spread = segments.expand(len(asked), -1)
        rows = torch.stack([looks[last - boundary] for _, last in asked]).square() * eligible
        labels = rows.new_zeros(len(asked), count).scatter_reduce(1, spread, rows, "amax")
        sums = labels.sum(1, keepdim=True)
        kept = sums[:, 0] > 0
        if count < 2 or not bool(kept.any()):
            return None
        words = []
        for first, last in asked:
            question = ids[:, first : last + 1]
            words.append(
                segment_word_scores(ids[:, :boundary], valid, question, torch.ones_like(question).bool(), segments)[0]
            )
        return _Asked(
            tokens=features[:boundary],
            queries=torch.cat(
                [query_features(features[None, : last + 1], mask[:, : last + 1], self.window) for _, last in asked]
            )[kept],
            segments=segments[0],
            words=torch.stack(words)[kept],
            labels=(labels / sums.clamp(min=1e-30))[kept],
            eligible=eligible,
        )


def _questions(lookup: Lookup) -> list[tuple[int, int]]:
    """First and last token of each question: what stands before an answer and behind the one before it."""
    places, first = [], lookup.boundary
    for place in range(lookup.boundary, len(lookup.ids)):
        if lookup.answers[place]:
            if place > first:
                places.append((first, place - 1))
            first = place + 1
    if not bool(lookup.answers.any()):
        places.append((lookup.boundary, len(lookup.ids) - 1))
    return places


def _train(
    scorer: RepairScorer,
    items: list[_Asked],
    checks: list[_Asked],
    *,
    epochs: int,
    learning_rate: float,
    weight_decay: float,
    dropout: float,
    batch: int = 4,
) -> tuple[RepairScorer, list[float]]:
    """Train in coordinates in which the features have mean 0 and variance 1, which are then taken into the weights."""
    seen = torch.cat([item.tokens for item in items])
    mean, scale = seen.mean(0), seen.std(0).clamp(min=1e-4)
    for item in [*items, *checks]:
        item.tokens = (item.tokens - mean) / scale
        item.queries = (item.queries - mean.repeat(2)) / scale.repeat(2)
    with torch.no_grad():
        for weight in (scorer.query_weight, scorer.key_weight):
            weight.normal_(std=weight.shape[1] ** -0.5)
    drop = nn.Dropout(dropout)
    steps = epochs * math.ceil(len(items) / batch)
    optimizer = torch.optim.AdamW(scorer.parameters(), learning_rate, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps)
    first = best = _validate(scorer, checks)
    state = copy.deepcopy(scorer.state_dict())
    for _ in range(epochs):
        order = torch.randperm(len(items)).tolist()
        for start in range(0, len(order), batch):
            chosen = [items[index] for index in order[start : start + batch]]
            loss = torch.cat([_losses(scorer, item, drop) for item in chosen]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        if (now := _validate(scorer, checks)) < best:
            best, state = now, copy.deepcopy(scorer.state_dict())
    scorer.load_state_dict(state)
    with torch.no_grad():
        scorer.key_weight.div_(scale[:, None])
        scorer.query_weight.div_(scale.repeat(2)[:, None])
        scorer.query_bias.sub_(torch.einsum("f,hfr->hr", mean.repeat(2), scorer.query_weight))
    return scorer, [round(first, 4), round(best, 4)]


@torch.no_grad()
def _validate(scorer: RepairScorer, checks: list[_Asked]) -> float:
    return float(torch.cat([_losses(scorer, item, nn.Identity()) for item in checks]).mean())


def _losses(scorer: RepairScorer, item: _Asked, drop: nn.Module) -> torch.Tensor:
    """Cross-entropy of each question in nats; the constant that the features' mean adds to a head changes nothing."""
    count = len(item.queries)
    scores = scorer.token_scores(drop(item.tokens)[None].expand(count, -1, -1), drop(item.queries))
    valid = item.eligible.expand(count, -1)
    found = scorer.segment_scores(scores, item.words, item.segments.expand(count, -1), valid)
    logs = found.log_softmax(-1).masked_fill(item.labels == 0, 0)
    return -(item.labels * logs).sum(-1)


__all__ = ["fit_repair_scorer"]
