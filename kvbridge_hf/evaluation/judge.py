"""Runs every condition of a judgement over the same questions and documents.

    target        the target reads the prefix itself (the ceiling)
    source        the source reads prefix and suffix itself
    handoff       the target goes on from the handed-over cache
    unmapped      ... from the nearest source layers, re-rotated, not mapped
    mismatched    ... from the handed-over cache of another prompt
    native_only   ... from the handoff's native parts (sinks, suffix), with the mapped tokens hidden
    no_context    the target reads the suffix alone (the floor)

What does not depend on the handoff is run once a [`Judge`], which so compares many mappers of one pair cheaply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from ..rotary import ContentRotary, positions_from_mask
from .controls import Handoff, UnmappedHandoff, leave_last_column, native_only_mask, unmapped_reason
from .documents import Document, document_batches
from .errors import EvaluationError
from .fidelity import AttentionOutputs, R2Sums, log_probs
from .flops import PrefillCost, count_distinct, share_of_prefill
from .questions import EncodedQuestion, Question, encode_question, question_batches
from .runs import (
    Batch,
    Reading,
    cache_entries,
    cache_from_entries,
    prefill,
    read_suffix,
    read_without_context,
)
from .scoring import BatchScores, Own, Scores, gather, score_batch

CONDITIONS = ("target", "handoff", "source", "unmapped", "mismatched", "native_only", "no_context")
CONTROLS = ("unmapped", "mismatched", "native_only")


@dataclass
class _Tally:
    """What is counted beside the scores while a handoff is judged."""

    statuses: dict[str, int] = field(default_factory=dict)
    costs: list[dict[str, float]] = field(default_factory=list)
    r2: dict[str, R2Sums] = field(default_factory=dict)
    native_tokens: int = 0
    prompt_tokens: int = 0


@dataclass
class Judgement:
    """What [`Judge.judge`] measured; `report.build_report` makes intervals and tables of it."""

    judge: Judge
    scores: dict[str, dict[str, Scores]]  # suite -> condition -> scores
    undefined: dict[str, str]  # condition -> why it could not be run
    statuses: dict[str, int]  # status of the handoffs -> number of prompts
    cost: dict[str, float] | None
    r2: dict[str, dict[str, Any] | None]
    native: dict[str, float] = field(default_factory=dict)


class Judge:
    """Judges handoffs of one pair on fixed data.

    Args:
        source_model, target_model: causal LMs with one tokenizer, in eval mode.
        questions: [`Question`]s (which need `tokenizer`) or encoded ones.
        documents: [`Document`]s.
        tokenizer: of the pair.
        batch_size: rows of one forward, about.
        attention: whether attention outputs are compared.
        keep_bytes: memory for the target's own results between judgements; beyond it they are computed again.

    Raises:
        EvaluationError: there is nothing to judge on.
    """

    def __init__(
        self,
        source_model: PreTrainedModel,
        target_model: PreTrainedModel,
        *,
        questions: Sequence[Question | EncodedQuestion] = (),
        documents: Sequence[Document] = (),
        tokenizer: Any = None,
        batch_size: int = 32,
        attention: bool = True,
        keep_bytes: int = 1 << 30,
    ):
        if not questions and not documents:
            raise EvaluationError("A judgement needs questions, documents or both.")
        if tokenizer is None and any(isinstance(question, Question) for question in questions):
            raise EvaluationError("Questions in text need the pair's tokenizer; pass tokenizer=.")
        for role, model in (("source", source_model), ("target", target_model)):
            if model.training:
                raise EvaluationError(f"The {role} model is in training mode (dropout); call .eval() first.")
        self.source_model, self.target_model = source_model, target_model
        self.questions = [q if isinstance(q, EncodedQuestion) else encode_question(tokenizer, q) for q in questions]
        self.documents = list(documents)
        self.batches: dict[str, list[Any]] = {}
        if self.documents:
            self.batches["documents"] = document_batches(self.documents, batch_size)
        if self.questions:
            self.batches["questions"] = question_batches(self.questions, batch_size)
        self.attention = attention
        self.unmapped_reason = unmapped_reason(source_model, target_model)
        self._keep_bytes = keep_bytes
        self._kept: dict[tuple[str, int], Own] = {}
        self._newest: tuple[tuple[str, int], Own] | None = None
        self._baselines: dict[tuple[Any, ...], BatchScores] = {}
        self._rotary: ContentRotary | None = None
        self._target_cost = PrefillCost.from_model(target_model)
        self._source_cost = PrefillCost.from_model(source_model)

    @torch.no_grad()
    def judge(self, handoff: Handoff, *, controls: Sequence[str] = CONTROLS) -> Judgement:
        """Runs a handoff and its controls over all data.

        Args:
            handoff: see [`Handoff`].
            controls: which of the three caches to run beside target, source and no context.

        Raises:
            EvaluationError: the handoff gave a cache that does not fit.
        """
        if unknown := set(controls) - set(CONTROLS):
            raise EvaluationError(f"Unknown controls {sorted(unknown)}; there are {', '.join(CONTROLS)}.")
        tally = _Tally()
        scores: dict[str, dict[str, Scores]] = {}
        missing: dict[str, dict[str, str]] = {}
        for suite, batches in self.batches.items():
            parts: dict[str, list[BatchScores]] = {}
            for index, batch in enumerate(batches):
                for name, one in self._judge_batch(suite, index, batch, handoff, controls, tally).items():
                    if isinstance(one, str):
                        missing.setdefault(name, {})[suite] = one
                    else:
                        parts.setdefault(name, []).append(one)
            # A control that some batch could not run has not seen the same items.
            scores[suite] = {
                name: gather(batches, own) for name, own in parts.items() if suite not in missing.get(name, {})
            }
        return Judgement(
            judge=self,
            scores=scores,
            undefined={
                name if len(suites) == len(self.batches) else f"{name} ({suite})": reason
                for name, suites in missing.items()
                for suite, reason in suites.items()
            },
            statuses=tally.statuses,
            cost=share_of_prefill(tally.costs) if all("map" in cost for cost in tally.costs) else None,
            r2={name: sums.result() for name, sums in tally.r2.items()},
            native={"tokens": tally.native_tokens, "of": tally.prompt_tokens},
        )

    def _judge_batch(
        self, suite: str, index: int, batch: Batch, handoff: Handoff, controls: Sequence[str], tally: _Tally
    ) -> dict[str, BatchScores | str]:
        """All conditions on one batch; a text instead of scores says why a control is not defined."""
        device = self.target_model.device
        scores: dict[str, BatchScores | str] = {name: run() for name, run in self._fixed(suite, index, batch).items()}
        # A continuation is what a document is scored on, so only a question may be looked at before it is answered.
        by_row = suite == "questions" and bool(getattr(handoff, "reads_question", False))
        if by_row:
            cache = handoff.for_questions(batch)  # type: ignore[attr-defined]
        else:
            cache = handoff(batch.prefix_ids.to(device), batch.prefix_mask.to(device))
        held = leave_last_column(cache, batch.prefix_ids.shape[1])
        sinks = min(int(getattr(handoff, "num_sinks", 0)), held)
        repaired = getattr(cache, "repaired", None)
        repaired = None if repaired is None else repaired[:, :held].cpu()
        cache = DynamicCache() if cache is None else cache
        if not by_row and batch.rows.shape[0] != batch.num_prefixes:
            cache.batch_select_indices(batch.rows.to(device))
            repaired = None if repaired is None else repaired[batch.rows]
        own = self._own_of(suite, index, batch)
        handed = self._score_and_read(batch, own, lambda: read_suffix(self.target_model, cache, batch))
        scores["handoff"], reading = handed
        entries = cache_entries(reading.cache, stop=held)
        if "mismatched" in controls:
            scores["mismatched"] = self._mismatched(batch, own, entries, held)
        if "unmapped" in controls:
            scores["unmapped"] = self._unmapped(suite, index, batch, held, sinks)
        if "native_only" in controls:
            scores["native_only"] = self._native_only(suite, index, batch, held, sinks, repaired)

        self._add_r2(tally, suite, batch, own, entries, sinks, repaired)
        status = str(getattr(getattr(cache, "report", None), "status", "ok"))
        # Where a handoff depends on the question, each question pays for the whole of its own.
        prefixes = batch.rows if by_row else torch.arange(batch.num_prefixes)
        mask = batch.prefix_mask[prefixes]
        distinct = count_distinct(batch.prefix_ids[prefixes, :held], mask[:, :held], sinks)
        of_prefix = None if repaired is None else repaired if by_row else repaired[batch.first_rows]
        tally.statuses[status] = tally.statuses.get(status, 0) + len(prefixes)
        rest = mask.shape[1] - held
        questions = batch.suffix_mask.sum(1).tolist() if by_row else [rest] * len(prefixes)
        tally.costs += self._costs(
            handoff, mask, distinct, questions, of_prefix, num_suffix=rest, fell_back=status == "fallback"
        )
        tally.prompt_tokens += int(mask.sum())
        tally.native_tokens += int(mask[:, held:].sum() + mask[:, :held].sum(1).clamp(max=sinks).sum())
        tally.native_tokens += 0 if of_prefix is None else int(of_prefix.sum())
        return scores

    # The conditions

    def _fixed(self, suite: str, index: int, batch: Batch) -> dict[str, Callable[[], BatchScores]]:
        """The conditions that know nothing of a handoff."""

        def target() -> BatchScores:
            own = self._own_of(suite, index, batch)
            scores = self._score(batch, own, lambda: own.reading or self._read_own(self.target_model, batch)[0])
            own.reading = None  # the cache in it is not needed again
            return scores

        def source() -> BatchScores:
            own = self._own_of(suite, index, batch)
            return self._score(
                batch, own, lambda: self._read_own(self.source_model, batch)[0], model=self.source_model
            )

        def no_context() -> BatchScores:
            own = self._own_of(suite, index, batch)
            return self._score(batch, own, lambda: read_without_context(self.target_model, batch))

        runs = {"target": target, "source": source, "no_context": no_context}
        return {name: self._once((name, suite, index), run) for name, run in runs.items()}

    def _once(self, key: tuple[Any, ...], run: Callable[[], BatchScores]) -> Callable[[], BatchScores]:
        def cached() -> BatchScores:
            if key not in self._baselines:
                self._baselines[key] = run()
            return self._baselines[key]

        return cached

    def _read_own(self, model: PreTrainedModel, batch: Batch) -> tuple[Reading, list[Any]]:
        """A model on its own cache. The last column of the prefix is read with the suffix, as after any handoff."""
        cache = prefill(model, batch, batch.prefix_ids.shape[1] - 1)
        entries = [] if cache is None else cache_entries(cache)
        return read_suffix(model, cache_from_entries(entries, batch.rows), batch), entries

    def _own_of(self, suite: str, index: int, batch: Batch) -> Own:
        key = (suite, index)
        if key in self._kept:
            return self._kept[key]
        if self._newest is None or self._newest[0] != key:
            with AttentionOutputs(self.target_model, batch.keep) if self.attention else nullcontext() as recorder:
                reading, entries = self._read_own(self.target_model, batch)
            attention = None if recorder is None else recorder.outputs
            self._newest = (key, Own(log_probs(reading.logits), attention, entries, reading))
        own = self._newest[1]
        if own.num_bytes <= self._keep_bytes:
            self._keep_bytes -= own.num_bytes
            self._kept[key] = own
        return own

    def _mismatched(self, batch: Batch, own: Own, entries: list[Any], held: int) -> BatchScores | str:
        if batch.num_prefixes < 2 or held < 1:
            return "not defined: it takes the handed-over caches of two different prompts"
        other = batch.other_prefix[batch.rows]
        cache = cache_from_entries(entries, batch.first_rows[other])
        mask = torch.cat([batch.prefix_mask[other][:, :held], batch.prefix_mask[batch.rows][:, held:]], dim=1)
        return self._score(batch, own, lambda: read_suffix(self.target_model, cache, batch, prefix_mask=mask))

    def _unmapped(self, suite: str, index: int, batch: Batch, held: int, sinks: int) -> BatchScores | str:
        if self.unmapped_reason is not None:
            return self.unmapped_reason

        def run() -> BatchScores:
            own = self._own_of(suite, index, batch)
            suffix = batch.prefix_ids.shape[1] - held
            control = UnmappedHandoff(self.source_model, self.target_model, sinks, suffix)
            cache = control(batch.prefix_ids, batch.prefix_mask)
            if cache is not None:
                cache.batch_select_indices(batch.rows.to(self.target_model.device))
            return self._score(batch, own, lambda: read_suffix(self.target_model, cache, batch))

        return self._once(("unmapped", suite, index, held, sinks), run)()

    def _native_only(
        self, suite: str, index: int, batch: Batch, held: int, sinks: int, repaired: torch.Tensor | None
    ) -> BatchScores:
        def run() -> BatchScores:
            own = self._own_of(suite, index, batch)
            hidden = native_only_mask(batch, held, sinks, repaired)
            if repaired is not None:
                return self._score(batch, own, lambda: self._read_hidden(batch, hidden))
            cache = prefill(self.target_model, batch, batch.prefix_ids.shape[1] - 1, mask=hidden)
            if cache is not None:
                cache.batch_select_indices(batch.rows.to(self.target_model.device))
            return self._score(
                batch,
                own,
                lambda: read_suffix(
                    self.target_model,
                    cache,
                    batch,
                    prefix_mask=hidden[batch.rows],
                    position_mask=batch.prefix_mask[batch.rows],
                ),
            )

        return run() if repaired is not None else self._once(("native_only", suite, index, held, sinks), run)()

    def _read_hidden(self, batch: Batch, hidden: torch.Tensor) -> Reading:
        """Rows whose own part of the prefix is hidden, which so share no cache."""
        return read_suffix(
            self.target_model, None, batch, prefix_mask=hidden, position_mask=batch.prefix_mask[batch.rows]
        )

    def _score(
        self, batch: Batch, own: Own, read: Callable[[], Reading], model: PreTrainedModel | None = None
    ) -> BatchScores:
        return self._score_and_read(batch, own, read, model)[0]

    def _score_and_read(
        self, batch: Batch, own: Own, read: Callable[[], Reading], model: PreTrainedModel | None = None
    ) -> tuple[BatchScores, Reading]:
        model = self.target_model if model is None else model
        return score_batch(model, batch, own, read, attention=self.attention and model is self.target_model)

    def _add_r2(
        self,
        tally: _Tally,
        suite: str,
        batch: Batch,
        own: Own,
        entries: list[Any],
        sinks: int,
        repaired: torch.Tensor | None,
    ) -> None:
        """Compares handed-over entries with the target's own in content space; native tokens and padding left out."""
        if not own.entries or not entries:
            return
        if self._rotary is None:
            self._rotary = ContentRotary.from_model(self.target_model)
        held = min(entries[0][0].shape[2], own.entries[0][0].shape[2])
        positions = positions_from_mask(batch.prefix_mask)[:, :held]
        valid = batch.prefix_mask[:, :held].bool() & (positions >= sinks)
        first = batch.first_rows
        if repaired is not None:
            valid &= ~repaired[first, :held]
        for layer, ((own_keys, own_values), (keys, values)) in enumerate(zip(own.entries, entries, strict=True)):
            at = positions.to(own_keys.device)
            keys, values = (states[first.to(states.device), :, :held].to(own_keys) for states in (keys, values))
            own_keys, own_values = own_keys[:, :, :held], own_values[:, :, :held]
            mask = valid.to(own_keys.device)
            strip = self._rotary.strip
            of_keys, of_values = (tally.r2.setdefault(f"{suite}_{kind}", R2Sums()) for kind in ("keys", "values"))
            of_keys.add(layer, strip(own_keys, at, layer), strip(keys, at, layer), mask)
            of_values.add(layer, own_values, values, mask)

    def _costs(
        self,
        handoff: Handoff,
        mask: torch.Tensor,
        distinct: list[int],
        questions: list[int],
        repaired: torch.Tensor | None,
        *,
        num_suffix: int,
        fell_back: bool,
    ) -> list[dict[str, float]]:
        flops = getattr(handoff, "flops", None)
        positions = positions_from_mask(mask)
        costs = []
        for row, length in enumerate(mask.sum(1).tolist()):
            known = {"num_distinct": distinct[row]} if getattr(handoff, "counts_distinct", False) else {}
            full = self._target_cost.flops(length)
            cost = {"prefill": full, "source_prefill": self._source_cost.flops(length)}
            if fell_back:
                cost |= {"map": 0.0, "native": full, "repair": 0.0, "choice": 0.0, "total": full}
            elif flops is not None:
                if repaired is None:
                    parts = flops(length, **known)
                    again = choice = 0.0
                else:
                    parts = flops(length, num_suffix=num_suffix, **known)
                    places = positions[row, : repaired.shape[1]][repaired[row]]
                    again = self._target_cost.flops_at(places.tolist(), getattr(handoff, "repair_layers", None))
                    choice = handoff.choice_flops(length, questions[row])  # type: ignore[attr-defined]
                cost |= {"map": parts["map"], "native": parts["native"], "repair": again, "choice": choice}
                cost["total"] = sum(cost[part] for part in ("map", "native", "repair", "choice"))
            costs.append(cost)
        return costs
