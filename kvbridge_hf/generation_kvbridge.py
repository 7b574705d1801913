"""`KVBridge`: a source model and a mapper, ready to hand what the source has read to a target."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from .cache_kvbridge import BridgedCache, MappedPrefix
from .content_reading import read_content
from .errors import (
    CacheMismatchError,
    GenerateArgumentError,
    HandoffRejected,
    KVBridgeError,
)
from .fingerprint import check_tokenizer
from .guard.events import emit, handoff_event
from .guard.gates import Handed, HandoffGate
from .guard.judging import judge
from .handoff import HandoffFallbackWarning, HandoffPolicy, HandoffReport
from .handoff_repair import apply_native_parts
from .modeling_kvbridge import KVBridgeMapper
from .pair_checks import PairChecks
from .prompt_layout import fit_mask, layout
from .prompt_reading import prompt_mask, read_columns, read_first_tokens
from .rotary import ContentRotary, positions_from_mask
from .source_cache import SourceCacheView, source_length

# What a handoff may fall back from: our own refusals, and what PyTorch raises when a forward or a map goes wrong.
FALLBACK_ERRORS = (KVBridgeError, RuntimeError)


class KVBridge:
    """Hands a source model's cache to a target model.

    ```python
    bridge = KVBridge(source_model=small, mapper=mapper)
    out = large.generate(**inputs, bridge=bridge, max_new_tokens=64)
    ```

    The source and its mapper are checked here, a target when it is first used (once per model: weights that are
    changed afterwards are not noticed). A bridge may be shared by threads.

    Args:
        source_model: the model that reads prompts, a Transformers causal LM in eval mode.
        mapper: the mapper fitted for this source.
        policy: how to hand over; the defaults of [`HandoffPolicy`] otherwise.
        tokenizer: the tokenizer in use; if given, it must be the one that the mapper was fitted with.

    Raises:
        FingerprintError: the mapper was fitted for another source checkpoint or tokenizer.
        PairMismatchError: the source does not have the geometry that the mapper reads, or the pair cannot work.
    """

    def __init__(
        self,
        source_model: PreTrainedModel,
        mapper: KVBridgeMapper,
        policy: HandoffPolicy | None = None,
        *,
        tokenizer: Any = None,
    ):
        self.source_model = source_model
        self.mapper = mapper
        self.policy = HandoffPolicy() if policy is None else policy
        config = mapper.config
        if tokenizer is not None:
            check_tokenizer(config.tokenizer_fingerprint, tokenizer)
        self._checks = PairChecks(source_model, mapper)
        self._lock = threading.Lock()
        self._warned: set[str] = set()
        self._local = threading.local()

    def __deepcopy__(self, memo: dict[int, Any]) -> KVBridge:
        # A handle to two models, as a model in a config would be: copying it would copy them.
        return self

    @property
    def last_report(self) -> HandoffReport | None:
        """Report of this thread's latest handoff, for callers to whom `generate` returns a bare tensor."""
        return getattr(self._local, "report", None)

    def check_target(self, target_model: PreTrainedModel) -> ContentRotary:
        """Check that the mapper was fitted for this target, and return the target's rotation.

        Raises:
            PairMismatchError, FingerprintError, UnsupportedModelError: what is wrong, the same each time it is asked.
        """
        return self._checks.target(target_model)

    @torch.no_grad()
    def handoff(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        source_cache: Cache | None = None,
        target_model: PreTrainedModel | None = None,
        *,
        source_attention_mask: torch.Tensor | None = None,
        target_cache: Cache | None = None,
        policy: HandoffPolicy | None = None,
        request_id: str | None = None,
    ) -> BridgedCache | Cache:
        """Turn what the source has read into a cache that the target can go on from.

        The cache covers the first columns of the prompt: all but the policy's native suffix, and no further than the
        source has read. Where the likelihood gate is on (see [`Gates`]) and there is no `target_cache`, the target
        has read the suffix for it, and the cache covers all but the last column. The caller (a forward, `generate`)
        gives the target the other columns, with the attention mask of the whole prompt. Where padding stands the
        cache holds zeros. A prompt so short that nothing is left to map is read by the target here.

        Args:
            input_ids: `(batch, columns)`, the prompt. May be left out when `source_cache` is given and no first tokens
                are to be read by the target (`num_sinks=0`).
            attention_mask: `(batch, columns)`; zero at padding, which may stand anywhere.
            source_cache: the source's cache of the prompt, if it has read it already. It may be shorter than the
                prompt (the target runs the rest) or longer (further columns are not used, and the report says so).
            target_model: the model to go on with.
            source_attention_mask: `(batch, source columns)`, the mask under which the source read, where it is not
                the beginning of `attention_mask` (another padding side). Tokens are matched by their rank in the row.
            target_cache: a cache of the target that holds the first columns of the prompt already, in the same layout;
                the columns that follow are appended to it in place, and it is returned.
            policy: used instead of the bridge's own.
            request_id: stands in the events and decides whether the request is shadowed.

        Returns:
            A [`BridgedCache`], its `.report` a [`HandoffReport`]; or `target_cache`, the report then in `last_report`.

        Raises:
            KVBridgeError: the pair, the tokens and the cache do not fit (with `on_failure="prefill"` the target reads
                the columns itself instead), or the arguments cannot work together (always).
            HandoffRejected: a gate rejected, and the policy says `on_rejection="error"` or there are no `input_ids`.
        """
        policy = self.policy if policy is None else policy
        if target_model is None:
            raise GenerateArgumentError("handoff() needs target_model=, the model that goes on from the cache.")
        if input_ids is None and source_cache is None:
            raise GenerateArgumentError("handoff() needs input_ids, source_cache or both.")
        start = 0 if target_cache is None else int(target_cache.get_seq_length())
        cache = self.attempt(
            target_model,
            input_ids,
            attention_mask,
            source_cache,
            source_attention_mask,
            target_cache=target_cache if start > 0 else None,
            policy=policy,
            request_id=request_id,
        )
        if input_ids is not None and (cache is None or cache.get_seq_length() == 0):
            part = "own_prefill" if cache is None else "native_prefix"
            return self._read_natively(target_model, input_ids, attention_mask, target_cache, policy, part)
        assert cache is not None
        if target_cache is None:
            return cache
        cache.write_into(target_cache)
        return target_cache

    @torch.no_grad()
    def attempt(
        self,
        target_model: PreTrainedModel,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        source_cache: Cache | None = None,
        source_attention_mask: torch.Tensor | None = None,
        *,
        target_cache: Cache | None = None,
        policy: HandoffPolicy,
        request_id: str | None = None,
    ) -> BridgedCache | None:
        """As [`handoff`], for a caller whose target can still read the prompt.

        Args:
            target_cache: a cache of the target that holds columns already; the result begins after them.

        Returns:
            None where the policy wants the target's own prefill; `last_report` says why.
        """
        report = self._local.report = HandoffReport()
        failure: Exception | None = None
        try:
            gate = HandoffGate(policy.gates, self.mapper.config, report)
            cache, handed = self.prepare(
                target_model,
                input_ids,
                attention_mask,
                source_cache,
                source_attention_mask,
                target_cache,
                policy,
                gate,
            )
            if handed is not None:
                apply_native_parts(cache, handed, self.source_model, target_model, self.mapper, policy, report)
                judge(gate, cache, handed, self.source_model, target_model, policy, request_id)
            # A failing map must not surprise the target in the middle of its first forward.
            return cache.map_all() if policy.on_failure == "prefill" else cache
        except Exception as error:
            failure = error
            wanted = policy.on_rejection if isinstance(error, HandoffRejected) else policy.on_failure
            # Without tokens there is nothing to fall back to, and wrong arguments stay wrong.
            final = not isinstance(error, FALLBACK_ERRORS) or isinstance(error, GenerateArgumentError)
            if wanted == "error" or input_ids is None or final:
                raise
            self._fall_back(error, report)
            return None
        finally:
            rows = None if input_ids is None else input_ids.shape[0]
            emit(handoff_event(report, batch_size=rows, request_id=request_id, error=failure), policy.on_event)
            failure = None  # it holds this frame, and with it the caches

    def _fall_back(self, error: Exception, report: HandoffReport) -> None:
        report.status = "fallback"
        report.reason = f"{type(error).__name__}: {error}"
        report.tokens_native += report.tokens_mapped
        report.tokens_mapped = 0
        kind = report.gate or type(error).__name__
        with self._lock:
            new = kind not in self._warned
            self._warned.add(kind)
        if new:
            warnings.warn(
                f"The target reads the prompt itself, as the handoff failed. {report.reason} (Shown once for each "
                "kind of failure; every report says it.)",
                HandoffFallbackWarning,
                stacklevel=4,
            )

    def prepare(
        self,
        target: PreTrainedModel,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        source_cache: Cache | None,
        source_mask: torch.Tensor | None,
        target_cache: Cache | None,
        policy: HandoffPolicy,
        gate: HandoffGate,
    ) -> tuple[BridgedCache, Handed | None]:
        """Build the cache of the columns that `target_cache` lacks; nothing is mapped yet. None: nothing has to be."""
        config, report = self.mapper.config, gate.report
        start = 0 if target_cache is None else int(target_cache.get_seq_length())
        mask, source_mask = self._masks(input_ids, attention_mask, source_cache, source_mask, report)
        rotary = self.check_target(target)
        num_sinks, suffix = self.native_parts(policy)
        if start > 0:
            num_sinks = 0  # the first tokens stand in the target's cache
        plan = layout(mask, source_mask, suffix)
        valid, positions = plan.valid[:, start:], plan.position_ids[:, start:]
        report.tokens_mapped = int((valid & (positions >= num_sinks)).sum())
        report.tokens_native = plan.prompt_tokens - report.tokens_mapped
        if report.tokens_mapped == 0:
            return BridgedCache(num_layers=config.target_geometry["num_layers"], report=report), None
        if input_ids is None and num_sinks > 0:
            raise GenerateArgumentError(
                f"The target reads the first {num_sinks} tokens itself and needs input_ids for that. Pass them, or "
                "set HandoffPolicy(num_sinks=0)."
            )

        gate.check_request(mask)
        native = None
        if input_ids is not None:
            columns = slice(plan.num_columns)
            if source_cache is None:
                with report.timed("source_prefill"):
                    source_cache = read_columns(self.source_model, input_ids[:, columns], mask[:, columns])
                gate.check_time()
            if num_sinks > 0:
                with report.timed("native_prefix"):
                    native = read_first_tokens(target, input_ids[:, columns], mask[:, columns], num_sinks)
        assert source_cache is not None
        view = SourceCacheView(source_cache, config.source_geometry, plan.source_stop)
        device = view.layers[0].keys.device
        read = (mask if source_mask is None else source_mask)[:, : plan.source_stop].to(device)
        covered = plan.valid.sum(-1, keepdim=True).to(device)
        seen = read & (positions_from_mask(read) < covered)
        gate.check_source(view, plan.source_stop, seen)
        content, source_columns = read_content(
            self.mapper.method,
            view,
            self._checks.source_rotary,
            read,
            plan,
            start,
            target=target,
            target_rotary=rotary,
            input_ids=input_ids,
            mask=mask,
            report=report,
        )
        prefix = MappedPrefix(
            self.mapper,
            content,
            rotary,
            position_ids=positions.to(target.device),
            valid=valid.to(target.device),
            source_columns=source_columns,
            native=native,
            device=target.device,
            dtype=target.dtype,
            on_mapped=lambda layer, seconds: report.add_time("map", seconds),
        )
        handed = Handed(
            input_ids,
            mask,
            start,
            plan.num_columns,
            valid,
            positions,
            num_sinks,
            view,
            seen,
            self._checks.source_rotary,
            target_cache,
        )
        return BridgedCache(prefix, report=report), handed

    def native_parts(self, policy: HandoffPolicy) -> tuple[int, int]:
        """Tokens at the beginning and columns at the end that the target reads itself."""
        config = self.mapper.config
        return policy.wanted("num_sinks", config), policy.wanted("num_native_suffix", config)

    def _masks(
        self,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        source_cache: Cache | None,
        source_mask: torch.Tensor | None,
        report: HandoffReport,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Masks of the prompt and of the source's cache, `(batch, columns)` each, bool; None without such a cache."""
        mask = None if input_ids is None else prompt_mask(input_ids, attention_mask)
        if mask is not None:
            report.tokens_native = int(mask.sum())
        if source_cache is None:
            if source_mask is not None:
                raise GenerateArgumentError("source_attention_mask= describes a source_cache=; none was given.")
            assert mask is not None
            return mask, None
        rows, length = source_length(source_cache, self.mapper.config.source_geometry)
        if source_mask is None:
            whole = mask if mask is not None else attention_mask
            source_mask = torch.ones(rows, length) if whole is None else fit_mask(whole, length)
        if tuple(source_mask.shape) != (rows, length):
            raise CacheMismatchError(
                f"The source cache holds {rows} rows of {length} columns, its mask has shape "
                f"{tuple(source_mask.shape)}. Pass the cache of exactly these prompts, one row each, and the mask "
                "under which the source read them."
            )
        source_mask = source_mask.bool()
        if mask is None:
            mask = source_mask
        elif length > mask.shape[1]:
            further = length - mask.shape[1]
            report.notes.append(f"The source cache holds {further} columns after the prompt; they are not used.")
        return mask, source_mask

    def _read_natively(
        self,
        target: PreTrainedModel,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        target_cache: Cache | None,
        policy: HandoffPolicy,
        part: str,
    ) -> BridgedCache | Cache:
        """The columns that `handoff` gives, read by the target itself: nothing could be mapped, or nothing had to."""
        report = self.last_report
        assert report is not None
        cache = target_cache
        if cache is None:
            num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
            cache = BridgedCache(num_layers=num_layers, report=report)
        mask = prompt_mask(input_ids, attention_mask)
        stop = max(mask.shape[1] - self.native_parts(policy)[1], 0)
        if stop > int(cache.get_seq_length()):
            with report.timed(part):
                read_columns(target, input_ids[:, :stop], mask[:, :stop], cache)
        return cache


__all__ = ["KVBridge"]
