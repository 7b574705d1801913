"""How far the target, when it recomputes mapped tokens, moves away from what was mapped.

A map that fits leaves little to mend; a wrong layer, another prompt's cache or a stranger's mapper leaves everything.
The repair computes both sides anyway, so the comparison costs a copy of the values of the tokens that it recomputes.
"""

from __future__ import annotations

from typing import Any

import torch


class RepairDrift:
    """Made before a repair, asked after it.

    Args:
        cache: the handed-over cache, mapped.
        chosen: `(batch, columns)`, bool, the tokens that will be recomputed.
        num_layers: lowest layers in which they will be; None: all.
    """

    def __init__(self, cache: Any, chosen: torch.Tensor, num_layers: int | None = None):
        self._num_layers = num_layers
        self._batch = chosen.shape[0]
        self._rows, self._columns = (index.cpu() for index in chosen.nonzero(as_tuple=True))
        self._before = [self._values(layer) for layer in cache.layers[:num_layers]]

    def _values(self, layer: Any) -> torch.Tensor:
        states = layer.values
        rows, columns = self._rows.to(states.device), self._columns.to(states.device)
        return states.transpose(1, 2)[rows, columns].float()  # (tokens, heads, head_dim)

    def measure(self, cache: Any) -> torch.Tensor:
        """`|recomputed - mapped| / |recomputed|` of the values of each row's tokens, the mean over these layers.

        Returns:
            `(batch,)`, float32 on the CPU; NaN where a row has no recomputed tokens. Layer by layer the squares are
            summed over the row's tokens, heads and channels.
        """
        ratios = []
        for before, layer in zip(self._before, cache.layers[: self._num_layers], strict=True):
            after = self._values(layer)
            sums = []
            for states in (after - before, after):
                total = torch.zeros(self._batch, device=states.device)
                sums.append(total.index_add(0, self._rows.to(states.device), states.square().sum((1, 2))))
            ratios.append((sums[0] / sums[1]).sqrt().cpu())
        return torch.stack(ratios).mean(0)


__all__ = ["RepairDrift"]
