"""Which source layers, and which of their heads, feed a target layer.

Everything is computed from statistics. A fit made on the training moments is scored on those moments or on held-out
ones: the squared error of a linear map expands into moments, so no held-out sample is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..errors import CalibrationError, FitConfigError
from .layout import KINDS, identity_blocks
from .moments import Moments
from .solve import solve_ridge
from .statistics import CalibrationStatistics, Statistics

if TYPE_CHECKING:
    from ..mappers.config import FitConfig


@dataclass
class Selection:
    """The support of a mapper.

    Attributes:
        layers (`list[list[int]]`): `(target_layers, k)` source layers, best first.
        heads (`list`, *optional*): `(target_layers, k, target_heads, block)` source heads, with head-local support.
        scores (`torch.Tensor`): `(target_layers, source_layers)` single-layer R^2, mean over heads and over K and V.
        scored_on (`str`): `"heldout"` or `"train"`.
    """

    layers: list[list[int]]
    heads: list[list[list[list[int]]]] | None
    scores: torch.Tensor
    scored_on: str


def penalty_of(moments: Moments, ridge_lambda: float, relative: bool) -> torch.Tensor:
    """The penalty added to each system's summed moments, `(S,)`."""
    if relative:
        return ridge_lambda * moments.gram.diagonal(dim1=-2, dim2=-1).mean(dim=-1)
    return torch.full_like(moments.weight, ridge_lambda)


def head_r2(residual: torch.Tensor, power: torch.Tensor) -> torch.Tensor:
    """R^2 from summed squares `(..., dim)` of one head: 1 - residual / power, over the dims together.

    A head that does not vary is predicted by the bias alone: 1 if the residual is 0 to rounding, else 0.
    """
    residual, power = residual.sum(dim=-1), power.sum(dim=-1)
    flat = power <= 0
    exact = (residual <= 0).to(residual.dtype)
    return torch.where(flat, exact, 1 - residual / torch.where(flat, torch.ones_like(power), power))


def single_layer_r2(
    train: Statistics, evaluate: Statistics, blocks: str, ridge_lambda: float, relative: bool = False
) -> torch.Tensor:
    """R^2 of every target head from one source layer at a time.

    One batched solve per source layer serves all its heads, both kinds, all target layers and all target heads.

    Args:
        train: The maps are fitted on these.
        evaluate: And scored on these (may be the same object).
        blocks: As in [`Statistics.layer_systems`].
        ridge_lambda, relative: The penalty.

    Returns:
        `(2, target_layers, source_layers, target_heads)` for keys and values, float64; with `blocks="single"` one more
        dimension at the end, over source heads.
    """
    layout = train.layout
    tables = []
    for layer in range(layout.source_layers):
        moments = train.layer_systems(layer, blocks)
        solution = solve_ridge(moments.gram, moments.cross, penalty_of(moments, ridge_lambda, relative))
        scored = moments if evaluate is train else evaluate.layer_systems(layer, blocks)
        residual = scored.about(moments.x_mean, moments.y_mean).residual(solution)
        systems = len(residual) // len(KINDS)
        shape = (len(KINDS), systems, layout.target_layers, -1, layout.target_dim)
        r2 = head_r2(residual.reshape(shape), scored.power.reshape(shape))  # kind, system, target layer, head
        if blocks == "single":
            tables.append(r2.permute(0, 2, 3, 1))
        else:
            tables.append(r2.permute(0, 2, 1, 3).flatten(2))
    return torch.stack(tables, dim=2)


def assign_heads(table: torch.Tensor, block: int) -> torch.Tensor:
    """Source heads by R^2: for each pair of layers the `block` best of each target head.

    Two target heads may read the same source head: nothing is used up by reading it.

    Args:
        table (`(target_layers, source_layers, target_heads, source_heads)`): Single-head R^2.
        block: Source heads per target head.

    Returns:
        Long `(target_layers, source_layers, target_heads, block)`, ascending in the last dimension.
    """
    order = torch.argsort(table, dim=-1, descending=True, stable=True)
    return order[..., :block].sort(dim=-1).values


def select(statistics: CalibrationStatistics, config: FitConfig) -> Selection:
    """Choose layers and heads as the settings say.

    Args:
        statistics: Of the pair.
        config: Its `top_k` has to be a number (`FitConfig.resolve_top_k`).
    """
    train = statistics.train
    on_heldout = config.selection_data == "heldout" and statistics.has_heldout
    evaluate = statistics.heldout if on_heldout else train
    layout = train.layout
    if config.head_block is not None and config.head_block > layout.source_heads:
        raise FitConfigError(f"head_block={config.head_block} heads asked for, the source has {layout.source_heads}.")
    identity = identity_blocks(layout.source_heads, layout.target_heads, config.head_block)
    heads: torch.Tensor | None = None
    if config.head_assignment == "fitted":
        table = single_layer_r2(train, evaluate, "single", config.ridge_lambda, config.ridge_relative).mean(dim=0)
        heads = assign_heads(table, len(identity[0]))
        scores = table.amax(dim=-1).mean(dim=-1)
        if config.selection == "r2_layer":
            scores = _layer_scores(train, evaluate, "layer", config)
    else:
        scores = _layer_scores(train, evaluate, "layer" if config.selection == "r2_layer" else "matched", config)
    if not bool(torch.isfinite(scores).all()):
        raise CalibrationError(
            "Layer scores are not finite: the statistics hold values too large for float64 squares. Check the models' "
            "keys and values."
        )
    assert config.top_k is not None
    ranking = torch.argsort(scores, dim=1, descending=True, stable=True)
    layers = ranking[:, : config.top_k].tolist()

    def heads_of(target_layer: int, chosen: list[int]) -> list[list[list[int]]] | None:
        if config.support == "full_head":
            return None
        return [identity if heads is None else heads[target_layer, layer].tolist() for layer in chosen]

    if config.selection == "greedy":
        count = config.greedy_candidates or max(16, 2 * config.top_k)
        candidates = ranking[:, : max(count, config.top_k)].tolist()
        layers = [
            greedy_layers(train, evaluate, target, candidates[target], heads_of(target, candidates[target]), config)
            for target in range(layout.target_layers)
        ]
    chosen_heads = None
    if config.support == "head_local":
        chosen_heads = [heads_of(target, chosen) for target, chosen in enumerate(layers)]
    return Selection(layers, chosen_heads, scores, "heldout" if on_heldout else "train")  # type: ignore[arg-type]


