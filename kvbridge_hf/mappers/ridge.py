"""Closed-form ridge regression, full-head or head-local, uniform or weighted.

Heo et al., arXiv:2608.03893 (full-head, top-k layers, lambda on summed moments) and Qu et al., arXiv:2609.00891
(head-local, receiver-sensitivity weights); the regression itself is in `linear`. Weights, metric and penalty change
coefficients only; support and runtime are the same. With a budget of layers the mapper is a ragged one: each target
layer has as many source layers as pay there.
"""

from __future__ import annotations

import torch

from ..modeling_kvbridge import KVBridgeMapper
from .base import FitContext, FitMethod, register_fit
from .budget import spend_layers
from .features import KIND_NAMES, fill_parameters
from .linear import by_head, check_solution, fit_layer, gather_facts, r2_by_kind


@register_fit
class RidgeFit(FitMethod):
    """The closed form; see the module."""

    name = "ridge"

    @torch.no_grad()
    def fit(self, context: FitContext) -> KVBridgeMapper:
        config, layout = context.config, context.statistics.layout
        heads, dim = layout.target_heads, layout.target_dim
        if config.layer_budget is None:
            fits = [fit_layer(context, target) for target in range(layout.target_layers)]
            counts = None
        else:
            fits, counts = spend_layers(context)
        facts = gather_facts(fits)
        facts["r2"] = r2_by_kind([fit.r2(fit.solution, dim) for fit in fits])
        facts["heldout_r2"] = None
        if context.statistics.has_heldout:
            facts["heldout_r2"] = r2_by_kind([fit.r2(fit.solution, dim, heldout=True) for fit in fits])
        weights = [by_head(fit.solution, heads, dim) for fit in fits]
        bias = torch.stack([fit.bias(fit.solution).reshape(2, heads, dim) for fit in fits], dim=1)
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
