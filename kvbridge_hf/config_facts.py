"""What a Transformers config says about a decoder's KV cache, in one spelling for all architectures and releases.

Only [`KVGeometry`] uses these functions. Each answers one question; none of them loads weights.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from .errors import UnsupportedModelError

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"

# Older names of layer types; Transformers renamed them between the releases that this library supports.
_LAYER_TYPE_NAMES = {
    "attention": FULL_ATTENTION,
    "mamba": "linear_attention",
    "recurrent": "linear_attention",
    "deepseek_sparse_attention": "indexed_attention",
    "qwen_sparse_attention": "indexed_attention",
}

# State-space parts that a config without `layer_types` gives away by its own fields.
_RECURRENT_FIELDS = ("mamba_d_state", "mamba_d_ssm", "ssm_cfg", "linear_num_key_heads")

# Models whose full-attention layers are not rotated although the config has rope parameters.
_ROTATES_SLIDING_LAYERS_ONLY = ("cohere2", "cohere2_moe", "afmoe")
_ROTATES_SLIDING_LAYERS_ONLY_IF_ANY = ("exaone4", "exaone_moe")


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of a config that describes the text decoder: the config itself, or a multimodal wrapper's text part."""
    return config.get_text_config(decoder=True)


def decoder_of(model: Any) -> nn.Module:
    """The text decoder inside a causal LM, a multimodal wrapper or a PEFT model: the module that holds the layers."""
    if hasattr(model, "get_base_model"):  # PEFT
        model = model.get_base_model()
    return model.get_decoder() if hasattr(model, "get_decoder") else model


def decoder_layers(model: Any) -> nn.ModuleList:
    """The text decoder's layers, in order.

    Raises:
        UnsupportedModelError: If no list with one module per layer of the config is found.
    """
    num_layers = number(text_config(model.config), "num_hidden_layers")
    for module in decoder_of(model).modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise UnsupportedModelError(
        f"{type(model).__name__} has no list of {num_layers} decoder layers, so its attention modules cannot be "
        "found. Pass the causal LM itself (AutoModelForCausalLM), not a wrapper of another library."
    )


def modeling_module(config_or_model: PreTrainedConfig | nn.Module) -> Any | None:
    """The Python module that defines the decoder's attention, or None if no class is registered for the config."""
    if isinstance(config_or_model, nn.Module):
        return sys.modules.get(type(decoder_of(config_or_model)).__module__)
    for config in (text_config(config_or_model), config_or_model):
        for auto_class in (AutoModelForCausalLM, AutoModelForImageTextToText):
            if type(config) in auto_class._model_mapping:
                return sys.modules[auto_class._model_mapping[type(config)].__module__]
    return None


def optional(config: PreTrainedConfig, name: str, default: Any = None) -> Any:
    """`getattr`, also for configs that refuse to give a field because it differs from layer to layer."""
    try:
        return getattr(config, name, default)
    except Exception as error:
        raise UnsupportedModelError(
            f"In models of type {config.model_type!r} {name} differs from layer to layer. A mapper needs one KV "
            "shape for all layers; use a model that has one."
        ) from error


def number(config: PreTrainedConfig, name: str) -> int:
    """An integer field that every decoder with a KV cache has.

    Raises:
        UnsupportedModelError: If it is missing or differs from layer to layer.
    """
    value = optional(config, name)
    if not isinstance(value, int):
        raise UnsupportedModelError(
            f"The config of model type {config.model_type!r} has {name}={value!r}. A KV cache can only be handed over "
            "between decoders with attention of one shape in every layer, whose configs have one number there."
        )
    return value


def num_kv_heads(config: PreTrainedConfig, num_heads: int) -> int:
    """KV heads per layer, as in the cache (Falcon's and GPT-BigCode's multi-query flags included)."""
    if config.model_type == "falcon" and not config.new_decoder_architecture:
        return 1 if config.multi_query else num_heads
    for name in ("num_key_value_heads", "num_kv_heads"):
        if optional(config, name) is not None:
            return number(config, name)
    return 1 if optional(config, "multi_query", False) else num_heads