def _layer_scores(train: Statistics, evaluate: Statistics, blocks: str, config: FitConfig) -> torch.Tensor:
    table = single_layer_r2(train, evaluate, blocks, config.ridge_lambda, config.ridge_relative)
    return table.mean(dim=(0, 3))


def greedy_layers(
    train: Statistics,
    evaluate: Statistics,
    target_layer: int,
    candidates: list[int],
    heads: list[list[list[int]]] | None,
    config: FitConfig,
) -> list[int]:
    """Forward selection for one target layer: at each step the layer whose joint fit with those chosen scores best.

    Features and outputs are replaced by what the layers chosen so far leave of them (block elimination of the
    regularised training moments; the same transformation is applied to the scoring moments). Then one small solve per
    candidate is its exact joint ridge fit.

    Args:
        train, evaluate: Fitted and scored on.
        target_layer: Which.
        candidates: Source layers to choose from.
        heads: `(len(candidates), target_heads, block)` with head-local support.
        config: `top_k`, support and penalty.

    Returns:
        `top_k` source layers in the order they were chosen.
    """
    moments = train.systems(target_layer, candidates, config.support, heads)
    held = evaluate.systems(target_layer, candidates, config.support, heads)
    power = held.power
    held = held.about(moments.x_mean, moments.y_mean)
    penalty = penalty_of(moments, config.ridge_lambda, config.ridge_relative)
    count, width = len(candidates), moments.gram.shape[-1] // len(candidates)
    gram = moments.gram + torch.diag_embed(penalty.unsqueeze(-1).expand(-1, count * width))
    cross = moments.cross.clone()
    held_gram, held_cross, left = held.gram.clone(), held.cross.clone(), held.power.clone()
    shape = (len(KINDS), -1, train.layout.target_dim)

    chosen: list[int] = []
    open_places = torch.ones(count, dtype=torch.bool, device=gram.device)
    assert config.top_k is not None
    while True:
        # All candidates at once: (S * candidates) systems of one layer's width
        blocks, rights = _diagonal_blocks(gram, count), cross.unflatten(1, (count, width)).flatten(0, 1)
        solutions = solve_ridge(blocks, rights, 0.0)
        held_rights = held_cross.unflatten(1, (count, width)).flatten(0, 1)
        explained = (solutions * (2 * held_rights - _diagonal_blocks(held_gram, count) @ solutions)).sum(dim=1)
        residual = left.unsqueeze(1) - explained.unflatten(0, (-1, count))  # S, candidate, outputs
        per_candidate = residual.clamp(min=0).transpose(0, 1).reshape(count, *shape)
        scores = head_r2(per_candidate, power.reshape(1, *shape).expand_as(per_candidate)).mean(dim=(1, 2))
        best = int(scores.masked_fill(~open_places, -float("inf")).argmax())
        chosen.append(best)
        open_places[best] = False
        if len(chosen) == config.top_k:
            break
        rows = slice(best * width, (best + 1) * width)
        solution = solutions.unflatten(0, (-1, count))[:, best]
        elimination = solve_ridge(gram[:, rows, rows], gram[:, rows], 0.0)  # (S, width, F)
        cross = cross - elimination.mT @ cross[:, rows]
        gram = gram - gram[:, :, rows] @ elimination
        beside = held_gram[:, :, rows] - elimination.mT @ held_gram[:, rows, rows]
        held_cross = held_cross - elimination.mT @ held_cross[:, rows] - beside @ solution
        held_gram = held_gram - elimination.mT @ held_gram[:, rows] - beside @ elimination
        left = residual[:, best]
    return [candidates[place] for place in chosen]


def _diagonal_blocks(gram: torch.Tensor, count: int) -> torch.Tensor:
    """`(S, count * width, count * width)` -> `(S * count, width, width)`: the blocks on the diagonal."""
    width = gram.shape[-1] // count
    blocks = gram.reshape(-1, count, width, count, width).diagonal(dim1=1, dim2=3)  # S, width, width, count
    return blocks.permute(0, 3, 1, 2).reshape(-1, width, width)


__all__ = ["Selection", "assign_heads", "greedy_layers", "head_r2", "penalty_of", "select", "single_layer_r2"]
