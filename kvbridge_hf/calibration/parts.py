"""A mapper fitted in parts: some target layers by one process, others by another, put together at the end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..configuration_kvbridge import KVBridgeConfig
from ..errors import ArtifactError
from ..geometry import KVGeometry
from ..mappers.base import FitContext, get_fit
from ..mappers.config import FitConfig
from ..modeling_kvbridge import KVBridgeMapper
from .accumulate import block_geometry
from .layout import StatisticsLayout
from .selection import Selection
from .statistics import CalibrationStatistics, Statistics
from .storage import load_folder, save_folder

INDEX_NAME = "part.json"
PARAMETERS = ("key_weight", "value_weight", "key_bias", "value_bias")
# Facts of a fit that are lists over kinds and then target layers.
BY_KIND = ("r2", "heldout_r2")


def needs_data(config: FitConfig) -> bool:
    """Whether a fit trains on the two models and the data, so that it goes on in one process."""
    return get_fit(config.method).needs_data or config.distillation is not None


def learns_choice(config: FitConfig) -> bool:
    """Whether the settings ask for a learned choice of what to repair, which needs lookups."""
    return "learned" in config.repair.split("+")


def needs_pair(config: FitConfig, lookups: bool = False) -> bool:
    """Whether a fit needs both models in memory.

    Args:
        config: Its settings.
        lookups: Whether there are lookups, which both models read where the settings learn from them.
    """
    return needs_data(config) or config.repair_layers == "auto" or (lookups and learns_choice(config))


def is_divisible(config: FitConfig) -> bool:
    """Whether each target layer can be fitted without the others, and from statistics alone.

    A learned choice changes nothing about it: it is fitted to the whole mapper afterwards.
    """
    return config.method == "ridge" and config.layer_budget is None and not needs_data(config)


def of_target_layers(statistics: CalibrationStatistics, first: int, last: int) -> CalibrationStatistics:
    """The statistics of some target layers; the moments are views."""
    layout = statistics.layout
    width = layout.heads_per_group * layout.target_dim
    outputs = slice(first * width, last * width)
    small: StatisticsLayout = replace(layout, target_layers=last - first)
    parts = [
        Statistics(small, part.moments.outputs(outputs), part.tokens, part.products)
        for part in (statistics.train, statistics.heldout)
    ]
    info = {**statistics.info, "target_geometry": block_geometry(statistics.info["target_geometry"], first, last)}
    return CalibrationStatistics(parts[0], parts[1], info)


def fit_part(context: FitContext, first: int, last: int, offset: int = 0) -> KVBridgeMapper:
    """Fit some target layers, with a selection made before.

    Args:
        context: Of these target layers and others.
        first, last: Which of its target layers, the last one excluded.
        offset: Number of its first target layer in the target, for the metrics, which are of all layers.
    """
    selection = context.selection
    small = Selection(
        selection.layers[first:last],
        None if selection.heads is None else selection.heads[first:last],
        selection.scores[first:last],
        selection.scored_on,
    )
    sensitivity, metrics = context.sensitivity, context.metrics
    part = FitContext(
        of_target_layers(context.statistics, first, last),
        context.config,
        small,
        None if sensitivity is None else sensitivity.of_target_layers(first, last),
        None if metrics is None else metrics.of_target_layers(offset + first, offset + last),
    )
    return get_fit(context.config.method).fit(part)


def part_folder(parent: Path, first: int, last: int) -> Path:
    return parent / f"layers-{first:04d}-{last:04d}"


def save_part(folder: Path, mapper: KVBridgeMapper) -> None:
    """Write a fitted part, atomically."""
    weights = {name: getattr(mapper, name).detach() for name in PARAMETERS}
    save_folder(folder, INDEX_NAME, {"weights": weights}, {"config": mapper.config.to_dict()})


def has_part(folder: Path) -> bool:
    return (folder / INDEX_NAME).is_file()


def assemble(folders: list[Path], target: KVGeometry) -> KVBridgeMapper:
    """The whole mapper from its parts, in the order of the target's layers.

    Raises:
        ArtifactError: a part is damaged, or they do not make up the target's layers.
    """
    weights: dict[str, list[torch.Tensor]] = {name: [] for name in PARAMETERS}
    configs: list[KVBridgeConfig] = []
    for folder in folders:
        tensors, facts = load_folder(folder, INDEX_NAME)
        configs.append(KVBridgeConfig.from_dict(facts["config"]))
        for name in PARAMETERS:
            weights[name].append(tensors["weights"][name])
    count = sum(config.target_geometry["num_layers"] for config in configs)
    if count != target.num_layers:
        raise ArtifactError(f"The parts have {count} target layers, the target has {target.num_layers}.")
    values = configs[0].to_dict()
    values.pop("architectures", None)
    assignments = [config.head_assignment for config in configs]
    values.update(
        target_geometry=target.to_dict(),
        selected_layers=[row for config in configs for row in config.selected_layers],
        head_assignment=None if assignments[0] is None else [row for part in assignments for row in part],  # type: ignore
        fit=_join_facts([config.fit for config in configs]),
    )
    config = KVBridgeConfig.from_dict(values)
    mapper = KVBridgeMapper(config)
    with torch.no_grad():
        for name, parts in weights.items():
            getattr(mapper, name).copy_(torch.cat(parts))
    mapper.to(dtype=weights[PARAMETERS[0]][0].dtype)  # type: ignore[call-arg]
    return mapper.eval()


def _join_facts(fits: list[dict[str, Any]]) -> dict[str, Any]:
    """Lists with one entry a target layer side by side; everything else is the same in all parts."""
    joined = dict(fits[0])
    for name, value in fits[0].items():
        if name in BY_KIND and value is not None:
            joined[name] = {kind: [score for fit in fits for score in fit[name][kind]] for kind in value}
        elif name in PER_LAYER:
            joined[name] = [entry for fit in fits for entry in fit[name]]
    return joined


# Facts of a fit that have one entry a target layer.
PER_LAYER = ("sensitivity_uniform_share", "penalties")


__all__ = [
    "assemble",
    "fit_part",
    "has_part",
    "is_divisible",
    "learns_choice",
    "needs_data",
    "needs_pair",
    "of_target_layers",
    "part_folder",
    "save_part",
]
