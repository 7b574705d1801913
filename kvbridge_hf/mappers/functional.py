"""A handoff as a differentiable function: map, put the native parts in, let the target go on, compare.

What training on the target's behaviour needs, whatever the mapper's method: both models are frozen and only run here,
gradients reach the mapper alone. Nothing of generation is involved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from ..cache_argument import cache_kwargs, output_cache
from ..calibration.traces import Batch, TracedModel
from ..modeling_kvbridge import KVBridgeMapper, SourceContent
from ..repair import recompute
from ..repair_choice import choose, question_scores, segment_question_scores, segments_of
from ..rotary import positions_from_mask
from ..target_extras import ANCHORS, OWN, own_extras, read_extras

Entries = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass
class OwnReading:
    """What the target makes of a batch by itself.

    Attributes:
        log_probs (`(B, T, vocab)`): Float32, of the next token after each column.
        entries (list of two `(B, H, T, d)`): Its cache, keys rotated.
    """

    log_probs: torch.Tensor
    entries: Entries


class FunctionalHandoff:
    """A pair, and a handoff between its models that gradients can pass.

    Args:
        source_model, target_model: Causal LMs of one tokenizer, or [`TracedModel`]s.
        num_sinks: First tokens of each row that the target computes itself.
        num_native_suffix: Last columns of a prefix that the target runs on top of the mapped ones; at least 1, as the
            first logits come from there.
        native_layers: Lowest layers of the target that it computes itself for all tokens.
        boundary_tokens: Ids that end a sentence, so that repair takes whole ones.
    """

    def __init__(
        self,
        source_model: Any,
        target_model: Any,
        num_sinks: int = 0,
        num_native_suffix: int = 1,
        native_layers: int = 0,
        boundary_tokens: Sequence[int] = (),
    ):
        self.source = source_model if isinstance(source_model, TracedModel) else TracedModel(source_model, "source")
        self.target = target_model if isinstance(target_model, TracedModel) else TracedModel(target_model, "target")
        self.num_sinks, self.num_native_suffix = num_sinks, max(1, num_native_suffix)
        self.native_layers = native_layers
        self.boundary_tokens = torch.tensor(list(boundary_tokens), dtype=torch.long)

    @torch.no_grad()
    def read_source(self, batch: Batch, stop: int, extras: dict[str, torch.Tensor] | None = None) -> SourceContent:
        """The source's content of the first `stop` columns."""
        part = Batch(batch.input_ids[:, :stop], batch.attention_mask[:, :stop], batch.numbers)
        positions = positions_from_mask(part.attention_mask.long()).to(self.source.device)
        valid = part.attention_mask.to(self.source.device)
        cache = self.source.forward(part)
        return SourceContent.from_cache(cache, self.source.rotary, positions, valid, extras=extras)

    @torch.no_grad()
    def read_target(self, batch: Batch) -> OwnReading:
        """The target's own cache and predictions: what a perfect handoff would give."""
        logits, cache = run_on_cache(self.target.model, batch, DynamicCache(), 0)
        entries = [(layer.keys, layer.values) for layer in cache.layers]
        return OwnReading(logits.log_softmax(-1), entries)

    def extras(
        self, mapper: KVBridgeMapper, batch: Batch, stop: int, own: OwnReading | None = None
    ) -> dict[str, torch.Tensor]:
        """What a method requires of the target for the first `stop` columns; `own` where it reads the whole cache."""
        names = mapper.method.requires
        ids, mask = batch.input_ids[:, :stop], batch.attention_mask[:, :stop]
        anchors = [name for name in names if name in ANCHORS]
        extras = read_extras(anchors, self.target.model, self.target.rotary, ids, mask)
        if set(names) & set(OWN):
            assert own is not None
            entries = [(keys[:, :, :stop], values[:, :, :stop]) for keys, values in own.entries]
            extras.update(own_extras(entries, self.target.rotary, positions_from_mask(mask.long())))
        return extras

    def map(self, mapper: KVBridgeMapper, source: SourceContent, own: OwnReading) -> Entries:
        """The handed-over entries of the columns of `source`: mapped, rotated, with the target's own sinks.

        Gradients reach the mapper's parameters. What is taken from the target's own cache is what a handoff computes:
        nothing but sinks stands before a sink, and nothing but native layers below a native layer.
        """
        device = own.entries[0][0].device
        positions = source.position_ids.to(device)
        sinks = ((positions < self.num_sinks) & source.valid.to(device))[:, None, :, None]
        entries = []
        for layer, (own_keys, own_values) in enumerate(own.entries):
            if layer < self.native_layers:
                stop = positions.shape[1]
                entries.append((own_keys[:, :, :stop], own_values[:, :, :stop]))
                continue
            keys, values = mapper.map_layer(layer, source)
            keys = self.target.rotary.apply(keys.to(device), positions, layer).to(own_keys.dtype)
            values = values.to(device, own_values.dtype)
            columns = keys.shape[2]
            entries.append(
                (
                    torch.where(sinks, own_keys[:, :, :columns], keys),
                    torch.where(sinks, own_values[:, :, :columns], values),
                )
            )
        return entries

    def go_on(self, batch: Batch, entries: Entries) -> torch.Tensor:
        """Logits `(B, T - columns, vocab)` of the columns that `entries` do not hold, float32."""
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(entries):
            cache.update(keys, values, layer)
        return run_on_cache(self.target.model, batch, cache, entries[0][0].shape[2])[0]

    def repair(
        self, entries: Entries, batch: Batch, question: torch.Tensor, native_fraction: float
    ) -> tuple[Entries, torch.Tensor]:
        """Entries of which the target has recomputed a share of the tokens, chosen by the question as a handoff does.

        Gradients reach the entries that the recomputed tokens attend to.

        Args:
            entries: Of the first columns.
            batch: Whole sequences.
            question (`(B, T)`): Bool; the tokens by which is chosen.
            native_fraction: Of the tokens behind the sinks.

        Returns:
            The entries, and which columns were recomputed, `(B, columns)`.
        """
        columns = entries[0][0].shape[2]
        ids, valid = batch.input_ids[:, :columns], batch.attention_mask[:, :columns]
        asked = batch.input_ids, question & batch.attention_mask
        if len(self.boundary_tokens):
            scores = segment_question_scores(ids, valid, *asked, segments_of(ids, valid, self.boundary_tokens))
        else:
            scores = question_scores(ids, valid, *asked)
        eligible = valid & (positions_from_mask(valid.long()) >= self.num_sinks)
        chosen = choose(scores, eligible, native_fraction)
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(entries):
            cache.update(keys, values, layer)
        recompute(self.target.model, cache, ids, valid, chosen)
        layers: list[Any] = cache.layers
        return [(layer.keys, layer.values) for layer in layers], chosen

    def hand_over(
        self,
        mapper: KVBridgeMapper,
        batch: Batch,
        boundary: int,
        own: OwnReading,
        question: torch.Tensor | None = None,
        native_fraction: float = 0.0,
    ) -> tuple[Entries, SourceContent]:
        """The entries that a handoff of the prefix gives, and the content that they were mapped from.

        Args:
            mapper: The mapper; gradients reach it.
            batch: Whole sequences, padded on either side.
            boundary: Columns of the prefix. The last `num_native_suffix` of them are the target's own.
            own: From `read_target`.
            question, native_fraction: See `repair`; nothing is recomputed with 0.
        """
        stop = self.mapped_columns(boundary)
        source = self.read_source(batch, stop, self.extras(mapper, batch, stop, own))
        entries = self.map(mapper, source, own)
        if native_fraction > 0:
            assert question is not None
            entries, _ = self.repair(entries, batch, question, native_fraction)
        return entries, source

    def continuation_kl(
        self,
        mapper: KVBridgeMapper,
        batch: Batch,
        boundary: int,
        question: torch.Tensor | None = None,
        native_fraction: float = 0.0,
        *,
        own: OwnReading | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """KL(target alone || target on the mapped prefix) on the tokens from column `boundary` on.

        Args:
            mapper, batch, boundary, question, native_fraction: As in `hand_over`.
            own: From `read_target`, where it is at hand.

        Returns:
            `(B, T - boundary)` in nats, 0 where there is no token, and the bool mask of tokens.
        """
        own = self.read_target(batch) if own is None else own
        stop = self.mapped_columns(boundary)
        entries, _ = self.hand_over(mapper, batch, boundary, own, question, native_fraction)
        logits = self.go_on(batch, entries)
        # The token in column c is predicted in column c - 1.
        return kl_on_tokens(own.log_probs[:, boundary - 1 : -1], logits[:, boundary - 1 - stop : -1], batch, boundary)

    def mapped_columns(self, boundary: int) -> int:
        """Columns of a prefix of `boundary` columns that are mapped; at least one."""
        return max(boundary - self.num_native_suffix, 1)


def kl_on_tokens(
    own_log_probs: torch.Tensor, logits: torch.Tensor, batch: Batch, boundary: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(own || other) of the predictions of the tokens from column `boundary` on; see `continuation_kl`."""
    there = batch.attention_mask[:, boundary:].to(logits.device)
    kl = nn.functional.kl_div(logits.log_softmax(-1), own_log_probs, reduction="none", log_target=True).sum(-1)
    return kl.masked_fill(~there, 0.0), there


def nll_on_tokens(logits: torch.Tensor, batch: Batch, boundary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of the tokens from column `boundary` on under `(B, T - boundary, vocab)` logits; as in [`kl_on_tokens`]."""
    there = batch.attention_mask[:, boundary:].to(logits.device)
    ids = batch.input_ids[:, boundary:].to(logits.device)
    nll = nn.functional.cross_entropy(logits.mT, ids, reduction="none")
    return nll.masked_fill(~there, 0.0), there


def run_on_cache(model: Any, batch: Batch, cache: DynamicCache, held: int) -> tuple[torch.Tensor, Any]:
    """Let a model read the columns of a batch from `held` on, on top of a cache of those before.

    Returns:
        Logits `(B, T - held, vocab)` in float32 and the cache.
    """
    device = model.get_input_embeddings().weight.device
    mask = batch.attention_mask.long()
    output = model(
        input_ids=batch.input_ids[:, held:].to(device),
        attention_mask=mask.to(device),
        position_ids=positions_from_mask(mask)[:, held:].to(device),
        use_cache=True,
        **cache_kwargs(cache),
    )
    return output.logits.float(), output_cache(output)


@contextmanager
def frozen(*models: nn.Module) -> Iterator[None]:
    """Eval mode and no gradients of the models' own parameters; both are put back afterwards."""
    modes = [(model, model.training) for model in models]
    wanted = [parameter for model in models for parameter in model.parameters() if parameter.requires_grad]
    try:
        for model in models:
            model.eval()
        for parameter in wanted:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)
        for model, mode in modes:
            model.train(mode)


@torch.no_grad()
def mean_kl(batches: Iterable[tuple[Any, ...]], kl: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Mean KL in nats a token over batches with their boundaries; every token counts once.

    Args:
        batches: Batches, the column at which each continuation starts, and what else `kl` takes.
        kl: `continuation_kl` of a mapper.
    """
    total, count = 0.0, 0
    for item in batches:
        values, there = kl(*item)
        total += float(values.double().sum())
        count += int(there.sum())
    return total / max(count, 1)


def draw_boundary(
    batch: Batch, seed: Sequence[int], *, min_prefix: int, min_continuation: int, max_continuation: int | None = None
) -> tuple[Batch, int]:
    """Draw where the prefix ends, and cut the batch behind the longest continuation wanted.

    The draw depends on the seed alone, so a resumed run and a repeated one see the same.

    Args:
        batch: Sequences.
        seed: Numbers that name this draw (seed of the run, step, ...).
        min_prefix, min_continuation, max_continuation: Columns. Where a batch is too short for both, the prefix gives
            way.

    Returns:
        The batch, possibly shorter, and the first column of the continuation.
    """
    generator = torch.Generator().manual_seed(hash_seed(seed))
    # Columns that every row has, so that each row has something on both sides.
    shared = batch.attention_mask.all(dim=0).nonzero().flatten()
    first, last = (0, batch.input_ids.shape[1]) if len(shared) == 0 else (int(shared[0]), int(shared[-1]) + 1)
    low, high = first + min_prefix, last - min_continuation
    high = max(high, first + 2)
    low = min(low, high)
    boundary = int(torch.randint(low, high + 1, (1,), generator=generator))
    if max_continuation is not None:
        stop = boundary + int(
            torch.randint(min(min_continuation, max_continuation), max_continuation + 1, (1,), generator=generator)
        )
        batch = Batch(batch.input_ids[:, :stop], batch.attention_mask[:, :stop], batch.numbers)
    return batch, boundary


def hash_seed(numbers: Sequence[int]) -> int:
    """One 63-bit seed of several numbers."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = ((state ^ (number & (2**64 - 1))) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        state ^= state >> 29
    return state >> 1


__all__ = [
    "Entries",
    "FunctionalHandoff",
    "OwnReading",
    "draw_boundary",
    "frozen",
    "hash_seed",
    "kl_on_tokens",
    "mean_kl",
    "nll_on_tokens",
    "run_on_cache",
]
