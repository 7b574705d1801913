"""What an error in a key or a value costs, direction by direction.

A key error `e` (content space, token n) moves the logit of a query `q` at a later position by `q' R_n e / sqrt(d)`, so
on average it costs `e' E[r r'] e` with `r = R_n' q` the query in the key's own frame: the query metric (kvxfer's
whitened ridge). Tokens count by what the attention makes of them, `a_n^2 |v_n - o|^2` (see `probe`). A value error `e`
reaches the residual stream as `W_O e`, so it costs `e' (W_O' W_O) e`, summed over the query heads that share the
value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..attention_outputs import output_projections
from ..config_facts import text_config
from ..errors import CalibrationError, UnsupportedModelError
from ..rotary import positions_from_mask
from .accumulate import fitted_part
from .probe import _Probe, _probing, boundary_columns
from .traces import Batch, NonFiniteError, TracedModel, evaluating

if TYPE_CHECKING:
    from ..mappers.config import FitConfig

# Keys that are drawn for each query; the mean over many queries is what counts.
DRAWS = 4


@dataclass
class OutputMetrics:
    """Metrics of one target.

    Attributes:
        keys, values (`(target_layers, target_heads, dim, dim)`): Symmetric, positive definite, of trace `dim`;
        float64.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def of_layer(self, layer: int) -> torch.Tensor:
        """`(2 * target_heads, dim, dim)`: keys, then values."""
        return torch.cat([self.keys[layer], self.values[layer]])

    def of_target_layers(self, first: int, last: int) -> OutputMetrics:
        """Those of some target layers."""
        return OutputMetrics(self.keys[first:last], self.values[first:last])


def normalised(metric: torch.Tensor, floor: float = 1e-3) -> torch.Tensor:
    """Scale metrics `(..., d, d)` to trace `d` and add a share of the identity, so that no direction is free.

    A metric that is zero becomes the identity.
    """
    dim = metric.shape[-1]
    eye = torch.eye(dim, dtype=metric.dtype, device=metric.device)
    trace = metric.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    scaled = torch.where(trace > 0, metric * dim / trace.clamp(min=torch.finfo(metric.dtype).tiny), eye)
    return (1 - floor) * 0.5 * (scaled + scaled.mT) + floor * eye


class MetricsAccumulator:
    """Sums up the query metric of a target over the sequences that are fitted.

    The draws of a sequence follow from its tokens and the seed, so batches, order and processes do not matter.

    Args:
        target: The model.
        config: Settings of the fit.
        boundaries: Queries looked at per sequence.
    """

    def __init__(self, target: TracedModel, config: FitConfig, boundaries: int = 32):
        self.target, self.config, self.boundaries = target, config, boundaries
        geometry = target.geometry
        shape = (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, geometry.head_dim)
        self.keys = torch.zeros(shape, dtype=torch.float64)

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        return {"metrics": {"keys": self.keys}}

    def facts(self) -> dict[str, Any]:
        return {}

    def restore(self, facts: dict[str, Any]) -> None:
        pass

    def reset(self) -> None:
        self.keys.zero_()

    def read(self, batch: Batch) -> torch.Tensor | None:
        """What the batch adds to the metrics of all layers."""
        with fitted_part(batch, self.config) as chosen, evaluating(self.target.model):
            return None if chosen is None else self._moments(chosen)

    def _moments(self, batch: Batch) -> torch.Tensor:
        probe = _QueryProbe(self.target, batch, self.config, self.boundaries)
        with _probing(self.target.model, probe):
            self.target.forward(batch)
        if len(probe.found) != self.target.geometry.num_layers:
            raise CalibrationError(
                f"{type(self.target.model).__name__} does not use Transformers' attention interface, so its queries "
                "cannot be read. Fit with metric='identity'."
            )
        for layer, rows in sorted(probe.bad.items()):
            if bool(rows.any()):
                raise NonFiniteError(
                    f"The target's queries of layer {layer} are NaN or Inf in sequence {int(batch.numbers[rows][0])}.",
                    rows,
                )
        return torch.stack([probe.moments[layer] for layer in range(self.target.geometry.num_layers)])

    def add(self, batch: Batch, found: torch.Tensor | None) -> None:
        if found is not None:
            self.keys.add_(found)

    def result(self) -> OutputMetrics:
        """The metrics; the values' follow from the weights alone."""
        return OutputMetrics(normalised(self.keys), normalised(value_metrics(self.target)))


