"""What a handoff costs, as a share of the target's own prefill.

Counted are multiply-adds as two operations each:

* linear layers of the decoder: `2 * in_features * out_features` a token (of a mixture of experts, the active ones);
* attention: `4 * num_query_heads * head_dim` for every (query, key) pair, in each layer;
* the map: two for every weight that a token meets. What a map computes of the token alone, wherever it stands, counts
  once for each different token that is mapped of a prompt; of a prompt whose tokens are not known, for all of them.

Left out on both sides are embeddings, norms, activations, rotations, softmax and the output layer (which runs for the
last token only, whichever way the cache came about).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..config_facts import decoder_of, text_config
from ..rotary import positions_from_mask
from ..target_extras import OWN
from .errors import EvaluationError

# What the models of transformers call the projections before the attention.
_QKV = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "W_pack")


@dataclass(frozen=True)
class PrefillCost:
    """FLOPs of reading tokens with a model.

    Attributes:
        linear_per_token: operations of all linear layers for one token.
        attention_per_pair: operations of all layers' attention for one query looking at one key.
        num_layers: of the model.
        qkv_per_layer: operations of one layer's query, key and value projections for one token, on average.
    """

    linear_per_token: float
    attention_per_pair: float
    num_layers: int = 1
    qkv_per_layer: float = 0.0

    @classmethod
    def from_model(cls, model: nn.Module) -> PrefillCost:
        """Counts the layers of a causal LM; weights on the meta device will do."""
        config = text_config(model.config)  # type: ignore[arg-type]
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        linear = qkv = 0.0
        for name, module in decoder_of(model).named_modules():
            # Quantised layers keep these two names and not the shape of the weight.
            inner, outer = getattr(module, "in_features", None), getattr(module, "out_features", None)
            if isinstance(inner, int) and isinstance(outer, int):
                linear += 2.0 * inner * outer
                if name.rsplit(".", 1)[-1] in _QKV:
                    qkv += 2.0 * inner * outer
                continue
            # Experts are held as stacked matrices (experts, in, out), of which a token meets a few.
            for parameter in module.parameters(recurse=False):
                if parameter.ndim == 3:
                    linear += 2.0 * parameter.numel() * _active_share(config, parameter.shape[0])
        if linear == 0.0:
            raise EvaluationError(f"Found no linear layers in {type(model).__name__}; its FLOPs cannot be counted.")
        layers = config.num_hidden_layers
        return cls(linear, 4.0 * layers * config.num_attention_heads * head_dim, layers, (qkv or linear) / layers)

    def flops(self, num_tokens: int, num_before: int = 0) -> float:
        """Operations for `num_tokens` tokens after `num_before` tokens that the cache holds."""
        pairs = num_tokens * num_before + num_tokens * (num_tokens + 1) / 2
        return self.linear_per_token * num_tokens + self.attention_per_pair * pairs

    def flops_at(self, positions: Iterable[int], num_layers: int | None = None) -> float:
        """Operations for tokens at these positions, each of which looks at all tokens up to itself.

        Args:
            positions: of the tokens.
            num_layers: lowest layers whose keys and values are wanted; the last of them does not run whole. None: all.
        """
        places = list(positions)
        whole = self.linear_per_token * len(places) + self.attention_per_pair * (sum(places) + len(places))
        if num_layers is None or num_layers >= self.num_layers:
            return whole
        return whole * (num_layers - 1) / self.num_layers + self.qkv_per_layer * len(places)

    def flops_of_lowest_layers(self, num_tokens: int, num_layers: int) -> float:
        """Operations until the lowest layers' keys and values are there: all but the last of them runs whole."""
        if num_layers == 0:
            return 0.0
        whole = self.flops(num_tokens) * (num_layers - 1) / self.num_layers
        return whole + self.qkv_per_layer * num_tokens


def _active_share(config: Any, num_experts: int) -> float:
    active = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None)
    return min(1.0, active / num_experts) if active else 1.0


