"""A Transformers cache whose layers are mapped from a source's cache when they are first touched."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from .mapped_prefix import MappedPrefix, NativePrefix

logger = logging.getLogger(__name__)


class BridgedLayer(DynamicLayer):
    """One layer of a [`BridgedCache`]: mapped when its keys or values are first touched, then a plain `DynamicLayer`.

    Its length is known without mapping. Cropping and row operations (repeat, select, reorder) before the first touch
    are remembered and cost no mapping. It may be mapped ahead by another thread, on another stream.

    Args:
        prefix: where the keys and values come from; None for an empty layer.
        layer_idx: the target layer.
    """

    def __init__(self, prefix: MappedPrefix | None = None, layer_idx: int = 0):
        self._prefix: MappedPrefix | None = None
        self._event: Any = None  # what a stream has to wait for before it reads what another one has mapped
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
        self._settle()
        return self._keys

    @keys.setter
    def keys(self, value: torch.Tensor | None) -> None:
        self.map()
        self._keys = value

    @property
    def values(self) -> torch.Tensor | None:
        self._settle()
        return self._values

    @values.setter
    def values(self, value: torch.Tensor | None) -> None:
        self.map()
        self._values = value

    def map(self, device: torch.device | None = None, stream: Any = None) -> None:
        """Compute the keys and values now.

        Args:
            device: another device than the target's.
            stream: the accelerator stream that is current, where another one will read the result.
        """
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
            self._event = None if stream is None else stream.record_event()
            # Last: other threads take a layer without prefix for finished.
            self._prefix = None

    def _settle(self, device: torch.device | None = None) -> None:
        """Map, or let the current stream wait for the one that has mapped ahead."""
        self.map(device)
        event, keys, values = self._event, self._keys, self._values
        if event is not None and keys is not None and values is not None:
            self._event = None
            current = _current_stream(keys.device)
            current.wait_event(event)
            for states in (keys, values):
                states.record_stream(current)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DynamicLayer.update`. The new states decide about device and dtype (autocast, spread models)."""
        self._settle(key_states.device)
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys.to(key_states), self._values.to(value_states)
            self.device, self.dtype = key_states.device, key_states.dtype
        return super().update(key_states, value_states, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> BridgedLayer:
        if self.is_mapped:
            self._settle()  # an event cannot be copied
        copied = memo[id(self)] = object.__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

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
        self._settle()
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
        #: `(batch,)`: how far these moved when they were recomputed, see [`RepairDrift`].
        self.drift: torch.Tensor | None = None

    @property
    def num_mapped_layers(self) -> int:
        """Layers that hold their keys and values already."""
        return sum(layer.is_mapped for layer in self.layers)

    def map_all(self) -> BridgedCache:
        """Map every layer now."""
        for layer in self.layers:
            layer.map()
        return self

    def map_ahead(self, stream: Any = None) -> threading.Thread:
        """Map the layers on a thread of their own, in their order, while the caller goes on.

        Whoever touches a layer waits for it, or maps it himself where it is not yet begun. A map that fails leaves its
        layer for whoever touches it, and with it the exception.

        Args:
            stream: a stream of the target's accelerator to map on; without one the work queues behind the target's
                own, and on a CPU there is none.

        Returns:
            The running thread.
        """
        layers = list(self.layers)
        before = None if stream is None else _current_stream(stream.device)

        def work() -> None:
            with torch.no_grad(), contextlib.nullcontext() if stream is None else stream:
                if stream is not None:
                    stream.wait_stream(before)  # the source may still be writing
                for layer in layers:
                    try:
                        layer.map(stream=stream)
                    except Exception:
                        logger.debug("Mapping layer %d ahead failed.", layer.layer_idx, exc_info=True)
                        return

        thread = threading.Thread(target=work, name="kvbridge-map-ahead", daemon=True)
        thread.start()
        return thread

    def take_offloading(self, cache: Cache) -> None:
        """Offload layers as `cache` would have (`cache_implementation="offloaded"`)."""
        if cache.offloading:
            self.offloading = True
            self.only_non_sliding = cache.only_non_sliding
            self.prefetch_stream = cache.prefetch_stream

    def write_into(self, cache: Cache, repeats: int = 1) -> None:
        """Append these columns to another cache (static, quantised, offloaded, or one that holds tokens already).

        Layers are mapped, handed over and let go one by one. A cache that cannot be cropped (a quantised one) gets
        them when all are mapped, so that a map that fails leaves it as it was. This cache is empty afterwards.

        Args:
            cache: a cache of the target; whatever it holds stands in front.
            repeats: how often to repeat each row, as `generate` does for beams and returned sequences.
        """
        filled: list[int] = []
        length = self.get_seq_length()
        if not all(_can_shrink(layer) for layer in cache.layers):
            self.map_all()
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
                target.crop(-length) if _can_shrink(target) and hasattr(target, "crop") else target.reset()
            raise


def _can_shrink(layer: Any) -> bool:
    return not hasattr(layer, "_quantized_keys")


def _current_stream(device: torch.device) -> Any:
    return torch.accelerator.current_stream(device)


__all__ = ["BridgedCache", "BridgedLayer", "MappedPrefix", "NativePrefix"]
