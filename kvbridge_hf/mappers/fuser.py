"""A learned fuser: the target keeps its own cache and adds what the source knows.

As in Cache-to-Cache (C2C, Fu et al., arXiv:2510.03215): for each target layer the source's and the target's own
keys (and values) of a token are projected together, mixed by a small network, scaled per head by a weight that depends
on the token, and added to the target's own through a gate of the layer. The price is the target's whole prefill, so
this is a comparison for quality and no handoff that saves anything.

The last projection starts at 0, where the result is the target's own cache. KL to the target is 0 there, so a fuser is
trained on the continuation's own tokens (`DistillationConfig(kl_weight=0, nll_weight=1)`).
"""

from __future__ import annotations

import torch
from torch.nn import functional

from ..errors import ArtifactError
from ..modeling_kvbridge import KVBridgeMapper, SourceContent, register_method
from .base import FitContext, FitMethod, register_fit
from .causal import deviations, standardisation
from .features import (
    KIND_NAMES,
    ByKindMethod,
    Reader,
    add_parameters,
    fill_parameters,
    grouped_features,
    target_shape,
)


@register_method
class FuserMethod(ByKindMethod):
    """For keys and for values, a target layer each: `key_project` `(layers, features + own, width)` with its bias,
    `key_mix` `(layers, width, width)`, `key_out` `(layers, width, own)`, `key_head` `(layers, width, heads)`, and the
    gate `key_gate` `(layers,)`; `own` are `heads * head_dim` of the target. `method_config["width"]` is the network's.
    """

    name = "fuser"
    requires = ("own_keys", "own_values")
    # Not from a column alone: the target's own cache needs all columns before it.
    tokenwise = False

    def build(self, mapper: KVBridgeMapper) -> None:
        config = mapper.config
        layers, heads, dim = target_shape(config)
        width = config.method_config.get("width")
        if not isinstance(width, int) or width < 1 or config.support != "full_head":
            raise ArtifactError(f"method_config['width'] must be a width, with full-head support, got {width!r}.")
        own = heads * dim
        for kind in KIND_NAMES:
            shapes = {
                "project": (layers, config.num_features + own, width),
                "project_bias": (layers, width),
                "mix": (layers, width, width),
                "out": (layers, width, own),
                "head": (layers, width, heads),
                "gate": (layers,),
            }
            add_parameters(mapper, **{f"{kind}_{name}": shape for name, shape in shapes.items()})

    def map_kind(
        self, mapper: KVBridgeMapper, kind: str, target_layer: int, source: SourceContent, read: Reader
    ) -> torch.Tensor:
        features = grouped_features(mapper, target_layer, read).squeeze(1)  # B, T, F
        own = source.extra(f"own_{kind}s")[target_layer].to(features)  # B, H, T, d
        weights = {
            name: getattr(mapper, f"{kind}_{name}")[target_layer].to(features.dtype)
            for name in ("project", "project_bias", "mix", "out", "head", "gate")
        }
        together = torch.cat([features, own.transpose(1, 2).flatten(2)], dim=-1)
        states = functional.silu(together @ weights["project"] + weights["project_bias"])
        states = states + functional.silu(states @ weights["mix"])
        added = (states @ weights["out"]).unflatten(-1, (own.shape[1], -1)).transpose(1, 2)
        by_head = (states @ weights["head"]).sigmoid().transpose(1, 2).unsqueeze(-1)  # B, H, T, 1
        return own + weights["gate"] * by_head * added

    def flops_per_token(self, mapper: KVBridgeMapper) -> float:
        """The fuser alone; the target's prefill comes on top, see [`~evaluation.controls.BridgeHandoff.flops`]."""
        names = ("project", "mix", "out", "head")
        return 2.0 * sum(getattr(mapper, f"{kind}_{name}").numel() for kind in KIND_NAMES for name in names)


@register_fit
class FuserFit(FitMethod):
    """Standardised features in, nothing out: the target's own cache, to be trained by `FitConfig.distillation`."""

    name = "fuser"

    @torch.no_grad()
    def fit(self, context: FitContext) -> KVBridgeMapper:
        config = context.config
        mapper = KVBridgeMapper(
            self.mapper_config(context, method_config={"width": config.fuser_width}, r2=None, heldout_r2=None)
        )
        generator = torch.Generator().manual_seed(config.seed)
        # Of the own part no moments are kept that say how its features vary together; a deviation each will do.
        own_mean, own_scale = own_standardisation(context)
        read = [standardisation(context, layers) for layers in context.selection.layers]
        for place, kind in enumerate(KIND_NAMES):
            project, bias = [], []
            for layer, (means, scales) in enumerate(read):
                mean = torch.cat([means.chunk(2)[place], own_mean[place, layer]])
                scale = torch.cat([scales.chunk(2)[place], own_scale[place, layer]])
                weight = torch.randn(len(mean), config.fuser_width, generator=generator) * len(mean) ** -0.5
                project.append(weight / scale[:, None])
                bias.append(-mean @ project[-1])
            mix = torch.randn(getattr(mapper, f"{kind}_mix").shape, generator=generator) * config.fuser_width**-0.5
            fill_parameters(mapper, **{f"{kind}_project": torch.stack(project), f"{kind}_mix": mix})
            fill_parameters(mapper, **{f"{kind}_project_bias": torch.stack(bias)})
            getattr(mapper, f"{kind}_gate").fill_(1.0)
        return mapper.to(getattr(torch, config.dtype)).eval()


def own_standardisation(context: FitContext) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation of the target's own keys and values, each `(2, layers, heads * head_dim)` float32."""
    means, scales = [], []
    for layer in range(context.statistics.layout.target_layers):
        systems = context.statistics.train.systems(layer, context.selection.layers[layer], "full_head", None)
        means.append(systems.y_mean)
        scales.append(deviations(systems.power, systems.weight))
    return torch.stack(means, dim=1).float().cpu(), torch.stack(scales, dim=1).float().cpu()


__all__ = ["FuserFit", "FuserMethod"]
