"""Which rotations of the keys can be taken off again, and how to name a rotation in one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Rotations that are a function of the position alone, so that they can be taken off and put on token by token.
FIXED_ROPE_TYPES = ("none", "default", "linear", "llama3", "yarn", "proportional")
# Rotations whose frequencies depend on the length of the whole sequence.
LENGTH_DEPENDENT_ROPE_TYPES = ("dynamic", "longrope", "su")


def rotary_by_layer_type(rotary: dict[str, Any], layer_types: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Rotary facts of each layer type in use, from the facts of [`KVGeometry`]."""
    if rotary["rope_type"] != "per_layer_type":
        return {name: rotary for name in sorted(set(layer_types))}
    missing = {"rope_type": "none"}
    return {name: rotary["per_layer_type"].get(name, missing) for name in sorted(set(layer_types))}


def rotary_problem(rotary: dict[str, Any], layer_types: Sequence[str]) -> tuple[str, str] | None:
    """Why a model's keys cannot be taken into content space, as (message, remedy); None if they can."""
    for facts in rotary_by_layer_type(rotary, layer_types).values():
        kind = facts["rope_type"]
        if kind in LENGTH_DEPENDENT_ROPE_TYPES:
            return (
                f"rotation of kind {kind!r} depends on the length of the whole sequence and not on a token's position "
                "alone, so the rotation inside a cached key cannot be known afterwards",
                "Use a checkpoint with a fixed rotation (default, linear, llama3 or yarn), or set such "
                "rope_parameters in its config if it was trained with them.",
            )
        if kind not in FIXED_ROPE_TYPES:
            return (
                f"rotation of kind {kind!r} is not known to depend on a token's position alone",
                f"Use a model with one of {', '.join(FIXED_ROPE_TYPES)}.",
            )
    return None


def describe_rotary(rotary: dict[str, Any], layer_types: Sequence[str], rotary_layers: Sequence[bool]) -> str:
    """Kind and parameters of a rotation in one line."""
    if rotary["rope_type"] == "per_layer_type":
        return "; ".join(
            f"{n}: {_describe_one(facts)}" for n, facts in rotary_by_layer_type(rotary, layer_types).items()
        )
    unrotated = list(rotary_layers).count(False) if rotary["rope_type"] != "none" else 0
    return _describe_one(rotary) + (f", {unrotated} layers without" if unrotated else "")


def _describe_one(facts: dict[str, Any]) -> str:
    parts = [facts["rope_type"]]
    if "rope_theta" in facts:
        parts.append(f"theta {facts['rope_theta']:g}")
    if facts.get("partial_rotary_factor", 1.0) != 1.0:
        parts.append(f"{facts['partial_rotary_factor']:g} of each head")
    if facts.get("interleaved"):
        parts.append("interleaved")
    scaling = {key: value for key, value in facts.get("scaling", {}).items() if not isinstance(value, (list, dict))}
    return ", ".join(parts + [f"{key} {value}" for key, value in scaling.items()])
