"""The linear map with anchors: exact, cheap parts of the target as regressors beside the source's features.

The target's layer 0 needs no attention: its keys and values, and the embedding below, follow from the token alone.
Beside the source's features they tell a map which token it is in the target's own terms; layer 0 itself becomes exact.
The regression is that of `linear`, on the wider features, in a pass of its own over the data. As what anchors add to a
mapped key or value depends on the token alone, a handoff computes it once for each different token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from ..calibration.accumulate import heldout_rows
from ..calibration.moments import Moments
from ..calibration.probe import probed
from ..calibration.selection import penalty_of
from ..calibration.solve import solve_ridge
from ..calibration.traces import Batch, Trace, TracedModel, evaluating, join_contents, kept_tokens, read_batches
from ..calibration.weighting import per_head, shrunk
from ..errors import ArtifactError, FitConfigError
from ..kernels import map_full_head, map_head_local
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
from .linear import by_head, check_solution, layer_r2, r2_by_kind


class _Anchored(ByKindMethod):
    """As `"ridge"`, with features `[source's, layer 0's of that kind, embedding]`; the last two as named.

    `key_weight`, `value_weight` `(target_layers, target_heads, features, target_head_dim)` with biases.
    """

    anchors: tuple[str, ...] = ()

    def build(self, mapper: KVBridgeMapper) -> None:
        layers, heads, dim = target_shape(mapper.config)
        features = mapper.config.num_features + sum(anchor_widths(mapper.config.target_geometry, self.anchors))
        for kind in KIND_NAMES:
            add_parameters(mapper, **{f"{kind}_weight": (layers, heads, features, dim)})
            add_parameters(mapper, **{f"{kind}_bias": (layers, heads, dim)})

    def map_kind(
        self, mapper: KVBridgeMapper, kind: str, target_layer: int, source: SourceContent, read: Reader
    ) -> torch.Tensor:
        features = grouped_features(mapper, target_layer, read)
        states = anchor_states(source, kind, self.anchors).to(features)
        weight = getattr(mapper, f"{kind}_weight")[target_layer]
        bias = getattr(mapper, f"{kind}_bias")[target_layer]
        of_source, of_anchors = weight.split([features.shape[-1], states.shape[-1]], dim=1)
        if mapper.config.support == "full_head":
            mapped = map_full_head(features.squeeze(1), of_source, bias)
        else:
            mapped = map_head_local(features, of_source, bias)
        # Every head reads the same anchors, whatever it reads of the source: (1, H, U, d) -> (U, H * d).
        added = map_full_head(states.unsqueeze(0), of_anchors, torch.zeros_like(bias))[0].transpose(0, 1).flatten(1)
        places = source.extra("anchor_places").to(added.device)
        return mapped + functional.embedding(places, added).unflatten(-1, bias.shape).transpose(1, 2)

    def flops_per_token(self, mapper: KVBridgeMapper) -> float:
        """The source's part of the map; see `flops_per_distinct_token` for the anchors'."""
        return 2.0 * mapper.config.num_features * self._outputs(mapper)

    def flops_per_distinct_token(self, mapper: KVBridgeMapper, mapped_layers: float = 1.0) -> float:
        """The anchors' part of the map, and layer 0's projections, which it takes whichever layers are mapped."""
        geometry = mapper.config.target_geometry
        own = layer0_flops(geometry) if "layer0" in self.anchors else 0.0
        return own + 2.0 * mapped_layers * sum(anchor_widths(geometry, self.anchors)) * self._outputs(mapper)

    @staticmethod
    def _outputs(mapper: KVBridgeMapper) -> int:
        return mapper.key_bias.numel() + mapper.value_bias.numel()


def anchor_states(source: SourceContent, kind: str, anchors: tuple[str, ...]) -> torch.Tensor:
    """The anchors of one kind side by side, `(different tokens, features)`; `anchor_places` says where they stand."""
    parts = [
        source.extra(f"anchor_{kind}s").flatten(1) if anchor == "layer0" else source.extra("anchor_embeddings")
        for anchor in anchors
    ]
    return torch.cat([part.to(parts[0].device) for part in parts], dim=-1)


def with_anchors(features: torch.Tensor, source: SourceContent, kind: str, anchors: tuple[str, ...]) -> torch.Tensor:
    """Features `(B, groups, T, F)` of one kind with the anchors beside them, column by column."""
    states = anchor_states(source, kind, anchors).to(features)
    beside = functional.embedding(source.extra("anchor_places").to(features.device), states)
    return torch.cat([features, beside.unsqueeze(1).expand(-1, features.shape[1], -1, -1)], dim=-1)


@register_method
class AnchoredMethod(_Anchored):
    """With keys and values of layer 0."""

    name = "anchored"
    anchors = ("layer0",)
    requires = ("anchor_keys", "anchor_values", "anchor_places")


@register_method
class EmbeddedMethod(_Anchored):
    """With the token embedding."""

    name = "anchored_embedding"
    anchors = ("embedding",)
    requires = ("anchor_embeddings", "anchor_places")


@register_method
class AnchoredEmbeddedMethod(_Anchored):
    """With both."""

    name = "anchored_both"
    anchors = ("layer0", "embedding")
    requires = ("anchor_keys", "anchor_values", "anchor_embeddings", "anchor_places")


RUNTIMES: dict[tuple[str, ...], type[_Anchored]] = {
    runtime.anchors: runtime for runtime in (AnchoredMethod, EmbeddedMethod, AnchoredEmbeddedMethod)
}


def anchor_widths(target_geometry: dict[str, Any], anchors: tuple[str, ...]) -> list[int]:
    """Regressors that each anchor adds."""
    if "embedding" in anchors and not target_geometry.get("hidden_size"):
        raise ArtifactError("An embedding as anchor needs target_geometry['hidden_size'].")
    widths = {
        "layer0": target_geometry["num_kv_heads"] * target_geometry["head_dim"],
        "embedding": target_geometry.get("hidden_size"),
    }
    return [int(widths[anchor]) for anchor in anchors]


def layer0_flops(target_geometry: dict[str, Any]) -> float:
    """Operations of a layer's query, key and value projections for a token; the forward that stops there runs all."""
    heads = target_geometry.get("num_query_heads", 0) + 2 * target_geometry["num_kv_heads"]
    return 2.0 * target_geometry.get("hidden_size", 0) * heads * target_geometry["head_dim"]