class _QueryProbe(_Probe):
    """Notes the query metric of every layer during one forward."""

    def __init__(self, target: TracedModel, batch: Batch, config: FitConfig, boundaries: int):
        columns, present = boundary_columns(batch.attention_mask, config.num_sinks, boundaries)
        implementation = text_config(target.model.config)._attn_implementation or "eager"
        super().__init__(implementation, batch.attention_mask, columns, present)
        self.rotary, self.num_sinks = target.rotary, config.num_sinks
        self.positions = positions_from_mask(batch.attention_mask.long())
        seeds = [int(share * 2**62) for share in batch.sequence_hashes(config.seed)]
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.moments: dict[int, torch.Tensor] = {}
        self.bad: dict[int, torch.Tensor] = {}

    def note(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kwargs: Any) -> None:
        scaling = kwargs.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        mask, columns, present = (tensor.to(key.device) for tensor in self.places)
        positions = self.positions.to(key.device)
        eligible = mask & (positions >= self.num_sinks)
        draws, weights, picked = draw_keys(
            query, key, value, scaling, eligible, mask, columns, present, self.generators
        )
        layer = module.layer_idx
        batch, heads, count, dim = picked.shape
        # Each draw stands in a column of its own, with the position of its key: the model's own rotation, undone.
        flat = picked.reshape(batch * heads * count, 1, 1, dim)
        where = positions.gather(1, draws.reshape(batch, -1)).reshape(-1, 1)
        framed = self.rotary.strip(flat, where, layer).reshape(batch, heads, count, dim).double()
        self.moments[layer] = torch.einsum("bhcd,bhc,bhce->hde", framed, weights.double(), framed).cpu()
        finite = torch.isfinite(framed).flatten(1).all(dim=1) & torch.isfinite(weights).flatten(1).all(dim=1)
        self.bad[layer] = ~finite.cpu()
        self.found[layer] = (weights, weights)


def draw_keys(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    eligible: torch.Tensor,
    attention_mask: torch.Tensor,
    columns: torch.Tensor,
    present: torch.Tensor,
    generators: Sequence[torch.Generator],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw keys of a layer for its queries, by how much an error in them would move the attention's output.

    Args:
        query (`(B, H_q, T, d)`), key, value (`(B, H, T, d)`): Rotated, as attention gets them.
        scaling: Of the logits.
        eligible (`(B, T)`): Tokens that may be drawn.
        attention_mask (`(B, T)`): Tokens that are there.
        columns, present (`(B, J)`): Of the queries.
        generators: Of the draws, one for each row.

    Returns:
        Columns of the keys, weights and queries: `(B, H, C)`, `(B, H, C)`, `(B, H, C, d)` with `C` queries of the
        group times [`DRAWS`]. The weight is the sensitivity summed over the keys, divided by the number of draws.
    """
    batch, heads, tokens, dim = key.shape
    groups, count = query.shape[1] // heads, columns.shape[1]
    index = columns[:, None, :, None].expand(-1, query.shape[1], -1, dim)
    picked = query.gather(2, index).float().reshape(batch, heads, groups * count, dim)
    key, value = key.float(), value.float()
    place = torch.arange(tokens, device=key.device)
    own = place == columns[..., None]
    seen = (attention_mask[:, None, :] & (place <= columns[..., None])) | own
    before = seen & ~own & present[..., None] & eligible[:, None, :]
    seen, before = (which[:, None].repeat(1, 1, groups, 1) for which in (seen, before))
    weights = (picked @ key.mT * scaling).masked_fill(~seen, -float("inf")).softmax(dim=-1)
    output = weights @ value
    distance = (
        value.square().sum(-1).unsqueeze(2) - 2 * output @ value.mT + output.square().sum(-1).unsqueeze(3)
    ).clamp(min=0)
    sensitivity = weights.square() * distance * before * scaling**2
    total = sensitivity.sum(-1)
    # Inverse of the distribution function; the same draws on every device.
    shape = (*total.shape[1:], DRAWS)
    uniform = torch.stack([torch.rand(shape, generator=generator) for generator in generators]).to(key.device)
    cumulative = sensitivity.cumsum(-1)
    draws = torch.searchsorted(cumulative, uniform * total.unsqueeze(-1)).clamp(max=tokens - 1)
    draws = draws.flatten(2)
    weights = (total / DRAWS).repeat_interleave(DRAWS, dim=2)
    return draws, weights, picked.repeat_interleave(DRAWS, dim=2)


def value_metrics(target: TracedModel) -> torch.Tensor:
    """`W_O' W_O` of every layer and KV head, `(layers, heads, dim, dim)` float64; zeros where it cannot be read."""
    geometry = target.geometry
    layers, heads, dim = geometry.num_layers, geometry.num_kv_heads, geometry.head_dim
    found = torch.zeros(layers, heads, dim, dim, dtype=torch.float64)
    try:
        projections = output_projections(target.model)
    except UnsupportedModelError:
        return found
    for layer, projection in enumerate(projections):
        weight = getattr(projection, "weight", None)
        if not isinstance(projection, nn.Linear) or weight is None or weight.is_meta:
            continue
        if weight.shape[1] % (heads * dim):  # a quantised layer's weights are packed
            continue
        grouped = weight.detach().double().cpu().unflatten(1, (heads, -1, dim))  # hidden, H, group, d
        found[layer] = torch.einsum("ohgd,ohge->hde", grouped, grouped)
    return found


__all__ = ["MetricsAccumulator", "OutputMetrics", "draw_keys", "normalised", "value_metrics"]
