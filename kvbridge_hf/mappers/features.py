"""What the runtimes of the methods have in common: their tensors' shapes, the kinds, the features that they read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..modeling_kvbridge import KVBridgeMapper, MapperMethod, SourceContent

KIND_NAMES = ("key", "value")
# `source.keys` or `source.values`.
Reader = Callable[[int], torch.Tensor]


def target_shape(config: Any) -> tuple[int, int, int]:
    """Layers, key/value heads and head dimension of the target of a [`KVBridgeConfig`]."""
    target = config.target_geometry
    return target["num_layers"], target["num_kv_heads"], target["head_dim"]


def add_parameters(mapper: KVBridgeMapper, **shapes: Iterable[int]) -> None:
    """Register empty parameters on a mapper."""
    for name, shape in shapes.items():
        mapper.register_parameter(name, nn.Parameter(torch.empty(tuple(shape))))


def fill_parameters(mapper: KVBridgeMapper, **tensors: torch.Tensor) -> None:
    """Copy fitted tensors into a mapper's parameters."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            getattr(mapper, name).copy_(tensor)


def kinds_of(source: SourceContent) -> Iterator[tuple[str, Reader]]:
    """`"key"` with `source.keys`, then `"value"` with `source.values`."""
    return zip(KIND_NAMES, (source.keys, source.values), strict=True)


class ByKindMethod(MapperMethod):
    """A method that maps keys and values by the same code with tensors of their own, all of them 0 before a fit."""

    def init_weights(self, mapper: KVBridgeMapper) -> None:
        for parameter in mapper.parameters():
            nn.init.zeros_(parameter)

    def map_layer(
        self, mapper: KVBridgeMapper, target_layer: int, source: SourceContent
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (self.map_kind(mapper, kind, target_layer, source, read) for kind, read in kinds_of(source))
        return keys, values

    def map_kind(
        self,
        mapper: KVBridgeMapper,
        kind: str,
        target_layer: int,
        source: SourceContent,
        read: Reader,
    ) -> torch.Tensor:
        """Map the `"key"`s or `"value"`s of a target layer, `(B, target_heads, T, target_head_dim)`.

        Args:
            mapper: Its tensors.
            kind: Which.
            target_layer: Which.
            source: The source's content.
            read: Of that kind.
        """
        raise NotImplementedError


def source_features(
    mapper: KVBridgeMapper,
    target_layer: int,
    read: Reader,
    device: torch.device,
    places: range | None = None,
) -> torch.Tensor:
    """What a linear map of a target layer reads of one kind.

    Args:
        mapper: Its config and assignment.
        target_layer: Which.
        read: `source.keys` or `source.values`.
        device: Where to.
        places: Of the selected source layers; all by default.

    Returns:
        `(B, T, features)` with full-head support, `(B, target_heads, T, features)` with head-local support.
    """
    chosen = mapper.config.selected_layers[target_layer]
    places = range(len(chosen)) if places is None else places
    content = [read(chosen[place]).to(device) for place in places]
    if mapper.config.support == "full_head":
        return torch.cat([layer.transpose(1, 2).flatten(2) for layer in content], dim=-1)
    gathered = []
    for place, layer in zip(places, content, strict=True):
        picked = layer[:, mapper.source_heads[target_layer, place].to(layer.device)]  # (B, H_t, block, T, d_s)
        gathered.append(picked.transpose(2, 3).flatten(3))
    return torch.cat(gathered, dim=-1)


def grouped_features(mapper: KVBridgeMapper, target_layer: int, read: Reader) -> torch.Tensor:
    """As [`source_features`], `(B, 1 or target_heads, T, features)` on the mapper's device, in float32 or wider."""
    features = source_features(mapper, target_layer, read, mapper.device)
    if mapper.config.support == "full_head":
        features = features.unsqueeze(1)
    return features.to(torch.promote_types(torch.promote_types(torch.float32, features.dtype), mapper.dtype))


__all__ = [
    "KIND_NAMES",
    "ByKindMethod",
    "Reader",
    "add_parameters",
    "fill_parameters",
    "grouped_features",
    "kinds_of",
    "source_features",
    "target_shape",
]
