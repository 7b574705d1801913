"""The native parts of a handoff that come after the map: the target's own lowest layers, and repair.

Everything here works on what a bridge has prepared ([`Handed`]) and on the cache that it is about to hand over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from .attention_reading import attention_to_prefix
from .cache_argument import cache_kwargs
from .cache_kvbridge import BridgedCache, BridgedLayer
from .errors import GenerateArgumentError
from .guard.gates import Handed
from .handoff import HandoffPolicy, HandoffReport
from .native_layers import read_native_layers
from .prompt_layout import in_source_columns, last_columns, token_columns
from .repair import repair, unsupported_reason
from .repair_choice import (
    attention_scores,
    choose,
    combine,
    question_scores,
    random_scores,
    recency_scores,
    segment_question_scores,
    segment_word_scores,
    segments_of,
    surprise_scores,
)
from .repair_drift import RepairDrift
from .repair_scorer import RepairScorer, query_features, scorer_features
from .rotary import positions_from_mask

# The source's last tokens, whose attention says what later tokens look at (`choice="sensitivity"`).
SENSITIVITY_WINDOW = 32


def apply_native_parts(
    cache: BridgedCache,
    handed: Handed,
    source_model: PreTrainedModel,
    target_model: PreTrainedModel,
    mapper: Any,
    policy: HandoffPolicy,
    report: HandoffReport,
) -> None:
    """Replace parts of a handed-over cache by the target's own, in place, as the policy (or else the mapper) says."""
    config = mapper.config
    num_layers, fraction = policy.wanted("native_layers", config), policy.wanted("native_fraction", config)
    if num_layers == 0 and fraction == 0:
        return
    if handed.input_ids is None:
        # The mapper's own wish is no reason to refuse a cache without tokens; the caller's is.
        if policy.native_layers or policy.native_fraction:
            raise GenerateArgumentError(
                "native_layers and native_fraction need input_ids: the target reads tokens again."
            )
        report.notes.append("Nothing was recomputed, as there are no input_ids.")
        return
    if num_layers > 0:
        with report.timed("native_layers"):
            _put_native_layers(cache, handed, target_model, num_layers)
        report.native_layers = num_layers
    if fraction > 0 and policy.native_fraction is None and (reason := unsupported_reason(target_model)):
        # A mapper's recommendation gives way; a caller who asked for it gets the error.
        report.notes.append(f"Nothing was repaired: {reason}")
        return
    if fraction > 0:
        with report.timed("repair_choice"):
            boundaries = torch.tensor(config.boundary_tokens, dtype=torch.long)
            choice = policy.wanted("repair", config)
            scores = _scores(choice, cache, handed, source_model, target_model, mapper, policy, boundaries)
            eligible = handed.valid & (handed.position_ids >= handed.num_sinks)
            chosen = choose(scores.to(eligible.device), eligible, fraction)
        with report.timed("repair"):
            depth = policy.wanted("repair_layers", config)
            drift = RepairDrift(cache, chosen, depth)
            repaired = repair(
                target_model,
                cache,
                handed.input_ids,
                handed.mask,
                chosen,
                before=handed.target_cache,
                num_layers=depth,
            )
            cache.drift = drift.measure(cache)
        report.tokens_repaired, report.repair_layers = repaired, depth
        report.tokens_mapped -= repaired
        report.tokens_native += repaired
        cache.repaired = chosen


def _put_native_layers(cache: BridgedCache, handed: Handed, target_model: PreTrainedModel, num_layers: int) -> None:
    assert handed.input_ids is not None
    ids, mask = handed.input_ids[:, : handed.stop], handed.mask[:, : handed.stop]
    padding = ~handed.valid[:, None, :, None]
    for index, states in enumerate(read_native_layers(target_model, ids, mask, num_layers)):
        keys, values = (state[:, :, handed.start :] for state in states)
        hidden = padding.to(keys.device)
        layer = BridgedLayer(layer_idx=index)  # the mapped one is let go before it was mapped
        layer.update(keys.masked_fill(hidden, 0), values.masked_fill(hidden, 0))
        cache.layers[index] = layer


