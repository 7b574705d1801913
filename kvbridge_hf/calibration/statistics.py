"""Mergeable statistics of a pair: what every closed-form fit needs of the calibration data.

One pass over the data gives the moments of all source layers with all target layers, for keys and for values. From
them follows the fit for any number of selected layers, any selection and any penalty. Memory does not depend on the
number of tokens.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ArtifactError, CalibrationError, FitConfigError
from .layout import KINDS, StatisticsLayout
from .moments import Moments, concatenate
from .storage import load_folder, save_folder

if TYPE_CHECKING:
    from .traces import Trace

FORMAT = 1
INDEX_NAME = "statistics.json"


@dataclass
class Statistics:
    """Moments of one set of tokens.

    Attributes:
        layout (`StatisticsLayout`): Order of features and outputs.
        moments (`Moments`): `2 * groups` systems: the groups of the keys, then those of the values.
        tokens (`int`): Tokens seen.
        products (`torch.dtype`): In which products are taken; sums are float64.
    """

    layout: StatisticsLayout
    moments: Moments
    tokens: int = 0
    products: torch.dtype = torch.float64

    @classmethod
    def zeros(
        cls,
        layout: StatisticsLayout,
        device: torch.device | str = "cpu",
        products: torch.dtype = torch.float64,
    ) -> Statistics:
        groups = len(layout.groups)
        return cls(layout, Moments.zeros(len(KINDS) * groups, layout.features, layout.outputs, device), 0, products)

    def update(self, trace: Trace, weights: torch.Tensor | None = None) -> None:
        """Add the tokens of a trace, in place.

        Args:
            trace: Content keys and values of both models.
            weights (`(N,)`, *optional*): One weight per token.
        """
        groups = len(self.layout.groups)
        device = self.moments.gram.device
        for place, (source, target) in enumerate(
            ((trace.source_keys, trace.target_keys), (trace.source_values, trace.target_values))
        ):
            x = self.layout.source_features(source.to(device))
            y = self.layout.target_outputs(target.to(device))
            self.moments[place * groups : (place + 1) * groups].update(
                x, y, None if weights is None else weights.to(device).expand(groups, -1), self.products
            )
        self.tokens += trace.num_tokens

    def merge(self, other: Statistics) -> Statistics:
        """Add another set of tokens of the same pair and layout, in place."""
        if other.layout != self.layout:
            raise CalibrationError(
                f"Statistics of different layouts do not merge: {self.layout} and {other.layout}. Collect both with "
                "the same models and support."
            )
        self.moments.merge(other.moments.to(self.moments.gram.device))
        self.tokens += other.tokens
        return self

    # ---- systems: the moments of one regression --------------------------------------------------------------------

    def systems(
        self, target_layer: int, layers: list[int], support: str, heads: list[list[list[int]]] | None = None
    ) -> Moments:
        """Moments of the regressions of one target layer on some source layers.

        Args:
            target_layer: Which.
            layers: Source layers in feature order.
            support: `"full_head"` or `"head_local"`.
            heads: `(len(layers), target_heads, block)` source heads, for `"head_local"`.

        Returns:
            `2 * R` systems (keys, then values), each with the outputs of `target_heads / R` consecutive target heads.
        """
        outputs = self.moments.outputs(self.layout.output_slice(target_layer))
        index = self.layout.feature_index
        if support == "full_head":
            self._need_full("a full-head fit")
            return outputs.features(index(layers))
        assert heads is not None
        if self.layout.support == "head_local":
            per_group = self.layout.heads_per_group
            if any(
                heads[place][head] != self.layout.groups[head // per_group]
                for place in range(len(layers))
                for head in range(self.layout.target_heads)
            ):
                self._need_full("a head assignment other than the identity")
            return outputs.features(index(layers))
        dim = self.layout.target_dim
        parts = [
            outputs.outputs(slice(head * dim, (head + 1) * dim)).features(
                index(layers, [heads[place][head] for place in range(len(layers))])
            )
            for head in range(self.layout.target_heads)
        ]
        return _kinds_first(parts)

    def layer_systems(self, source_layer: int, blocks: str) -> Moments:
        """Moments of the regressions of *all* target layers on one source layer.

        Args:
            source_layer: Which.
            blocks: Which heads of it feed which target heads. `"matched"`: the identity blocks. `"layer"`: all feed
                all. `"single"`: each source head alone feeds every target head.

        Returns:
            `2 * R` systems, keys first. `"matched"`: R blocks with the outputs (target layer, head of the block, dim).
            `"layer"`: R = 1 with the outputs (target layer, target head, dim). `"single"`: R = source heads, each with
            the same outputs as `"layer"`.
        """
        index = self.layout.feature_index
        if blocks == "matched" and self.layout.support == "head_local":
            return self.moments.features(index([source_layer]))
        self._need_full({"layer": "a score of whole layers", "single": "a fitted head assignment"}.get(blocks, blocks))
        if blocks == "layer":
            return self.moments.features(index([source_layer]))
        if blocks == "single":
            return _kinds_first(
                [self.moments.features(index([source_layer], [[head]])) for head in range(self.layout.source_heads)]
            )
        local = self.head_local_layout
        per_group = local.heads_per_group
        return _kinds_first(
            [
                self.moments.features(index([source_layer], [group])).outputs(
                    self.layout.output_index(list(range(place * per_group, (place + 1) * per_group)))
                )
                for place, group in enumerate(local.groups)
            ]
        )

    @property
    def head_local_layout(self) -> StatisticsLayout:
        return StatisticsLayout(**{**self.layout.to_dict(), "support": "head_local"})

    def _need_full(self, what: str) -> None:
        if self.layout.support != "full_head":
            raise FitConfigError(
                f"These statistics keep matched heads only (support='head_local'); {what} needs statistics collected "
                "with support='full_head' or head_assignment='fitted'."
            )


@dataclass
class CalibrationStatistics:
    """Statistics of the sequences to fit on and of those held out, with their provenance.

    Attributes:
        train, heldout (`Statistics`): Disjoint sequences.
        info (`dict`): JSON facts: geometries, fingerprints, counts, the settings that shaped the statistics.
    """

    train: Statistics
    heldout: Statistics
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def layout(self) -> StatisticsLayout:
        return self.train.layout

    @property
    def has_heldout(self) -> bool:
        return self.heldout.tokens > 0

    def merge(self, other: CalibrationStatistics) -> CalibrationStatistics:
        """Add statistics of other sequences of the same pair and settings, in place."""
        for name in IDENTITY:
            if self.info.get(name) != other.info.get(name):
                raise CalibrationError(
                    f"Statistics with different {name} do not merge: {self.info.get(name)!r} and "
                    f"{other.info.get(name)!r}. Collect both with the same models and settings."
                )
        self.train.merge(other.train)
        self.heldout.merge(other.heldout)
        for name in COUNTS:
            self.info[name] = self.info.get(name, 0) + other.info.get(name, 0)
        self.info["max_positions"] = max(self.info.get("max_positions", 0), other.info.get("max_positions", 0))
        return self

    def save(self, folder: str | os.PathLike) -> None:
        """Write to a folder, atomically (see `storage`)."""
        sets = {"train": self.train, "heldout": self.heldout}
        facts = {
            "format": FORMAT,
            "layout": self.layout.to_dict(),
            "products": str(self.train.products).removeprefix("torch."),
            "tokens": {name: statistics.tokens for name, statistics in sets.items()},
            "info": self.info,
        }
        save_folder(folder, INDEX_NAME, {name: s.moments.tensors() for name, s in sets.items()}, facts)

    @classmethod
    def load(cls, folder: str | os.PathLike, device: str = "cpu") -> CalibrationStatistics:
        """Read what `save` wrote.

        Raises:
            ArtifactError: the folder is incomplete, damaged, or of another format.
        """
        tensors, facts = load_folder(folder, INDEX_NAME, device)
        if facts.get("format") != FORMAT:
            raise ArtifactError(
                f"Statistics of format {facts.get('format')!r} in {folder}; this version reads format {FORMAT}. "
                "Collect them again."
            )
        try:
            layout = StatisticsLayout(**facts["layout"])
            products = getattr(torch, facts["products"])
            parts = {}
            for name in ("train", "heldout"):
                expected = Statistics.zeros(layout, "meta").moments.tensors()
                found = tensors[name]
                for key, tensor in expected.items():
                    if found[key].shape != tensor.shape or found[key].dtype != tensor.dtype:
                        raise ArtifactError(
                            f"{name}.{key} in {folder} is {tuple(found[key].shape)} {found[key].dtype}, the layout "
                            f"wants {tuple(tensor.shape)} {tensor.dtype}; collect the statistics again."
                        )
                    if not bool(torch.isfinite(found[key]).all()):
                        raise ArtifactError(f"{name}.{key} in {folder} holds NaN or Inf; collect them again.")
                parts[name] = Statistics(layout, Moments(**found), facts["tokens"][name], products)
            return cls(parts["train"], parts["heldout"], facts["info"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(f"{INDEX_NAME} in {folder} is incomplete: {error!r}.") from error


# What two statistics must share to be of one calibration, and what adds up when they merge.
IDENTITY = (
    "source_geometry",
    "target_geometry",
    "source_fingerprint",
    "target_fingerprint",
    "tokenizer_fingerprint",
    "num_sinks",
    "token_stride",
    "heldout_fraction",
    "seed",
)
COUNTS = ("sequences", "heldout_sequences", "skipped_sequences", "input_tokens")


def _kinds_first(parts: list[Moments]) -> Moments:
    """Several moments of (keys, values) -> all their keys, then all their values."""
    return concatenate([part[kind : kind + 1] for kind in range(len(KINDS)) for part in parts])


__all__ = ["COUNTS", "IDENTITY", "INDEX_NAME", "CalibrationStatistics", "Statistics"]