def map_flops_per_token(mapper: Any) -> float:
    """Operations of a mapper for one token.

    That is what the mapper's `flops_per_token()` or its method's `flops_per_token(mapper)` says, else two a weight of
    a linear map. What a method counts once for each different token is not in it, see
    [`map_flops_per_distinct_token`].
    """
    if callable(own := getattr(mapper, "flops_per_token", None)):
        return float(own())
    if callable(own := getattr(getattr(mapper, "method", None), "flops_per_token", None)):
        return float(own(mapper))
    weights = [getattr(mapper, name, None) for name in ("key_weight", "value_weight")]
    if any(weight is None for weight in weights):
        raise EvaluationError(
            f"{type(mapper).__name__} has neither flops_per_token() nor key_weight and value_weight; "
            "give it flops_per_token() so that its cost can be reported."
        )
    return 2.0 * sum(weight.numel() for weight in weights if weight is not None)


def map_flops_per_distinct_token(mapper: Any, mapped_layers: float = 1.0) -> float:
    """Operations of a mapper for each different token, by its method's `flops_per_distinct_token`; 0 without one.

    Args:
        mapper: the mapper.
        mapped_layers: share of the target's layers that is mapped.
    """
    own = getattr(getattr(mapper, "method", None), "flops_per_distinct_token", None)
    return float(own(mapper, mapped_layers)) if callable(own) else 0.0


def whole_prompt_flops(mapper: Any, target: PrefillCost, num_tokens: int) -> float:
    """Operations of a mapper that do not grow with the tokens alone, for a prompt of so many mapped tokens.

    A method that looks at earlier tokens says them with `context_flops(mapper, num_tokens)`; one that reads the
    target's own cache costs its whole prefill.
    """
    context = mapper.method.context_flops(mapper, num_tokens)
    return context + (target.flops(num_tokens) if set(OWN) & set(mapper.method.requires) else 0.0)


def handoff_flops(
    target: PrefillCost,
    num_tokens: int,
    *,
    map_per_token: float,
    num_sinks: int,
    num_suffix: int,
    native_layers: int = 0,
    map_per_distinct: float = 0.0,
    num_distinct: int | None = None,
) -> dict[str, float]:
    """Operations of one handoff of a prompt, part by part.

    Args:
        target: the target's cost of reading tokens itself.
        num_tokens: tokens of the prompt.
        map_per_token: operations of the map for one token.
        num_sinks: first tokens that the target reads itself.
        num_suffix: last tokens that the target reads itself, on top of all before them.
        native_layers: lowest layers that the target computes itself for all other tokens; they are not mapped.
        map_per_distinct: operations of the map for each different token, of the layers that are mapped.
        num_distinct: different tokens among the mapped ones (those that are neither sinks nor suffix). Where it is
            not given, all are taken as different, which is an upper bound.

    Returns:
        `map`, `native` (sinks, suffix and lowest layers), `total`, and `prefill`, what the target would have spent
        alone.
    """
    suffix = min(num_suffix, num_tokens)
    sinks = min(num_sinks, num_tokens - suffix)
    mapped = num_tokens - suffix - sinks
    native = target.flops(sinks) + target.flops(suffix, num_before=num_tokens - suffix)
    native += target.flops_of_lowest_layers(num_tokens - suffix, native_layers)
    mapped_layers = 1 - native_layers / target.num_layers
    distinct = mapped if num_distinct is None else min(num_distinct, mapped)
    mapping = map_per_token * mapped * mapped_layers + map_per_distinct * distinct
    parts = {"map": mapping, "native": native}
    return {**parts, "total": sum(parts.values()), "prefill": target.flops(num_tokens)}


def count_distinct(input_ids: torch.Tensor, mask: torch.Tensor, num_sinks: int) -> list[int]:
    """Different tokens of each row `(B, T)` behind its first `num_sinks` ones, padding left out."""
    mapped = mask.bool() & (positions_from_mask(mask) >= num_sinks)
    return [len(ids[kept].unique()) for ids, kept in zip(input_ids, mapped, strict=True)]


def share_of_prefill(costs: Iterable[dict[str, float]]) -> dict[str, float]:
    """Shares of the target's prefill that a set of handoffs spent, sums over sums."""
    totals: dict[str, float] = {}
    for cost in costs:
        for part, value in cost.items():
            totals[part] = totals.get(part, 0.0) + value
    if not totals.get("prefill"):
        raise EvaluationError("No handoff with a prompt was given, so there is no prefill to compare with.")
    return {part: value / totals["prefill"] for part, value in totals.items() if part != "prefill"}