def _scores(
    choice: str,
    cache: BridgedCache,
    handed: Handed,
    source_model: PreTrainedModel,
    target_model: PreTrainedModel,
    mapper: Any,
    policy: HandoffPolicy,
    boundaries: torch.Tensor,
) -> torch.Tensor:
    """Scores of the handed-over columns, `(batch, stop - start)`."""

    def by_question() -> torch.Tensor:
        return _by_question(handed, policy.question_tokens, boundaries)

    def by_scorer() -> torch.Tensor:
        return _by_scorer(handed, source_model, mapper.repair_scorer, policy.question_tokens, boundaries)

    def by_source() -> torch.Tensor:
        return _by_source(handed, source_model, handed.mask[:, handed.stop :])

    def by_target() -> torch.Tensor:
        return _by_target(cache, handed, target_model)

    def by_surprise() -> torch.Tensor:
        assert handed.input_ids is not None
        ids, mask = handed.input_ids[:, : handed.stop], handed.mask[:, : handed.stop]
        positions, device = positions_from_mask(mask), source_model.device
        logits = source_model(
            input_ids=ids.to(device), attention_mask=mask.long().to(device), position_ids=positions.to(device)
        ).logits
        return surprise_scores(logits, ids.to(device), mask.to(device))[:, handed.start :]

    ways: dict[str, Callable[[], torch.Tensor]] = {
        "question": by_question,
        "source_attention": by_source,
        "target_attention": by_target,
        "sensitivity": lambda: _by_source(handed, source_model, None),
        "surprise": by_surprise,
        "recency": lambda: recency_scores(handed.valid),
        "random": lambda: random_scores(handed.valid),
        "learned": by_scorer,
    }
    found = [ways[name]().to(handed.valid.device) for name in choice.split("+")]
    return found[0] if len(found) == 1 else combine(*found)


def _by_question(handed: Handed, question_tokens: int, boundaries: torch.Tensor) -> torch.Tensor:
    assert handed.input_ids is not None
    mask, covered = handed.mask.to(handed.input_ids.device), slice(handed.start, handed.stop)
    return scores_by_question(handed.input_ids, mask, covered, _question_length(handed, question_tokens), boundaries)


def _question_length(handed: Handed, question_tokens: int) -> torch.Tensor:
    """Tokens of each row's question, `(batch,)`: what the cache does not cover, or else so many at least."""
    return handed.mask[:, handed.stop :].sum(1).clamp(min=question_tokens)


def scores_by_question(
    input_ids: torch.Tensor,
    mask: torch.Tensor,
    covered: slice,
    question_tokens: int | torch.Tensor,
    boundaries: torch.Tensor,
) -> torch.Tensor:
    """Scores of the covered columns by the last `question_tokens` tokens of each row, wherever its padding stands.

    Args:
        input_ids, mask: `(batch, columns)`, the whole prompt's.
        covered: the columns that may be recomputed.
        question_tokens: for all rows, or `(batch,)`.
        boundaries: token ids that end a segment; none to score tokens one by one.
    """
    question = last_tokens(input_ids, mask, question_tokens)
    valid, ids = mask[:, covered], input_ids[:, covered]
    if boundaries.numel() == 0:
        return question_scores(ids, valid, *question)
    return segment_question_scores(ids, valid, *question, segments_of(ids, valid, boundaries))


