"""What an error in a key or a value costs, direction by direction.

A key error `e` (content space, token n) moves the logit of a query `q` at a later position by `q' R_n e / sqrt(d)`, so
on average it costs `e' E[r r'] e` with `r = R_n' q` the query in the key's own frame: the query metric (kvxfer's
whitened ridge). Tokens count by what the attention makes of them, `a_n^2 |v_n - o|^2` (see `probe`). A value error `e`
reaches the residual stream as `W_O e`, so it costs `e' (W_O' W_O) e`, summed over the query heads that share the
value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..attention_outputs import output_projections
from ..config_facts import text_config
from ..errors import CalibrationError, UnsupportedModelError
from ..rotary import positions_from_mask
from .probe import _Probe, _probing, boundary_columns
from .traces import Batch, TracedModel

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


def normalised(metric: torch.Tensor, floor: float = 1e-3) -> torch.Tensor:
    """Scale metrics `(..., d, d)` to trace `d` and add a share of the identity, so that no direction is free.

    A metric that is zero becomes the identity.
    """
    dim = metric.shape[-1]
    eye = torch.eye(dim, dtype=metric.dtype, device=metric.device)
    trace = metric.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    scaled = torch.where(trace > 0, metric * dim / trace.clamp(min=torch.finfo(metric.dtype).tiny), eye)
    return (1 - floor) * 0.5 * (scaled + scaled.mT) + floor * eye


class MetricCollector:
    """Sums up the query metric of a target over batches.

    Args:
        target: The model.
        num_sinks: First tokens that are not mapped.
        boundaries: Queries looked at per sequence.
        seed: Of the draws.
    """

    def __init__(self, target: TracedModel, num_sinks: int = 0, boundaries: int = 32, seed: int = 0):
        self.target, self.num_sinks, self.boundaries = target, num_sinks, boundaries
        self.generator = torch.Generator().manual_seed(seed)
        geometry = target.geometry
        shape = (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, geometry.head_dim)
        self.keys = torch.zeros(shape, dtype=torch.float64)

    @torch.no_grad()
    def update(self, batch: Batch) -> None:
        """Add sequences."""
        columns, present = boundary_columns(batch.attention_mask, self.num_sinks, self.boundaries)
        implementation = text_config(self.target.model.config)._attn_implementation or "eager"
        probe = _QueryProbe(implementation, batch.attention_mask, columns, present)
        probe.collector = self
        probe.positions = positions_from_mask(batch.attention_mask.long())
        with _probing(self.target.model, probe):
            self.target.forward(batch)
        if len(probe.found) != self.target.geometry.num_layers:
            raise CalibrationError(
                f"{type(self.target.model).__name__} does not use Transformers' attention interface, so its queries "
                "cannot be read. Fit with metric='identity'."
            )

    def result(self) -> OutputMetrics:
        """The metrics; the values' follow from the weights alone."""
        return OutputMetrics(normalised(self.keys), normalised(value_metrics(self.target)))


class _QueryProbe(_Probe):
    collector: MetricCollector
    positions: torch.Tensor

    def note(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kwargs: Any) -> None:
        scaling = kwargs.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        mask, columns, present = (tensor.to(key.device) for tensor in self.places)
        sinks = self.positions.to(key.device) < self.collector.num_sinks
        draws, weights, picked = draw_keys(
            query, key, value, scaling, mask & ~sinks, mask, columns, present, self.collector.generator
        )
        layer = module.layer_idx
        positions = self.positions.to(key.device)
        batch, heads, count, dim = picked.shape
        # Each draw stands in a column of its own, with the position of its key: the model's own rotation, undone.
        flat = picked.reshape(batch * heads * count, 1, 1, dim)
        where = positions.gather(1, draws.reshape(batch, -1)).reshape(-1, 1)
        framed = self.collector.target.rotary.strip(flat, where, layer).reshape(batch, heads, count, dim).double()
        moment = torch.einsum("bhcd,bhc,bhce->hde", framed, weights.double(), framed)
        self.collector.keys[layer] += moment.cpu()
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
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw keys of a layer for its queries, by how much an error in them would move the attention's output.

    Args:
        query (`(B, H_q, T, d)`), key, value (`(B, H, T, d)`): Rotated, as attention gets them.
        scaling: Of the logits.
        eligible (`(B, T)`): Tokens that may be drawn.
        attention_mask (`(B, T)`): Tokens that are there.
        columns, present (`(B, J)`): Of the queries.
        generator: Of the draws.

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
    uniform = torch.rand((*total.shape, DRAWS), generator=generator).to(key.device)
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


__all__ = ["MetricCollector", "OutputMetrics", "draw_keys", "normalised", "value_metrics"]
