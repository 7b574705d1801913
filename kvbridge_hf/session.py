"""`HandoffSession`: one conversation that moves between models, each with a cache of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, StoppingCriteria

from .cache_argument import cache_kwargs, output_cache
from .cache_kvbridge import BridgedCache
from .errors import GenerateArgumentError, HandoffRejected
from .generation_kvbridge import KVBridge
from .guard.events import emit, make_event
from .handoff import HandoffPolicy
from .modeling_kvbridge import KVBridgeMapper
from .prompt_reading import read_columns
from .session_repair import repair_history
from .session_state import ON_GATE, ModelState, Span, SwitchReport, common_prefix, parse_resync, share_cache

Messages = list[dict[str, str]]


class HandoffSession:
    """A conversation between a user and several models that share a tokenizer.

    ```python
    session = HandoffSession(
        {"small": small, "large": large},
        mappers={("small", "large"): up, ("large", "small"): down},
        tokenizer=tokenizer,
    )
    session.send("user", "Who has the violin?")
    session.generate(model="small", max_new_tokens=32)
    session.send("user", "And in which city is it?")
    session.generate(model="large", max_new_tokens=32)      # maps what small has read and written, reads the rest
    ```

    Each model keeps the cache of what it has read or got mapped. On a switch only the tokens that it lacks are mapped
    and appended; what it read itself stays native. Calls may come from several threads and are served one by one.

    Args:
        models: the models by name.
        mappers: `{(source name, target name): mapper}`. A pair without one is never mapped: the target reads natively.
        tokenizer: the models' tokenizer.
        policy: of every handoff. By default what fails is read natively, visibly in the reports.
        resync: when a model reads natively, from the first mapped token on, what it had got mapped: `"never"`;
            `"every N"`, at every N-th time it is brought up to date by mapping; `"on gate"`, when a gate rejects
            (with the other two only the tokens of the rejected handoff are read natively).
        repair_history: before each handoff, let the model recompute of what it was handed over in earlier turns the
            share that the policy says, chosen by the question that is asked now.
        render: `render(messages, add_generation_prompt) -> token ids`; the tokenizer's chat template by default.

    Raises:
        PairMismatchError, FingerprintError: a mapper does not fit its models.
    """

    def __init__(
        self,
        models: Mapping[str, PreTrainedModel],
        mappers: Mapping[tuple[str, str], KVBridgeMapper],
        tokenizer: Any,
        policy: HandoffPolicy | None = None,
        *,
        resync: str = "never",
        repair_history: bool = True,
        render: Callable[[Messages, bool], Sequence[int]] | None = None,
    ):
        self.models: dict[str, Any] = dict(models)
        self.tokenizer = tokenizer
        self.policy = HandoffPolicy(on_failure="prefill") if policy is None else policy
        self.resync = resync
        self.repair_history = repair_history
        self._every = parse_resync(resync)
        unknown = sorted({name for pair in mappers for name in pair} - set(self.models))
        if unknown or not self.models:
            raise GenerateArgumentError(
                f"mappers name models {unknown} that are not among models= ({sorted(self.models)})."
                if unknown
                else "models= is empty; give at least one model by name."
            )
        if render is None and not getattr(tokenizer, "chat_template", None):
            raise GenerateArgumentError(
                "The tokenizer has no chat template. Set tokenizer.chat_template, or pass render=, a function "
                "(messages, add_generation_prompt) -> token ids."
            )
        self._custom_render = render
        self.bridges = {
            (source, target): KVBridge(self.models[source], mapper, self.policy, tokenizer=tokenizer)
            for (source, target), mapper in mappers.items()
        }
        for (_, target), bridge in self.bridges.items():
            bridge.check_target(self.models[target])
        self.messages: Messages = []
        self.reports: list[SwitchReport] = []
        self._tokens: list[int] = []
        self._states = {name: ModelState() for name in self.models}
        self._lock = threading.RLock()

    @property
    def input_ids(self) -> torch.Tensor:
        """The conversation's tokens so far, `(1, tokens)`."""
        return torch.tensor([self._tokens], dtype=torch.long)

    def spans(self, model: str) -> list[Span]:
        """Where the columns of a model's cache come from."""
        return list(self._state(model).spans)

    def cache_of(self, model: str) -> Cache | None:
        """The model's live cache; read it, do not change it."""
        return self._state(model).cache

    def send(self, role: str, text: str) -> None:
        """Add a message. No model runs before it is asked."""
        with self._lock:
            self.messages.append({"role": role, "content": text})
            self._retell(add_generation_prompt=False)

    def edit(self, index: int, text: str) -> None:
        """Replace the text of a message; what the models have read beyond the first difference is forgotten."""
        with self._lock:
            self.messages[index] = {**self.messages[index], "content": text}
            self._retell(add_generation_prompt=False)

    def truncate(self, num_messages: int) -> None:
        """Forget all but the first messages."""
        with self._lock:
            del self.messages[num_messages:]
            self._retell(add_generation_prompt=False)

    def branch(self) -> HandoffSession:
        """A second session that goes on from here on its own. The caches are shared until one of them grows."""
        with self._lock:
            other = object.__new__(HandoffSession)
            other.__dict__.update(self.__dict__)
            other.messages = [dict(message) for message in self.messages]
            other.reports, other._tokens, other._lock = [], list(self._tokens), threading.RLock()
            other._states = {
                name: ModelState(share_cache(state.cache), list(state.spans), state.switches)
                for name, state in self._states.items()
            }
            return other

    @torch.no_grad()
    def catch_up(self, model: str, *, add_generation_prompt: bool = True) -> SwitchReport:
        """Bring a model up to date: map what another model has read, read the rest natively, all but the last token.

        [`generate`] does it by itself; call it ahead to hide its time.
        """
        with self._lock:
            self._retell(add_generation_prompt)
            return self._catch_up(model)

    def generate(self, model: str, **kwargs: Any) -> str:
        """Let a model answer; its message is added to the conversation.

        Args:
            model: its name.
            kwargs: for Transformers' `generate`, such as `max_new_tokens`, `do_sample`, `streamer`.

        Returns:
            The text of the answer without special tokens.

        Raises:
            GenerateArgumentError: arguments under which there is more than one line of text, or none that goes on
            from a
                cache.
        """
        for name in ("num_beams", "num_return_sequences"):
            if (kwargs.get(name) or 1) > 1:
                raise GenerateArgumentError(
                    f"A session follows one line of text; {name}={kwargs[name]} is not possible."
                )
        for name in ("bridge", "input_ids", "inputs", "cache", "past_key_values", "attention_mask"):
            if name in kwargs:
                raise GenerateArgumentError(f"The session itself gives generate() its {name}; leave it out.")
        with self._lock:
            self._retell(add_generation_prompt=True)
            state = self._state(model)
            self._catch_up(model)
            ids = self.input_ids.to(self.models[model].device)
            held = state.length
            kwargs.update(cache_kwargs(state.cache if state.cache is not None else DynamicCache()))
            try:
                output = self.models[model].generate(
                    ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **kwargs
                )
            except BaseException:
                state.crop(held)  # what was generated until then is nobody's text
                raise
            tokens = output.sequences[0].tolist()
            state.cache = output_cache(output)
            state.grow(state.length, None)
            text = self.tokenizer.decode(tokens[len(self._tokens) :], skip_special_tokens=True).strip()
            self._tokens = tokens
            state.crop(len(tokens))
            self.messages.append({"role": "assistant", "content": text})
            return text

    def stream(self, model: str, **kwargs: Any) -> Iterator[str]:
        """As [`generate`], text by text while it is written. An abandoned iterator ends the answer where it is."""
        from transformers import StoppingCriteriaList, TextIteratorStreamer

        streamer = TextIteratorStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        abandoned = threading.Event()
        criteria = StoppingCriteriaList(kwargs.pop("stopping_criteria", None) or [])
        criteria.append(_StopWhen(abandoned))
        failure: list[BaseException] = []

        def run() -> None:
            try:
                self.generate(model, streamer=streamer, stopping_criteria=criteria, **kwargs)
            except BaseException as error:
                failure.append(error)
                streamer.end()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield from streamer
        finally:
            abandoned.set()
            thread.join()
        if failure:
            raise failure[0]

    def save(self, folder: str | Path) -> None:
        """Write messages, tokens and caches to a folder (safetensors and JSON, hashed), atomically."""
        from .session_storage import save_session

        with self._lock:
            save_session(self, Path(folder))

    @classmethod
    def load(
        cls,
        folder: str | Path,
        models: Mapping[str, PreTrainedModel],
        mappers: Mapping[tuple[str, str], KVBridgeMapper],
        tokenizer: Any,
        policy: HandoffPolicy | None = None,
        **kwargs: Any,
    ) -> HandoffSession:
        """Restore a saved session with the models, mappers and tokenizer that it was saved with.

        Raises:
            ArtifactError: a file is damaged.
            FingerprintError: a model or the tokenizer is another one; the caches would be wrong.
        """
        from .session_storage import load_session

        session = cls(models, mappers, tokenizer, policy, **kwargs)
        load_session(session, Path(folder))
        return session

    def _state(self, model: str) -> ModelState:
        if model not in self._states:
            raise GenerateArgumentError(
                f"There is no model named {model!r} in this session; there are {sorted(self.models)}."
            )
        return self._states[model]

    def _retell(self, add_generation_prompt: bool) -> None:
        """Turn the messages into tokens; caches keep what stands before the first token that differs."""
        if self._custom_render is not None:
            tokens = list(self._custom_render(self.messages, add_generation_prompt))
        elif self.messages:
            text = self.tokenizer.apply_chat_template(
                self.messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
            tokens = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        else:
            tokens = []
        common = common_prefix(self._tokens, tokens)
        for state in self._states.values():
            state.crop(common)
        self._tokens = tokens

    def _catch_up(self, name: str) -> SwitchReport:
        state, started = self._state(name), time.perf_counter()
        report = SwitchReport(name, tokens_history=len(self._tokens))
        if not self._tokens:
            raise GenerateArgumentError("The conversation is empty; send() a message first.")
        last = len(self._tokens) - 1
        state.crop(last)  # the last token gives the first logits
        report.tokens_kept = state.length
        report.source = self._choose_source(name)
        if report.source is not None:
            state.switches += 1
            if self._every and state.switches % self._every == 0:
                self._forget_mapped(state, report)
            else:
                self._map(name, report.source, report)
        if state.length < last:
            ids = self.input_ids[:, :last]
            state.cache = read_columns(self.models[name], ids, torch.ones_like(ids, dtype=torch.bool), state.cache)
        state.grow(last, None)
        report.tokens_native = last - report.tokens_kept - report.tokens_mapped
        report.seconds = time.perf_counter() - started
        self.reports.append(report)
        fields = {
            key: getattr(report, key)
            for key in ("status", "source", "target", "tokens_mapped", "tokens_native", "tokens_history", "resync")
            + ("tokens_repaired",)
        }
        emit(make_event("switch", **fields, times={"switch": report.seconds}), self.policy.on_event)
        return report

    def _choose_source(self, target: str) -> str | None:
        """The model whose cache covers most of what the target lacks, and among equals most of it natively."""
        held, best = self._states[target].length, None
        for (name, to), bridge in self.bridges.items():
            if to != target:
                continue
            stop = self._mapped_stop(bridge, name)
            native = sum(span.stop - max(span.start, held) for span in self._states[name].spans if span.origin is None)
            if stop > held and (best is None or (stop, native) > best[0]):
                best = ((stop, native), name)
        return None if best is None else best[1]

    def _mapped_stop(self, bridge: KVBridge, source: str) -> int:
        """End of the columns that a handoff from a source would map."""
        _, suffix = bridge.native_parts(self.policy)
        return min(len(self._tokens) - max(suffix, 1), self._states[source].length)

    def _map(self, name: str, source: str, report: SwitchReport) -> None:
        state, bridge = self._states[name], self.bridges[source, name]
        policy = replace(self.policy, on_rejection="error") if self.resync == ON_GATE else self.policy
        held, stop = state.length, self._mapped_stop(bridge, source)
        if self.repair_history and state.cache is not None and state.first_mapped is not None:
            suffix = max(bridge.native_parts(policy)[1], 1)
            report.tokens_repaired = repair_history(
                self.models[name], state.cache, self.input_ids, state.spans, bridge.mapper.config, policy, suffix
            )
        try:
            cache = bridge.handoff(
                self.input_ids.to(self.models[name].device),
                source_cache=self._states[source].cache,
                target_model=self.models[name],
                target_cache=state.cache if held > 0 else None,
                policy=policy,
            )
        except HandoffRejected as error:
            report.handoff = bridge.last_report
            if self.resync != ON_GATE:
                raise
            report.status, report.reason = "fallback", str(error)
            self._forget_mapped(state, report)
            return
        handoff = report.handoff = bridge.last_report
        assert handoff is not None
        if isinstance(cache, BridgedCache):
            cache.map_all()  # the source's cache may change before the target is asked
        state.cache = cache
        report.status, report.reason = handoff.status, handoff.reason
        if handoff.status == "ok" and handoff.tokens_mapped > 0:
            first = held if held > 0 else min(bridge.native_parts(policy)[0], stop)
            state.grow(first, None)
            state.grow(stop, source)
            report.tokens_mapped = stop - first
        state.grow(state.length, None)

    @staticmethod
    def _forget_mapped(state: ModelState, report: SwitchReport) -> None:
        """Drop the cache from its first mapped column on; the caller reads it again natively."""
        first = state.first_mapped
        if first is not None:
            report.resync = True
            state.crop(first)
            report.tokens_kept = state.length


class _StopWhen(StoppingCriteria):
    """Ends a generation when an event is set."""

    def __init__(self, event: threading.Event):
        self.event = event

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self.event.is_set(), device=input_ids.device, dtype=torch.bool)


__all__ = ["HandoffSession", "Span", "SwitchReport", "share_cache"]
