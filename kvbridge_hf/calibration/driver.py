"""From two models and tokens to a mapper."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from ..errors import CalibrationError, FitConfigError
from ..fingerprint import model_fingerprint, tokenizer_fingerprint
from ..geometry import check_pair
from ..mappers.base import FitContext, FitData, get_fit
from ..mappers.config import FitConfig
from ..modeling_kvbridge import KVBridgeMapper
from .layout import StatisticsLayout
from .metrics import MetricCollector, OutputMetrics
from .probe import sensitivities
from .samples import Samples
from .selection import Selection, select
from .statistics import CalibrationStatistics, Statistics
from .traces import Batch, Trace, TracedModel, evaluating, kept_tokens, read_batches, trace
from .weighting import SensitivityMoments

logger = logging.getLogger(__name__)

# Settings that shape the statistics; a fit from saved statistics must ask for the same.
SHAPING = ("num_sinks", "token_stride", "heldout_fraction", "seed")


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
    whole_heads = config.support == "full_head" or config.head_assignment == "fitted" or config.selection == "r2_layer"
    whole_heads = whole_heads or config.head_block is not None
    layout = StatisticsLayout.from_geometries(
        "full_head" if whole_heads else "head_local", source.geometry, target.geometry
    )
    device = _statistics_device(target)
    products = getattr(torch, config.moments_dtype)
    statistics = CalibrationStatistics(
        Statistics.zeros(layout, device, products),
        Statistics.zeros(layout, device, products),
        {
            "source_geometry": source.geometry.to_dict(),
            "target_geometry": target.geometry.to_dict(),
            "source_fingerprint": model_fingerprint(source_model),
            "target_fingerprint": model_fingerprint(target_model),
            "tokenizer_fingerprint": None if tokenizer is None else tokenizer_fingerprint(tokenizer),
            "dataset": dataset,
            **{name: getattr(config, name) for name in SHAPING},
            "sequences": 0,
            "heldout_sequences": 0,
            "skipped_sequences": 0,
            "input_tokens": 0,
            "max_positions": 0,
        },
    )
    info = statistics.info
    for batch in _checked_batches(token_batches, source, target, config, "statistics", progress, info):
        found = trace(source, target, batch, config.num_sinks, config.token_stride)
        heldout = _heldout_rows(batch, config)
        info["sequences"] += int((~heldout).sum())
        info["heldout_sequences"] += int(heldout.sum())
        info["input_tokens"] += int(batch.lengths.sum())
        info["max_positions"] = max(info["max_positions"], int(batch.lengths.max()))
        in_heldout = heldout[found.rows]
        for part, chosen in ((statistics.train, ~in_heldout), (statistics.heldout, in_heldout)):
            if bool(chosen.all()):
                part.update(found)
            elif bool(chosen.any()):
                part.update(found.select(chosen))
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
    sensitivity = SensitivityMoments(
        statistics.layout, selection, config.support, _statistics_device(target), products
    )
    for batch in _checked_batches(token_batches, source, target, config, "sensitivity", progress):
        train = ~_heldout_rows(batch, config)
        if not bool(train.any()):
            continue
        batch = batch.select(train)
        found: Trace = trace(source, target, batch, config.num_sinks, config.token_stride)
        with evaluating(target_model):
            raw = sensitivities(target, batch, config.num_sinks)
        keep = kept_tokens(batch.attention_mask, config.num_sinks, config.token_stride)
        weights = tuple(kind.transpose(2, 3)[:, keep.to(kind.device)] for kind in raw)  # layers, N, heads
        sensitivity.update(found, weights)  # type: ignore[arg-type]
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
        train = ~_heldout_rows(batch, fit_config)
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
        in_heldout = _heldout_rows(batch, fit_config)[found.rows]
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
    _check_enough(statistics, config)
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


def _heldout_rows(batch: Batch, config: FitConfig) -> torch.Tensor:
    """Which sequences are held out: by a hash of their tokens, so batches, order and processes do not matter."""
    return torch.tensor([value < config.heldout_fraction for value in batch.sequence_hashes(config.seed)])


def _check_enough(statistics: CalibrationStatistics, config: FitConfig) -> None:
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


def _statistics_device(target: TracedModel) -> torch.device:
    """Where the moments are kept: with the target, if its device has float64."""
    device = target.device
    return device if device.type in ("cpu", "cuda", "xpu") else torch.device("cpu")


__all__ = [
    "collect_metrics",
    "collect_samples",
    "collect_sensitivity",
    "collect_statistics",
    "fit_from_statistics",
    "fit_mapper",
]
