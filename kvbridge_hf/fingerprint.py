"""Which checkpoint and which tokenizer a mapper was fitted for.

A mapper turns the cache of one checkpoint into the cache of another. Applied to anything else of the same shape (a
later revision, a fine-tuned variant, another seed) it gives a plausible cache of wrong numbers. So a mapper carries
digests of both models, which depend neither on the dtype a model is loaded in nor on device or Transformers release.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import nn

from .config_facts import decoder_layers, text_config
from .errors import FingerprintError, UnsupportedModelError
from .geometry import KVGeometry
from .tokenizer_facts import tokenizer_facts

logger = logging.getLogger(__name__)

# Parts of a parameter's name that say it takes part in making keys or values; fused projections included.
_KV_NAMES = frozenset(
    ("k_proj", "v_proj", "kv_proj", "qkv_proj", "k_norm", "v_norm", "key_layernorm", "k_layernorm", "key", "value")
    + ("query_key_value", "c_attn", "Wqkv", "qkv", "W_pack", "att_proj", "k", "v")
)
# Config fields beyond the geometry that change what a layer computes.
_CONFIG_FIELDS = ("intermediate_size", "hidden_act", "rms_norm_eps", "layer_norm_eps", "query_pre_attn_scalar")
# What a user may change without making another model: padding of the vocabulary and the longest sequence.
_FREE_GEOMETRY = ("vocab_size", "max_position_embeddings")
_SAMPLES_PER_PARAMETER = 64


def model_fingerprint(model: Any) -> dict[str, str | None]:
    """Digests of a loaded model.

    Args:
        model: A causal LM, a multimodal wrapper or a PEFT model.

    Returns:
        Dict with
        - `config`: SHA-256 of geometry and numerics,
        - `kv_projections`: SHA-256 of all weights that make keys and values, rounded to bfloat16 so that the dtype a
          bfloat16 checkpoint is loaded in does not matter; None if they are quantized or not loaded,
        - `weights_sample`: SHA-256 of some entries of every other weight of the decoder layers (keys and values of a
          layer depend on all layers below it); None if quantized, offloaded or not loaded,
        - `name_or_path`, `revision` (commit hash on the Hub, if known), `architecture`: for messages.
    """
    config = model.config
    quantized = getattr(config, "quantization_config", None) is not None
    layers = decoder_layers(model)
    return {
        "config": _config_digest(model),
        "kv_projections": None if quantized else _kv_digest(layers, type(model).__name__),
        "weights_sample": None if quantized else _sample_digest(layers),
        "name_or_path": getattr(config, "_name_or_path", None) or None,
        "revision": getattr(config, "_commit_hash", None),
        "architecture": text_config(config).model_type,
    }


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 of what decides which ids a text gets; see [`TokenizerFacts.digest`]."""
    return tokenizer_facts(tokenizer).digest()


def check_fingerprint(expected: dict[str, Any], model: Any, role: str) -> None:
    """Make sure that a model is the one a mapper was fitted for.

    Args:
        expected: The mapper's fingerprint for this role. Fields it lacks are not compared.
        model: The loaded model.
        role: `"source"` or `"target"`, for the message.

    Raises:
        FingerprintError: Naming what differs and both checkpoints.
    """
    if not expected:
        logger.warning("The mapper has no fingerprint of its %s model, so it was not compared.", role)
        return
    found = _config_digest(model)
    if expected.get("config") not in (None, found):
        raise FingerprintError(_complaint(expected, model, role, "its config differs (sizes, rotary or layer facts)"))
    fingerprint = model_fingerprint(model)
    meanings = {"kv_projections": "its K and V projection weights differ", "weights_sample": "its weights differ"}
    for name, meaning in meanings.items():
        if expected.get(name) is None or fingerprint[name] is None:
            continue
        if expected[name] != fingerprint[name]:
            raise FingerprintError(_complaint(expected, model, role, meaning))
    if fingerprint["kv_projections"] is None:
        logger.warning(
            "The %s model is quantized or not fully loaded; its weights could not be compared with the mapper's %r.",
            role,
            expected.get("name_or_path"),
        )


