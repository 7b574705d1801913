"""Reading a source's cache: checks that it fits, and a snapshot that later changes do not reach."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache, StaticCache

from .errors import CacheMismatchError


class _LayerView:
    """Keys and values of one source layer as they were when the view was taken."""

    def _read(self, kind: str) -> torch.Tensor:
        raise NotImplementedError

    @property
    def keys(self) -> torch.Tensor:
        return self._read("keys")

    @property
    def values(self) -> torch.Tensor:
        return self._read("values")


class _PlainLayerView(_LayerView):
    def __init__(self, keys: torch.Tensor, values: torch.Tensor, layer: int):
        self._states = {"keys": keys, "values": values}
        self._versions = {kind: _version(states) for kind, states in self._states.items()}
        self._layer = layer

    def _read(self, kind: str) -> torch.Tensor:
        states = self._states[kind]
        if _version(states) != self._versions[kind]:
            raise CacheMismatchError(
                f"The source cache's layer {self._layer} was written in place after the handoff and before its {kind} "
                "were mapped. Call map_all() on the handed-over cache before you reuse or reset the source's."
            )
        return states


class _QuantizedLayerView(_LayerView):
    """Of a quantised layer. It is dequantised each time it is read, so that one layer at a time stands in
    memory as it is: what the source itself attends to, quantisation error included."""

    def __init__(self, layer: Any):
        self._layer = layer
        # Transformers replaces these when the cache grows; it does not write into them.
        self._quantized = {"keys": layer._quantized_keys, "values": layer._quantized_values}
        self._recent = {"keys": layer.keys, "values": layer.values}
        self._order = getattr(layer, "_pending_beam_idx", None)

    def _read(self, kind: str) -> torch.Tensor:
        states = self._layer._dequantize(self._quantized[kind])
        if self._order is not None:
            states = states.index_select(0, self._order.to(states.device))
        recent = self._recent[kind]
        return torch.cat([states, recent], dim=-2) if recent.dim() == 4 else states


class SourceCacheView:
    """A source model's cache as a mapper may read it: `.layers[i].keys` and `.values`.

    Growing, cropping or reordering the original replaces its tensors and does not reach the view. A static cache is
    written in place, so the needed columns are copied. A quantised one is dequantised layer by layer as it is read.

    Args:
        cache: the source's cache.
        geometry: `source_geometry` of the mapper.
        stop: first columns that are needed.

    Raises:
        CacheMismatchError: the cache has another shape than the source's geometry says, or one that cannot be read.
    """

    def __init__(self, cache: Cache, geometry: dict[str, Any], stop: int):
        self.layers: list[_LayerView] = []
        self._length = stop
        for index, layer in enumerate(_layers(cache, geometry)):
            if _is_quantized(layer):
                view = _QuantizedLayerView(layer)
                if int(layer.get_seq_length()) < stop or index == 0:
                    _check_states(view.keys, "keys", index, geometry, stop)
                self.layers.append(view)
                continue
            keys, values = layer.keys, layer.values
            for kind, states in (("keys", keys), ("values", values)):
                _check_states(states, kind, index, geometry, stop)
            if isinstance(cache, StaticCache):
                keys, values = keys[:, :, :stop].clone(), values[:, :, :stop].clone()
            self.layers.append(_PlainLayerView(keys, values, index))

    def get_seq_length(self) -> int:
        """Columns that may be read."""
        return self._length


def source_length(cache: Cache, geometry: dict[str, Any]) -> tuple[int, int]:
    """Rows and columns of a source's cache.

    Raises:
        CacheMismatchError: it is empty or no cache of this source.
    """
    layers = _layers(cache, geometry)
    length = int(cache.get_seq_length())
    if length == 0:
        raise CacheMismatchError(
            "The source cache is empty. Leave source_cache out, so that the source reads the prompt, or pass the "
            "cache that it returned for this prompt."
        )
    keys = _QuantizedLayerView(layers[0]).keys if _is_quantized(layers[0]) else layers[0].keys
    _check_states(keys, "keys", 0, geometry, length)
    return keys.shape[0], length


def _layers(cache: Cache, geometry: dict[str, Any]) -> list[Any]:
    layers = getattr(cache, "layers", None)
    if not isinstance(cache, Cache) or layers is None:
        raise CacheMismatchError(
            f"source_cache must be a Transformers Cache, got {type(cache).__name__}. Pass what the source returned "
            "with use_cache=True."
        )
    if len(layers) != geometry["num_layers"]:
        raise CacheMismatchError(
            f"The source cache has {len(layers)} layers and the mapper's source {geometry['num_layers']}. Pass the "
            "cache of the source model itself."
        )
    for index, layer in enumerate(layers):
        # A window that has cut something: fewer columns are held than were read.
        is_cut = getattr(layer, "is_sliding", False) and int(layer.get_seq_length()) > layer.keys.shape[2]
        if is_cut:
            raise CacheMismatchError(
                f"Layer {index} of the source cache is a {type(layer).__name__}, which does not hold every token's "
                "keys and values. Read the prompt with a dynamic, a static or a quantised cache."
            )
    return layers


def _is_quantized(layer: Any) -> bool:
    return getattr(layer, "_quantized_keys", None) is not None


def _check_states(states: Any, kind: str, layer: int, geometry: dict[str, Any], stop: int) -> None:
    heads, head_dim = geometry["num_kv_heads"], geometry["head_dim"]
    shape = tuple(states.shape) if isinstance(states, torch.Tensor) else None
    if shape is None or len(shape) != 4 or shape[1] != heads or shape[3] != head_dim or shape[2] < stop:
        raise CacheMismatchError(
            f"Layer {layer} of the source cache has {kind} of shape {shape}; (batch, {heads}, at least {stop}, "
            f"{head_dim}) is needed. Pass the cache of the source model itself, of exactly these tokens."
        )


def _version(states: torch.Tensor) -> int:
    # Tensors made in inference mode are not tracked.
    return 0 if states.is_inference() else states._version


__all__ = ["SourceCacheView", "source_length"]
