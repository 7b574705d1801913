"""Sensitivity-weighted moments: a second pass over the data, after the layers are selected.

Every target layer, head and kind has weights of its own, so the weighted moments hold only the features that were
selected. They are collected with the raw weights; normalising them and shrinking them towards uniform is linear in the
moments and is done afterwards, from the sums of the weights and of their squares.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..errors import FitConfigError
from .layout import KINDS, StatisticsLayout
from .moments import Moments
from .selection import Selection
from .traces import Trace


def uniform_share(weight: torch.Tensor, weight_sq: torch.Tensor, tokens: torch.Tensor, floor: float) -> torch.Tensor:
    """How far weights have to be shrunk towards uniform to keep an effective sample size.

    Weights `w` of mean 1 with coefficient of variation `c` become `(1 - s) w + s`, whose Kish effective sample size is
    `N / (1 + (1 - s)^2 c^2)`.

    Args:
        weight, weight_sq (`(S,)`): Sums of the weights and of their squares.
        tokens (`(S,)`): `N`.
        floor: Least effective sample size; `N` where the floor is above it.

    Returns:
        `(S,)`: the least `s` in [0, 1].
    """
    variation = (tokens * weight_sq / weight.square().clamp(min=torch.finfo(weight.dtype).tiny) - 1).clamp(min=0)
    allowed = (tokens / floor - 1).clamp(min=0) if floor > 0 else torch.full_like(tokens, float("inf"))
    kept = (allowed / variation.clamp(min=torch.finfo(weight.dtype).tiny)).sqrt().clamp(max=1)
    kept = torch.where(weight > 0, kept, torch.zeros_like(kept))
    return 1 - kept


def per_head(moments: Moments, heads: int, dim: int) -> Moments:
    """Systems that serve several target heads, written out as one system for each head (keys, then values)."""
    systems = len(moments.weight)
    serve = len(KINDS) * heads // systems

    def outputs(tensor: torch.Tensor) -> torch.Tensor:  # (S, ..., serve * dim) -> (S * serve, ..., dim)
        return tensor.unflatten(-1, (serve, dim)).movedim(-2, 1).flatten(0, 1)

    def shared(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.repeat_interleave(serve, dim=0)

    return Moments(
        weight=shared(moments.weight),
        weight_sq=shared(moments.weight_sq),
        x_mean=shared(moments.x_mean),
        y_mean=outputs(moments.y_mean),
        gram=shared(moments.gram),
        cross=outputs(moments.cross),
        power=outputs(moments.power),
    )


def shrunk(weighted: Moments, uniform: Moments, ess_per_feature: float) -> tuple[Moments, float]:
    """Moments under normalised weights, shrunk towards uniform; see [`SensitivityMoments.combine`].

    Args:
        weighted: Under the raw weights.
        uniform: The same systems, unweighted.
        ess_per_feature: Least effective samples per feature.
    """
    tokens = uniform.weight
    share = uniform_share(weighted.weight, weighted.weight_sq, tokens, ess_per_feature * weighted.gram.shape[-1])
    scale = torch.where(weighted.weight > 0, (1 - share) * tokens / weighted.weight, torch.zeros_like(share))
    return weighted.scaled(scale).merge(uniform.scaled(share)), float(share.mean())


class SensitivityMoments:
    """Weighted moments of the selected features of every target layer.

    Args:
        layout: Of the statistics.
        selection: Layers and heads; the moments serve no other.
        support: `"full_head"` or `"head_local"`.
        device: Of the moments.
        products: Dtype of the matrix products.
    """

    def __init__(
        self,
        layout: StatisticsLayout,
        selection: Selection,
        support: str,
        device: torch.device | str = "cpu",
        products: torch.dtype = torch.float64,
    ):
        self.layout, self.support, self.products = layout, support, products
        self.layers, self.heads = selection.layers, selection.heads
        block = layout.source_heads if selection.heads is None else len(selection.heads[0][0][0])
        features = len(selection.layers[0]) * block * layout.source_dim
        systems = len(KINDS) * layout.target_heads
        self.moments = [
            Moments.zeros(systems, features, layout.target_dim, device) for _ in range(layout.target_layers)
        ]

    def update(self, trace: Trace, weights: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Add tokens.

        Args:
            trace: `N` tokens.
            weights (two of `(target_layers, N, target_heads)`): For keys and for values.
        """
        heads = self.layout.target_heads
        kinds = ((trace.source_keys, trace.target_keys), (trace.source_values, trace.target_values))
        for kind, (source, target) in enumerate(kinds):
            for layer, moments in enumerate(self.moments):
                device = moments.gram.device
                x = self._features(source, layer).to(device)
                y = target[layer].transpose(0, 1).to(device)
                part = moments[kind * heads : (kind + 1) * heads]
                part.update(x, y, weights[kind][layer].T.to(device), self.products)

    def _features(self, source: torch.Tensor, target_layer: int) -> torch.Tensor:
        """`(source_layers, N, source_heads, dim)` -> `(target_heads, N, features)`."""
        chosen = source[self.layers[target_layer]]  # k, N, H_s, d
        if self.heads is None:
            flat = chosen.transpose(0, 1).flatten(1)
            return flat.unsqueeze(0).expand(self.layout.target_heads, -1, -1)
        heads = torch.tensor(self.heads[target_layer], device=source.device)  # k, H_t, block
        parts = [layer[:, heads[place]] for place, layer in enumerate(chosen)]  # each N, H_t, block, d
        return torch.stack(parts, dim=2).flatten(2).transpose(0, 1)

    def merge(self, other: SensitivityMoments) -> SensitivityMoments:
        """Add other tokens, in place."""
        self.check(other.layers, other.heads)
        for mine, theirs in zip(self.moments, other.moments, strict=True):
            mine.merge(theirs.to(mine.gram.device))
        return self

    def of_target_layers(self, first: int, last: int) -> SensitivityMoments:
        """Those of some target layers; the moments are shared."""
        part = SensitivityMoments.__new__(SensitivityMoments)
        part.layout = replace(self.layout, target_layers=last - first)
        part.support, part.products = self.support, self.products
        part.layers = self.layers[first:last]
        part.heads = None if self.heads is None else self.heads[first:last]
        part.moments = self.moments[first:last]
        return part

    def check(self, layers: list[list[int]], heads: list | None) -> None:
        if (layers, heads) != (self.layers, self.heads):
            raise FitConfigError(
                "The weighted moments were collected for other source layers or heads than this fit selects. Collect "
                "them again with these settings."
            )

    def combine(self, target_layer: int, uniform: Moments, ess_per_feature: float) -> tuple[Moments, float]:
        """Moments under the normalised weights, shrunk towards uniform as little as the floor allows.

        Args:
            target_layer: Which.
            uniform: The unweighted moments of the same regressions.
            ess_per_feature: Least effective samples per feature.

        Returns:
            `2 * target_heads` systems whose weights sum to the number of tokens, and the mean uniform share.
        """
        weighted = self.moments[target_layer]
        uniform = per_head(uniform, self.layout.target_heads, self.layout.target_dim).to(weighted.gram.device)
        return shrunk(weighted, uniform, ess_per_feature)


__all__ = ["SensitivityMoments", "per_head", "shrunk", "uniform_share"]
