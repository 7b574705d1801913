"""A handoff as a model of EleutherAI's lm-evaluation-harness: the source reads each context, the target answers.

    import lm_eval
    model = HandoffLM(KVBridge(source, mapper), target, tokenizer)
    results = lm_eval.simple_evaluate(model=model, tasks=["arc_easy"])

Requests run one by one, as every context is handed over for itself; of requests that follow each other with the same
context (the choices of one question) the context is handed over once. Gates are off, as a handoff that one of them
rejects would be answered from the target's own cache and judged as a good one. Nothing here needs the harness to be
installed; it gives the base class that its `simple_evaluate` asks for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm
from transformers import Cache, PreTrainedModel

from ..cache_argument import cache_kwargs
from ..generation_kvbridge import KVBridge
from ..guard.settings import Gates
from ..prompt_reading import read_columns
from .errors import EvaluationError

if TYPE_CHECKING:
    _LM = object
else:
    try:
        from lm_eval.api.model import LM as _LM
    except ImportError:
        _LM = object


class HandoffLM(_LM):
    """Answers the harness's requests with a target that goes on from the source's mapped cache.

    Args:
        bridge: the bridge, whose gates are left out; None lets the target read everything itself, the score to
            compare with.
        target_model: the model that goes on.
        tokenizer: of the pair.
        max_new_tokens: of a generation, where the task says nothing.
        progress: whether to show bars.
        keep_gates: judge the bridge with its gates, as it would serve: what they reject is then the target's own
            answer, and `statuses` says how often.
    """

    def __init__(
        self,
        bridge: KVBridge | None,
        target_model: PreTrainedModel,
        tokenizer: Any,
        *,
        max_new_tokens: int = 256,
        progress: bool = True,
        keep_gates: bool = False,
    ):
        super().__init__()
        if bridge is not None and not keep_gates:
            bridge = KVBridge(bridge.source_model, bridge.mapper, replace(bridge.policy, gates=Gates.off()))
        self.bridge, self.target_model, self.tokenizer = bridge, target_model, tokenizer
        self.max_new_tokens, self.progress = max_new_tokens, progress
        #: Contexts by the status of their handoff: `"ok"`, `"fallback"`, or `"native"` without a bridge.
        self.statuses: dict[str, int] = {}

    @property
    def tokenizer_name(self) -> str:
        """Under which the harness caches requests."""
        return str(getattr(self.tokenizer, "name_or_path", "")).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The tokenizer's own, whatever the harness would choose."""
        return self.tokenizer.chat_template if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Messages as text, with the tokenizer's chat template."""
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    @torch.no_grad()
    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-probability of each continuation after its context, and whether it is the greedy one.

        Args:
            requests: with `.args == (context, continuation)`.
        """
        results, known = [], _Context()
        for request in self._bar(requests, disable_tqdm, "loglikelihood"):
            context, continuation = self.encode_pair(*request.args)
            if not continuation:
                raise EvaluationError(f"The continuation {request.args[1]!r} has no tokens to score.")
            if known.tokens != context:
                known = _Context(context, *self._read(context))
            results.append(self._score(known, continuation))
        return results

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Refused: where every token is scored there is no context that could be handed over."""
        raise EvaluationError(
            "loglikelihood_rolling scores every token of a text, so nothing of it can be handed over. Use a task with "
            "contexts, or kvbridge_hf.evaluation.judge_handoff on documents, which splits them."
        )

    @torch.no_grad()
    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """What the target writes after each context, up to a stopping text.

        Args:
            requests: with `.args == (context, settings)`; of the settings `until`, `max_gen_toks`, `do_sample`,
                `temperature`, `top_p` and `top_k` are used.
        """
        texts = []
        for request in self._bar(requests, disable_tqdm, "generate_until"):
            context, settings = request.args
            until = settings.get("until") or []
            until = [until] if isinstance(until, str) else [text for text in until if text]
            kwargs = {name: settings[name] for name in ("temperature", "top_p", "top_k") if name in settings}
            kwargs["do_sample"] = bool(settings.get("do_sample", False))
            if not kwargs["do_sample"]:
                kwargs = {"do_sample": False}
            if until:
                kwargs |= {"stop_strings": until, "tokenizer": self.tokenizer}
            if self.bridge is not None:
                kwargs["bridge"] = self.bridge
            ids = self._tensor(self.encode(context))
            limit = int(settings.get("max_gen_toks", self.max_new_tokens))
            target: Any = self.target_model
            output = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, **kwargs)
            self._count()
            text = self.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
            for stop in until:
                text = text.split(stop)[0]
            texts.append(text)
        return texts

    def encode(self, text: str) -> list[int]:
        """Tokens of a context; an empty one is the token that begins a text."""
        tokens = list(self.tokenizer(text)["input_ids"]) if text else []
        if tokens:
            return tokens
        first = self.tokenizer.bos_token_id
        first = self.tokenizer.eos_token_id if first is None else first
        if first is None:
            raise EvaluationError("An empty context needs a tokenizer with a bos_token or an eos_token.")
        return [first]

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokens of a context and of what follows it; spaces at the context's end belong to the continuation."""
        stripped = context.rstrip()
        whole = self.encode(context + continuation)
        first = self.encode(stripped)
        return first, whole[len(first) :]

    def _read(self, context: list[int]) -> tuple[Cache | None, int]:
        """The target's cache of a context, and the columns of it that are left to the target (one or more)."""
        if len(context) < 2:
            return None, len(context)
        ids = self._tensor(context)
        if self.bridge is None:
            cache = read_columns(self.target_model, ids[:, :-1], torch.ones_like(ids[:, :-1], dtype=torch.bool))
        else:
            cache = self.bridge.handoff(ids, target_model=self.target_model)
        self._count()
        held = min(int(cache.get_seq_length()), len(context) - 1)
        return (cache, len(context) - held) if held > 0 else (None, len(context))

    def _score(self, context: _Context, continuation: list[int]) -> tuple[float, bool]:
        tokens = context.tokens + continuation
        held = len(context.tokens) - context.left
        kwargs: dict[str, Any] = {"use_cache": False}
        if context.cache is not None:
            surplus = int(context.cache.get_seq_length()) - held  # what an earlier continuation left
            if surplus > 0:
                context.cache.crop(-surplus)  # negative, the one way that all supported versions read alike
            kwargs = {"use_cache": True, **cache_kwargs(context.cache)}
        mask = torch.ones(1, len(tokens), dtype=torch.long, device=self.target_model.device)
        logits = self.target_model(self._tensor(tokens[held:]), attention_mask=mask, **kwargs).logits
        predicted = logits[0, -len(continuation) - 1 : -1].float().log_softmax(-1)
        wanted = torch.tensor(continuation, device=predicted.device)
        score = predicted.gather(-1, wanted[:, None]).sum()
        return float(score), bool((predicted.argmax(-1) == wanted).all())

    def _tensor(self, tokens: list[int]) -> torch.Tensor:
        return torch.tensor([tokens], device=self.target_model.device)

    def _count(self) -> None:
        report = None if self.bridge is None else self.bridge.last_report
        status = "native" if report is None else report.status
        self.statuses[status] = self.statuses.get(status, 0) + 1

    def _bar(self, requests: Iterable[Any], disable: bool, title: str) -> Iterable[Any]:
        return tqdm(requests, desc=title, disable=disable or not self.progress)


class _Context:
    """The context that was read last."""

    def __init__(self, tokens: list[int] | None = None, cache: Cache | None = None, left: int = 0):
        self.tokens = [] if tokens is None else tokens
        self.cache, self.left = cache, left


__all__ = ["HandoffLM"]
