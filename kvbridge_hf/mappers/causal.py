"""The linear map and a small causal attention layer over the source's features on top of it.

A pointwise map cannot compose: what a lookup needs (which name stands before which value) is often the work of an
attention layer that the source does not have or has elsewhere. One pre-norm transformer layer reads the source's
content of all earlier tokens once,

    h = W_in x,   h += Attention(h),   h += MLP(h),   y_l = linear map of layer l + W_l norm(h)

with rotary attention over the tokens' own positions. `W_l` starts at 0, so the fit is the linear map; the layer is
trained on the target's predictions (`FitConfig.distillation`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..errors import ArtifactError
from ..modeling_kvbridge import AffineMethod, KVBridgeMapper, SourceContent, register_method
from .base import FitContext, FitMethod, get_fit, register_fit
from .features import KIND_NAMES, add_parameters, fill_parameters, target_shape

THETA = 10_000.0
# Width of the MLP in units of the layer's.
EXPANSION = 2


@register_method
class CausalMethod(AffineMethod):
    """Parameters of `"ridge"`, and of the layer: `trunk_in` `(features, width)` with `trunk_in_bias`, `trunk_qkv`
    `(width, 3 * width)`, `trunk_o`, `trunk_up`, `trunk_down`, and `key_out`, `value_out` `(target_layers, width,
    target_heads * target_head_dim)`. Its features are keys and values of every source layer that a target layer reads.
    """

    name = "causal"
    tokenwise = False

    def build(self, mapper: KVBridgeMapper) -> None:
        super().build(mapper)
        layers, heads, dim = target_shape(mapper.config)
        sizes = mapper.config.method_config
        width, num_heads = sizes.get("width"), sizes.get("heads")
        if not isinstance(width, int) or not isinstance(num_heads, int) or num_heads < 1 or width % (2 * num_heads):
            raise ArtifactError(
                f"method_config needs 'heads' and a 'width' that is heads times an even number, got {sizes!r}."
            )
        source = mapper.config.source_geometry
        features = 2 * len(read_layers(mapper.config)) * source["num_kv_heads"] * source["head_dim"]
        add_parameters(
            mapper,
            trunk_in=(features, width),
            trunk_in_bias=(width,),
            trunk_qkv=(width, 3 * width),
            trunk_o=(width, width),
            trunk_up=(width, EXPANSION * width),
            trunk_down=(EXPANSION * width, width),
            key_out=(layers, width, heads * dim),
            value_out=(layers, width, heads * dim),
        )

    def init_weights(self, mapper: KVBridgeMapper) -> None:
        for parameter in mapper.parameters():
            nn.init.zeros_(parameter)

    def map_layer(
        self, mapper: KVBridgeMapper, target_layer: int, source: SourceContent
    ) -> tuple[torch.Tensor, torch.Tensor]:
        linear = super().map_layer(mapper, target_layer, source)
        parameters = [getattr(mapper, f"trunk_{name}") for name in ("in", "in_bias", "qkv", "o", "up", "down")]
        # Weights that were changed since, or another grad mode, make another state.
        key = (torch.is_grad_enabled(), *((id(tensor), tensor._version) for tensor in parameters))
        states = source.shared(key, lambda: run_trunk(mapper, source))
        mapped = []
        for name, part in zip(KIND_NAMES, linear, strict=True):
            added = states @ getattr(mapper, f"{name}_out")[target_layer].to(states.dtype)
            mapped.append(part + added.unflatten(-1, (part.shape[1], -1)).transpose(1, 2))
        return mapped[0], mapped[1]

    def flops_per_token(self, mapper: KVBridgeMapper) -> float:
        return 2.0 * sum(tensor.numel() for name, tensor in mapper.named_parameters() if not name.endswith("_bias"))

    def context_flops(self, mapper: KVBridgeMapper, num_tokens: int) -> float:
        """Operations of the attention, which grow with the square of the prompt."""
        return 4.0 * mapper.config.method_config["width"] * num_tokens * (num_tokens + 1) / 2


def read_layers(config: Any) -> list[int]:
    """Source layers that any target layer reads, ascending."""
    return sorted({layer for row in config.selected_layers for layer in row})


def trunk_features(mapper: KVBridgeMapper, source: SourceContent) -> torch.Tensor:
    """Keys, then values, of the layers read: `(B, T, features)`, float32 or wider."""
    parts = [
        read(layer).to(mapper.device).transpose(1, 2).flatten(2)
        for read in (source.keys, source.values)
        for layer in read_layers(mapper.config)
    ]
    dtype = torch.promote_types(torch.promote_types(torch.float32, parts[0].dtype), mapper.dtype)
    return torch.cat(parts, dim=-1).to(dtype)


def run_trunk(mapper: KVBridgeMapper, source: SourceContent) -> torch.Tensor:
    """The normed states `(B, T, width)` that all target layers read."""
    x = trunk_features(mapper, source)
    weights = {
        name: getattr(mapper, f"trunk_{name}").to(x.dtype) for name in ("in", "in_bias", "qkv", "o", "up", "down")
    }
    positions, valid = source.position_ids.to(x.device), source.valid.to(x.device)
    states = x @ weights["in"] + weights["in_bias"]
    split = (3, mapper.config.method_config["heads"], -1)
    query, key, value = (_norm(states) @ weights["qkv"]).unflatten(-1, split).permute(2, 0, 3, 1, 4)
    query, key = _rotate(query, positions), _rotate(key, positions)
    columns = torch.arange(x.shape[1], device=x.device)
    # A padded column sees itself, as a query that sees nothing gives NaN.
    seen = (columns <= columns[:, None]) & valid[:, None, :] | torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
    read = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen[:, None])
    states = states + read.transpose(1, 2).flatten(2) @ weights["o"]
    states = states + functional.silu(_norm(states) @ weights["up"]) @ weights["down"]
    return _norm(states)


def _norm(states: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(states, states.shape[-1:], eps=1e-6)


def _rotate(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary positions of `(B, H, T, d)`, the half-rotated convention."""
    half = states.shape[-1] // 2
    rates = THETA ** (-torch.arange(half, device=states.device, dtype=torch.float32) / half)
    angles = (positions[..., None].float() * rates)[:, None]  # B, 1, T, half
    cos, sin = angles.cos().to(states.dtype), angles.sin().to(states.dtype)
    first, second = states.split(half, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@register_fit
class CausalFit(FitMethod):
    """The linear map of `"ridge"`, beside a layer that adds nothing yet."""

    name = "causal"

    @torch.no_grad()
    def fit(self, context: FitContext) -> KVBridgeMapper:
        config = context.config
        linear = get_fit("ridge").fit(context)
        sizes = {"width": config.causal_width, "heads": config.causal_heads}
        facts = {name: linear.config.fit[name] for name in ("r2", "heldout_r2")}
        mapper = KVBridgeMapper(self.mapper_config(context, method_config=sizes, **facts))
        fill_parameters(mapper, **dict(linear.named_parameters()))
        fill_parameters(mapper, **initial_trunk(context, mapper))
        return mapper.to(getattr(torch, config.dtype)).eval()


def initial_trunk(context: FitContext, mapper: KVBridgeMapper) -> dict[str, torch.Tensor]:
    """Weights at which the layer starts: standardised features in, nothing out."""
    generator = torch.Generator().manual_seed(context.config.seed)
    mean, scale = standardisation(context, read_layers(mapper.config))
    tensors = {}
    for name in ("in", "qkv", "o", "up", "down"):
        shape = getattr(mapper, f"trunk_{name}").shape
        tensors[f"trunk_{name}"] = torch.randn(shape, generator=generator) * shape[0] ** -0.5
    tensors["trunk_in"] = tensors["trunk_in"] / scale[:, None]
    tensors["trunk_in_bias"] = -mean @ tensors["trunk_in"]
    return tensors


def standardisation(context: FitContext, layers: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation of keys, then values, of source layers over the fitted tokens; float32."""
    train = context.statistics.train
    systems = train.systems(0, layers, "full_head", None)  # keys and values: means (2, F), grams (2, F, F)
    scale = deviations(systems.gram.diagonal(dim1=-2, dim2=-1), systems.weight)
    return systems.x_mean.flatten().float().cpu(), scale.flatten().float().cpu()


def deviations(power: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Standard deviations from sums of squares `(kinds, n)` over tokens of a weight; never quite 0."""
    variance = power / weight.unsqueeze(-1).clamp(min=1)
    return variance.maximum(variance.mean(dim=-1, keepdim=True).clamp(min=1e-30) * 1e-6).sqrt()


__all__ = ["CausalFit", "CausalMethod", "deviations", "run_trunk", "standardisation", "trunk_features"]
