"""Calibrating the gates of a mapper: what its handoffs look like when nothing is wrong."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from ..calibration.traces import read_batches
from ..errors import CalibrationError
from ..generation_kvbridge import KVBridge
from ..geometry import KVGeometry
from ..handoff import HandoffPolicy, HandoffReport
from ..handoff_repair import apply_native_parts
from ..modeling_kvbridge import KVBridgeMapper
from ..prompt_layout import left_aligned
from .defaults import SCORED, GateDefaults, MagnitudeModel, SuffixModel
from .gates import FEW_TOKENS, HandoffGate, suffix_scores, token_norms
from .likelihood import SuffixScores
from .settings import Gates
from .shadow import compare_with_own

# Quantiles of single tokens' norms between which a layer's calibrated range lies.
TOKEN_QUANTILES = (0.001, 0.999)
# Norms kept for a quantile, for each layer and kind.
MAX_NORMS = 100_000
MIN_ROWS = 20
# In the units of a score's statistics, the distance from a median to the 95 % quantile.
MIN_LIMIT = 0.5
# With the source at hand every one of them is known.
_PARTS = ("tokens", "nll", "source_nll", "divergence", "reverse_divergence")


@dataclass
class _Observations:
    """What handoffs of calibration rows looked like."""

    norms: list[list[torch.Tensor]]  # one list a layer and kind, keys first
    batches: list[tuple[list[list[torch.Tensor]], int]]
    scores: list[SuffixScores]
    kl: list[torch.Tensor]
    tokens: int = 0


def calibrate_gates(
    source_model: PreTrainedModel,
    target_model: PreTrainedModel,
    mapper: KVBridgeMapper,
    token_batches: Iterable[Any],
    *,
    num_native_suffix: int | None = None,
    quantile: float = 0.99,
    seed: int = 0,
) -> dict[str, Any]:
    """Hand calibration prompts over, look at them as the gates do, and store the thresholds in the mapper's config.

    Every sequence is cut at a random length, so that the suffix falls on any part of a text, and handed over by a
    bridge without gates. Call it after [`fit_mapper`], before `save_pretrained`, with text of the kind that will be
    served and that the mapper was *not* fitted on: on its own data a fit looks better than it will be.

    Args:
        source_model, target_model: the pair.
        mapper: the fitted mapper; `mapper.config.gates` is replaced.
        token_batches: as for [`fit_mapper`].
        num_native_suffix: last tokens that the target reads itself; None takes the mapper's own number. The likelihood
            gate needs two or more.
        quantile: share of handoffs of the same kind that each threshold lets pass, in expectation over the rows drawn
            (split conformal prediction: of n rows the threshold is the `ceil((n + 1) * quantile)`-th). Below
            `quantile / (1 - quantile)` rows it is the largest, and lets fewer pass. Two thresholds reject at most
            `2 * (1 - quantile)`.
        seed: of the cuts.

    Returns:
        The dict that `mapper.config.gates` now is.

    Raises:
        CalibrationError: fewer than 20 rows have tokens to map and to score, or something is not finite.
    """
    if not 0.5 <= quantile < 1:
        raise CalibrationError(
            f"quantile must be in [0.5, 1), got {quantile!r}; 0.99 lets 99 % of good handoffs pass."
        )
    suffix = int(mapper.config.num_native_suffix if num_native_suffix is None else num_native_suffix)
    policy = HandoffPolicy(num_native_suffix=suffix, gates=Gates.off())
    mapper.config.gates = {}
    found = _observe(KVBridge(source_model, mapper, policy), target_model, token_batches, policy, seed)
    if len(found.batches) == 0 or sum(rows for _, rows in found.batches) < MIN_ROWS:
        raise CalibrationError(
            f"Only {sum(rows for _, rows in found.batches)} rows could be handed over; calibrating gates takes "
            f"{MIN_ROWS} or more, and a hundred for a threshold at 1 % of them. Give more or longer sequences."
        )
    defaults = GateDefaults(
        magnitude=_magnitude(found, quantile),
        suffix_likelihood=_suffix(found, quantile),
        quantile=quantile,
        rows=sum(rows for _, rows in found.batches),
        tokens=found.tokens,
        kl=_quantiles(torch.cat(found.kl)),
    )
    mapper.config.gates = defaults.to_dict()
    return mapper.config.gates


@torch.no_grad()
def _observe(
    bridge: KVBridge, target: PreTrainedModel, token_batches: Iterable[Any], policy: HandoffPolicy, seed: int
) -> _Observations:
    num_layers = int(bridge.mapper.config.target_geometry["num_layers"])
    found = _Observations([[] for _ in range(2 * num_layers)], [], [], [])
    vocab = min(KVGeometry.from_model(model).vocab_size for model in (bridge.source_model, target))
    for ids, mask in _prompts(token_batches, vocab, bridge, policy, seed):
        gate = HandoffGate(policy.gates, bridge.mapper.config, HandoffReport())
        cache, handed = bridge.prepare(target, ids, mask, None, None, None, policy, gate)
        if handed is None:
            continue
        cache.map_all()
        mapped = handed.valid & (handed.position_ids >= handed.num_sinks)
        rows = mapped.any(-1)
        if not bool(rows.any()):
            continue
        of_batch = []
        for index, layer in enumerate(cache.layers):
            for kind, states in enumerate((layer.keys, layer.values)):
                norms = token_norms(states, handed).cpu()
                of_batch.append([row[shown] for row, shown in zip(norms[rows], mapped[rows].cpu(), strict=True)])
                found.norms[2 * index + kind].extend(of_batch[-1])
        found.batches.append((of_batch, int(rows.sum())))
        found.tokens += int(mapped.sum())
        apply_native_parts(cache, handed, bridge.source_model, target, bridge.mapper, policy, gate.report)
        scores = suffix_scores(target, bridge.source_model, cache, handed, keep_columns=False)
        if scores is not None:
            found.scores.append(_select(scores, rows.cpu() & (scores.tokens > 0)))
        compared = compare_with_own(target, cache, handed)
        if compared is not None:
            found.kl.append(compared["kl"][rows.cpu()])
    return found


def _prompts(
    token_batches: Iterable[Any], vocab: int, bridge: KVBridge, policy: HandoffPolicy, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches padded on the left, cut at a random length of their shortest row's or more."""
    rng = random.Random(seed)
    num_sinks, suffix = bridge.native_parts(policy)
    least = num_sinks + suffix + 1
    for batch in read_batches(token_batches, vocab):
        batch = batch.select(batch.lengths > least)
        if len(batch.input_ids) == 0:
            continue
        ids, mask = batch.input_ids, batch.attention_mask
        shortest = int(batch.lengths.min())
        drop = rng.randint(0, max(shortest - max(least + 1, shortest // 4), 0))
        order = left_aligned(mask)
        if order is not None:
            ids, mask = ids.gather(1, order), mask.gather(1, order)
        yield ids[:, : ids.shape[1] - drop], mask[:, : mask.shape[1] - drop]


def _magnitude(found: _Observations, quantile: float) -> MagnitudeModel:
    ranges = []
    for norms in found.norms:
        values = torch.cat(norms)
        if not bool(values.isfinite().all()):
            raise CalibrationError("A mapped layer is not finite on calibration text. Check the fit before its gates.")
        step = max(1, len(values) // MAX_NORMS)
        low, high = (float(torch.quantile(values[::step], q)) for q in TOKEN_QUANTILES)
        ranges.append((low, high))
    worst = []
    for of_batch, rows in found.batches:
        for row in range(rows):
            shares = []
            for norms, (low, high) in zip(of_batch, ranges, strict=True):
                outside = int(((norms[row] < low) | (norms[row] > high)).sum())
                shares.append(outside / len(norms[row]) if outside > FEW_TOKENS else 0.0)
            worst.append(max(shares))
    limit = conformal_quantile(torch.tensor(worst, dtype=torch.float64), quantile)
    # A limit of zero would make one token too many of three in any prompt a reason.
    return MagnitudeModel(ranges[::2], ranges[1::2], max(limit, 0.02))


def _suffix(found: _Observations, quantile: float) -> SuffixModel | None:
    if not found.scores:
        return None
    parts = {name: torch.cat([getattr(part, name) for part in found.scores]) for name in _PARTS}
    drifts = [part.drift for part in found.scores]
    drift = None if any(part is None for part in drifts) else torch.cat(drifts)  # type: ignore[arg-type]
    scores = SuffixScores(**parts, drift=drift)
    statistics = {}
    for name in SCORED:
        if getattr(scores, name) is None:
            continue  # nothing is repaired
        values = getattr(scores, name).double()
        if name == "drift":
            values = values[~values.isnan()]
            if len(values) < MIN_ROWS:
                continue
        if not bool(values.isfinite().all()):
            raise CalibrationError(f"The suffix's {name} is not finite on calibration text. Check both models first.")
        median, high = float(values.median()), float(torch.quantile(values, 0.95))
        statistics[name] = (median, max(high - median, 1e-3))
    model = SuffixModel(statistics, 1.0, 1.0, num_tokens=int(scores.tokens.median()))
    bare = model.total(scores, without_drift=True)
    without = max(conformal_quantile(bare, quantile), MIN_LIMIT)
    whole = model.total(scores)
    whole = whole[~whole.isnan()]
    # A limit of nothing, of a mapper that is exact, would make rounding a reason.
    limit = max(conformal_quantile(whole, quantile), MIN_LIMIT) if "drift" in statistics else without
    return replace(model, limit=limit, limit_without_drift=without)


def conformal_quantile(values: torch.Tensor, quantile: float) -> float:
    """The value that a further one stays below or at with a probability of `quantile` or more (Vovk et al. 2005)."""
    ordered = values.sort().values
    return float(ordered[min(math.ceil((len(ordered) + 1) * quantile), len(ordered)) - 1])


def _select(scores: SuffixScores, rows: torch.Tensor) -> SuffixScores:
    selected = {name: getattr(scores, name)[rows] for name in _PARTS}
    return SuffixScores(**selected, drift=None if scores.drift is None else scores.drift[rows])


def _quantiles(values: torch.Tensor) -> dict[str, float]:
    values = values[values.isfinite()].double()
    return {name: float(torch.quantile(values, q)) for name, q in (("median", 0.5), ("p95", 0.95), ("p99", 0.99))}


__all__ = ["calibrate_gates"]
