"""Tokens of a pair kept as they are, for methods that train on samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .traces import Trace

_FIELDS = ("source_keys", "source_values", "target_keys", "target_values")


@dataclass
class Samples:
    """At most `most` tokens, a uniform sample of all that were offered.

    Attributes:
        tensors (`dict`): `source_keys`, `source_values`, `target_keys`, `target_values`, each `(layers, N, heads,
            dim)` float32 on the CPU.
    """

    most: int
    generator: torch.Generator
    tensors: dict[str, torch.Tensor]
    priority: torch.Tensor

    @classmethod
    def empty(cls, most: int, seed: int) -> Samples:
        return cls(most, torch.Generator().manual_seed(seed), {}, torch.empty(0))

    def update(self, trace: Trace) -> None:
        """Offer the tokens of a trace: each gets a random priority, and those with the highest ones stay."""
        added = {name: getattr(trace, name).float().cpu() for name in _FIELDS}
        priority = torch.cat([self.priority, torch.rand(trace.num_tokens, generator=self.generator)])
        tensors = {
            name: torch.cat([self.tensors[name], added[name]], dim=1) if self.tensors else added[name]
            for name in _FIELDS
        }
        if len(priority) > self.most:
            # In the order in which they came, so that the same tokens give the same tensors.
            kept = priority.topk(self.most).indices.sort().values
            priority, tensors = priority[kept], {name: tensor[:, kept] for name, tensor in tensors.items()}
        self.priority, self.tensors = priority, tensors

    @property
    def num_tokens(self) -> int:
        return len(self.priority)


__all__ = ["Samples"]
