"""Makes `generate()` understand `bridge=`.

`GenerationMixin.generate` gets a thin wrapper. Without `bridge=` it calls the original with what it was given. With
it, the original runs too, with a callable as its own `custom_generate=`: Transformers prepares everything (config,
processors, criteria, the empty cache, the expanded batch), calls us where it would start to decode, we put the
handed-over columns in the cache and let the decoding method that it would have used go on from there.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import (
    Cache,
    DynamicCache,
    GenerationMixin,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.utils import GENERATION_MODES_MAPPING
from transformers.utils import ModelOutput

from .cache_argument import CACHE_ARG, get_cache
from .errors import GenerateArgumentError
from .generation_kvbridge import KVBridge
from .handoff import HandoffReport
from .prompt_layout import fit_mask, left_aligned
from .prompt_reading import read_columns
from .rotary import positions_from_mask

_HOOK_FLAG = "_kvbridge_original"

# Arguments that put something else than tokens before the model; a source that reads tokens has not seen it.
_OTHER_INPUTS = (
    "inputs_embeds",
    "pixel_values",
    "pixel_values_videos",
    "input_features",
    "input_values",
    "encoder_outputs",
)

# Decoding methods that need what only the target's own reading of the prompt gives (its hidden states).
_NEEDS_OWN_PREFILL = ("use_mtp", "assistant_early_exit")


def install() -> None:
    """Wrap `GenerationMixin.generate`; a second call changes nothing."""
    original = GenerationMixin.generate
    if hasattr(original, _HOOK_FLAG):
        return

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        bridge = kwargs.pop("bridge", None)
        if bridge is None:
            return original(self, *args, **kwargs)
        return _generate(self, original, bridge, args, kwargs)

    setattr(generate, _HOOK_FLAG, original)
    GenerationMixin.generate = generate  # type: ignore[method-assign]


def uninstall() -> None:
    """Put Transformers' own `generate` back."""
    GenerationMixin.generate = getattr(GenerationMixin.generate, _HOOK_FLAG, GenerationMixin.generate)  # type: ignore


