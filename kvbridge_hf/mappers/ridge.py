"""Closed-form ridge regression, full-head or head-local, uniform or weighted.

Heo et al., arXiv:2608.03893 (full-head, top-k layers, lambda on summed moments) and Qu et al., arXiv:2609.00891
(head-local, receiver-sensitivity weights). For each target layer, head and kind

    W = (gram + lambda I)^-1 cross,    b = mean(y) - W' mean(x)

with the centred moments of the selected features. Only a weighted fit has other moments; support and runtime are the
same.
"""

from __future__ import annotations

from typing import Any

import torch

from ..calibration.layout import KINDS
from ..calibration.moments import Moments
from ..calibration.selection import head_r2, penalty_of
from ..calibration.solve import solve_ridge
from ..calibration.weighting import per_head
from ..errors import CalibrationError, FitConfigError
from ..modeling_kvbridge import KVBridgeMapper
from .base import FitContext, FitMethod, register_fit


@register_fit
class RidgeFit(FitMethod):
    """The closed form; see the module."""

    name = "ridge"

    @torch.no_grad()
    def fit(self, context: FitContext) -> KVBridgeMapper:
        config, statistics = context.config, context.statistics
        if config.weighting == "sensitivity" and context.sensitivity is None:
            raise FitConfigError(
                "weighting='sensitivity' needs weighted moments, which take a second pass over the data: use "
                "fit_mapper, or collect_sensitivity and fit_from_statistics(..., sensitivity=...)."
            )
        layout = statistics.layout
        weights, biases = [], []
        scores: dict[str, list[torch.Tensor]] = {"r2": [], "heldout_r2": []}
        facts: dict[str, Any] = {}
        for target in range(layout.target_layers):
            heads = None if context.selection.heads is None else context.selection.heads[target]
            arguments = (target, context.selection.layers[target], config.support, heads)
            uniform = statistics.train.systems(*arguments)
            moments = uniform
            if config.weighting == "sensitivity":
                assert context.sensitivity is not None
                moments, shrink = context.sensitivity.combine(target, uniform, config.ess_per_feature)
                facts.setdefault("sensitivity_uniform_share", []).append(shrink)
            solution = solve_ridge(
                moments.gram, moments.cross, penalty_of(moments, config.ridge_lambda, config.ridge_relative)
            )
            weights.append(_by_head(solution, layout.target_heads, layout.target_dim))
            bias = moments.y_mean - (moments.x_mean.unsqueeze(1) @ solution).squeeze(1)
            biases.append(bias.reshape(len(KINDS), layout.target_heads, layout.target_dim))
            # R^2 counts every token once, also where the fit does not, so that it compares over weightings.
            scored = {"r2": uniform}
            if statistics.has_heldout:
                scored["heldout_r2"] = statistics.heldout.systems(*arguments)
            if moments is not uniform:
                scored = {
                    name: per_head(part, layout.target_heads, layout.target_dim) for name, part in scored.items()
                }
            for name, target_moments in scored.items():
                scores[name].append(_layer_r2(target_moments, moments, solution, layout.target_dim))

        facts["r2"] = _by_kind(scores["r2"])
        facts["heldout_r2"] = _by_kind(scores["heldout_r2"]) if scores["heldout_r2"] else None
        mapper = KVBridgeMapper(self.mapper_config(context, **facts))
        dtype = getattr(torch, config.dtype)
        weight, bias = torch.stack(weights, dim=1), torch.stack(biases, dim=1)
        if not bool(torch.isfinite(weight).all() and torch.isfinite(bias).all()):
            raise CalibrationError(
                "The fit gave NaN or Inf: the statistics are not finite or far beyond float64. Collect them again."
            )
        for kind, name in enumerate(("key", "value")):
            getattr(mapper, f"{name}_weight").copy_(weight[kind])
            getattr(mapper, f"{name}_bias").copy_(bias[kind])
        return mapper.to(dtype).eval()


def _by_head(solution: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
    """`(2 * R, F, heads per system * dim)` -> `(2, target_heads, F, dim)`."""
    systems, features, _ = solution.shape
    split = solution.reshape(len(KINDS), systems // len(KINDS), features, -1, dim)
    return split.permute(0, 1, 3, 2, 4).reshape(len(KINDS), heads, features, dim)


def _layer_r2(scored: Moments, fitted: Moments, solution: torch.Tensor, dim: int) -> torch.Tensor:
    """R^2 of keys and of values of one target layer, mean over heads, `(2,)`."""
    residual = scored.about(fitted.x_mean, fitted.y_mean).residual(solution)
    shape = (len(KINDS), -1, dim)
    return head_r2(residual.reshape(shape), scored.power.reshape(shape)).mean(dim=1)


def _by_kind(scores: list[torch.Tensor]) -> dict[str, list[float]]:
    table = torch.stack(scores, dim=1)
    return {kind: table[place].tolist() for place, kind in enumerate(KINDS)}


__all__ = ["RidgeFit"]
