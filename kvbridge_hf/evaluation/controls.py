"""What a handoff is, for a judgement, and the controls that any handoff has to beat.

The target alone is the ceiling, no context the floor. Beside them stand the source alone and three caches that look
like a handoff and should not work: the nearest source layer without a map, another prompt's mapped cache, and the
tokens that the target read itself without any mapped ones.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from transformers import Cache, PreTrainedModel

from ..generation_kvbridge import KVBridge
from ..geometry import KVGeometry
from ..guard.settings import Gates
from ..handoff import HandoffPolicy
from ..handoff_repair import SENSITIVITY_WINDOW
from ..modeling_kvbridge import KVBridgeMapper
from ..prompt_reading import read_columns
from ..rotary import ContentRotary, positions_from_mask
from .errors import EvaluationError
from .flops import (
    PrefillCost,
    handoff_flops,
    map_flops_per_distinct_token,
    map_flops_per_token,
    whole_prompt_flops,
)
from .runs import Batch, cache_entries, cache_from_entries, run


@runtime_checkable
class Handoff(Protocol):
    """Anything that gives the target a cache of a prompt.

    Called with `input_ids` and `attention_mask` `(batch, tokens)`, padded on the left, it returns a cache of the
    target for all but the last n columns; the target reads those itself (and the last one in any case). Three
    attributes are optional (and see [`BridgeHandoff`] for those of a handoff that recomputes tokens by the question):

        num_sinks (int): first tokens of a row that the target computed itself (0 if missing);
        flops(num_tokens) -> dict: `map` and `native`, the operations for a prompt of that many tokens.
            Without it the cost of the handoff is not reported.
        counts_distinct (bool): whether `flops` also takes `num_distinct=`, the number of different tokens among those
            that are neither sinks nor left to the target (False if missing).
    """

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Cache | None: ...


class BridgeHandoff:
    """The handoff of a [`KVBridge`] to a target.

    Args:
        bridge: the bridge, whose policy decides on native parts and on what a failure does.
        target_model: the model that goes on.
    """

    def __init__(self, bridge: KVBridge, target_model: PreTrainedModel):
        self.bridge = bridge
        self.target_model = target_model

    @property
    def mapper(self) -> KVBridgeMapper:
        return self.bridge.mapper

    @cached_property
    def _source_cost(self) -> PrefillCost:
        return PrefillCost.from_model(self.bridge.source_model)

    @cached_property
    def _target_cost(self) -> PrefillCost:
        return PrefillCost.from_model(self.target_model)

    def _wanted(self, name: str) -> Any:
        return self.bridge.policy.wanted(name, self.mapper.config)

    @property
    def num_sinks(self) -> int:
        """The policy's number of native first tokens, or else the mapper's."""
        return int(self._wanted("num_sinks"))

    @property
    def num_native_suffix(self) -> int:
        """The policy's number of native last tokens, or else the mapper's; at least 1."""
        return max(1, int(self._wanted("num_native_suffix")))

    #: See [`Handoff`].
    counts_distinct = True

    def flops(
        self, num_tokens: int, num_suffix: int | None = None, num_distinct: int | None = None
    ) -> dict[str, float]:
        """Operations of one handoff without repair; see [`~evaluation.flops.handoff_flops`].

        Args:
            num_tokens: tokens of the prompt.
            num_suffix: last ones that the target reads itself; the policy's by default.
            num_distinct: different tokens among the mapped ones. Without it all are taken as different, so that the
                cost of a map that computes something once a token is an upper bound.
        """
        suffix = self.num_native_suffix if num_suffix is None else num_suffix
        parts = handoff_flops(
            self._target_cost,
            num_tokens,
            map_per_token=map_flops_per_token(self.mapper),
            num_sinks=self.num_sinks,
            num_suffix=suffix,
            native_layers=self.native_layers,
            map_per_distinct=map_flops_per_distinct_token(
                self.mapper, 1 - self.native_layers / self._target_cost.num_layers
            ),
            num_distinct=num_distinct,
        )
        more = whole_prompt_flops(self.mapper, self._target_cost, max(num_tokens - suffix, 0))
        return {**parts, "map": parts["map"] + more, "total": parts["total"] + more}

    @property
    def native_layers(self) -> int:
        """The policy's number of native lowest layers, or else the mapper's."""
        return int(self._wanted("native_layers"))

    @property
    def repair_layers(self) -> int | None:
        """The policy's number of lowest layers that are recomputed, or else the mapper's; None: all."""
        return self._wanted("repair_layers")

    @property
    def reads_question(self) -> bool:
        """Whether what the handoff recomputes depends on the question, so that each question needs one of its own."""
        return self._wanted("native_fraction") > 0

    def choice_flops(self, num_tokens: int, num_question: int) -> float:
        """Operations of choosing what to recompute: what either model reads for that alone."""
        if not self.reads_question:
            return 0.0
        ways, source, target = self._wanted("repair").split("+"), self._source_cost, self._target_cost
        return sum(
            {
                "source_attention": source.flops(num_question, num_tokens),
                "target_attention": target.flops(num_question, num_tokens),
                "surprise": source.flops(num_tokens),
                "sensitivity": source.flops(min(SENSITIVITY_WINDOW, num_tokens), num_tokens),
                "learned": source.flops(num_question, num_tokens) + self._scorer_flops(num_tokens),
            }.get(way, 0.0)
            for way in ways
        )

    def _scorer_flops(self, num_tokens: int) -> float:
        scorer = self.mapper.repair_scorer
        return 0.0 if scorer is None else scorer.flops(num_tokens)

    def for_questions(self, batch: Batch) -> Cache | None:
        """One handoff for every row of a batch, of its prefix as the source has read it, with its question at hand."""
        device = self.target_model.device
        source_cache = read_columns(self.bridge.source_model, batch.prefix_ids, batch.prefix_mask.bool())
        source_cache.batch_select_indices(batch.rows.to(self.bridge.source_model.device))
        prefix_mask = batch.prefix_mask[batch.rows]
        return self.bridge.handoff(
            input_ids=torch.cat([batch.prefix_ids[batch.rows], batch.suffix_ids], dim=1).to(device),
            attention_mask=torch.cat([prefix_mask, batch.suffix_mask], dim=1).to(device),
            source_cache=source_cache,
            source_attention_mask=prefix_mask.to(device),
            target_model=self.target_model,
        )

    def __call__(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, source_cache: Cache | None = None
    ) -> Cache | None:
        return self.bridge.handoff(
            input_ids=input_ids,
            attention_mask=attention_mask,
            source_cache=source_cache,
            target_model=self.target_model,
        )


def as_handoff(source_model: PreTrainedModel, target_model: PreTrainedModel, given: Any) -> Handoff:
    """A mapper, a bridge or a handoff as a handoff to the target.

    Raises:
        EvaluationError: it is none of these.
        KVBridgeError: mapper and models do not fit.
    """
    if isinstance(given, KVBridgeMapper):
        # A gate that rejects would put the target's own cache in the place of what is to be judged.
        given = KVBridge(source_model, given, HandoffPolicy(gates=Gates.off()))
    if isinstance(given, KVBridge):
        given.check_target(target_model)
        return BridgeHandoff(given, target_model)
    if callable(given) and not isinstance(given, torch.nn.Module):
        return given
    raise EvaluationError(
        f"Cannot judge a {type(given).__name__}; give a KVBridgeMapper, a KVBridge or a callable (input_ids, "
        "attention_mask) -> cache of the target."
    )


def leave_last_column(cache: Cache | None, columns: int) -> int:
    """Columns that a handed-over cache holds, cut in place so that at least the last one is left to the target.

    The first logits come from that column, in every condition alike.

    Raises:
        EvaluationError: the cache holds more columns than the prompt has.
    """
    held = 0 if cache is None else int(cache.get_seq_length())
    if held > columns:
        raise EvaluationError(f"The handed-over cache holds {held} columns, the prompt has only {columns}.")
    if cache is not None and held == columns and held > 0:
        cache.crop(-1)
        held -= 1
    return held


class OwnCache:
    """The target's own cache, handed over: what a perfect handoff would give."""

    num_sinks = 0

    def __init__(self, target_model: PreTrainedModel, num_native_suffix: int = 1):
        self.target_model = target_model
        self.num_native_suffix = num_native_suffix

    def flops(self, num_tokens: int) -> dict[str, float]:
        """All of the target's own prefill."""
        return {"map": 0.0, "native": PrefillCost.from_model(self.target_model).flops(num_tokens)}

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Cache | None:
        held = input_ids.shape[1] - self.num_native_suffix
        if held < 1:
            return None
        cache = cache_from_entries([])
        positions = positions_from_mask(attention_mask)[:, :held]
        run(self.target_model, cache, input_ids[:, :held], attention_mask[:, :held], position_ids=positions)
        return cache


