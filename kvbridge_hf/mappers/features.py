"""What the runtimes of the methods have in common: their tensors' shapes, the kinds, the features that they read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..modeling_kvbridge import KVBridgeMapper, MapperMethod, SourceContent
from ..source_content import Reader, source_features

KIND_NAMES = ("key", "value")


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
    "target_shape",
]