@dataclass
class _LayerMoments:
    """Of one target layer: of the sequences fitted, of those held out, and (per head) under sensitivity weights."""

    train: Moments
    heldout: Moments
    weighted: Moments | None = None


@register_fit
class AnchoredFit(FitMethod):
    """Ridge on the source's features and the anchors, uniform or with sensitivity weights; see the module."""

    name = "anchored"
    needs_data = True

    @torch.no_grad()
    def fit(self, context: FitContext) -> KVBridgeMapper:
        config, layout = context.config, context.statistics.layout
        if config.metric != "identity" or config.lambda_search:
            raise FitConfigError("method='anchored' is fitted with metric='identity' and lambda_search=False.")
        heads, dim = layout.target_heads, layout.target_dim
        runtime = RUNTIMES[config.anchors]
        weights, biases, shares = [], [], []
        scores: dict[str, list[torch.Tensor]] = {"r2": [], "heldout_r2": []}
        for found in self._moments(context, runtime.anchors):
            moments, uniform, heldout = found.train, found.train, found.heldout
            if found.weighted is not None:
                uniform, heldout = per_head(uniform, heads, dim), per_head(heldout, heads, dim)
                moments, share = shrunk(found.weighted, uniform, config.ess_per_feature)
                shares.append(share)
            solution = solve_ridge(
                moments.gram, moments.cross, penalty_of(moments, config.ridge_lambda, config.ridge_relative)
            )
            bias = moments.y_mean - (moments.x_mean.unsqueeze(1) @ solution).squeeze(1)
            weights.append(by_head(solution, heads, dim))
            biases.append(bias.reshape(2, heads, dim))
            scores["r2"].append(layer_r2(uniform, moments, solution, dim))
            if float(heldout.weight.min()) > 0:
                scores["heldout_r2"].append(layer_r2(heldout, moments, solution, dim))
        facts: dict[str, Any] = {name: r2_by_kind(found) if found else None for name, found in scores.items()}
        if shares:
            facts["sensitivity_uniform_share"] = shares
        mapper = KVBridgeMapper(self.mapper_config(context, runtime=runtime.name, **facts))
        for kind, name in enumerate(KIND_NAMES):
            weight, bias = torch.stack(weights, dim=1)[kind], torch.stack(biases, dim=1)[kind]
            check_solution(weight, bias)
            fill_parameters(mapper, **{f"{name}_weight": weight, f"{name}_bias": bias})
        return mapper.to(getattr(torch, config.dtype)).eval()

    @staticmethod
    def _moments(context: FitContext, anchors: tuple[str, ...]) -> list[_LayerMoments]:
        """Moments of every target layer, from a pass over the data."""
        config, layout, data = context.config, context.statistics.layout, context.data
        assert data is not None
        source, target = TracedModel(data.source_model, "source"), TracedModel(data.target_model, "target")
        heads, dim = layout.target_heads, layout.target_dim
        groups = 1 if context.selection.heads is None else heads
        block = layout.source_heads if context.selection.heads is None else len(context.selection.heads[0][0][0])
        features = len(context.selection.layers[0]) * block * layout.source_dim
        features += sum(anchor_widths(target.geometry.to_dict(), anchors))
        weighted = config.weighting == "sensitivity"
        found = [
            _LayerMoments(
                train=Moments.zeros(2 * groups, features, heads // groups * dim),
                heldout=Moments.zeros(2 * groups, features, heads // groups * dim),
                weighted=Moments.zeros(2 * heads, features, dim) if weighted else None,
            )
            for _ in range(layout.target_layers)
        ]
        vocab_size = min(source.geometry.vocab_size, target.geometry.vocab_size)
        for batch in read_batches(data.token_batches, vocab_size):
            batch = batch.select(batch.lengths > config.num_sinks)
            held = heldout_rows(batch, config)
            for part, is_held in ((batch.select(~held), False), (batch.select(held), True)):
                if len(part.input_ids) == 0:
                    continue
                tokens, embeddings, sensitivity = _read(source, target, part, context, weighted and not is_held)
                for layer, moments in enumerate(found):
                    x, y = _regression(context, tokens, embeddings, layer, anchors)
                    (moments.heldout if is_held else moments.train).update(x, y)
                    if sensitivity is not None and moments.weighted is not None:
                        # A system for each head: (2 * groups, N, H * d) -> (2 * heads, N, d).
                        outputs = y.unflatten(-1, (heads // groups, dim)).movedim(2, 1).flatten(0, 1)
                        every = x.repeat_interleave(heads // groups, dim=0)
                        raw = torch.cat([kind[layer].T for kind in sensitivity]).cpu()
                        moments.weighted.update(every, outputs, raw)
        return found


def _read(
    source: TracedModel, target: TracedModel, batch: Batch, context: FitContext, weighted: bool
) -> tuple[Trace, torch.Tensor, list[torch.Tensor] | None]:
    """Both models' content of a batch, the target's embeddings `(N, hidden)`, raw weights `(layers, N, heads)`."""
    config = context.config
    keep = kept_tokens(batch.attention_mask, config.num_sinks, config.token_stride)
    raw = None
    with evaluating(source.model, target.model):
        content = source.content(batch, keep)
        if weighted:
            with probed(target, batch, config.num_sinks) as result:
                own = target.content(batch, keep)
            raw = [kind.transpose(2, 3)[:, keep.to(kind.device)] for kind in result()]
        else:
            own = target.content(batch, keep)
        embed = target.model.get_input_embeddings()
        embeddings = embed(batch.input_ids[keep].to(embed.weight.device)).float().cpu()
    return join_contents(batch, keep, content, own), embeddings, raw


def _regression(
    context: FitContext, found: Trace, embeddings: torch.Tensor, target: int, anchors: tuple[str, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Features `(2 * groups, N, F)` and outputs `(2 * groups, N, M)` of a target layer, keys first."""
    selection = context.selection
    xs, ys = [], []
    for kind in ("keys", "values"):
        chosen = getattr(found, f"source_{kind}")[selection.layers[target]].cpu()  # k, N, H_s, d
        own = getattr(found, f"target_{kind}").cpu()
        if selection.heads is None:
            x = chosen.transpose(0, 1).flatten(1).unsqueeze(0)
            y = own[target].flatten(1).unsqueeze(0)
        else:
            heads = torch.tensor(selection.heads[target])  # k, H_t, block
            x = torch.stack([layer[:, heads[place]] for place, layer in enumerate(chosen)], dim=2)
            x, y = x.flatten(2).transpose(0, 1), own[target].transpose(0, 1)
        beside = {"layer0": own[0].flatten(1), "embedding": embeddings}
        added = [beside[anchor].unsqueeze(0).expand(len(x), -1, -1) for anchor in anchors]
        xs.append(torch.cat([x, *added], dim=-1))
        ys.append(y)
    return torch.cat(xs), torch.cat(ys)


__all__ = [
    "RUNTIMES",
    "AnchoredFit",
    "AnchoredMethod",
    "anchor_states",
    "anchor_widths",
    "layer0_flops",
    "with_anchors",
]