def unmapped_reason(source_model: PreTrainedModel, target_model: PreTrainedModel) -> str | None:
    """Why the unmapped control does not exist for a pair, or None where it does."""
    source, target = KVGeometry.from_model(source_model), KVGeometry.from_model(target_model)
    shapes = [(geometry.num_kv_heads, geometry.head_dim) for geometry in (source, target)]
    if shapes[0] == shapes[1]:
        return None
    return (
        "not defined: the source has {} KV heads of width {}, the target {} of width {}, so a source layer cannot "
        "stand in for a target layer without a map"
    ).format(*shapes[0], *shapes[1])


def nearest_layer(target_layer: int, num_target_layers: int, num_source_layers: int) -> int:
    """Source layer at the same relative depth, first on first and last on last."""
    if num_target_layers == 1:
        return num_source_layers - 1
    return round(target_layer * (num_source_layers - 1) / (num_target_layers - 1))


class UnmappedHandoff:
    """The unmapped control: each target layer gets the nearest source layer, its keys re-rotated for the target.

    Args:
        source_model, target_model: a pair for which [`unmapped_reason`] is None.
        num_sinks, num_native_suffix: native parts, those of the handoff that the control stands beside.
    """

    def __init__(
        self,
        source_model: PreTrainedModel,
        target_model: PreTrainedModel,
        num_sinks: int = 0,
        num_native_suffix: int = 1,
    ):
        self.source_model, self.target_model = source_model, target_model
        self.num_sinks, self.num_native_suffix = num_sinks, num_native_suffix
        self.source_rotary = ContentRotary.from_model(source_model)
        self.target_rotary = ContentRotary.from_model(target_model)

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Cache | None:
        held = input_ids.shape[1] - self.num_native_suffix
        if held < 1:
            return None
        source_cache = OwnCache(self.source_model, self.num_native_suffix)(input_ids, attention_mask)
        source = cache_entries(source_cache)
        positions = positions_from_mask(attention_mask)[:, :held].to(self.target_model.device)
        num_layers = KVGeometry.from_model(self.target_model).num_layers
        entries = []
        for layer in range(num_layers):
            nearest = nearest_layer(layer, num_layers, len(source))
            keys, values = (states.to(self.target_model.device, self.target_model.dtype) for states in source[nearest])
            content = self.source_rotary.strip(keys, positions, nearest)
            entries.append((self.target_rotary.apply(content, positions, layer), values))
        entries = with_native_sinks(
            self.target_model, entries, input_ids[:, :held], attention_mask[:, :held], self.num_sinks
        )
        return cache_from_entries(entries)


