"""A handed-over cache built by hand, in float64 and row by row, to compare the library's with.

It shares no code with the library: its own rotation, its own products, no padding until the rows are put together.
"""

from __future__ import annotations

import functools

import torch
from models import tiny_model
from transformers import DynamicCache

from kvbridge_hf import KVBridgeConfig, KVBridgeMapper, KVGeometry
from kvbridge_hf.cache_argument import cache_kwargs
from kvbridge_hf.fingerprint import model_fingerprint

PAD = 0


def fail_at_layer(monkeypatch, mapper, broken: int) -> None:
    """Let the map of one target layer raise RuntimeError("out of memory")."""
    map_layer = type(mapper).map_layer

    def fail(self, layer, source):
        if layer == broken:
            raise RuntimeError("out of memory")
        return map_layer(self, layer, source)

    monkeypatch.setattr(type(mapper), "map_layer", fail)


def random_mapper(source, target, *, top_k=2, num_sinks=0, num_native_suffix=1, seed=0, support="full_head"):
    """A mapper of random weights, for a pair of any sizes."""
    source_geometry, target_geometry = KVGeometry.from_model(source), KVGeometry.from_model(target)
    generator = torch.Generator().manual_seed(seed)
    layers = [
        torch.randperm(source_geometry.num_layers, generator=generator)[:top_k].tolist()
        for _ in range(target_geometry.num_layers)
    ]
    config = KVBridgeConfig(
        source_geometry=source_geometry.to_dict(),
        target_geometry=target_geometry.to_dict(),
        source_fingerprint=model_fingerprint(source),
        target_fingerprint=model_fingerprint(target),
        top_k=top_k,
        selected_layers=layers,
        support=support,
        num_sinks=num_sinks,
        num_native_suffix=num_native_suffix,
    )
    mapper = KVBridgeMapper(config)
    with torch.no_grad():
        for name, parameter in sorted(mapper.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * (0.3 if name.endswith("bias") else parameter.shape[-2] ** -0.5))
    return mapper.eval()


@functools.cache
def pair(source_arch="qwen3", target_arch="llama", **mapper_kwargs):
    """Source, target and mapper, not to be changed; depth, heads and head_dim all differ."""
    source = tiny_model(source_arch, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16)
    target = tiny_model(target_arch, num_layers=4, num_heads=6, num_kv_heads=3, head_dim=8, seed=1)
    return source, target, random_mapper(source, target, **mapper_kwargs)


def rotate(keys, positions, model, sign=1.0):
    """Half-rotated rotary embedding over the whole head (RoFormer eq. 34), default frequencies."""
    theta = model.config.rope_parameters["rope_theta"]
    half = keys.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = sign * positions.double()[:, None] * frequencies
    first, second = keys[..., :half], keys[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@torch.no_grad()
def row_states(source, target, mapper, tokens, num_columns, num_sinks):
    """Keys and values of one row's first tokens: `[(heads, num_columns, head_dim)] * layers`, twice."""
    if num_columns <= 0:
        geometry = mapper.config.target_geometry
        empty = torch.zeros(geometry["num_kv_heads"], 0, geometry["head_dim"])
        return [empty] * geometry["num_layers"], [empty] * geometry["num_layers"]
    ids = torch.tensor([tokens])
    read = DynamicCache()
    source(ids, **cache_kwargs(read))
    own = DynamicCache()
    target(ids, **cache_kwargs(own))
    positions = torch.arange(num_columns)
    weights = {name: parameter.double() for name, parameter in mapper.named_parameters()}
    keys, values = [], []
    for layer, selected in enumerate(mapper.config.selected_layers):
        key_features, value_features = [], []
        for index in selected:
            source_keys = read.layers[index].keys[0, :, :num_columns].double()
            key_features += list(rotate(source_keys, positions, source, sign=-1.0))
            value_features += list(read.layers[index].values[0, :, :num_columns].double())
        key = torch.einsum("tf,hfd->htd", torch.cat(key_features, -1), weights["key_weight"][layer])
        value = torch.einsum("tf,hfd->htd", torch.cat(value_features, -1), weights["value_weight"][layer])
        key = rotate(key + weights["key_bias"][layer][:, None], positions, target).float()
        value = (value + weights["value_bias"][layer][:, None]).float()
        sinks = min(num_sinks, num_columns)
        key[:, :sinks] = own.layers[layer].keys[0, :, :sinks]
        value[:, :sinks] = own.layers[layer].values[0, :, :sinks]
        keys.append(key)
        values.append(value)
    return keys, values


def reference_cache(source, target, mapper, ids, mask, num_columns, num_sinks=0):
    """The cache of the first `num_columns` columns of a padded batch, as a plain `DynamicCache`."""
    geometry = mapper.config.target_geometry
    shape = (len(ids), geometry["num_kv_heads"], num_columns, geometry["head_dim"])
    keys = [torch.zeros(shape) for _ in range(geometry["num_layers"])]
    values = [torch.zeros(shape) for _ in range(geometry["num_layers"])]
    for row in range(len(ids)):
        columns = mask[row].nonzero()[:, 0]
        tokens = ids[row, columns].tolist()
        columns = columns[columns < num_columns]
        row_keys, row_values = row_states(source, target, mapper, tokens, len(columns), num_sinks)
        for layer in range(geometry["num_layers"]):
            keys[layer][row, :, columns] = row_keys[layer]
            values[layer][row, :, columns] = row_values[layer]
    cache = DynamicCache()
    for layer in range(geometry["num_layers"]):
        cache.update(keys[layer], values[layer], layer)
    return cache


def batch(lengths, side="left", seed=0, vocab=96):
    """Random token ids, padded; `side` may be "left", "right" or "mixed" (rows alternate)."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.full((len(lengths), width), PAD)
    mask = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        left = side == "left" or (side == "mixed" and row % 2 == 0)
        columns = slice(width - length, width) if left else slice(0, length)
        ids[row, columns] = torch.randint(3, vocab, (length,), generator=generator)
        mask[row, columns] = 1
    return ids, mask


def positions_of(mask):
    return (mask.cumsum(-1) - 1).clamp(min=0)
