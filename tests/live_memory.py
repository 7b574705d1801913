"""Bytes of tensors alive, counted exactly on any device, for tests and benchmarks of peak memory."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Counts the storages that operations inside the `with` block make, until each is freed.

    Attributes:
        live, peak: bytes now and at most. What was there before the block does not count.
    """

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {
            id(leaf.untyped_storage())
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
                self._add(leaf.untyped_storage(), before)
        return result

    def _add(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        key = id(storage)
        if key in before or key in self._known:
            return
        size = storage.nbytes()

        def freed(_, key=key, size=size):
            del self._known[key]
            self.live -= size

        self._known[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)


def cache_bytes(cache) -> int:
    """Bytes of a cache's keys and values."""
    return sum(states.nbytes for layer in cache.layers for states in (layer.keys, layer.values))
