"""A Transformers cache whose layers are mapped from a source's cache when they are first touched."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from .modeling_kvbridge import KVBridgeMapper, SourceContent
from .rotary import ContentRotary


@dataclass(frozen=True)
class NativePrefix:
    """Keys and values of a sequence's first tokens as the target itself computes them.

    Nothing stands before them, so they are exact. The first token of a sequence is an outlier that takes much of the
    attention (a *sink*), and a map fitted over all tokens gets it wrong (DESIGN 4).

    Args:
        keys, values: one tensor `(batch, target_heads, num_sinks, target_head_dim)` per target layer, rotated; the
            token at position p stands in column p.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def num_tokens(self) -> int:
        return self.keys[0].shape[-2]


class MappedPrefix:
    """Everything that gives the target's keys and values of a run of prompt columns, one layer at a time.

    It is a snapshot: what happens to the source's cache afterwards does not reach it. It may be shared by copies of a
    cache and by threads; each layer is computed under a lock of its own.

    Args:
        mapper: the fitted mapper.
        source: the source's content; its columns are `source_columns`, or exactly the mapped ones.
        rotary: the target's rotation.
        position_ids, valid: `(batch, columns)` of the mapped columns.
        source_columns: `(batch, columns)`, long: the column of `source` for each of them; None when they agree.
        native: the first tokens, read by the target itself.
        device, dtype: where and in which dtype the target keeps its cache.
        on_mapped: called with `(layer, seconds)` after each mapped layer. The seconds are the host's: on an
            accelerator the work may still be queued.
    """

    def __init__(
        self,
        mapper: KVBridgeMapper,
        source: SourceContent,
        rotary: ContentRotary,
        *,
        position_ids: torch.Tensor,
        valid: torch.Tensor,
        source_columns: torch.Tensor | None = None,
        native: NativePrefix | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        on_mapped: Callable[[int, float], None] | None = None,
    ):
        self.mapper = mapper
        self.source = source
        self.rotary = rotary
        self.position_ids = position_ids
        self.source_columns = source_columns
        self.native = native
        self.device = torch.device(device)
        self.dtype = dtype
        self.on_mapped = on_mapped
        self.num_layers = int(mapper.config.target_geometry["num_layers"])
        self._locks = [threading.Lock() for _ in range(self.num_layers)]
        # Asked once for all layers: the answers cost a device synchronisation each.
        self._padding = None if bool(valid.all()) else ~valid
        self._native_index: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        if native is not None:
            rows, columns = torch.nonzero(valid & (position_ids < native.num_tokens), as_tuple=True)
            if rows.numel() > 0:
                self._native_index = (rows, columns, position_ids[rows, columns])

    def __deepcopy__(self, memo: dict[int, Any]) -> MappedPrefix:
        # Nothing here changes, and a copy would copy the mapper and the source's cache.
        return self

    @property
    def batch_size(self) -> int:
        return self.position_ids.shape[0]

    @property
    def num_columns(self) -> int:
        return self.position_ids.shape[1]

    def lock(self, layer: int) -> threading.Lock:
        return self._locks[layer]

    def layer(self, layer: int, device: torch.device | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Map one target layer, for another device than `self.device` if asked for.

        Returns:
            Keys (rotated) and values, `(batch, target_heads, columns, target_head_dim)`, zero at padding.
        """
        started = time.perf_counter()
        device = self.device if device is None else device
        # The map chooses its own precision, and a cache is no place for gradients.
        mapper_device = self.mapper.device.type
        with torch.no_grad(), torch.autocast(device.type, enabled=False), torch.autocast(mapper_device, enabled=False):
            keys, values = self.mapper.map_layer(layer, self.source)
            keys, values = keys.to(device), values.to(device)
            if self.source_columns is not None:
                index = self.source_columns.to(device)[:, None, :, None]
                keys = keys.gather(2, index.expand(-1, keys.shape[1], -1, keys.shape[3]))
                values = values.gather(2, index.expand(-1, values.shape[1], -1, values.shape[3]))
            keys = self.rotary.apply(keys, self.position_ids.to(device), layer).to(self.dtype)
            values = values.to(self.dtype)
            keys, values = self._finish(keys, "keys", layer), self._finish(values, "values", layer)
        if self.on_mapped is not None:
            self.on_mapped(layer, time.perf_counter() - started)
        return keys, values

    def _finish(self, states: torch.Tensor, kind: str, layer: int) -> torch.Tensor:
        """Put the target's own first tokens in their columns and zeros where padding stands."""
        if self.native is not None and self._native_index is not None:
            own = getattr(self.native, kind)[layer].to(states.device, states.dtype)
            rows, columns, slots = (index.to(states.device) for index in self._native_index)
            # Advanced indices around a slice come first in the result: (tokens, heads, head_dim).
            states = states.transpose(1, 2).index_put((rows, columns), own[rows, :, slots]).transpose(1, 2)
        if self._padding is not None:
            states = states.masked_fill(self._padding.to(states.device)[:, None, :, None], 0)
        return states.contiguous()


class BridgedLayer(DynamicLayer):
    """One layer of a [`BridgedCache`]: mapped when its keys or values are first touched, then a plain `DynamicLayer`.

    Its length is known without mapping. Cropping and row operations (repeat, select, reorder) before the first touch
    are remembered and cost no mapping.

    Args:
        prefix: where the keys and values come from; None for an empty layer.
        layer_idx: the target layer.
    """

    def __init__(self, prefix: MappedPrefix | None = None, layer_idx: int = 0):
        self._prefix: MappedPrefix | None = None
        super().__init__()
        self.layer_idx = layer_idx
        if prefix is not None and prefix.num_columns > 0:
            self._prefix = prefix
            self._length = prefix.num_columns
            self._rows: torch.Tensor | None = None
            self.device, self.dtype = prefix.device, prefix.dtype
            self.is_initialized = True

    @property
    def is_mapped(self) -> bool:
        """Whether the layer holds its keys and values already (or never had any to map)."""
        return self._prefix is None

    @property
    def keys(self) -> torch.Tensor | None:
        self.map()
        return self._keys

    @keys.setter
    def keys(self, value: torch.Tensor | None) -> None:
        self.map()
        self._keys = value

    @property
    def values(self) -> torch.Tensor | None:
        self.map()
        return self._values

    @values.setter
    def values(self, value: torch.Tensor | None) -> None:
        self.map()
        self._values = value

    def map(self, device: torch.device | None = None) -> None:
        """Compute the keys and values now, for another device than the target's if asked for."""
        prefix = self._prefix
        if prefix is None:
            return
        with prefix.lock(self.layer_idx):
            if self._prefix is None:
                return
            states = []
            for tensor in prefix.layer(self.layer_idx, device):
                if self._length < prefix.num_columns:
                    tensor = tensor[:, :, : self._length].contiguous()
                if self._rows is not None:
                    tensor = tensor.index_select(0, self._rows.to(tensor.device))
                states.append(tensor)
            self._keys, self._values = states
            self.device, self.dtype = self._keys.device, self._keys.dtype
            self._rows = None
            # Last: other threads take a layer without prefix for finished.
            self._prefix = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DynamicLayer.update`. The new states decide about device and dtype (autocast, spread models)."""
        self.map(key_states.device)
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys.to(key_states), self._values.to(value_states)
            self.device, self.dtype = key_states.device, key_states.dtype
        return super().update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self) -> int:
        prefix = self._prefix
        return super().get_seq_length() if prefix is None else self._length

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove <= 0 and self._defer(lambda: self._shorten(-tokens_to_remove)):
            return
        # A positive number means the final length in older releases and an error in newer ones: theirs to decide.
        super().crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if not self._defer(lambda: self._take_rows(lambda rows: rows.repeat_interleave(repeats))):
            super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if not self._defer(lambda: self._take_rows(lambda rows: rows[indices.to(rows.device)])):
            super().batch_select_indices(indices)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if not self._defer(lambda: self._take_rows(lambda rows: rows[beam_idx.to(rows.device)])):
            super().reorder_cache(beam_idx)

    def reset(self) -> None:
        """Empty the layer. What was not mapped yet will not be."""
        if not self._defer(self._drop):
            super().reset()
        # Older releases zero the states and keep their length, which for a growing layer is no empty layer.
        self._keys = self._values = None
        self.is_initialized = False

    def offload(self) -> None:
        # An unmapped layer has nothing on the target's device.
        if self.is_mapped:
            super().offload()

    def prefetch(self) -> None:
        """Bring the layer to the target's device: from the CPU, or by mapping it (on the caller's current stream)."""
        self.map()
        super().prefetch()

    def _defer(self, change: Callable[[], None]) -> bool:
        """Apply `change` to the pending state; False when there is none (any more)."""
        prefix = self._prefix
        if prefix is None:
            return False
        with prefix.lock(self.layer_idx):
            if self._prefix is None:
                return False
            change()
        return True

    def _shorten(self, tokens: int) -> None:
        self._length = max(self._length - tokens, 0)

    def _take_rows(self, take: Callable[[torch.Tensor], torch.Tensor]) -> None:
        assert self._prefix is not None
        rows = self._rows
        if rows is None:
            rows = torch.arange(self._prefix.batch_size, device=self._prefix.device)
        self._rows = take(rows)

    def _drop(self) -> None:
        self._prefix = self._rows = None


class BridgedCache(DynamicCache):
    """A `DynamicCache` that starts with columns mapped from another model's cache.

    Pass it as `cache=` (`past_key_values=` in older Transformers) to a forward or to `generate` of the target. Nothing
    is mapped before it is touched; a mapped layer is an ordinary dynamic layer.

    Args:
        prefix: the columns it starts with; None for an empty cache.
        num_layers: layers of the target.
        report: the [`HandoffReport`] of the handoff that made it.
        offloading, offload_only_non_sliding: as for `DynamicCache`.
    """

    def __init__(
        self,
        prefix: MappedPrefix | None = None,
        num_layers: int | None = None,
        report: Any = None,
        offloading: bool = False,
        offload_only_non_sliding: bool = False,
    ):
        if num_layers is None:
            num_layers = prefix.num_layers if prefix is not None else 0
        layers: list[Any] = [BridgedLayer(prefix, layer) for layer in range(num_layers)]
        # Not DynamicCache.__init__, which makes layers of its own.
        Cache.__init__(self, layers=layers, offloading=offloading, offload_only_non_sliding=offload_only_non_sliding)
        self.layers: list[Any]
        self.report = report
        #: `(batch, columns)`, bool: the mapped tokens that the target has recomputed (as they were handed over).
        self.repaired: torch.Tensor | None = None

    @property
    def num_mapped_layers(self) -> int:
        """Layers that hold their keys and values already."""
        return sum(layer.is_mapped for layer in self.layers)

    def map_all(self) -> BridgedCache:
        """Map every layer now."""
        for layer in self.layers:
            layer.map()
        return self

    def take_offloading(self, cache: Cache) -> None:
        """Offload layers as `cache` would have (`cache_implementation="offloaded"`)."""
        if cache.offloading:
            self.offloading = True
            self.only_non_sliding = cache.only_non_sliding
            self.prefetch_stream = cache.prefetch_stream

    def write_into(self, cache: Cache, repeats: int = 1) -> None:
        """Append these columns to another cache (static, quantised, offloaded, or one that holds tokens already).

        Layers are mapped, handed over and let go one by one. This cache is empty afterwards.

        Args:
            cache: a cache of the target; whatever it holds stands in front.
            repeats: how often to repeat each row, as `generate` does for beams and returned sequences.
        """
        filled: list[int] = []
        length = self.get_seq_length()
        try:
            for index, layer in enumerate(self.layers):
                if length > 0:
                    if repeats > 1:
                        layer.batch_repeat_interleave(repeats)
                    cache.update(layer.keys, layer.values, index)
                    filled.append(index)
                layer.reset()
        except BaseException:
            # Half a handoff is worse than none: leave the caller's cache as it was.
            for index in filled:
                target = cache.layers[index]
                # Static layers could not be cropped in older releases.
                target.crop(-length) if hasattr(target, "crop") else target.reset()
            raise


__all__ = ["BridgedCache", "BridgedLayer", "MappedPrefix", "NativePrefix"]
