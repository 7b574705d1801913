"""Low-rank maps: reduced-rank regression in the metric of features and outputs, stored as factors.

With `A = gram + lambda I` the ridge map `W` loses `|A^(1/2) (W - V) T|^2` when `V` is put in its place and an output
error `e` costs `e' T T' e`. The best `V` of rank r is the truncated singular value decomposition (Eckart-Young) of
`A^(1/2) W T`, so `V = W T P P' T^-1` with `P` its first r right singular vectors. With full-head support all heads of
a target layer share their r features.
"""

from __future__ import annotations

from typing import Any

import torch

from ..calibration.layout import KINDS
from ..errors import ArtifactError, FitConfigError
from ..modeling_kvbridge import KVBridgeMapper, SourceContent, register_method
from .base import FitContext, FitMethod, register_fit
from .features import (
    KIND_NAMES,
    ByKindMethod,
    Reader,
    add_parameters,
    fill_parameters,
    grouped_features,
    target_shape,
)
from .linear import LayerFit, check_solution, fit_layer, gather_facts, r2_by_kind
from .spectral import OutputBasis, identity_basis


@register_method
class LowRankMethod(ByKindMethod):
    """Two factors a target layer and kind, and group of heads that reads the same features.

    `key_down` and `value_down` are `(features, all ranks)`, `key_up` and `value_up` `(all ranks, heads of a group *
    target_head_dim)`; `method_config["ranks"][kind][target_layer][group]` says which columns belong to which.
    """

    name = "low_rank"

    def build(self, mapper: KVBridgeMapper) -> None:
        config = mapper.config
        layers, heads, head_dim = target_shape(config)
        groups = 1 if config.support == "full_head" else heads
        ranks = config.method_config.get("ranks")
        fits = isinstance(ranks, dict) and all(
            isinstance(ranks.get(kind), list)
            and len(ranks[kind]) == layers
            and all(
                len(row) == groups and all(isinstance(rank, int) and rank >= 1 for rank in row) for row in ranks[kind]
            )
            for kind in KINDS
        )
        if not fits:
            raise ArtifactError(
                f"method_config['ranks'] must give a rank for keys and values of {layers} target layers and {groups} "
                f"groups of heads, got {ranks!r}."
            )
        assert ranks is not None
        for kind, name in zip(KINDS, KIND_NAMES, strict=True):
            total = sum(map(sum, ranks[kind]))
            add_parameters(mapper, **{f"{name}_down": (config.num_features, total)})
            add_parameters(mapper, **{f"{name}_up": (total, heads // groups * head_dim)})
            add_parameters(mapper, **{f"{name}_bias": (layers, heads, head_dim)})

    def map_kind(
        self, mapper: KVBridgeMapper, kind: str, target_layer: int, source: SourceContent, read: Reader
    ) -> torch.Tensor:
        ranks = mapper.config.method_config["ranks"][f"{kind}s"]
        down, up = getattr(mapper, f"{kind}_down"), getattr(mapper, f"{kind}_up")
        bias = getattr(mapper, f"{kind}_bias")[target_layer]
        features = grouped_features(mapper, target_layer, read)
        dtype = features.dtype
        start, parts = sum(map(sum, ranks[:target_layer])), []
        for group, rank in enumerate(ranks[target_layer]):
            columns = slice(start, start + rank)
            parts.append(features[:, group] @ down[:, columns].to(dtype) @ up[columns].to(dtype))
            start += rank
        flat = torch.cat(parts, dim=-1)  # (B, T, H_t * d_t)
        return flat.unflatten(-1, bias.shape).transpose(1, 2) + bias.to(dtype).unsqueeze(1)

    def flops_per_token(self, mapper: KVBridgeMapper) -> float:
        return 2.0 * sum(getattr(mapper, f"{kind}_{part}").numel() for kind in KIND_NAMES for part in ("down", "up"))


class _Factors:
    """The full map of one target layer, ready to be cut at any rank.

    One group a kind and set of heads that reads the same features: `(2 * groups)` systems.
    """

    def __init__(self, fit: LayerFit, context: FitContext, target: int):
        layout, config = context.statistics.layout, context.config
        dim = layout.target_dim
        groups = 1 if config.support == "full_head" else layout.target_heads
        solution, gram = fit.solution, fit.moments.gram
        if len(solution) != 2 * groups:
            # Heads weighted apart that read the same features: one group, in the metric of the unweighted features.
            if config.support == "full_head":
                merged = solution.unflatten(0, (2, -1)).transpose(1, 2).flatten(2)
                gram = fit.uniform.gram.unflatten(0, (2, -1))[:, 0]
                solution = merged
            else:
                serve = 2 * groups // len(solution)
                solution = solution.unflatten(-1, (serve, dim)).movedim(-2, 1).flatten(0, 1)
                gram = gram.repeat_interleave(serve, dim=0)
        if config.metric == "query":
            assert context.metrics is not None
            basis = OutputBasis(context.metrics.of_layer(target).to(gram.device), len(solution))
        else:
            basis = identity_basis(len(solution), solution.shape[-1], dim)
        penalty = torch.full((len(gram), 1, 1), config.ridge_lambda, dtype=gram.dtype, device=gram.device)
        if config.ridge_relative:
            penalty = penalty * gram.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
        eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        rooted = basis.root(solution)
        explained = rooted.mT @ (gram + penalty * eye) @ rooted
        energy, directions = torch.linalg.eigh(0.5 * (explained + explained.mT))
        self.energy, directions = energy.flip(-1).clamp(min=0), directions.flip(-1)  # S, M, best first
        self.down = rooted @ directions  # S, F, M
        self.up = basis.unroot(directions.mT)  # S, M, M
        self.most = min(solution.shape[1:])


@register_fit
class LowRankFit(FitMethod):
    """The ridge map of `linear`, cut to a rank, an energy, or a budget of weights."""

    name = "low_rank"

    @torch.no_grad()
    def fit(self, context: FitContext) -> KVBridgeMapper:
        config, layout = context.config, context.statistics.layout
        heads, dim = layout.target_heads, layout.target_dim
        if config.rank is None and config.rank_energy is None and config.rank_budget is None:
            raise FitConfigError("method='low_rank' needs rank, rank_energy or rank_budget.")
        fits, factors = [], []
        for target in range(layout.target_layers):
            fit = fit_layer(context, target)
            fits.append(fit)
            factors.append(_Factors(fit, context, target))
        ranks = choose_ranks(factors, config)
        facts: dict[str, Any] = gather_facts(fits)
        groups = 1 if config.support == "full_head" else heads
        by_kind = {
            kind: [row[place * groups : (place + 1) * groups] for row in ranks] for place, kind in enumerate(KINDS)
        }
        r2: list[torch.Tensor] = []
        heldout: list[torch.Tensor] = []
        down: dict[int, list[torch.Tensor]] = {0: [], 1: []}
        up: dict[int, list[torch.Tensor]] = {0: [], 1: []}
        biases = []
        for fit, factor, row in zip(fits, factors, ranks, strict=True):
            for system, rank in enumerate(row):
                down[system // groups].append(factor.down[system, :, :rank])
                up[system // groups].append(factor.up[system, :rank])
            cut = torch.stack([factor.down[s, :, :rank] @ factor.up[s, :rank] for s, rank in enumerate(row)])
            # Back to the systems of the fit: their outputs are the same, in the same order.
            cut = _as_systems(cut, fit.solution, dim)
            biases.append(fit.bias(cut).reshape(2, heads, dim))
            r2.append(fit.r2(cut, dim))
            if fit.heldout is not None:
                heldout.append(fit.r2(cut, dim, heldout=True))
        facts["r2"], facts["heldout_r2"] = r2_by_kind(r2), r2_by_kind(heldout) if heldout else None
        mapper = KVBridgeMapper(self.mapper_config(context, method_config={"ranks": by_kind}, **facts))
        for kind, name in enumerate(KIND_NAMES):
            parts = {
                f"{name}_down": torch.cat(down[kind], dim=1),
                f"{name}_up": torch.cat(up[kind]),
                f"{name}_bias": torch.stack([bias[kind] for bias in biases]),
            }
            check_solution(*parts.values())
            fill_parameters(mapper, **parts)
        return mapper.to(getattr(torch, config.dtype)).eval()


def choose_ranks(factors: list[_Factors], config: Any) -> list[list[int]]:
    """A rank for every target layer and system, at least 1.

    A budget is spent on the components that explain the largest share of what their own map explains; each costs its
    row of both factors.
    """
    ranks = [[1] * len(factor.energy) for factor in factors]
    if config.rank is not None:
        return [[min(config.rank, factor.most)] * len(factor.energy) for factor in factors]
    if config.rank_energy is not None:
        for row, factor in zip(ranks, factors, strict=True):
            share = factor.energy.cumsum(-1) / factor.energy.sum(-1, keepdim=True).clamp(min=1e-300)
            below = (share < config.rank_energy - 1e-12).sum(-1) + 1
            row[:] = below.clamp(max=factor.most).tolist()
        return ranks
    full = sum(factor.down[0].numel() * len(factor.down) for factor in factors)
    cost = factors[0].down.shape[1] + factors[0].up.shape[2]
    affordable = int(config.rank_budget * full / cost) - sum(map(len, ranks))
    components = sorted(
        (
            (-float(value / energy.sum().clamp(min=1e-300)), place, system, rank)
            for place, factor in enumerate(factors)
            for system, energy in enumerate(factor.energy)
            for rank, value in enumerate(energy[: factor.most])
            if rank > 0
        ),
    )
    for _, place, system, rank in components[: max(affordable, 0)]:
        ranks[place][system] = max(ranks[place][system], rank + 1)
    return ranks


def _as_systems(cut: torch.Tensor, like: torch.Tensor, dim: int) -> torch.Tensor:
    """Maps `(S', F, M')` in the systems of `like` `(S, F, M)`: the heads keep their order."""
    heads = cut.unflatten(-1, (-1, dim)).movedim(2, 1).flatten(0, 1)  # all heads, F, d
    per = like.shape[-1] // dim
    return heads.unflatten(0, (-1, per)).movedim(1, 2).flatten(2)


__all__ = ["LowRankFit", "LowRankMethod", "choose_ranks"]