def check_tokenizer(expected: str | None, tokenizer: Any) -> None:
    """Make sure that a tokenizer gives the ids a mapper was fitted for.

    Raises:
        FingerprintError: If it does not.
    """
    if expected is not None and tokenizer_fingerprint(tokenizer) != expected:
        name = getattr(tokenizer, "name_or_path", None)
        raise FingerprintError(
            f"The tokenizer {name!r} gives other token ids than the one this mapper was fitted with. Use the "
            "tokenizer of the mapper's source and target models, unchanged (added tokens count)."
        )


def _complaint(expected: dict[str, Any], model: Any, role: str, what: str) -> str:
    config = model.config
    loaded = f"{getattr(config, '_name_or_path', None)!r} at revision {getattr(config, '_commit_hash', None)}"
    fitted = f"{expected.get('name_or_path')!r} at revision {expected.get('revision')}"
    hint = ""
    if getattr(model, "dtype", None) == torch.float16:
        hint = " A float32 checkpoint loaded in float16 is rounded twice and looks different; use bfloat16 or float32."
    return (
        f"The {role} model is not the one this mapper was fitted for: {what}. The mapper's {role} is {fitted}; the "
        f"model loaded is {loaded}. Load that checkpoint and revision, or fit a mapper for this one.{hint}"
    )


def _config_digest(model: Any) -> str:
    facts = KVGeometry.from_model(model).to_dict()
    for name in _FREE_GEOMETRY:
        facts.pop(name)
    config = text_config(model.config)
    facts["numerics"] = {name: getattr(config, name, None) for name in _CONFIG_FIELDS}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _own_parameters(layer: nn.Module) -> Iterator[tuple[nn.Module, list[str]]]:
    """Each submodule with the names, in its layer and without PEFT's wrapping, of the parameters it owns."""
    for prefix, module in sorted(layer.named_modules(), key=lambda item: item[0]):
        owned = sorted(name for name, _ in module.named_parameters(recurse=False))
        if owned:
            parts = [part for part in prefix.split(".") if part and part != "base_layer"]
            yield module, [".".join((*parts, name)) for name in owned]


def _kv_digest(layers: nn.ModuleList, model_name: str) -> str | None:
    digest = hashlib.sha256()
    seen = False
    for index, layer in enumerate(layers):
        for module, names in _own_parameters(layer):
            names = [name for name in names if _KV_NAMES & set(name.split("."))]
            # Weights that Accelerate keeps on disk or in host memory are brought in for a module at a time.
            with align_module_device(module) if names else nullcontext():
                for name in names:
                    weight = getattr(module, name.rpartition(".")[2])
                    if not _is_readable(weight):
                        return None
                    digest.update(f"{index}.{name} {tuple(weight.shape)}".encode())
                    digest.update(_bfloat16_bytes(weight))
                    seen = True
    if not seen:
        raise UnsupportedModelError(
            f"No weights that make keys or values were found in {model_name}. Names containing one of "
            f"{', '.join(sorted(_KV_NAMES))} were looked for; this architecture is not supported."
        )
    return digest.hexdigest()


def _sample_digest(layers: nn.ModuleList) -> str | None:
    digest = hashlib.sha256()
    for index, layer in enumerate(layers):
        for module, names in _own_parameters(layer):
            for name in names:
                weight = getattr(module, name.rpartition(".")[2])
                if not _is_readable(weight):
                    return None
                flat = _local(weight).reshape(-1)
                places = torch.linspace(0, flat.numel() - 1, min(_SAMPLES_PER_PARAMETER, flat.numel()))
                digest.update(f"{index}.{name} {tuple(weight.shape)}".encode())
                digest.update(_bfloat16_bytes(flat[places.long().to(flat.device)]))
    return digest.hexdigest()


def _is_readable(weight: torch.Tensor) -> bool:
    """False for weights on the meta device and for packed or 8-bit ones, whose numbers are not the checkpoint's."""
    return weight.device.type != "meta" and weight.is_floating_point() and weight.element_size() > 1


def _local(weight: torch.Tensor) -> torch.Tensor:
    weight = weight.detach()
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight  # sharded over processes


def _bfloat16_bytes(weight: torch.Tensor) -> bytes:
    rounded = _local(weight).to(torch.bfloat16)
    # float16 holds every bfloat16 number above 2^-17 (and below 65,504) exactly, and only some of the smaller ones.
    rounded = torch.where(rounded.abs() <= 2.0**-17, torch.zeros_like(rounded), rounded).cpu().contiguous()
    return rounded.view(torch.int16).numpy().tobytes()
