"""From two models and tokens to a mapper."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from ..errors import CalibrationError, FitConfigError
from ..geometry import check_pair
from ..mappers.base import FitContext, FitData, get_fit
from ..mappers.config import FitConfig
from ..modeling_kvbridge import KVBridgeMapper
from .accumulate import (
    SHAPING,
    ModelFacts,
    SensitivityAccumulator,
    StatisticsAccumulator,
    data_info,
    heldout_rows,
    new_statistics,
    statistics_device,
)
from .metrics import MetricsAccumulator, OutputMetrics
from .passes import Accumulator
from .repair_fit import fit_repair
from .samples import Samples
from .selection import Selection, select
from .statistics import CalibrationStatistics
from .traces import Batch, TracedModel, read_batches, trace
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
    lookups: Iterable[Any] | None = None,
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
        lookups: Texts with questions about them, for a distillation with `lookup_fraction` (see there) and for
            `repair="learned"` (see [`~calibration.repair_scorer.fit_repair_scorer`]).

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
    lookups = None if lookups is None else list(lookups)
    data = FitData(source_model, target_model, token_batches, progress, lookups)
    statistics = collect_statistics(
        source_model, target_model, token_batches, config, tokenizer=tokenizer, dataset=dataset, progress=progress
    )
    more: dict[str, Any] = {}
    if config.weighting == "sensitivity":
        more["sensitivity"] = _Collection(data, config).sensitivity(statistics)
    if config.metric == "query":
        more["metrics"] = _Collection(data, config).metrics()
    return fit_and_distill(_context(statistics, config, data=data, **more), output_dir)


def fit_and_distill(context: FitContext, output_dir: Any = None) -> KVBridgeMapper:
    """Fit from a context, and train on the target's predictions where the settings ask for it.

    Args:
        context: Of the fit; with its data where those are needed.
        output_dir: See [`fit_mapper`].
    """
    config, data = context.config, context.data
    mapper = get_fit(config.method).fit(context)
    if config.distillation is not None:
        from ..mappers.distillation import distill  # transformers.Trainer is slow to import

        assert data is not None
        mapper = distill(
            mapper,
            data.source_model,
            data.target_model,
            data.token_batches,
            config.distillation,
            lookups=data.lookups,
            heldout_fraction=config.heldout_fraction,
            seed=config.seed,
            output_dir=output_dir,
            progress=data.progress,
        )
    return fit_repair(mapper, config, data)


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
    if config.repair_layers == "auto":
        reasons.append("repair_layers='auto'")
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
    collection = _Collection(FitData(source_model, target_model, token_batches, progress), config)
    return collection.statistics(data_info(tokenizer, dataset))


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
    data = FitData(source_model, target_model, token_batches, progress)
    return _Collection(data, fit_config).sensitivity(statistics)


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
    return _Collection(FitData(source_model, target_model, token_batches, progress), fit_config).metrics()


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
    return _Collection(FitData(source_model, target_model, token_batches, progress), fit_config).samples()


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
    context = _context(statistics, fit_config or FitConfig(), sensitivity, metrics, data)
    return get_fit(context.config.method).fit(context)


def _context(
    statistics: CalibrationStatistics,
    config: FitConfig,
    sensitivity: SensitivityMoments | None = None,
    metrics: OutputMetrics | None = None,
    data: FitData | None = None,
) -> FitContext:
    """All that a fit is made from, with its layers selected; refuses what does not belong together."""
    config, selection = _select(statistics, config)
    if sensitivity is not None:
        sensitivity.check(selection.layers, selection.heads)
    if get_fit(config.method).needs_data and data is None:
        raise FitConfigError(
            f"method={config.method!r} trains on the data itself: use fit_mapper, or pass data=FitData(source, "
            "target, token_batches)."
        )
    return FitContext(statistics, config, selection, sensitivity, metrics, data)


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


class _Collection:
    """Both models over all batches, once for each thing that is collected."""

    def __init__(self, data: FitData, config: FitConfig):
        self.data, self.config = data, config
        self.source = TracedModel(data.source_model, "source")
        self.target = TracedModel(data.target_model, "target")
        self.layers = (0, self.target.geometry.num_layers)

    def statistics(self, info: dict[str, Any]) -> CalibrationStatistics:
        self.config.resolve_top_k(self.source.geometry.num_layers)
        source, target = ModelFacts.of(self.data.source_model), ModelFacts.of(self.data.target_model)
        statistics = new_statistics(source, target, self.config, device=statistics_device(self.target), info=info)
        contents = self.target if self.data.source_model is self.data.target_model else self.source
        accumulator = StatisticsAccumulator(statistics, contents, self.target, self.config, self.layers)
        self._run("statistics", accumulator, statistics.info)
        return statistics

    def sensitivity(self, statistics: CalibrationStatistics) -> SensitivityMoments:
        config, selection = _select(statistics, self.config)
        products = getattr(torch, config.moments_dtype)
        device = statistics_device(self.target)
        moments = SensitivityMoments(statistics.layout, selection, config.support, device, products)
        self._run("sensitivity", SensitivityAccumulator(moments, self.source, self.target, config, self.layers))
        return moments

    def metrics(self) -> OutputMetrics:
        accumulator = MetricsAccumulator(self.target, self.config)
        self._run("metrics", accumulator)
        return accumulator.result()

    def samples(self) -> tuple[Samples, Samples]:
        config = self.config
        parts = [Samples.empty(config.max_samples, config.seed) for _ in range(2)]
        for batch in self._batches("samples"):
            found = trace(self.source, self.target, batch, config.num_sinks, config.token_stride)
            in_heldout = heldout_rows(batch, config)[found.rows]
            for part, chosen in zip(parts, (~in_heldout, in_heldout), strict=True):
                if bool(chosen.any()):
                    part.update(found.select(chosen))
        return parts[0], parts[1]

    def _run(self, label: str, accumulator: Accumulator, info: dict[str, Any] | None = None) -> None:
        for batch in self._batches(label, info):
            accumulator.add(batch, accumulator.read(batch))

    def _batches(self, label: str, info: dict[str, Any] | None = None) -> Iterator[Batch]:
        """Batches of sequences that have tokens behind the sinks, with a progress bar; `info` counts the others."""
        config = self.config
        vocab_size = min(self.source.geometry.vocab_size, self.target.geometry.vocab_size)
        try:
            total = len(self.data.token_batches)  # type: ignore[arg-type]
        except TypeError:
            total = None
        with tqdm(total=total, desc=label, unit="batch", disable=None if self.data.progress else True) as bar:
            for batch in read_batches(self.data.token_batches, vocab_size):
                usable = batch.lengths > config.num_sinks
                if not bool(usable.all()):
                    if config.short_sequences == "error":
                        row = int((~usable).nonzero()[0])
                        raise CalibrationError(
                            f"Sequence {int(batch.numbers[row])} has {int(batch.lengths[row])} tokens, and the first "
                            f"num_sinks={config.num_sinks} of each sequence are kept out of the fit, so nothing is "
                            "left of it. Leave such sequences out, set short_sequences='skip', or lower num_sinks."
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


__all__ = [
    "check_enough",
    "collect_metrics",
    "collect_samples",
    "collect_sensitivity",
    "collect_statistics",
    "fit_and_distill",
    "fit_from_statistics",
    "fit_mapper",
    "statistics_device",
]
