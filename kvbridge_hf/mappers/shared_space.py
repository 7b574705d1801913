"""One shared space for a fleet of models: 2P maps instead of P (P - 1).

Every model has an encoder from its content features (all layers and heads) into a space of `width` dimensions and a
decoder out of it; a handoff from p to q is encoder p and then decoder q. All are fitted together, so that

    sum over p != q of | S_q (x_q - D_q' E_p' x_p) |^2

is small, `S_q` scaling every head to variance 1. The start is the MAXVAR generalised canonical correlation (Kettenring
1971): the eigenvectors of the models' joint correlation after each was whitened by itself. From there decoders and
encoders are solved in turn, each exactly, which never raises the sum. All of it needs joint second moments only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..calibration.moments import Moments
from ..calibration.solve import solve_ridge
from ..calibration.traces import TracedModel, evaluating, kept_tokens, read_batches
from ..configuration_kvbridge import KVBridgeConfig
from ..errors import ArtifactError, CalibrationError, FitConfigError
from ..fingerprint import model_fingerprint, tokenizer_fingerprint
from ..geometry import check_pair
from ..modeling_kvbridge import KVBridgeMapper, SourceContent, register_method
from .base import library_versions
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
class SharedSpaceMethod(ByKindMethod):
    """An encoder of the source and a decoder of the target, with the shared space between them.

    `key_encoder` `(features, width)`, `key_decoder` `(target_layers, target_heads, width, target_head_dim)`,
    `key_bias`; the same for values. `method_config["width"]` is the shared space's.
    """

    name = "shared_space"

    def build(self, mapper: KVBridgeMapper) -> None:
        config = mapper.config
        width = config.method_config.get("width")
        layers, heads, dim = target_shape(config)
        if not isinstance(width, int) or width < 1 or config.support != "full_head":
            raise ArtifactError(f"method_config['width'] must be a width, with full-head support, got {width!r}.")
        if len({tuple(row) for row in config.selected_layers}) != 1:
            raise ArtifactError("In a shared space all target layers read the same source layers.")
        for kind in KIND_NAMES:
            add_parameters(mapper, **{f"{kind}_encoder": (config.num_features, width)})
            add_parameters(mapper, **{f"{kind}_decoder": (layers, heads, width, dim)})
            add_parameters(mapper, **{f"{kind}_bias": (layers, heads, dim)})

    def map_kind(
        self, mapper: KVBridgeMapper, kind: str, target_layer: int, source: SourceContent, read: Reader
    ) -> torch.Tensor:
        features = grouped_features(mapper, target_layer, read)
        dtype = features.dtype
        shared = features @ getattr(mapper, f"{kind}_encoder").to(dtype)
        decoder = getattr(mapper, f"{kind}_decoder")[target_layer].to(dtype)
        bias = getattr(mapper, f"{kind}_bias")[target_layer].to(dtype)
        return shared @ decoder + bias.unsqueeze(1)

    def flops_per_token(self, mapper: KVBridgeMapper) -> float:
        """The encoder is run anew for every target layer, as layers are mapped one at a time."""
        layers = mapper.config.target_geometry["num_layers"]
        parts = [(getattr(mapper, f"{kind}_encoder"), getattr(mapper, f"{kind}_decoder")) for kind in KIND_NAMES]
        return 2.0 * sum(layers * encoder.numel() + decoder.numel() for encoder, decoder in parts)


@dataclass
class SharedSpace:
    """Encoders and decoders of a fleet.

    Attributes:
        names (`list[str]`): Of the models.
        width (`int`): Of the space.
        encoders, decoders (`dict[str, Tensor]`): `(2, features, width)` and `(2, width, features)` of each model, keys
            first; features are all layers, heads and dims.
        means (`dict[str, Tensor]`): `(2, features)`.
        objective (`list[float]`): Mean `1 - R^2` over ordered pairs, kinds and heads, after each round of the fit.
        facts (`dict[str, dict]`): Geometry and fingerprint of each model.
        info (`dict`): Settings and counts.
    """

    names: list[str]
    width: int
    encoders: dict[str, torch.Tensor]
    decoders: dict[str, torch.Tensor]
    means: dict[str, torch.Tensor]
    objective: list[float]
    facts: dict[str, dict[str, Any]]
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def num_maps(self) -> int:
        return len(self.encoders) + len(self.decoders)

    @torch.no_grad()
    def mapper(self, source: str, target: str, dtype: torch.dtype = torch.float32) -> KVBridgeMapper:
        """The mapper from one model of the fleet to another."""
        for name in (source, target):
            if name not in self.names:
                raise FitConfigError(f"The shared space has no model {name!r}; it has {', '.join(self.names)}.")
        from_, to = self.facts[source]["geometry"], self.facts[target]["geometry"]
        config = KVBridgeConfig(
            source_geometry=from_,
            target_geometry=to,
            source_fingerprint=self.facts[source]["fingerprint"],
            target_fingerprint=self.facts[target]["fingerprint"],
            tokenizer_fingerprint=self.info.get("tokenizer_fingerprint"),
            method=SharedSpaceMethod.name,
            method_config={"width": self.width},
            support="full_head",
            top_k=from_["num_layers"],
            selected_layers=[list(range(from_["num_layers"]))] * to["num_layers"],
            num_sinks=self.info["num_sinks"],
            num_native_suffix=self.info["num_native_suffix"],
            max_calibrated_positions=self.info["max_positions"],
            fit={**self.info, "method": SharedSpaceMethod.name, "fleet": self.names},
        )
        mapper = KVBridgeMapper(config)
        shape = target_shape(config)
        for kind, name in enumerate(KIND_NAMES):
            encoder, decoder = self.encoders[source][kind], self.decoders[target][kind]
            bias = self.means[target][kind] - self.means[source][kind] @ encoder @ decoder
            heads = decoder.unflatten(1, shape).permute(1, 2, 0, 3)
            fill_parameters(mapper, **{f"{name}_encoder": encoder, f"{name}_decoder": heads})
            fill_parameters(mapper, **{f"{name}_bias": bias.unflatten(0, shape)})
        return mapper.to(dtype).eval()  # type: ignore[arg-type]


def fit_shared_space(
    models: Mapping[str, nn.Module],
    token_batches: Iterable[Any],
    width: int,
    *,
    ridge_lambda: float = 1e-6,
    rounds: int = 10,
    num_sinks: int = 4,
    num_native_suffix: int = 8,
    token_stride: int = 1,
    tokenizer: Any = None,
) -> SharedSpace:
    """Fit a shared space for a fleet of models that share a tokenizer.

    Args:
        models: Name -> causal LM; two or more.
        token_batches: As in [`fit_mapper`].
        width: Dimensions of the shared space, for keys and for values each.
        ridge_lambda: Penalty, as a share of each model's mean variance.
        rounds: Of solving decoders and encoders in turn after the canonical start.
        num_sinks, num_native_suffix, token_stride: As in [`FitConfig`].
        tokenizer: The shared tokenizer; its fingerprint is then recorded.

    Raises:
        PairMismatchError: two models do not fit.
        FitConfigError: fewer than two models, or the width is none.
        CalibrationError: no tokens.
    """
    names = list(models)
    if len(names) < 2 or width < 1 or rounds < 0:
        raise FitConfigError(
            f"A shared space needs two models or more, a width and rounds >= 0, got {names}, {width}, {rounds}."
        )
    traced = {name: TracedModel(model, name) for name, model in models.items()}
    for one in names:
        for other in names:
            if one != other:
                check_pair(models[one], models[other]).raise_if_unfit()
    sizes = [t.geometry.num_layers * t.geometry.num_kv_heads * t.geometry.head_dim for t in traced.values()]
    vocab_size = min(t.geometry.vocab_size for t in traced.values())
    moments = Moments.zeros(2, sum(sizes), 1)
    longest = 0
    for batch in read_batches(token_batches, vocab_size):
        keep = kept_tokens(batch.attention_mask, num_sinks, token_stride)
        longest = max(longest, int(batch.lengths.max()))
        with evaluating(*models.values()):
            contents = [t.content(batch, keep) for t in traced.values()]  # each two of (L, N, H, d)
        x = torch.stack(
            [torch.cat([content[kind].transpose(0, 1).flatten(1).cpu() for content in contents], 1) for kind in (0, 1)]
        )
        moments.update(x, x.new_zeros(2, x.shape[1], 1))
    tokens = int(moments.weight[0])
    if tokens < 2:
        raise CalibrationError(
            f"The data gave {tokens} tokens behind the {num_sinks} sinks; a shared space needs more."
        )
    parts = _slices(sizes)
    dims = [t.geometry.head_dim for t in traced.values()]
    encoders, decoders, objective = _solve(moments.gram / tokens, parts, dims, width, ridge_lambda, rounds)
    return SharedSpace(
        names,
        width,
        dict(zip(names, encoders, strict=True)),
        dict(zip(names, decoders, strict=True)),
        {name: moments.x_mean[:, part] for name, part in zip(names, parts, strict=True)},
        objective,
        {
            name: {"geometry": traced[name].geometry.to_dict(), "fingerprint": model_fingerprint(models[name])}
            for name in names
        },
        {
            "tokens": tokens,
            "max_positions": longest,
            "ridge_lambda": ridge_lambda,
            "rounds": rounds,
            "num_sinks": num_sinks,
            "num_native_suffix": num_native_suffix,
            "token_stride": token_stride,
            "libraries": library_versions(),
            "tokenizer_fingerprint": None if tokenizer is None else tokenizer_fingerprint(tokenizer),
        },
    )


def _slices(sizes: list[int]) -> list[slice]:
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _solve(
    joint: torch.Tensor, parts: list[slice], dims: list[int], width: int, ridge_lambda: float, rounds: int
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[float]]:
    """Encoders, decoders and the objective after each round, from the joint covariance `(2, D, D)`."""
    models = range(len(parts))
    penalties = [
        ridge_lambda * joint[:, part, part].diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=1e-30) for part in parts
    ]
    # Every head counts alike: its outputs are scaled to a variance of 1 in all.
    scales = []
    for part, dim in zip(parts, dims, strict=True):
        variance = joint[:, part, part].diagonal(dim1=-2, dim2=-1)
        head = variance.unflatten(-1, (-1, dim)).sum(-1, keepdim=True).expand(-1, -1, dim).flatten(1)
        scales.append(torch.where(head > 0, head.clamp(min=1e-30).rsqrt(), 0.0))
    encoders = _canonical_start(joint, parts, penalties, width)
    decoders = _solve_decoders(joint, parts, encoders)
    objective = [_objective(joint, parts, scales, dims, encoders, decoders)]
    for _ in range(rounds):
        rooted = [decoders[q] * scales[q].unsqueeze(1) for q in models]
        for p in models:
            others = [q for q in models if q != p]
            inner = torch.stack([rooted[q] @ rooted[q].mT for q in others]).sum(0)  # width, width
            right = torch.stack(
                [(joint[:, parts[p], parts[q]] * scales[q].unsqueeze(1)) @ rooted[q].mT for q in others]
            ).sum(0)
            left = solve_ridge(joint[:, parts[p], parts[p]], right, penalties[p])
            encoders[p] = solve_ridge(inner, left.mT.contiguous(), 0.0).mT
        decoders = _solve_decoders(joint, parts, encoders)
        objective.append(_objective(joint, parts, scales, dims, encoders, decoders))
    return encoders, decoders, objective


def _canonical_start(
    joint: torch.Tensor, parts: list[slice], penalties: list[torch.Tensor], width: int
) -> list[torch.Tensor]:
    """Encoders `(2, F, width)` of MAXVAR: each model whitened, then the directions that they share."""
    if width > joint.shape[-1]:
        raise FitConfigError(f"width={width} is more than all models' features together ({joint.shape[-1]}).")
    whiteners = []
    for part, penalty in zip(parts, penalties, strict=True):
        values, vectors = torch.linalg.eigh(joint[:, part, part])
        root = (values.clamp(min=0) + penalty.unsqueeze(-1)).rsqrt()
        whiteners.append((vectors * root.unsqueeze(1)) @ vectors.mT)
    white = torch.zeros_like(joint)
    for one, left in zip(parts, whiteners, strict=True):
        for other, right in zip(parts, whiteners, strict=True):
            white[:, one, other] = left @ joint[:, one, other] @ right
    _, vectors = torch.linalg.eigh(0.5 * (white + white.mT))
    shared = vectors[:, :, -width:].flip(-1)
    return [whitener @ shared[:, part] for part, whitener in zip(parts, whiteners, strict=True)]


def _solve_decoders(joint: torch.Tensor, parts: list[slice], encoders: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each model's least-squares decoder from the other models' codes, `(2, width, F)`."""
    decoders = []
    for q, part in enumerate(parts):
        others = [p for p in range(len(parts)) if p != q]
        codes = torch.stack([encoders[p].mT @ joint[:, parts[p], parts[p]] @ encoders[p] for p in others]).sum(0)
        cross = torch.stack([encoders[p].mT @ joint[:, parts[p], part] for p in others]).sum(0)
        decoders.append(solve_ridge(codes, cross, 0.0))
    return decoders


def _objective(
    joint: torch.Tensor,
    parts: list[slice],
    scales: list[torch.Tensor],
    dims: list[int],
    encoders: list[torch.Tensor],
    decoders: list[torch.Tensor],
) -> float:
    """Mean squared error over variance: over ordered pairs, kinds and heads."""
    errors = []
    for p, one in enumerate(parts):
        for q, other in enumerate(parts):
            if p == q:
                continue
            map_ = encoders[p] @ decoders[q]
            explained = (map_ * (2 * joint[:, one, other] - joint[:, one, one] @ map_)).sum(1)
            left = (joint[:, other, other].diagonal(dim1=-2, dim2=-1) - explained) * scales[q].square()
            errors.append(left.unflatten(-1, (-1, dims[q])).sum(-1).mean())
    return float(torch.stack(errors).mean())


__all__ = ["SharedSpace", "SharedSpaceMethod", "fit_shared_space"]
