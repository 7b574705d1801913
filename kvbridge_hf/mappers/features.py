"""What the runtimes of the methods have in common: their tensors' shapes, and the features that they read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..modeling_kvbridge import KVBridgeMapper, SourceContent

KIND_NAMES = ("key", "value")


def target_shape(config: Any) -> tuple[int, int, int]:
    """Layers, key/value heads and head dimension of the target of a [`KVBridgeConfig`]."""
    target = config.target_geometry
    return target["num_layers"], target["num_kv_heads"], target["head_dim"]


def add_parameters(mapper: KVBridgeMapper, **shapes: Iterable[int]) -> None:
    """Register empty parameters on a mapper."""
    for name, shape in shapes.items():
        mapper.register_parameter(name, nn.Parameter(torch.empty(tuple(shape))))


def zero_parameters(mapper: KVBridgeMapper) -> None:
    """All parameters of a mapper at 0."""
    for parameter in mapper.parameters():
        nn.init.zeros_(parameter)


def fill_parameters(mapper: KVBridgeMapper, **tensors: torch.Tensor) -> None:
    """Copy fitted tensors into a mapper's parameters."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            getattr(mapper, name).copy_(tensor)


def kinds_of(source: SourceContent) -> Iterator[tuple[str, Callable[[int], torch.Tensor]]]:
    """`"key"` with `source.keys`, then `"value"` with `source.values`."""
    return zip(KIND_NAMES, (source.keys, source.values), strict=True)


def source_features(
    mapper: KVBridgeMapper,
    target_layer: int,
    read: Callable[[int], torch.Tensor],
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


def grouped_features(mapper: KVBridgeMapper, target_layer: int, read: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """As [`source_features`], `(B, 1 or target_heads, T, features)` on the mapper's device, in float32 or wider."""
    features = source_features(mapper, target_layer, read, mapper.device)
    if mapper.config.support == "full_head":
        features = features.unsqueeze(1)
    return features.to(torch.promote_types(torch.promote_types(torch.float32, features.dtype), mapper.dtype))


__all__ = [
    "KIND_NAMES",
    "add_parameters",
    "fill_parameters",
    "grouped_features",
    "kinds_of",
    "source_features",
    "target_shape",
    "zero_parameters",
]
