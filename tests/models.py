"""Small random models of real architectures, for all tests.

`tiny_model("qwen3")` gives a float32 model in eval mode on the CPU, the same one for the same arguments. The weights
are not the library defaults: with `std=0.02` and unit norms attention is almost uniform and a lost bias or norm weight
goes unnoticed. Here projections keep the scale of their input, and norm weights and biases are random.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

# name -> model_type and the config fields that make the architecture what it is
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "ministral3": {"model_type": "ministral3", "sliding_window": None},
    "olmo2": {"model_type": "olmo2"},
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 2},
    "phi3": {"model_type": "phi3", "sliding_window": None, "partial_rotary_factor": 0.5, "pad_token_id": 0},
    "glm": {"model_type": "glm", "partial_rotary_factor": 0.5},
    "cohere": {"model_type": "cohere", "use_qk_norm": True, "logit_scale": 0.5},
}

# One example of each scaling. The original lengths are small, so that positions above 4,096 are far beyond them.
ROPE_SCALING: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 512,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
}


def tiny_config(
    arch: str,
    *,
    num_layers: int = 3,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    hidden_size: int | None = None,
    vocab_size: int = 96,
    rope: str | dict[str, Any] | None = None,
    max_position_embeddings: int = 8192,
    **overrides: Any,
) -> PreTrainedConfig:
    """Config of a tiny model.

    Args:
        arch: A key of [`ARCHITECTURES`].
        num_layers, num_heads, num_kv_heads, head_dim, vocab_size, max_position_embeddings: Sizes.
        hidden_size: Default `num_heads * head_dim`, the only choice that every architecture takes.
        rope: A key of [`ROPE_SCALING`] or a whole `rope_parameters` dict; None leaves the architecture's default.
        overrides: Any other config field.
    """
    fields = copy.deepcopy(ARCHITECTURES[arch])
    model_type = fields.pop("model_type")
    fields.update(
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=num_heads * head_dim if hidden_size is None else hidden_size,
        intermediate_size=2 * num_heads * head_dim,
        vocab_size=vocab_size,
        max_position_embeddings=max_position_embeddings,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    if rope is not None:
        parameters = copy.deepcopy(ROPE_SCALING[rope] if isinstance(rope, str) else rope)
        if "partial_rotary_factor" in fields:
            parameters.setdefault("partial_rotary_factor", fields["partial_rotary_factor"])
        if arch == "ministral3" and parameters["rope_type"] == "yarn":
            # The published models scale queries by position (Llama 4's temperature); keep that in the tests.
            parameters.setdefault("llama_4_scaling_beta", 0.1)
        elif arch == "ministral3":
            parameters.setdefault("llama_4_scaling_beta", 0.0)
            parameters.setdefault("original_max_position_embeddings", 512)
        fields["rope_parameters"] = parameters
    fields.update(overrides)
    return AutoConfig.for_model(model_type, **fields)


@torch.no_grad()
def randomize_(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Fill all parameters in place with seeded values of a useful scale (see the module's docstring)."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        if "norm" in name and name.endswith("weight"):
            value = 1.0 + 0.2 * noise
        elif parameter.ndim < 2:
            value = 0.3 * noise
        elif "embed" in name:
            value = noise
        else:
            value = noise * (1.5 * parameter.shape[-1] ** -0.5)
        parameter.copy_(value)
    return model


def tiny_model(arch: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> PreTrainedModel:
    """Random model of a named architecture; see [`tiny_config`] for the keyword arguments."""
    config = tiny_config(arch, **overrides)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize_(model, seed)
    return model.to(dtype).eval() if dtype != torch.float32 else model.eval()
