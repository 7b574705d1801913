"""What the passes of a calibration fill: statistics of a block of target layers, and their sensitivity moments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..errors import FitConfigError
from ..fingerprint import model_fingerprint, tokenizer_fingerprint
from ..geometry import KVGeometry
from ..segment_boundaries import boundary_tokens
from .layout import StatisticsLayout
from .probe import probed
from .statistics import COUNTS, CalibrationStatistics, Statistics
from .traces import Batch, NonFiniteError, Trace, TracedModel, evaluating, join_contents, kept_tokens
from .weighting import SensitivityMoments

if TYPE_CHECKING:  # methods import this module
    from ..mappers.config import FitConfig

# Settings that shape the statistics; a fit from them must ask for the same.
SHAPING = ("num_sinks", "token_stride", "heldout_fraction", "seed")


@dataclass(frozen=True)
class ModelFacts:
    """What is recorded of a model, also when it is not in memory any more."""

    geometry: KVGeometry
    fingerprint: dict[str, Any]

    @classmethod
    def of(cls, model: Any) -> ModelFacts:
        return cls(KVGeometry.from_model(model), model_fingerprint(model))


class Contents(Protocol):
    """Gives the source's content keys and values of a batch: the model itself, or what it wrote to disk."""

    def content(self, batch: Batch, keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See [`TracedModel.content`]."""


def statistics_support(config: FitConfig) -> str:
    """Which statistics a fit needs: of matched heads only, or of whole heads."""
    whole = config.support == "full_head" or config.head_assignment == "fitted" or config.selection == "r2_layer"
    return "full_head" if whole or config.head_block is not None else "head_local"


def block_geometry(geometry: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    """A model's geometry as if it had only some of its layers."""
    block = {**geometry, "num_layers": last - first}
    for name in ("layer_types", "rotary_layers"):
        if name in geometry:
            block[name] = geometry[name][first:last]
    return block


def new_statistics(
    source: ModelFacts,
    target: ModelFacts,
    config: FitConfig,
    layers: tuple[int, int] | None = None,
    *,
    device: torch.device | str = "cpu",
    info: Mapping[str, Any] | None = None,
) -> CalibrationStatistics:
    """Empty statistics of a pair.

    Args:
        source, target: The pair.
        config: Settings.
        layers: First target layer of a block and the one behind its last; all by default.
        device: Of the moments.
        info: More for the provenance; see [`data_info`].
    """
    layout = StatisticsLayout.from_geometries(statistics_support(config), source.geometry, target.geometry)
    geometry = target.geometry.to_dict()
    if layers is not None:
        layout = replace(layout, target_layers=layers[1] - layers[0])
        geometry = block_geometry(geometry, *layers)
    products = getattr(torch, config.moments_dtype)
    return CalibrationStatistics(
        Statistics.zeros(layout, device, products),
        Statistics.zeros(layout, device, products),
        {
            "source_geometry": source.geometry.to_dict(),
            "target_geometry": geometry,
            "source_fingerprint": source.fingerprint,
            "target_fingerprint": target.fingerprint,
            **(data_info() if info is None else info),
            **{name: getattr(config, name) for name in SHAPING},
            **dict.fromkeys(COUNTS, 0),
            "max_positions": 0,
        },
    )


def data_info(tokenizer: Any = None, dataset: Any = None) -> dict[str, Any]:
    """What statistics record of the tokenizer and the data.

    Args:
        tokenizer: The pair's, if it is known.
        dataset: What the tokens are; JSON types.
    """
    info: dict[str, Any] = {"tokenizer_fingerprint": None, "dataset": dataset}
    if tokenizer is not None:
        info.update(tokenizer_fingerprint=tokenizer_fingerprint(tokenizer), boundary_tokens=boundary_tokens(tokenizer))
    return info


def statistics_device(target: TracedModel) -> torch.device:
    """Where the moments are kept: with the target, if its device has float64."""
    device = target.device
    return device if device.type in ("cpu", "cuda", "xpu") else torch.device("cpu")


def heldout_rows(batch: Batch, config: FitConfig) -> torch.Tensor:
    """Which sequences are held out: by a hash of their tokens, so batches, order and processes do not matter."""
    return torch.tensor([value < config.heldout_fraction for value in batch.sequence_hashes(config.seed)])


@contextmanager
def fitted_part(batch: Batch, config: FitConfig) -> Iterator[Batch | None]:
    """The sequences of a batch that are fitted; None if there are none. Errors name the rows of the whole batch."""
    train = ~heldout_rows(batch, config)
    try:
        yield batch.select(train) if bool(train.any()) else None
    except NonFiniteError as error:
        bad = torch.zeros_like(train)
        bad[train.nonzero()[:, 0][error.rows]] = True
        raise NonFiniteError(str(error), bad) from error


def _block(trace: Trace, first: int, last: int) -> Trace:
    return replace(trace, target_keys=trace.target_keys[first:last], target_values=trace.target_values[first:last])


class StatisticsAccumulator:
    """Fills the statistics of a block of target layers.

    Args:
        statistics: To fill.
        contents: The source's.
        target: The target.
        config: Settings.
        layers: The block.
    """

    def __init__(
        self,
        statistics: CalibrationStatistics,
        contents: Contents,
        target: TracedModel,
        config: FitConfig,
        layers: tuple[int, int],
    ):
        self.statistics, self.contents, self.target = statistics, contents, target
        self.config, self.layers = config, layers

    @property
    def _parts(self) -> dict[str, Statistics]:
        return {"train": self.statistics.train, "heldout": self.statistics.heldout}

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        return {name: part.moments.tensors() for name, part in self._parts.items()}

    def facts(self) -> dict[str, Any]:
        counts = {name: self.statistics.info[name] for name in (*COUNTS, "max_positions")}
        return {"tokens": {name: part.tokens for name, part in self._parts.items()}, "counts": counts}

    def restore(self, facts: dict[str, Any]) -> None:
        for name, part in self._parts.items():
            part.tokens = facts["tokens"][name]
        self.statistics.info.update(facts["counts"])

    def reset(self) -> None:
        for part in self._parts.values():
            part.tokens = 0
            for tensor in part.moments.tensors().values():
                tensor.zero_()
        self.statistics.info.update({name: 0 for name in (*COUNTS, "max_positions")})

    def read(self, batch: Batch) -> Trace:
        keep = kept_tokens(batch.attention_mask, self.config.num_sinks, self.config.token_stride)
        with evaluating(self.target.model):
            source = self.contents.content(batch, keep)
            target = source if self.contents is self.target else self.target.content(batch, keep)
        return _block(join_contents(batch, keep, source, target), *self.layers)

    def add(self, batch: Batch, found: Trace) -> None:
        heldout = heldout_rows(batch, self.config)
        info = self.statistics.info
        info["sequences"] += int((~heldout).sum())
        info["heldout_sequences"] += int(heldout.sum())
        info["input_tokens"] += int(batch.lengths.sum())
        info["max_positions"] = max(info["max_positions"], int(batch.lengths.max()))
        in_heldout = heldout[found.rows]
        for part, chosen in ((self.statistics.train, ~in_heldout), (self.statistics.heldout, in_heldout)):
            if bool(chosen.all()):
                part.update(found)
            elif bool(chosen.any()):
                part.update(found.select(chosen))


class SensitivityAccumulator:
    """Fills the sensitivity moments of a block of target layers, from the sequences that are fitted.

    Args:
        moments: To fill.
        contents, target, config, layers: As in [`StatisticsAccumulator`].
    """

    def __init__(
        self,
        moments: SensitivityMoments,
        contents: Contents,
        target: TracedModel,
        config: FitConfig,
        layers: tuple[int, int],
    ):
        if moments.layout.target_layers != layers[1] - layers[0]:
            raise FitConfigError(f"Moments of {moments.layout.target_layers} target layers for the block {layers}.")
        self.moments, self.contents, self.target = moments, contents, target
        self.config, self.layers = config, layers

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        return {f"layer{place:04d}": moments.tensors() for place, moments in enumerate(self.moments.moments)}

    def facts(self) -> dict[str, Any]:
        return {"layers": self.moments.layers, "heads": self.moments.heads}

    def restore(self, facts: dict[str, Any]) -> None:
        self.moments.check(facts["layers"], facts["heads"])

    def reset(self) -> None:
        for moments in self.moments.moments:
            for tensor in moments.tensors().values():
                tensor.zero_()

    def read(self, batch: Batch) -> tuple[Trace, tuple[torch.Tensor, torch.Tensor]] | None:
        config = self.config
        with fitted_part(batch, config) as chosen:
            if chosen is None:
                return None
            keep = kept_tokens(chosen.attention_mask, config.num_sinks, config.token_stride)
            with evaluating(self.target.model):
                source = self.contents.content(chosen, keep)
                with probed(self.target, chosen, config.num_sinks) as result:
                    target = self.target.content(chosen, keep)
                raw = result()
            self._check_finite(raw, chosen)
        first, last = self.layers
        weights = [kind[first:last].transpose(2, 3)[:, keep.to(kind.device)] for kind in raw]  # layers, N, heads
        return _block(join_contents(chosen, keep, source, target), first, last), (weights[0], weights[1])

    def _check_finite(self, raw: tuple[torch.Tensor, torch.Tensor], batch: Batch) -> None:
        mask = batch.attention_mask.to(raw[0].device)[None, :, None, :]
        bad = torch.stack([(~torch.isfinite(kind) & mask).any(dim=3).any(dim=2) for kind in raw])  # kind, layer, row
        if bool(bad.any()):
            layer = int(bad.any(dim=2).any(dim=0).nonzero()[0])
            rows = bad.any(dim=1).any(dim=0).cpu()
            raise NonFiniteError(
                f"The target's attention weights of layer {layer} are NaN or Inf in sequence "
                f"{int(batch.numbers[rows][0])}.",
                rows,
            )

    def add(self, batch: Batch, found: tuple[Trace, tuple[torch.Tensor, torch.Tensor]] | None) -> None:
        if found is not None:
            self.moments.update(*found)


__all__ = [
    "SHAPING",
    "Contents",
    "ModelFacts",
    "SensitivityAccumulator",
    "StatisticsAccumulator",
    "block_geometry",
    "data_info",
    "fitted_part",
    "heldout_rows",
    "new_statistics",
    "statistics_device",
    "statistics_support",
]