def _generate(
    model: PreTrainedModel,
    original: Callable[..., Any],
    bridge: KVBridge,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if not isinstance(bridge, KVBridge):
        raise GenerateArgumentError(f"bridge= must be a KVBridge, got {type(bridge).__name__}.")
    names = list(inspect.signature(original).parameters)[1:]  # without self
    kwargs.update(zip(names, args, strict=False))
    _refuse(model, kwargs)
    decoding = _BridgedDecoding(model, bridge, kwargs)
    output = original(model, custom_generate=decoding.decode, **kwargs)
    return decoding.finish(output)


def _refuse(model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    if model.config.is_encoder_decoder:
        raise GenerateArgumentError(
            f"{type(model).__name__} is an encoder-decoder model. Use bridge= with decoder-only models."
        )
    for name in _OTHER_INPUTS:
        if kwargs.get(name) is not None:
            raise GenerateArgumentError(
                f"generate(bridge=...) hands over what was read from input_ids; {name}= is not supported. Leave "
                "bridge= out, or pass tokens only."
            )
    if isinstance(kwargs.get("custom_generate"), str):
        raise GenerateArgumentError(
            f"custom_generate={kwargs['custom_generate']!r} replaces generate() as a whole and cannot be combined "
            "with bridge=. Pass a callable, or call bridge.handoff() and give its cache to that repository's generate."
        )
    config = kwargs.get("generation_config")
    if kwargs.get("token_healing", getattr(config, "token_healing", False)):
        raise GenerateArgumentError(
            "token_healing=True rewrites the end of the prompt, which the source has read as it was. Leave it out."
        )
    if kwargs.get("cache_implementation") == "paged":
        raise GenerateArgumentError(
            "cache_implementation='paged' (continuous batching) keeps its own cache and cannot take a handoff."
        )


class _BridgedDecoding:
    """One `generate(bridge=...)` call: its arguments, and what is done when Transformers is ready to decode.

    Takes out of `kwargs` what Transformers does not know or would not pass on to a `custom_generate` callable.
    """

    def __init__(self, model: PreTrainedModel, bridge: KVBridge, kwargs: dict[str, Any]):
        self.bridge = bridge
        self.source_cache: Cache | None = kwargs.pop("source_cache", None)
        self.source_mask: torch.Tensor | None = kwargs.pop("source_attention_mask", None)
        self.request_id: str | None = kwargs.pop("request_id", None)
        self.own_cache = get_cache(kwargs) is not None
        self.report: HandoffReport | None = None
        self.prompt: torch.Tensor | None = None  # the caller's columns, where they were turned
        # generate() reads the first three itself, but passes none of these on to a callable.
        self.mode_kwargs = {name: kwargs.get(name) for name in ("synced_gpus", "assistant_model", "streamer")}
        self.mode_kwargs |= {name: kwargs.pop(name, None) for name in ("tokenizer", "assistant_tokenizer")}
        self.custom: Callable[..., Any] | None = kwargs.pop("custom_generate", None)
        self.custom_kwargs: dict[str, Any] = {}
        if self.custom is not None:
            usual = inspect.signature(GenerationMixin._sample).parameters
            own = [name for name in inspect.signature(self.custom).parameters if name not in usual]
            self.custom_kwargs = {name: kwargs.pop(name) for name in own if name in kwargs}
        self._take_stop_strings(model, kwargs)
        self._turn_explicit(kwargs)

    def _take_stop_strings(self, model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
        """Make criteria of stop strings: with a callable, `generate` loses the tokenizer that it makes them with."""
        tokenizer, config = self.mode_kwargs["tokenizer"], kwargs.get("generation_config")
        defaults: Any = model.generation_config
        given = [
            kwargs.get("stop_strings"),
            getattr(config, "stop_strings", None),
            getattr(defaults, "stop_strings", None),
        ]
        strings = next((entry for entry in given if entry is not None), None)
        if strings is None or tokenizer is None:
            return
        criteria = kwargs.get("stopping_criteria") or []
        kwargs["stopping_criteria"] = StoppingCriteriaList([*criteria, StopStringCriteria(tokenizer, strings)])
        if given[1] is not None:
            kwargs["generation_config"] = copy.deepcopy(config)
            kwargs["generation_config"].stop_strings = None
        if given[0] is not None or given[2] is not None:
            kwargs["stop_strings"] = None  # what is passed here counts most

    def _turn_explicit(self, kwargs: dict[str, Any]) -> None:
        """Turn a batch that is padded on the right, and check the positions that came with it."""
        name = "input_ids" if kwargs.get("input_ids") is not None else "inputs"
        ids, mask = kwargs.get(name), kwargs.get("attention_mask")
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
            return
        positions = kwargs.get("position_ids")
        if positions is not None:
            real = torch.ones_like(ids) if mask is None else mask
            if positions.shape != real.shape or bool(((positions_from_mask(real) != positions) & real.bool()).any()):
                raise GenerateArgumentError(
                    "generate(bridge=...) takes positions from the attention mask (cumsum - 1); the position_ids= "
                    "given differ. Leave them out."
                )
            kwargs.pop("position_ids")
        if mask is None:
            return
        if mask.shape != ids.shape:
            raise GenerateArgumentError(
                f"attention_mask has shape {tuple(mask.shape)} and input_ids {tuple(ids.shape)}. With bridge= pass "
                "the whole prompt, also where a cache holds its beginning."
            )
        order = left_aligned(mask)
        if order is not None:
            kwargs[name], kwargs["attention_mask"] = self._turn(ids, mask, order)

    def _turn(self, ids: torch.Tensor, mask: torch.Tensor, order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.prompt = ids
        if self.source_cache is not None and self.source_mask is None:
            self.source_mask = fit_mask(mask, int(self.source_cache.get_seq_length()))
        return ids.gather(1, order.to(ids.device)), mask.gather(1, order)

    def decode(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        inputs_tensor: torch.Tensor | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """The `custom_generate` callable: called with everything prepared, the batch expanded, the cache empty."""
        if not generation_config.use_cache or get_cache(model_kwargs) is None:
            raise GenerateArgumentError(
                "generate(bridge=...) hands over a cache; use_cache=False leaves no place for it."
            )
        for name in _NEEDS_OWN_PREFILL:
            if getattr(generation_config, name, None):
                raise GenerateArgumentError(
                    f"{name} drafts from the target's own reading of the prompt, which a handoff spares. Leave it out."
                )
        method, method_kwargs = self._decoding_method(model, generation_config)
        if "inputs_tensor" in inspect.signature(method).parameters:
            method_kwargs["inputs_tensor"] = inputs_tensor

        expand = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        input_ids = self._turn_inferred(input_ids, model_kwargs, expand)
        self._fill(model, input_ids, model_kwargs, expand)
        _read_in_chunks(model, input_ids, model_kwargs, generation_config)
        if method is getattr(type(model), "_assisted_decoding", None):
            model = _Prefilled(model)  # type: ignore[assignment]
        return method(
            model,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            **method_kwargs,
            **model_kwargs,
        )

    def _decoding_method(self, model: Any, generation_config: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The method that `generate` would have called, and its arguments of the mode."""
        if self.custom is not None:
            return self.custom, dict(self.custom_kwargs)
        mode = generation_config.get_generation_mode(self.mode_kwargs["assistant_model"])
        name = GENERATION_MODES_MAPPING[mode]
        if "/" in name:
            raise GenerateArgumentError(
                f"{mode.value} lives in the Hub repository {name} and brings its own loop, which cannot start from a "
                "handed-over cache. Use greedy search, sampling, beam search or assisted decoding."
            )
        given = {key: value for key, value in self.mode_kwargs.items() if value is not None}
        model._validate_generation_mode(mode, generation_config, given)
        method = getattr(type(model), name)
        known = inspect.signature(method).parameters
        return method, {key: value for key, value in given.items() if key in known}

    def _turn_inferred(self, input_ids: torch.Tensor, model_kwargs: dict[str, Any], expand: int) -> torch.Tensor:
        """Turn a batch whose padding on the right `generate` itself has inferred from the pad token."""
        mask = model_kwargs.get("attention_mask")
        order = None if mask is None or mask.shape != input_ids.shape else left_aligned(mask)
        if order is None:
            return input_ids
        assert mask is not None
        ids, mask = self._turn(input_ids, mask, order)
        self.prompt = input_ids[::expand]
        if self.source_mask is not None:
            self.source_mask = self.source_mask[:: self.source_mask.shape[0] // self.prompt.shape[0]]
        model_kwargs["attention_mask"] = mask
        if model_kwargs.get("position_ids") is not None:
            model_kwargs["position_ids"] = positions_from_mask(mask)
        return ids

    def _fill(
        self, model: PreTrainedModel, input_ids: torch.Tensor, model_kwargs: dict[str, Any], expand: int
    ) -> None:
        """Put the handed-over columns in the cache that the decoding method will use.

        Without a handoff (a fallback) the cache stays as it is, and the method prefills as it always does.
        """
        cache, mask = get_cache(model_kwargs), model_kwargs.get("attention_mask")
        assert cache is not None
        policy = self.bridge.policy
        suffix = policy.num_native_suffix
        suffix = self.bridge.mapper.config.num_native_suffix if suffix is None else suffix
        bridged = self.bridge.attempt(
            model,
            input_ids[::expand],  # one of each expanded group: source and mapper work on the batch as it was given
            None if mask is None else mask[::expand],
            self.source_cache,
            self.source_mask,
            target_cache=cache if int(cache.get_seq_length()) > 0 else None,
            policy=replace(policy, num_native_suffix=max(suffix, 1)),
            request_id=self.request_id,
        )
        self.report = self.bridge.last_report
        if bridged is None or bridged.get_seq_length() == 0:
            return
        if type(cache) is DynamicCache and not self.own_cache:
            if expand > 1:
                bridged.batch_repeat_interleave(expand)
            bridged.take_offloading(cache)
            model_kwargs[CACHE_ARG] = bridged
        else:
            bridged.write_into(cache, repeats=expand)

    def finish(self, output: Any) -> Any:
        """Give the output the caller's columns and the report."""
        if self.prompt is not None:
            sequences = output if isinstance(output, torch.Tensor) else output.sequences
            prompt = self.prompt.to(sequences.device)
            repeats = sequences.shape[0] // prompt.shape[0]
            sequences[:, : prompt.shape[1]] = prompt.repeat_interleave(repeats, dim=0)
        if isinstance(output, ModelOutput):
            output.handoff_report = self.report
        return output


def _read_in_chunks(
    model: PreTrainedModel, input_ids: torch.Tensor, model_kwargs: dict[str, Any], generation_config: Any
) -> None:
    """Read what follows a handed-over cache in chunks of `prefill_chunk_size`, all but the last chunk.

    Releases up to 5.17 read the whole prompt again when a cache that holds tokens meets this setting.
    """
    cache = get_cache(model_kwargs)
    chunk = getattr(generation_config, "prefill_chunk_size", None)
    if chunk is None or cache is None or int(cache.get_seq_length()) == 0:
        return
    mask = model_kwargs.get("attention_mask")
    if mask is None:
        mask = torch.ones_like(input_ids)
    while input_ids.shape[1] - int(cache.get_seq_length()) > chunk:
        stop = int(cache.get_seq_length()) + chunk
        read_columns(model, input_ids[:, :stop], mask[:, :stop].bool(), cache)
    generation_config.prefill_chunk_size = None


class _Prefilled:
    """A model as assisted decoding should see it when its cache is filled already.

    `_assisted_decoding` gives the model the whole prompt in its first step, whatever the cache holds (transformers
    issue 31644). All that differs here is the number of columns that step prepares.
    """

    def __init__(self, model: Any):
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, next_sequence_length: int | None = None, **kwargs: Any
    ) -> Any:
        cache = get_cache(kwargs)
        if next_sequence_length is None and cache is not None and int(cache.get_seq_length()) > 0:
            next_sequence_length = input_ids.shape[1] - int(cache.get_seq_length())
        return self._model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=next_sequence_length, **kwargs
        )


__all__ = ["install", "uninstall"]
