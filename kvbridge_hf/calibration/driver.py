"""From two models and tokens to a mapper."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from ..errors import CalibrationError, FitConfigError
from ..fingerprint import tokenizer_fingerprint
from ..geometry import check_pair
from ..mappers.base import FitContext, FitData, get_fit
from ..mappers.config import FitConfig
from ..modeling_kvbridge import KVBridgeMapper
from ..segment_boundaries import boundary_tokens
from .accumulate import (
    SHAPING,
    ModelFacts,
    SensitivityAccumulator,
    StatisticsAccumulator,
    heldout_rows,
    new_statistics,
)
from .metrics import MetricCollector, OutputMetrics
from .samples import Samples
from .selection import Selection, select
from .statistics import CalibrationStatistics
from .traces import Batch, TracedModel, evaluating, read_batches, trace
from .weighting import SensitivityMoments

logger = logging.getLogger(__name__)


def fit_mapper(
    source_model: nn.Module,
    target_model: nn.Module,
    token_batches: Iterable[Any],
    fit_config: FitConfig | None = None,
    *,
    tokenizer: Any = None,
    dataset: Any = None,
    progress: bool = True,
    output_dir: Any = None,
) -> KVBridgeMapper:
    """Fit a mapper from the source's KV cache to the target's.

    Args:
        source_model, target_model: Causal LMs that share a tokenizer.
        token_batches: Re-iterable of `input_ids` tensors, or of mappings with `input_ids` and `attention_mask`. Read
            once, and once more each for `weighting="sensitivity"`, `metric="query"`, a method that trains on samples,
            and `distillation`.
        fit_config: Settings; the defaults if not given.
        tokenizer: The shared tokenizer; its fingerprint is then recorded in the mapper.
        dataset: What the tokens are (a name, a dict); recorded in the mapper's provenance as it is.
        progress: Show a bar (never outside a terminal).
        output_dir: Where a distillation keeps its checkpoints, to go on from after an interruption; see
            [`~mappers.distillation.distill`].

    Returns:
        The mapper, in eval mode on the CPU. `config.fit` holds settings, counts, versions and the R^2 of keys and
        values per target layer (`"r2"`, and `"heldout_r2"` on the sequences held out; None if there were none).

    Raises:
        PairMismatchError: the pair does not fit.
        FitConfigError: a setting does not fit the pair.
        CalibrationError: the data cannot be used; says why and where.
    """
    config = fit_config or FitConfig()
    reasons = _reads_again(config)
    if reasons and iter(token_batches) is token_batches:
        raise FitConfigError(
            f"{reasons[0]} reads the data twice, but token_batches is an iterator and can be read once "
            "only. Pass a list, a dataset or a DataLoader."
        )
    statistics = collect_statistics(
        source_model, target_model, token_batches, config, tokenizer=tokenizer, dataset=dataset, progress=progress
    )
    sensitivity = None
    if config.weighting == "sensitivity":
        sensitivity = collect_sensitivity(
            source_model, target_model, token_batches, statistics, config, progress=progress
        )
    metrics = None
    if config.metric == "query":
        metrics = collect_metrics(source_model, target_model, token_batches, config, progress=progress)
    data = FitData(source_model, target_model, token_batches, progress)
    mapper = fit_from_statistics(statistics, config, sensitivity=sensitivity, metrics=metrics, data=data)
    if config.distillation is not None:
        from ..mappers.distillation import distill  # transformers.Trainer is slow to import

        mapper = distill(
            mapper,
            source_model,
            target_model,
            token_batches,
            config.distillation,
            heldout_fraction=config.heldout_fraction,
            seed=config.seed,
            output_dir=output_dir,
            progress=progress,
        )
    return mapper


def _reads_again(config: FitConfig) -> list[str]:
    """Settings that need the data more than once."""
    reasons = []
    if config.weighting == "sensitivity":
        reasons.append("weighting='sensitivity'")
    if config.metric == "query":
        reasons.append("metric='query'")
    if get_fit(config.method).needs_data:
        reasons.append(f"method={config.method!r}")
    if config.distillation is not None:
        reasons.append("distillation")
    return reasons


def collect_statistics(
    source_model: nn.Module,
    target_model: nn.Module,
    token_batches: Iterable[Any],
    fit_config: FitConfig | None = None,
    *,
    tokenizer: Any = None,
    dataset: Any = None,
    progress: bool = True,
) -> CalibrationStatistics:
    """Run both models over the data once and keep the moments; see [`fit_mapper`] for the arguments.

    The result serves every `top_k`, penalty and selection. Collected with `support="full_head"` it serves both
    supports and every head assignment.
    """
    config = fit_config or FitConfig()
    check_pair(source_model, target_model).raise_if_unfit()
    source, target = TracedModel(source_model, "source"), TracedModel(target_model, "target")
    config.resolve_top_k(source.geometry.num_layers)
    statistics = new_statistics(
        ModelFacts.of(source_model),
        ModelFacts.of(target_model),
        config,
        device=statistics_device(target),
        tokenizer_fingerprint=None if tokenizer is None else tokenizer_fingerprint(tokenizer),
        dataset=dataset,
    )
    contents = target if source_model is target_model else source
    accumulator = StatisticsAccumulator(statistics, contents, target, config, (0, target.geometry.num_layers))
    info = statistics.info
    if tokenizer is not None:
        info["boundary_tokens"] = boundary_tokens(tokenizer)
    for batch in _checked_batches(token_batches, source, target, config, "statistics", progress, info):
        accumulator.add(batch, accumulator.read(batch))
    return statistics


def collect_sensitivity(
    source_model: nn.Module,
    target_model: nn.Module,
    token_batches: Iterable[Any],
    statistics: CalibrationStatistics,
    fit_config: FitConfig,
    *,
    progress: bool = True,
) -> SensitivityMoments:
    """The second pass of `weighting="sensitivity"`: weighted moments of the features that the fit selects.

    Args:
        source_model, target_model, token_batches, progress: As in the first pass; see [`fit_mapper`].
        statistics: Of the first pass.
        fit_config: Settings of the fit.
    """
    config, selection = _select(statistics, fit_config)
    source, target = TracedModel(source_model, "source"), TracedModel(target_model, "target")
    products = getattr(torch, config.moments_dtype)
    sensitivity = SensitivityMoments(statistics.layout, selection, config.support, statistics_device(target), products)
    layers = (0, target.geometry.num_layers)
    accumulator = SensitivityAccumulator(sensitivity, source, target, config, layers)
    for batch in _checked_batches(token_batches, source, target, config, "sensitivity", progress):
        accumulator.add(batch, accumulator.read(batch))
    return sensitivity


def collect_metrics(
    source_model: nn.Module,
    target_model: nn.Module,
    token_batches: Iterable[Any],
    fit_config: FitConfig,
    *,
    progress: bool = True,
) -> OutputMetrics:
    """The pass of `metric="query"`: what the target's queries look along, over the sequences that are fitted.

    Args:
        source_model, target_model, token_batches, progress: As in the first pass; see [`fit_mapper`].
        fit_config: Settings of the fit.
    """
    source, target = TracedModel(source_model, "source"), TracedModel(target_model, "target")
    collector = MetricCollector(target, fit_config.num_sinks, seed=fit_config.seed)
    for batch in _checked_batches(token_batches, source, target, fit_config, "metrics", progress):
        train = ~heldout_rows(batch, fit_config)
        if bool(train.any()):
            with evaluating(target_model):
                collector.update(batch.select(train))
    return collector.result()


def collect_samples(
    source_model: nn.Module,
    target_model: nn.Module,
    token_batches: Iterable[Any],
    fit_config: FitConfig,
    *,
    progress: bool = True,
) -> tuple[Samples, Samples]:
    """Tokens to train on and tokens held out, for methods that moments are not enough for.

    Args:
        source_model, target_model, token_batches, progress: As in the first pass; see [`fit_mapper`].
        fit_config: Settings of the fit; at most `max_samples` tokens each are kept.
    """
    source, target = TracedModel(source_model, "source"), TracedModel(target_model, "target")
    parts = [Samples.empty(fit_config.max_samples, fit_config.seed) for _ in range(2)]
    for batch in _checked_batches(token_batches, source, target, fit_config, "samples", progress):
        found = trace(source, target, batch, fit_config.num_sinks, fit_config.token_stride)
        in_heldout = heldout_rows(batch, fit_config)[found.rows]
        for part, chosen in zip(parts, (~in_heldout, in_heldout), strict=True):
            if bool(chosen.any()):
                part.update(found.select(chosen))
    return parts[0], parts[1]


def fit_from_statistics(
    statistics: CalibrationStatistics,
    fit_config: FitConfig | None = None,
    *,
    sensitivity: SensitivityMoments | None = None,
    metrics: OutputMetrics | None = None,
    data: FitData | None = None,
) -> KVBridgeMapper:
    """Fit from statistics that are there already: any `top_k`, penalty, selection.

    Args:
        statistics: From [`collect_statistics`] or `CalibrationStatistics.load`.
        fit_config: Settings. Those that shaped the statistics have to agree.
        sensitivity: From [`collect_sensitivity`], for `weighting="sensitivity"`.
        metrics: From [`collect_metrics`], for `metric="query"`.
        data: The pair and its data, for a method that trains on samples.
    """
    config, selection = _select(statistics, fit_config or FitConfig())
    if sensitivity is not None:
        sensitivity.check(selection.layers, selection.heads)
    method = get_fit(config.method)
    if method.needs_data and data is None:
        raise FitConfigError(
            f"method={config.method!r} trains on the data itself: use fit_mapper, or pass data=FitData(source, "
            "target, token_batches)."
        )
    return method.fit(FitContext(statistics, config, selection, sensitivity, metrics, data))


def _select(statistics: CalibrationStatistics, config: FitConfig) -> tuple[FitConfig, Selection]:
    config = config.resolve_top_k(statistics.layout.source_layers)
    for name in SHAPING:
        if name in statistics.info and statistics.info[name] != getattr(config, name):
            raise FitConfigError(
                f"The statistics were collected with {name}={statistics.info[name]!r}, the fit asks for "
                f"{getattr(config, name)!r}. Use FitConfig({name}={statistics.info[name]!r}) or collect again."
            )
    check_enough(statistics, config)
    with torch.no_grad():
        return config, select(statistics, config)


def _checked_batches(
    token_batches: Iterable[Any],
    source: TracedModel,
    target: TracedModel,
    config: FitConfig,
    label: str,
    progress: bool,
    info: dict[str, Any] | None = None,
) -> Iterator[Batch]:
    """Batches of sequences that have tokens behind the sinks, with a progress bar."""
    vocab_size = min(source.geometry.vocab_size, target.geometry.vocab_size)
    try:
        total = len(token_batches)  # type: ignore[arg-type]
    except TypeError:
        total = None
    bar = tqdm(total=total, desc=label, unit="batch", disable=None if progress else True)
    with bar:
        for batch in read_batches(token_batches, vocab_size):
            usable = batch.lengths > config.num_sinks
            if not bool(usable.all()):
                if config.short_sequences == "error":
                    row = int((~usable).nonzero()[0])
                    raise CalibrationError(
                        f"Sequence {int(batch.numbers[row])} has {int(batch.lengths[row])} tokens, and the first "
                        f"num_sinks={config.num_sinks} of each sequence are kept out of the fit, so nothing is left "
                        "of it. Leave such sequences out, set short_sequences='skip', or lower num_sinks."
                    )
                if info is not None:
                    info["skipped_sequences"] += int((~usable).sum())
                batch = batch.select(usable)
            if len(batch.input_ids):
                yield batch
            bar.update(1)


def check_enough(statistics: CalibrationStatistics, config: FitConfig) -> None:
    """Refuse statistics without tokens and say what is missing, for a fit."""
    info = statistics.info
    if statistics.train.tokens < 2:
        heldout, skipped = info.get("heldout_sequences"), info.get("skipped_sequences")
        if heldout:
            raise CalibrationError(
                f"All {heldout} usable sequences fell into the held-out part (heldout_fraction="
                f"{config.heldout_fraction}). Use more sequences or heldout_fraction=0."
            )
        if skipped:
            raise CalibrationError(
                f"All {skipped} sequences were too short: none has tokens behind the {config.num_sinks} sinks. Use "
                "longer sequences or lower num_sinks."
            )
        raise CalibrationError(
            f"The calibration data gave {statistics.train.tokens} tokens. token_batches must be a re-iterable of "
            "input_ids tensors or of mappings with input_ids; an iterator that was read before is empty."
        )
    if config.heldout_fraction > 0 and not statistics.has_heldout:
        logger.warning(
            "None of the %d sequences was held out (heldout_fraction=%s takes them by a hash), so layers are selected "
            "on the fitted tokens and no held-out R^2 is reported. Use more sequences or a larger fraction.",
            info.get("sequences"),
            config.heldout_fraction,
        )
    if info.get("skipped_sequences"):
        logger.warning("%d sequences were too short and left out.", info["skipped_sequences"])


def statistics_device(target: TracedModel) -> torch.device:
    """Where the moments are kept: with the target, if its device has float64."""
    device = target.device
    return device if device.type in ("cpu", "cuda", "xpu") else torch.device("cpu")


__all__ = [
    "check_enough",
    "collect_metrics",
    "collect_samples",
    "collect_sensitivity",
    "collect_statistics",
    "fit_from_statistics",
    "fit_mapper",
]
