"""Closed-form ridge regression, full-head or head-local, uniform or weighted.

Heo et al., arXiv:2608.03893 (full-head, top-k layers, lambda on summed moments) and Qu et al., arXiv:2609.00891
(head-local, receiver-sensitivity weights); the regression itself is in `linear`. Weights, metric and penalty change
coefficients only; support and runtime are the same. With a budget of layers the mapper is a ragged one: each target
layer has as many source layers as pay there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..modeling_kvbridge import KVBridgeMapper
from .base import FitContext, FitMethod, register_fit
from .budget import spend_layers
from .features import KIND_NAMES, fill_parameters
from .linear import LayerFit, by_head, check_solution, fit_layer, r2_by_kind


@register_fit
class RidgeFit(FitMethod):
    """The closed form; see the module."""

    name = "ridge"

    @torch.no_grad()
    def fit(self, context: FitContext) -> KVBridgeMapper:
        config, layout = context.config, context.statistics.layout
        heads, dim = layout.target_heads, layout.target_dim
        counts = None
        if config.layer_budget is None:
            # One at a time: the moments of a layer are much larger than its map.
            fits: Iterable[LayerFit] = (fit_layer(context, target) for target in range(layout.target_layers))
        else:
            fits, counts = spend_layers(context)
        found, r2, heldout, weights, biases = [], [], [], [], []
        for fit in fits:
            found.append(fit.facts)
            r2.append(fit.r2(fit.solution, dim))
            if context.statistics.has_heldout:
                heldout.append(fit.r2(fit.solution, dim, heldout=True))
            weights.append(by_head(fit.solution, heads, dim))
            biases.append(fit.bias(fit.solution).reshape(2, heads, dim))
            del fit
        bias = torch.stack(biases, dim=1)
        facts: dict[str, Any] = {name: [entry[name] for entry in found] for name in sorted(found[0])}
        facts.update(r2=r2_by_kind(r2), heldout_r2=r2_by_kind(heldout) if heldout else None)
        if counts is None:
            mapper = KVBridgeMapper(self.mapper_config(context, **facts))
            weight = torch.stack(weights, dim=1)
        else:
            mapper = KVBridgeMapper(
                self.mapper_config(context, runtime="ragged", method_config={"layer_counts": counts}, **facts)
            )
            weight = torch.cat(weights, dim=2)
        check_solution(weight, bias)
        for kind, name in enumerate(KIND_NAMES):
            fill_parameters(mapper, **{f"{name}_weight": weight[kind], f"{name}_bias": bias[kind]})
        return mapper.to(getattr(torch, config.dtype)).eval()


__all__ = ["RidgeFit"]
