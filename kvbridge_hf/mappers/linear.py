"""The linear map of one target layer from moments: what the closed-form methods have in common.

For each target layer, head and kind

    W = (gram + lambda I)^-1 cross,    b = mean(y) - W' mean(x)

with the centred moments of the selected features. Sensitivity weights change the moments, a metric turns the penalty
into one per direction of the outputs, a search chooses the penalty on held-out moments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..calibration.layout import KINDS
from ..calibration.moments import Moments
from ..calibration.selection import head_r2, penalty_of
from ..calibration.solve import solve_ridge
from ..calibration.weighting import per_head
from ..errors import CalibrationError, FitConfigError
from .base import FitContext
from .spectral import OutputBasis, SpectralRidge, identity_basis, penalty_grid


@dataclass
class LayerFit:
    """The linear map of one target layer.

    Attributes:
        moments (`Moments`): `S` systems, those the fit was made on: keys first, `2 * target_heads / S` heads a system.
        uniform (`Moments`): Of the same regressions, every token counting once.
        heldout (`Moments`, *optional*): Likewise, of the tokens held out; systems as in `moments`.
        solution (`(S, F, M)`): `W`.
        basis (`OutputBasis`, *optional*): The outputs' metric.
        facts (`dict`): What the fit found, for the provenance.
    """

    moments: Moments
    uniform: Moments
    heldout: Moments | None
    solution: torch.Tensor
    basis: OutputBasis | None
    facts: dict[str, Any] = field(default_factory=dict)

    def bias(self, solution: torch.Tensor) -> torch.Tensor:
        """`(S, M)`, of this map or of one put in its place."""
        return self.moments.y_mean - (self.moments.x_mean.unsqueeze(1) @ solution).squeeze(1)

    def r2(self, solution: torch.Tensor, dim: int, *, heldout: bool = False) -> torch.Tensor:
        """R^2 of keys and of values, mean over heads, `(2,)`.

        Every token counts once, also where the fit was weighted, so that it compares over weightings.
        """
        scored = self.heldout if heldout else self.uniform
        assert scored is not None
        return layer_r2(scored, self.moments, solution, dim)


def fit_layer(context: FitContext, target: int, layers: int | None = None) -> LayerFit:
    """Fit one target layer.

    Args:
        context: Of the fit.
        target: Which.
        layers: Only the first so many of the selected source layers.
    """
    config, statistics, layout = context.config, context.statistics, context.statistics.layout
    heads = None if context.selection.heads is None else context.selection.heads[target]
    arguments = (target, context.selection.layers[target], config.support, heads)
    uniform = statistics.train.systems(*arguments)
    heldout = statistics.heldout.systems(*arguments) if statistics.has_heldout else None
    moments = uniform
    facts: dict[str, Any] = {}
    if config.weighting == "sensitivity":
        if context.sensitivity is None:
            raise FitConfigError(
                "weighting='sensitivity' needs weighted moments, which take a second pass over the data: use "
                "fit_mapper, or collect_sensitivity and fit_from_statistics(..., sensitivity=...)."
            )
        moments, share = context.sensitivity.combine(target, uniform, config.ess_per_feature)
        facts["sensitivity_uniform_share"] = share
        uniform = per_head(uniform, layout.target_heads, layout.target_dim)
        heldout = None if heldout is None else per_head(heldout, layout.target_heads, layout.target_dim)
    if layers is not None and layers < len(context.selection.layers[target]):
        width = moments.gram.shape[-1] // len(context.selection.layers[target])
        first = torch.arange(layers * width, device=moments.gram.device)
        same = uniform is moments
        moments = moments.features(first)
        uniform = moments if same else uniform.features(first)
        heldout = None if heldout is None else heldout.features(first)
    penalty = penalty_of(moments, config.ridge_lambda, config.ridge_relative)
    basis = None
    if config.metric == "query":
        if context.metrics is None:
            raise FitConfigError(
                "metric='query' needs the target's queries: use fit_mapper, or collect_metrics and "
                "fit_from_statistics(..., metrics=...)."
            )
        basis = OutputBasis(context.metrics.of_layer(target).to(moments.gram.device), len(moments.weight))
    if basis is None and not config.lambda_search:
        solution = solve_ridge(moments.gram, moments.cross, penalty)
        return LayerFit(moments, uniform, heldout, solution, basis, facts)
    outputs = moments.cross.shape[-1]
    ridge = SpectralRidge(
        moments, identity_basis(len(moments.weight), outputs, layout.target_dim) if basis is None else basis
    )
    penalties = penalty.unsqueeze(-1).expand(-1, outputs)
    if config.lambda_search:
        if heldout is None:
            raise FitConfigError("lambda_search=True needs held-out sequences; use heldout_fraction=0.1 or more data.")
        scored = heldout.about(moments.x_mean, moments.y_mean)
        penalties = ridge.best_penalty(penalty_grid(moments, penalty), scored, layout.target_dim)
        facts["penalties"] = penalties[:, :: layout.target_dim].flatten().tolist()
    return LayerFit(moments, uniform, heldout, ridge.solve(penalties), basis, facts)


def by_head(solution: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
    """`(2 * R, F, heads per system * dim)` -> `(2, target_heads, F, dim)`."""
    systems, features, _ = solution.shape
    split = solution.reshape(len(KINDS), systems // len(KINDS), features, -1, dim)
    return split.permute(0, 1, 3, 2, 4).reshape(len(KINDS), heads, features, dim)


def layer_r2(scored: Moments, fitted: Moments, solution: torch.Tensor, dim: int) -> torch.Tensor:
    """R^2 of keys and of values of one target layer, mean over heads, `(2,)`."""
    residual = scored.about(fitted.x_mean, fitted.y_mean).residual(solution)
    shape = (len(KINDS), -1, dim)
    return head_r2(residual.reshape(shape), scored.power.reshape(shape)).mean(dim=1)


def r2_by_kind(scores: list[torch.Tensor]) -> dict[str, list[float]]:
    """`(2,)` of every target layer -> lists under the kinds' names."""
    table = torch.stack(scores, dim=1)
    return {kind: table[place].tolist() for place, kind in enumerate(KINDS)}


def gather_facts(fits: list[LayerFit]) -> dict[str, Any]:
    """Facts of all layers, one list each."""
    names = {name for fit in fits for name in fit.facts}
    return {name: [fit.facts[name] for fit in fits] for name in sorted(names)}


def check_solution(*tensors: torch.Tensor) -> None:
    """Refuse a fit that is not finite."""
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
        raise CalibrationError(
            "The fit gave NaN or Inf: the statistics are not finite or far beyond float64. Collect them again."
        )


__all__ = ["LayerFit", "by_head", "check_solution", "fit_layer", "gather_facts", "layer_r2", "r2_by_kind"]