def layer_types(config: PreTrainedConfig, num_layers: int) -> tuple[str, ...]:
    """Layer types as `DynamicCache` derives them: from the config's list if there is one, else from window fields."""
    types = optional(config, "layer_types") or optional(config, "layers_block_type")
    if types is not None:
        return tuple(_LAYER_TYPE_NAMES.get(name, name) for name in types)
    if any(optional(config, name) is not None for name in _RECURRENT_FIELDS):
        return ("hybrid",) * num_layers
    if optional(config, "sliding_window") is not None and optional(config, "use_sliding_window", True):
        return (SLIDING_ATTENTION,) * num_layers
    if optional(config, "attention_chunk_size") is not None:
        return ("chunked_attention",) * num_layers
    return (FULL_ATTENTION,) * num_layers


def shared_kv_layers(config: PreTrainedConfig) -> int:
    """How many layers read another layer's K and V instead of having their own (Gemma 3n)."""
    modes = optional(config, "kv_sharing_modes")
    if modes is not None:
        return sum(mode == "reuse" for mode in modes)
    return optional(config, "num_kv_shared_layers") or 0


def has_uniform_layers(config: PreTrainedConfig) -> bool:
    """False if some layers have another KV head count or head_dim than the config's main fields say."""
    pairs = (
        ("head_dim", "global_head_dim"),
        ("head_dim", "swa_head_dim"),
        ("num_key_value_heads", "num_global_key_value_heads"),
        ("num_key_value_heads", "swa_num_key_value_heads"),
    )
    return all(optional(config, other) in (None, optional(config, main)) for main, other in pairs)


def rotary_facts(config: PreTrainedConfig) -> dict[str, Any]:
    """Kind and parameters of the rotation of the keys; the fields are listed at [`KVGeometry`]."""
    text = text_config(config)
    parameters = optional(text, "rope_parameters")
    stated = optional(text, "position_embedding_type", "rope")
    if stated not in ("rope", "rotary") or optional(text, "alibi", False):
        return {"rope_type": "none", "position_embedding_type": "alibi" if optional(text, "alibi", False) else stated}
    if not parameters:
        if optional(text, "rotary_dim") is not None:  # GPT-J and CodeGen rotate without the shared rope machinery
            return {"rope_type": "unknown", "rotary_dim": text.rotary_dim}
        return {"rope_type": "none"}
    interleaved = _is_interleaved(config)
    nested = {key: value for key, value in parameters.items() if isinstance(value, dict) and "rope_type" in value}
    if nested:
        by_type = {_LAYER_TYPE_NAMES.get(key, key): _one_rotary(value, text) for key, value in sorted(nested.items())}
        return {"rope_type": "per_layer_type", "interleaved": interleaved, "per_layer_type": by_type}
    return {**_one_rotary(parameters, text), "interleaved": interleaved}


def _one_rotary(parameters: dict[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    named = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
    partial = parameters.get("partial_rotary_factor") or optional(config, "partial_rotary_factor") or 1.0
    scaling = {key: value for key, value in sorted(parameters.items()) if key not in named and value is not None}
    return {
        "rope_type": parameters.get("rope_type", parameters.get("type", "default")),
        "rope_theta": float(parameters["rope_theta"]),
        "partial_rotary_factor": float(partial),
        "scaling": scaling,
    }


def _is_interleaved(config: PreTrainedConfig) -> bool | None:
    rotate_half = getattr(modeling_module(config), "rotate_half", None)
    if rotate_half is None:
        return None
    # rotate_half sends a channel pair (a, b) to (-b, a), so channel 0 shows its partner: 1, or half the width.
    return bool(rotate_half(torch.arange(4.0))[0] == -1.0)


def rotary_layers(
    config: PreTrainedConfig, types: tuple[str, ...], rotary: dict[str, Any], num_layers: int
) -> tuple[bool, ...]:
    """Which layers rotate their keys."""
    if rotary["rope_type"] == "none":
        return (False,) * num_layers
    flags = optional(config, "no_rope_layers")
    if flags:  # SmolLM3 and Llama 4: despite the name, 1 means that the layer does rotate
        return tuple(bool(flag) for flag in flags[:num_layers])
    if rotary["rope_type"] == "per_layer_type":
        return tuple(name in rotary["per_layer_type"] for name in types)
    sliding = tuple(name == SLIDING_ATTENTION for name in types)
    if config.model_type in _ROTATES_SLIDING_LAYERS_ONLY:
        return sliding
    if config.model_type in _ROTATES_SLIDING_LAYERS_ONLY_IF_ANY and optional(config, "sliding_window") is not None:
        return sliding
    return (True,) * num_layers
