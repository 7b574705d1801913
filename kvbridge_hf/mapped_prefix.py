"""The target's keys and values of a run of prompt columns, mapped layer by layer from a source's content."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

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
        self._forget_others(layer)
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

    def _forget_others(self, layer: int) -> None:
        """Let go what this layer does not read, so that never more than one target layer's source content is held.

        Neighbouring target layers mostly read the same source layers; what both read is stripped once.
        """
        needed = set(self.mapper.config.selected_layers[layer])
        for other in self.source.held_layers - needed:
            self.source.forget(other)

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


__all__ = ["MappedPrefix", "NativePrefix"]
