"""How many source layers each target layer gets under one budget, and the mapper that has them."""

from __future__ import annotations

import heapq
from typing import Any

import torch

from ..errors import ArtifactError
from ..kernels import map_full_head, map_head_local
from ..modeling_kvbridge import AffineMethod, KVBridgeMapper, SourceContent, register_method
from ..source_content import source_features
from .base import FitContext
from .features import KIND_NAMES, add_parameters, kinds_of, target_shape
from .linear import LayerFit, fit_layer


def spend(errors: list[list[float]], budget: int) -> list[int]:
    """Take from each row a prefix, at least its first entry, so that the last entries' sum is small.

    Step by step the row whose next entry lowers the error most takes it; a row stops where its next entry would raise
    the error. With convex rows that is the optimum.

    Args:
        errors: `errors[row][k - 1]` with `k` entries taken.
        budget: Entries in all; at least one a row is taken whatever it is.

    Returns:
        How many each row takes.
    """
    counts = [1] * len(errors)
    waiting: list[tuple[float, int]] = []

    def offer(row: int) -> None:
        taken = counts[row]
        if taken < len(errors[row]) and errors[row][taken] < errors[row][taken - 1]:
            heapq.heappush(waiting, (errors[row][taken] - errors[row][taken - 1], row))

    for row in range(len(errors)):
        offer(row)
    while waiting and sum(counts) < budget:
        _, row = heapq.heappop(waiting)
        counts[row] += 1
        offer(row)
    return counts


def spend_layers(context: FitContext) -> tuple[list[LayerFit], list[int]]:
    """Fit every target layer with as many source layers as `layer_budget` gives it.

    Errors are `1 - R^2`, mean over keys and values and heads, on held-out moments where there are any.

    Returns:
        The fits, and the number of source layers of each.
    """
    config, layout = context.config, context.statistics.layout
    assert config.layer_budget is not None and config.top_k is not None
    fits = [
        [fit_layer(context, target, layers) for layers in range(1, config.top_k + 1)]
        for target in range(layout.target_layers)
    ]
    heldout = context.statistics.has_heldout
    errors = [
        [1 - float(fit.r2(fit.solution, layout.target_dim, heldout=heldout).mean()) for fit in row] for row in fits
    ]
    counts = spend(errors, round(config.layer_budget * layout.target_layers))
    return [row[count - 1] for row, count in zip(fits, counts, strict=True)], counts


@register_method
class RaggedMethod(AffineMethod):
    """Affine maps whose target layers read different numbers of source layers.

    `method_config["layer_counts"]` says how many of its `selected_layers` each target layer reads. The weights are
    `(target_heads, features of all target layers, target_head_dim)`, those of one target layer side by side.
    """

    name = "ragged"

    def build(self, mapper: KVBridgeMapper) -> None:
        config = mapper.config
        layers, heads, head_dim = target_shape(config)
        counts: Any = config.method_config.get("layer_counts")
        whole = isinstance(counts, list) and len(counts) == layers and all(isinstance(count, int) for count in counts)
        if not whole or not all(1 <= count <= config.top_k for count in counts):
            raise ArtifactError(
                f"method_config['layer_counts'] must give each of the {layers} target layers 1 to "
                f"top_k={config.top_k} source layers, got {counts!r}."
            )
        features = sum(counts) * config.head_block * config.source_geometry["head_dim"]
        for kind in KIND_NAMES:
            add_parameters(mapper, **{f"{kind}_weight": (heads, features, head_dim)})
            add_parameters(mapper, **{f"{kind}_bias": (layers, heads, head_dim)})

    def map_layer(
        self, mapper: KVBridgeMapper, target_layer: int, source: SourceContent
    ) -> tuple[torch.Tensor, torch.Tensor]:
        config = mapper.config
        counts = config.method_config["layer_counts"]
        width = config.head_block * config.source_geometry["head_dim"]
        start = sum(counts[:target_layer]) * width
        part = slice(start, start + counts[target_layer] * width)
        places = range(counts[target_layer])
        mapped = []
        for name, read in kinds_of(source):
            weight = getattr(mapper, f"{name}_weight")[:, part]
            bias = getattr(mapper, f"{name}_bias")[target_layer]
            features = source_features(mapper, target_layer, read, weight.device, places)
            run = map_full_head if config.support == "full_head" else map_head_local
            mapped.append(run(features, weight, bias))
        return mapped[0], mapped[1]

    def flops_per_token(self, mapper: KVBridgeMapper) -> float:
        return 2.0 * (mapper.key_weight.numel() + mapper.value_weight.numel())


__all__ = ["RaggedMethod", "spend", "spend_layers"]