def with_native_sinks(
    target_model: PreTrainedModel,
    entries: list[tuple[torch.Tensor, torch.Tensor]],
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    num_sinks: int,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Entries in which the first `num_sinks` tokens of each row are the target's own."""
    num_sinks = min(num_sinks, input_ids.shape[1])
    if num_sinks < 1:
        return entries
    device = entries[0][0].device
    input_ids, attention_mask = input_ids.to(device), attention_mask.to(device)
    # The first real column of a row, then the columns of its sinks; a row with fewer tokens ends in padding.
    first = attention_mask.argmax(1, keepdim=True)
    columns = first + torch.arange(num_sinks, device=device)
    inside = columns < input_ids.shape[1]
    columns = columns.clamp_max(input_ids.shape[1] - 1)
    mask = attention_mask.gather(1, columns) * inside
    cache = cache_from_entries([])
    run(target_model, cache, input_ids.gather(1, columns), mask)
    merged = []
    for (keys, values), own in zip(entries, cache_entries(cache), strict=True):
        rows, sinks = mask.bool().nonzero(as_tuple=True)
        keys, values = keys.clone(), values.clone()
        for mixed, exact in ((keys, own[0]), (values, own[1])):
            mixed[rows, :, columns[rows, sinks]] = exact[rows, :, sinks].to(mixed.dtype)
        merged.append((keys, values))
    return merged


def native_only_mask(batch: Batch, held: int, num_sinks: int, repaired: torch.Tensor | None = None) -> torch.Tensor:
    """The prefix mask `(prefixes, columns)` without the mapped tokens; sinks and the columns from `held` on stay.

    With `repaired`, `(rows, held)`, it is `(rows, columns)` and these tokens stay too.
    """
    if repaired is not None:
        kept = torch.nn.functional.pad(repaired.cpu(), (0, batch.prefix_mask.shape[1] - held))
        plain = native_only_mask(batch, held, num_sinks)[batch.rows]
        return torch.where(kept, batch.prefix_mask[batch.rows], plain)
    position = positions_from_mask(batch.prefix_mask)
    column = torch.arange(batch.prefix_mask.shape[1])
    return batch.prefix_mask * ((position < num_sinks) | (column >= held))
