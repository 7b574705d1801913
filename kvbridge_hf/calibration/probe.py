"""What the target's attention does with each cached token: receiver sensitivity.

Qu et al., arXiv:2609.00891. Let a query `q` at a later position attend over the prefix with weights `a_n` and output
`o = sum_n a_n v_n`. An error `e` in `v_n` moves the output by `a_n e`; an error in `k_n` by
`a_n (v_n - o) (q . e) / sqrt(d)`. Squared, with the direction of `e` averaged out:

    w_V[n] = a_n^2          w_K[n] = a_n^2 |v_n - o|^2 |q|^2 / d

summed over the query heads that share a KV head and over queries right after log-spaced prefix boundaries.

The queries are read where Transformers hands them to its attention function. For the time of one forward the model's
attention implementation is replaced by one that notes the sensitivities and then calls the replaced implementation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..config_facts import text_config
from ..errors import CalibrationError
from .traces import Batch, TracedModel

NAME = "kvbridge_probe"
_active: list[_Probe] = []


def boundary_columns(attention_mask: torch.Tensor, num_sinks: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of the first query after each prefix boundary.

    Boundaries are log-spaced from the first prefix that holds a token behind the sinks to the whole sequence but one.

    Args:
        attention_mask (`(B, T)`): Bool.
        num_sinks: Tokens at the start that are of no interest.
        count: Boundaries per sequence; those that round to the same length count once.

    Returns:
        Columns `(B, count)` (0 where there is none) and a bool mask of those that are there.
    """
    lengths = attention_mask.sum(dim=1).double()
    last = lengths - 1
    first = torch.minimum(torch.full_like(last, num_sinks + 1.0), last)
    steps = torch.linspace(0, 1, count, dtype=torch.float64, device=attention_mask.device)
    low, high = first.clamp(min=1).log(), last.clamp(min=1).log()
    prefix = (low[:, None] + (high - low)[:, None] * steps).exp().round().long()
    present = (last >= 1)[:, None].expand_as(prefix).clone()
    present[:, 1:] &= prefix[:, 1:] != prefix[:, :-1]
    # Column of the token at position p: valid columns first, in order
    order = torch.argsort(attention_mask.int(), dim=1, descending=True, stable=True)
    columns = order.gather(1, prefix.clamp(max=attention_mask.shape[1] - 1))
    return columns.masked_fill(~present, 0), present


def token_sensitivity(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    attention_mask: torch.Tensor,
    columns: torch.Tensor,
    present: torch.Tensor,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sensitivities of one layer.

    Args:
        query (`(B, H_q, T, d)`), key, value (`(B, H_kv, T, d)`): As attention gets them (rotated).
        scaling: Of the logits, 1/sqrt(d) in most models.
        attention_mask (`(B, T)`): Bool.
        columns, present (`(B, J)`): Of the queries looked at.
        softcap: Of the logits, where the model has one.

    Returns:
        `w_K`, `w_V`, each `(B, H_kv, T)` float32.
    """
    batch, heads, tokens, dim = key.shape
    groups = query.shape[1] // heads
    count = columns.shape[1]
    index = columns[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[-1])
    query = query.gather(2, index).float().view(batch, heads, groups * count, -1)
    key, value = key.float(), value.float()
    logits = query @ key.mT * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    place = torch.arange(tokens, device=key.device)
    # A query always sees its own token; one that is not there would else see nothing, and its softmax would be NaN
    own = place == columns[..., None]
    seen = attention_mask[:, None, :] & (place <= columns[..., None]) | own  # B, J, T
    before = seen & ~own & present[..., None]  # only the prefix counts: not the query's own token
    seen, before = (which[:, None].repeat(1, 1, groups, 1) for which in (seen, before))  # B, 1, groups * J, T
    weights = logits.masked_fill(~seen, -float("inf")).softmax(dim=-1)
    output = weights @ value
    squared = weights.square() * before
    distance = (
        value.square().sum(dim=-1).unsqueeze(2) - 2 * output @ value.mT + output.square().sum(dim=-1).unsqueeze(3)
    ).clamp(min=0)
    norm = query.square().sum(dim=-1, keepdim=True) * scaling**2
    return (squared * distance * norm).sum(dim=2), squared.sum(dim=2)


class _Probe:
    """Notes the sensitivities of every layer during one forward."""

    def __init__(self, implementation: str, mask: torch.Tensor, columns: torch.Tensor, present: torch.Tensor):
        self.implementation = implementation
        self.places = (mask, columns, present)
        self.found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attention(self, module: nn.Module) -> Callable[..., Any]:
        if self.implementation == "eager":
            function: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward
            return function
        return ALL_ATTENTION_FUNCTIONS[self.implementation]

    def note(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kwargs: Any) -> None:
        scaling = kwargs.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        mask, columns, present = (tensor.to(key.device) for tensor in self.places)
        self.found[module.layer_idx] = token_sensitivity(
            query, key, value, scaling, mask, columns, present, kwargs.get("softcap")
        )


def _attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> Any:
    probe = _active[-1]
    probe.note(module, query, key, value, kwargs)
    return probe.attention(module)(module, query, key, value, attention_mask, **kwargs)


def _mask(*args: Any, **kwargs: Any) -> Any:
    return ALL_MASK_ATTENTION_FUNCTIONS[_active[-1].implementation](*args, **kwargs)


@contextmanager
def _probing(model: Any, probe: _Probe) -> Iterator[None]:
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    _active.append(probe)
    try:
        model.set_attn_implementation(NAME)
        yield
    finally:
        model.set_attn_implementation(probe.implementation)
        _active.pop()


def sensitivities(
    target: TracedModel, batch: Batch, num_sinks: int = 0, boundaries: int = 32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sensitivities of every layer and KV head of the target to errors in each token's key and value.

    Args:
        target: The target model.
        batch: Sequences.
        num_sinks: First tokens that are not mapped; prefix boundaries start behind them.
        boundaries: Queries per sequence.

    Returns:
        `w_K`, `w_V`, each `(layers, B, heads, T)` float32.

    Raises:
        CalibrationError: the model does not use Transformers' attention interface.
    """
    with probed(target, batch, num_sinks, boundaries) as result:
        target.forward(batch)
    return result()


@contextmanager
def probed(
    target: TracedModel, batch: Batch, num_sinks: int = 0, boundaries: int = 32
) -> Iterator[Callable[[], tuple[torch.Tensor, torch.Tensor]]]:
    """While this is open, a forward of the target over the batch notes the sensitivities; arguments as above.

    Yields:
        A function that returns them once the forward is done; see [`sensitivities`].
    """
    columns, present = boundary_columns(batch.attention_mask, num_sinks, boundaries)
    implementation = text_config(target.model.config)._attn_implementation or "eager"
    probe = _Probe(implementation, batch.attention_mask, columns, present)
    layers = target.geometry.num_layers

    def result() -> tuple[torch.Tensor, torch.Tensor]:
        if sorted(probe.found) != list(range(layers)):
            raise CalibrationError(
                f"{type(target.model).__name__} does not use Transformers' attention interface, so its queries cannot "
                f"be read (layers seen: {sorted(probe.found)} of {layers}). Fit with weighting='uniform'."
            )
        device = probe.found[0][0].device
        keys, values = (
            torch.stack([probe.found[layer][kind].to(device) for layer in range(layers)]) for kind in (0, 1)
        )
        return keys, values

    with _probing(target.model, probe):
        yield result


__all__ = ["boundary_columns", "probed", "sensitivities", "token_sensitivity"]