def last_tokens(
    input_ids: torch.Tensor, mask: torch.Tensor, count: int | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last `count` tokens of each row side by side, and which of them are tokens of the row's own count."""
    counts = torch.as_tensor(count, device=input_ids.device).expand(len(input_ids))
    width = min(int(counts.max()), input_ids.shape[1]) if len(counts) else 0
    order = last_columns(mask, width)
    own = torch.arange(width, 0, -1, device=input_ids.device) <= counts[:, None]
    return input_ids.gather(1, order), mask.gather(1, order).bool() & own


def _by_scorer(
    handed: Handed,
    source_model: PreTrainedModel,
    scorer: RepairScorer | None,
    question_tokens: int,
    boundaries: torch.Tensor,
) -> torch.Tensor:
    """What the mapper's own heads say, from the source's cache of the prompt and of the question."""
    assert handed.input_ids is not None
    if scorer is None:
        raise GenerateArgumentError(
            "repair='learned' needs a mapper with a fitted scorer, and this one has none. Fit it with lookups (see "
            "calibration.repair_scorer.fit_repair_scorer), or choose by 'question'."
        )
    held = handed.source_mask.shape[1]
    copied, ids, mask = _on_source(handed, handed.input_ids[:, handed.stop :], handed.mask[:, handed.stop :], held)
    positions = positions_from_mask(mask)
    if bool(mask[:, held:].any()):
        source_model(
            input_ids=ids[:, held:].to(source_model.device),
            attention_mask=mask.to(source_model.device),
            position_ids=positions[:, held:].to(source_model.device),
            use_cache=True,
            return_dict=True,
            **cache_kwargs(copied),
        )
    else:
        mask, positions = mask[:, :held], positions[:, :held]
    features = scorer_features(copied.layers, handed.source_rotary, positions, scorer.layers)
    home = scorer.query_bias.device
    features, mask = features.masked_fill(~mask.bool()[..., None], 0).to(home), mask.to(home)
    found = scorer.token_scores(features[:, :held], query_features(features, mask, scorer.window))
    place = _source_columns(handed)[:, None].to(home).expand(-1, found.shape[1], -1)
    found = found.gather(2, place)

    prompt, whole = handed.input_ids.to(home), handed.mask.to(home)
    valid, covered = handed.valid.to(home), prompt[:, handed.start : handed.stop]
    segments = segments_of(covered, valid, boundaries)
    question = last_tokens(prompt, whole, _question_length(handed, question_tokens).to(home))
    words = segment_word_scores(covered, valid, *question, segments)
    eligible = valid & (handed.position_ids.to(home) >= handed.num_sinks)
    of_segments = scorer.segment_scores(found, words, segments, eligible)
    behind = (of_segments.amax(-1, keepdim=True) - of_segments).gather(1, segments)
    # From 0 to 1, so that they can be joined with others.
    return (1 / (1 + behind)).nan_to_num(0.0).masked_fill(~eligible, 0)


def _by_source(handed: Handed, source_model: PreTrainedModel, question_mask: torch.Tensor | None) -> torch.Tensor:
    """Where the source looks from the question, or (None) from the last tokens that it has read."""
    assert handed.input_ids is not None
    device = handed.source.layers[0].keys.device
    read = handed.source_mask.to(device)
    columns = read.shape[1]
    if question_mask is None:
        window = min(SENSITIVITY_WINDOW, max(columns // 2, 1))
        held, tail = columns - window, read[:, columns - window :]
        tail_ids = in_source_columns(handed.input_ids.to(device), handed.mask, handed.source_mask)[:, held:]
    else:
        held, tail = columns, question_mask.to(device)
        tail_ids = handed.input_ids[:, handed.stop :].to(device)
        _need_question(tail)
    copied, ids, mask = _on_source(handed, tail_ids, tail, held)
    attention = attention_to_prefix(source_model, copied, ids, mask)
    spread = (0, 0) if question_mask is None else (6, 2)
    scores = attention_scores(attention, read[:, :held], before=spread[0], after=spread[1])
    scores = torch.nn.functional.pad(scores, (0, columns - held))
    return scores.gather(1, _source_columns(handed).to(device))


def _on_source(
    handed: Handed, ids: torch.Tensor, mask: torch.Tensor, held: int
) -> tuple[DynamicCache, torch.Tensor, torch.Tensor]:
    """A copy of the source's cache of its first `held` columns, and ids and mask with further columns behind them."""
    copied = DynamicCache()
    for index, layer in enumerate(handed.source.layers):
        copied.update(layer.keys[:, :, :held], layer.values[:, :, :held], index)
    read = handed.source_mask[:, :held].to(handed.source.layers[0].keys.device)
    ids, mask = ids.to(read.device), mask.to(read.device)
    ids = torch.cat([ids.new_zeros(ids.shape[0], held), ids], dim=1)
    return copied, ids, torch.cat([read, mask.bool()], dim=1).long()


def _source_columns(handed: Handed) -> torch.Tensor:
    """The source's column of each handed-over column, `(batch, stop - start)`, token by token."""
    return token_columns(handed.source_mask, handed.position_ids.to(handed.source_mask.device))


def _by_target(cache: BridgedCache, handed: Handed, target_model: PreTrainedModel) -> torch.Tensor:
    assert handed.input_ids is not None
    _need_question(handed.mask[:, handed.stop :])
    copied = DynamicCache()
    for index, layer in enumerate(cache.layers):
        keys, values = layer.keys, layer.values
        if handed.target_cache is not None:
            front: Any = handed.target_cache.layers[index]
            keys = torch.cat([front.keys[:, :, : handed.start], keys], dim=2)
            values = torch.cat([front.values[:, :, : handed.start], values], dim=2)
        copied.update(keys, values, index)
    mask = handed.mask.to(target_model.device)
    attention = attention_to_prefix(target_model, copied, handed.input_ids, mask.long())
    return attention_scores(attention, mask[:, : handed.stop].to(attention.device))[:, handed.start :]


def _need_question(mask: torch.Tensor) -> None:
    if not bool(mask.any()):
        raise GenerateArgumentError(
            "Choosing what to repair by attention needs a question: a token that the cache does not cover. "
            "Raise num_native_suffix, or choose by 'question', 'sensitivity' or 'recency'."
        )


__all__ = ["apply_native_parts", "last_tokens", "scores_by_question"]
