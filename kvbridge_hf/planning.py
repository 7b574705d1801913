"""What a pair costs before anything is loaded: mapper, handoff and calibration, from two configs.

`kvbridge plan` prints [`plan_pair`]. Counts of weights and caches are exact. FLOPs are those of matrix products (all
experts of a mixture), with a multiplication and an addition counted as two. Memory is what the own planner of the
calibration expects.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from .calibration.memory_plan import choose_plan, make_plan
from .calibration.model_size import ModelSize, Workload, count_parameters
from .errors import CalibrationError, FitConfigError, ModelNotFoundError
from .geometry import KVGeometry, check_pair
from .mappers.config import FitConfig
from .published_models import published_config, published_names

SUPPORTS = ("full_head", "head_local")
GIB = 2**30
# Bytes of one number as a mapper or a cache stores it.
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Host memory of a process with Python, PyTorch and Transformers loaded; 0.6 GiB here without CUDA, more with it.
_PROCESS_BYTES = 2 * GIB


def load_config(name_or_config: Any) -> PreTrainedConfig:
    """Config of a model given as a config, a model, a folder, a config file, a known model's name or a Hub id.

    Names of known models ([`published_names`]) need no network. Weights are never downloaded.

    Raises:
        ModelNotFoundError: If there is no such model, or it cannot be reached.
    """
    if isinstance(name_or_config, PreTrainedConfig):
        return name_or_config
    if isinstance(name_or_config, nn.Module):
        return name_or_config.config  # type: ignore[return-value]
    name = str(name_or_config)
    if not Path(name).exists():
        known = published_config(name)
        if known is not None:
            return known
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelNotFoundError(
            f"No config was found for {name!r}: {reason} Give a folder with a config.json, a config file, a Hub id, "
            f"or one of the names known without a network: {', '.join(published_names())}."
        ) from error


@dataclasses.dataclass(frozen=True)
class MapperSize:
    """Weights of a linear mapper, keys and values together.

    Args:
        features (`int`): Inputs of one target head.
        weights, biases (`int`): Numbers stored.
    """

    features: int
    weights: int
    biases: int

    @property
    def parameters(self) -> int:
        """Weights and biases."""
        return self.weights + self.biases

    def flops_per_token(self) -> float:
        """Every weight is multiplied and added once per token."""
        return 2.0 * self.weights


def mapper_size(source: KVGeometry, target: KVGeometry, support: str, top_k: int) -> MapperSize:
    """Size of the mapper of a pair.

    Full-head: a target head reads all source heads of `top_k` layers. Head-local: its matched head alone, or its group
    of `source_heads / target_heads` where the source has more.

    Raises:
        FitConfigError: If the support is unknown or `top_k` does not fit the source.
    """
    if support not in SUPPORTS:
        raise FitConfigError(f"support must be one of {', '.join(SUPPORTS)}, got {support!r}.")
    if not 1 <= top_k <= source.num_layers:
        raise FitConfigError(f"top_k must be between 1 and the source's {source.num_layers} layers, got {top_k}.")
    heads = source.num_kv_heads
    if support == "head_local":
        heads = max(1, -(-source.num_kv_heads // target.num_kv_heads))
    features = top_k * heads * source.head_dim
    outputs = 2 * target.num_layers * target.kv_width
    return MapperSize(features, outputs * features, outputs)


def plan_pair(
    source: Any,
    target: Any,
    support: str = "full_head",
    top_k: int = 8,
    *,
    dtype: str = "float32",
    context: int = 32768,
    num_sequences: int = 500,
    sequence_length: int = 1024,
    batch_size: int = 8,
    token_stride: int = 1,
    memory_budget: int = 80 * GIB,
) -> dict[str, Any]:
    """Sizes, FLOPs and memory of a pair.

    Args:
        source, target: See [`load_config`].
        support, top_k: Of the mapper.
        dtype: In which the mapper is stored.
        context: Tokens handed over, for the FLOPs of handoff and prefill.
        num_sequences, sequence_length, batch_size, token_stride: Calibration data.
        memory_budget: Bytes of the device that calibrates; decides the number of passes of plans b and c.

    Returns:
        Dict of plain JSON types: `source`, `target`, `fits`, `reasons`, `support`, `top_k`, `mapper`, `handoff`,
        `calibration`.

    Raises:
        ModelNotFoundError, UnsupportedModelError, FitConfigError: If there is nothing to plan.
    """
    if dtype not in _BYTES:
        raise FitConfigError(f"dtype must be one of {', '.join(_BYTES)}, got {dtype!r}.")
    configs = {"source": load_config(source), "target": load_config(target)}
    geometries = {role: KVGeometry.from_config(config) for role, config in configs.items()}
    check = check_pair(geometries["source"], geometries["target"])
    sizes = {name: mapper_size(geometries["source"], geometries["target"], name, top_k) for name in SUPPORTS}
    mapper_size(geometries["source"], geometries["target"], support, top_k)  # refuses an unknown support
    models = {role: ModelSize.of(config) for role, config in configs.items()}
    parameters = {role: (model.body_parameters, model.parameters) for role, model in models.items()}
    chosen = sizes[support]
    plans = calibration_plans(
        models["source"],
        models["target"],
        top_k,
        dtype=dtype,
        num_sequences=num_sequences,
        sequence_length=sequence_length,
        batch_size=batch_size,
        token_stride=token_stride,
        memory_budget=memory_budget,
    )
    return {
        **{
            role: _describe_model(name, configs[role], geometries[role], parameters[role])
            for role, name in (("source", source), ("target", target))
        },
        "fits": check.ok,
        "reasons": [str(reason) for reason in check],
        "support": support,
        "top_k": top_k,
        "mapper": {
            "features_per_head": chosen.features,
            "weights": chosen.weights,
            "biases": chosen.biases,
            "parameters": chosen.parameters,
            "bytes": {name: chosen.parameters * size for name, size in _BYTES.items() if name != "float16"},
            "gib": {name: chosen.parameters * size / GIB for name, size in _BYTES.items() if name != "float16"},
            "weights_by_support": {name: size.weights for name, size in sizes.items()},
        },
        "handoff": _handoff(chosen, geometries, parameters, context),
        "calibration": {
            "num_sequences": num_sequences,
            "sequence_length": sequence_length,
            "batch_size": batch_size,
            "token_stride": token_stride,
            "memory_budget": memory_budget,
            "plans": plans,
        },
    }


def calibration_plans(
    source: ModelSize,
    target: ModelSize,
    top_k: int,
    *,
    dtype: str,
    num_sequences: int,
    sequence_length: int,
    batch_size: int,
    token_stride: int,
    memory_budget: int,
) -> list[dict[str, Any]]:
    """The three ways to calibrate, for each support: passes, disk, host and device memory, artifact size, FLOPs.

    A plan that does not fit the budget in any number of passes is given with the number that needs least memory.
    """
    work = Workload(num_sequences, sequence_length, batch_size, token_stride)
    rows = []
    for support in SUPPORTS:
        config = FitConfig(support=support, top_k=top_k, dtype=dtype)
        for name in ("a", "b", "c"):
            try:
                plan = choose_plan(source, target, config, work, memory_budget, name)
                fits = True
            except CalibrationError:
                fits, blocks = False, 1 if name == "a" else target.geometry.num_layers
                plan = make_plan(name, blocks, source, target, config, work)
            device = sum(size for part, size in plan.parts.items() if part != "process")
            # A checkpoint brings one of the two sets of moments to the host, and the mapper is put together there.
            host = _PROCESS_BYTES + max(plan.parts.get("statistics", 0) // 2, plan.artifact)
            rows.append(
                {
                    "support": support,
                    "plan": name,
                    "fits": fits,
                    "passes": plan.passes,
                    "blocks": len(plan.blocks),
                    "device_bytes": device,
                    "device_parts": {part: size for part, size in plan.parts.items() if part != "process"},
                    "host_bytes": host,
                    "disk_bytes": plan.disk,
                    "artifact_bytes": plan.artifact,
                    "flops": plan.flops,
                }
            )
    return rows


def _describe_model(
    name: Any, config: PreTrainedConfig, geometry: KVGeometry, parameters: tuple[int, int]
) -> dict[str, Any]:
    return {
        "name": name if isinstance(name, str) else getattr(config, "_name_or_path", "") or geometry.model_type,
        "model_type": geometry.model_type,
        "parameters": parameters[1],
        "num_layers": geometry.num_layers,
        "num_kv_heads": geometry.num_kv_heads,
        "head_dim": geometry.head_dim,
        "num_query_heads": geometry.num_query_heads,
        "hidden_size": geometry.hidden_size,
        "cache_bytes_per_token": 2 * geometry.num_layers * geometry.kv_width * _BYTES["bfloat16"],
    }


def _handoff(
    mapper: MapperSize, geometries: dict[str, KVGeometry], parameters: dict[str, tuple[int, int]], context: int
) -> dict[str, Any]:
    prefill = {role: _prefill_flops(geometries[role], parameters[role][0], context) for role in geometries}
    mapping = mapper.flops_per_token() * context
    return {
        "context": context,
        "map_flops": mapping,
        "source_prefill_flops": prefill["source"],
        "target_prefill_flops": prefill["target"],
        "map_share_of_target_prefill": mapping / prefill["target"],
        "source_and_map_share_of_target_prefill": (mapping + prefill["source"]) / prefill["target"],
    }


def _prefill_flops(geometry: KVGeometry, body_parameters: int, tokens: int) -> float:
    """Each weight once per token, and causal attention: a token meets half of the context on average, for scores and
    for values."""
    attention = 4.0 * geometry.num_layers * geometry.num_query_heads * geometry.head_dim * tokens * (tokens + 1) / 2
    return 2.0 * body_parameters * tokens + attention


def to_text(plan: dict[str, Any]) -> str:
    """A plan for a terminal."""
    lines = []
    for role in ("source", "target"):
        side = plan[role]
        lines.append(
            f"{role}: {side['name']} ({side['model_type']}, {side['parameters'] / 1e9:.2f} B parameters): "
            f"{side['num_layers']} layers, {side['num_kv_heads']} KV heads of {side['head_dim']}, "
            f"{side['cache_bytes_per_token'] / 1024:.0f} KiB of cache a token in bfloat16"
        )
    lines += ["fits: yes" if plan["fits"] else "fits: no", *(f"  - {reason}" for reason in plan["reasons"])]
    mapper, handoff = plan["mapper"], plan["handoff"]
    lines += [
        f"mapper: {plan['support']}, {plan['top_k']} source layers per target layer, "
        f"{mapper['features_per_head']:,} features per head",
        f"  {mapper['weights']:,} weights + {mapper['biases']:,} biases (keys and values) = "
        f"{mapper['parameters']:,} parameters",
        f"  {mapper['gib']['float32']:.4f} GiB in float32, {mapper['gib']['bfloat16']:.4f} GiB in bfloat16",
        f"  weights by support: {', '.join(f'{k} {v:,}' for k, v in mapper['weights_by_support'].items())}",
        f"handoff of {handoff['context']:,} tokens: {handoff['map_flops']:.3g} FLOPs, "
        f"{100 * handoff['map_share_of_target_prefill']:.1f} % of the target's own prefill "
        f"({handoff['target_prefill_flops']:.3g}); with the source's prefill "
        f"{100 * handoff['source_and_map_share_of_target_prefill']:.1f} %",
    ]
    work = plan["calibration"]
    lines += [
        f"calibration on {work['num_sequences']:,} sequences of {work['sequence_length']:,} tokens, batches of "
        f"{work['batch_size']}, every {work['token_stride']}. token, {work['memory_budget'] / GIB:.0f} GiB a device:",
        "  support     plan  passes      device        host        disk    artifact      FLOPs",
    ]
    for row in work["plans"]:
        sizes = [
            f"{row[name] / GIB:8.2f} GiB" for name in ("device_bytes", "host_bytes", "disk_bytes", "artifact_bytes")
        ]
        note = "" if row["fits"] else "  does not fit one device"
        lines.append(
            f"  {row['support']:<11} {row['plan']:<4} {row['passes']:>7}{''.join(sizes)}  {row['flops']:9.2e}{note}"
        )
    lines.append("  plan a: one pass; b: blocks of target layers; c: the source's keys and values on disk first.")
    return "\n".join(lines)


__all__ = [
    "MapperSize",
    "calibration_plans",
    "count_parameters",
    "load_config",
    "mapper_size",
    "plan_pair",
    "to_text",
]
