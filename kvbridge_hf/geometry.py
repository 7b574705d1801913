"""What a model's KV cache looks like, and why two models fit together or do not.

Both are read from configs: a folder's `config.json`, a loaded config or a model give the same answer, and nothing here
loads weights.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from . import config_facts as facts
from .config_facts import FULL_ATTENTION, SLIDING_ATTENTION, text_config
from .errors import PairMismatchError, UnsupportedModelError
from .rotary_kinds import describe_rotary, rotary_problem
from .tokenizer_facts import compare_tokenizers, tokenizer_facts

# Model families pad their embedding tables differently (Qwen2.5: 151,936 and 152,064 rows for one tokenizer).
_VOCABULARY_PADDING = 1024


@dataclass(frozen=True)
class KVGeometry:
    """Shape and position encoding of one model's KV cache.

    Args:
        model_type (`str`): `model_type` of the text decoder.
        num_layers (`int`): Decoder layers, each with one K and one V tensor in the cache.
        num_kv_heads, head_dim (`int`): One layer's K is `(batch, num_kv_heads, tokens, head_dim)`.
        num_query_heads, hidden_size, vocab_size (`int`): As in the config.
        layer_types (`tuple[str, ...]`): One name a layer, in Transformers' newest spelling.
        rotary_layers (`tuple[bool, ...]`): False where a layer's keys are not rotated (SmolLM3's every fourth layer).
        rotary (`dict`): `rope_type` (`"none"` without rotation), `rope_theta`, `partial_rotary_factor`, `interleaved`
            (None if the modelling file does not say) and `scaling` (the other rope parameters); with `rope_type`
            `"per_layer_type"` a dict `per_layer_type` holds these facts for each layer type.
        max_position_embeddings (`int`, *optional*): Longest sequence the model was made for.
        cache (`dict`): What else decides whether a cache can be handed over: `is_encoder_decoder`, `kv_lora_rank`,
            `value_head_dim`, `sliding_window`, `shared_kv_layers`, `uniform_layers`.
    """

    model_type: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_query_heads: int
    hidden_size: int
    vocab_size: int
    layer_types: tuple[str, ...]
    rotary_layers: tuple[bool, ...]
    rotary: dict[str, Any]
    max_position_embeddings: int | None = None
    cache: dict[str, Any] = field(default_factory=dict)

    @property
    def kv_width(self) -> int:
        """Width of one layer's K (or V) over all heads, `num_kv_heads * head_dim`."""
        return self.num_kv_heads * self.head_dim

    @classmethod
    def of(cls, model_or_config: Any) -> KVGeometry:
        """Geometry of a model, a config, a geometry's dict or a geometry (returned as it is)."""
        if isinstance(model_or_config, KVGeometry):
            return model_or_config
        if isinstance(model_or_config, dict):
            return cls.from_dict(model_or_config)
        if isinstance(model_or_config, PreTrainedConfig):
            return cls.from_config(model_or_config)
        return cls.from_model(model_or_config)

    @classmethod
    def from_model(cls, model: nn.Module) -> KVGeometry:
        """Geometry of a loaded model; see [`~KVGeometry.from_config`]."""
        config = getattr(model, "config", None)
        if not isinstance(config, PreTrainedConfig):
            raise UnsupportedModelError(
                f"A {type(model).__name__} has no Transformers config. Pass a Transformers causal LM or its config."
            )
        return cls.from_config(config)

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> KVGeometry:
        """Geometry of the text decoder that a config describes.

        What cannot be handed over (a sliding window, a compressed cache) is recorded here and not refused, so that
        [`check_pair`] can name everything at once.

        Raises:
            UnsupportedModelError: If the config is not one of a decoder with attention of one shape in every layer.
        """
        text = text_config(config)
        num_layers = facts.number(text, "num_hidden_layers")
        num_heads = facts.number(text, "num_attention_heads")
        hidden_size = facts.number(text, "hidden_size")
        head_dim = facts.optional(text, "head_dim") or hidden_size // num_heads
        layer_types = facts.layer_types(text, num_layers)
        rotary = facts.rotary_facts(config)
        return cls(
            model_type=text.model_type,
            num_layers=num_layers,
            num_kv_heads=facts.num_kv_heads(text, num_heads),
            head_dim=head_dim,
            num_query_heads=num_heads,
            hidden_size=hidden_size,
            vocab_size=facts.number(text, "vocab_size"),
            layer_types=layer_types,
            rotary_layers=facts.rotary_layers(text, layer_types, rotary, num_layers),
            rotary=rotary,
            max_position_embeddings=facts.optional(text, "max_position_embeddings"),
            cache={
                "is_encoder_decoder": bool(config.is_encoder_decoder or text.is_encoder_decoder),
                "kv_lora_rank": facts.optional(text, "kv_lora_rank"),
                "value_head_dim": facts.optional(text, "v_head_dim") or head_dim,
                "sliding_window": facts.optional(text, "sliding_window"),
                "shared_kv_layers": facts.shared_kv_layers(text),
                "uniform_layers": facts.has_uniform_layers(text),
            },
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; [`~KVGeometry.from_dict`] gives an equal geometry back."""
        data = dataclasses.asdict(self)
        data["layer_types"] = list(self.layer_types)
        data["rotary_layers"] = list(self.rotary_layers)
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> KVGeometry:
        """Inverse of [`~KVGeometry.to_dict`].

        Raises:
            UnsupportedModelError: If a field is missing or unknown.
        """
        known = {entry.name for entry in dataclasses.fields(cls)}
        missing = known - {"max_position_embeddings", "cache"} - set(data)
        unknown = set(data) - known
        if missing or unknown:
            raise UnsupportedModelError(
                f"Not a KVGeometry: fields {sorted(missing)} are missing and {sorted(unknown)} are unknown. Use the "
                "dict that KVGeometry.to_dict() gives."
            )
        data = dict(data)
        data["layer_types"] = tuple(data["layer_types"])
        data["rotary_layers"] = tuple(bool(flag) for flag in data["rotary_layers"])
        return cls(**data)


@dataclass(frozen=True)
class PairReason:
    """One difference between source and target: where, both values, what it means and what can be done."""

    field: str
    source: Any
    target: Any
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field} (source: {self.source}, target: {self.target}): {self.message}. {self.remedy}"


@dataclass(frozen=True)
class PairCheck:
    """Verdict on a pair: a sequence of the reasons against it, so an empty one is a pair that fits.

    Args:
        reasons (`tuple[PairReason, ...]`): What forbids a handoff.
        notes (`tuple[PairReason, ...]`): What is worth knowing and forbids nothing, such as unequal head counts.
    """

    reasons: tuple[PairReason, ...] = ()
    notes: tuple[PairReason, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing forbids a handoff."""
        return not self.reasons

    def __iter__(self) -> Iterator[PairReason]:
        return iter(self.reasons)

    def __len__(self) -> int:
        return len(self.reasons)

    def raise_if_unfit(self) -> None:
        """Raises:
        PairMismatchError: With all reasons, if there are any.
        """
        if self.reasons:
            lines = "\n".join(f"- {reason}" for reason in self.reasons)
            raise PairMismatchError(f"Source and target do not fit together:\n{lines}", self.reasons)

    def describe(self) -> str:
        """All reasons and notes, one a line."""
        lines = ["The pair fits." if self.ok else "The pair does not fit:"]
        lines += [f"- {reason}" for reason in self.reasons]
        if self.notes:
            lines += ["Notes:", *(f"- {note}" for note in self.notes)]
        return "\n".join(lines)


def check_pair(
    source: Any, target: Any, *, source_tokenizer: Any | None = None, target_tokenizer: Any | None = None
) -> PairCheck:
    """Every reason why a cache of `source` cannot be handed to `target`.

    Unequal depths, head counts and widths are no reasons, as a mapper takes care of them; they are noted.

    Args:
        source, target: Each a model, a config or a [`KVGeometry`].
        source_tokenizer, target_tokenizer: The tokenizers. If one is missing, only the vocabulary sizes of the configs
            are compared, and a note says so.

    Returns:
        [`PairCheck`]. Nothing is raised for a pair that does not fit; see [`PairCheck.raise_if_unfit`].
    """
    pair = _Pair()
    unreadable: dict[str, UnsupportedModelError] = {}
    for role, side in (("source", source), ("target", target)):
        try:
            pair.sides[role] = KVGeometry.of(side)
        except UnsupportedModelError as error:
            unreadable[role] = error
    for problem in unreadable.values():
        values = {"source": _name_of(source), "target": _name_of(target)}
        remedy = "Use a decoder-only model with ordinary attention in every layer."
        pair.reasons.append(PairReason("config", **values, message=str(problem).rstrip("."), remedy=remedy))
    pair.check_cache_kinds()
    pair.check_layer_types()
    pair.check_rotary()
    if len(pair.sides) == 2:
        if source_tokenizer is None or target_tokenizer is None:
            pair.check_vocabulary_sizes()
        else:
            pair.check_tokenizers(source_tokenizer, target_tokenizer)
        pair.note_sizes()
    return PairCheck(tuple(pair.reasons), tuple(pair.notes))


class _Pair:
    """Collects reasons and notes about the geometries that could be read, by role."""

    def __init__(self) -> None:
        self.sides: dict[str, KVGeometry] = {}
        self.reasons: list[PairReason] = []
        self.notes: list[PairReason] = []

    def values(self, read: Callable[[KVGeometry], Any]) -> dict[str, Any]:
        """One fact of both sides; None for a side whose geometry could not be read."""
        return {role: read(self.sides[role]) if role in self.sides else None for role in ("source", "target")}

    def _blame(self, at_fault: list[str]) -> str:
        return "both models have" if len(at_fault) == 2 else f"the {at_fault[0]} has"

    def check_cache_kinds(self) -> None:
        """Encoder-decoder, compressed (MLA), shared and non-uniform caches."""
        decoders = "Use a decoder-only model."
        plain = "Use a model that caches keys and values themselves (multi-head or grouped-query attention)."
        kinds = (
            ("is_encoder_decoder", bool, "an encoder, whose output a decoder's cache does not hold", decoders),
            ("kv_lora_rank", bool, "a compressed cache (multi-head latent attention, as DeepSeek)", plain),
            ("shared_kv_layers", bool, "layers that read another layer's keys and values", plain),
            ("uniform_layers", lambda value: value is False, "layers with KV of different shapes", plain),
        )
        for name, is_bad, message, remedy in kinds:
            values = self.values(lambda side: side.cache.get(name))  # noqa: B023, read at once
            bad = [role for role, value in values.items() if is_bad(value)]
            if bad:
                self.reasons.append(PairReason(name, **values, message=f"{self._blame(bad)} {message}", remedy=remedy))
        # With MLA the widths always differ, and the reason is given above.
        bad = [role for role, side in self.sides.items() if _value_head_dim(side) != side.head_dim]
        bad = [role for role in bad if not self.sides[role].cache.get("kv_lora_rank")]
        if bad:
            values = self.values(lambda side: f"keys {side.head_dim}, values {_value_head_dim(side)}")
            message = f"{self._blame(bad)} keys and values of different widths"
            self.reasons.append(PairReason("value_head_dim", **values, message=message, remedy=plain))

    def check_layer_types(self) -> None:
        """Every layer must keep keys and values of all tokens."""
        values = self.values(_describe_layers)
        bad = [role for role, side in self.sides.items() if set(_limiting_layers(side)) - {FULL_ATTENTION}]
        if bad:
            self.reasons.append(
                PairReason(
                    "layer_types",
                    **values,
                    message=f"{self._blame(bad)} layers that do not keep the keys and values of all tokens",
                    remedy=(
                        "Use a model with full attention in every layer. A model with a sliding window in all layers "
                        "can be loaded without it (from_pretrained(..., sliding_window=None)), which is exact for "
                        "sequences no longer than the window."
                    ),
                )
            )
        windowed = [role for role, side in self.sides.items() if set(side.layer_types) != {FULL_ATTENTION}]
        wide = [role for role in windowed if role not in bad]
        if wide:
            message = f"{self._blame(wide)} a window as long as its longest sequence, which cuts nothing"
            self.notes.append(PairReason("layer_types", **values, message=message, remedy="Nothing to do."))

    def check_rotary(self) -> None:
        """Both rotations must depend on a token's position alone."""
        values = self.values(lambda side: describe_rotary(side.rotary, side.layer_types, side.rotary_layers))
        problems = {role: rotary_problem(side.rotary, side.layer_types) for role, side in self.sides.items()}
        for role, problem in problems.items():
            if problem is not None:
                message, remedy = problem
                self.reasons.append(PairReason("rotary", **values, message=f"the {role}'s {message}", remedy=remedy))
        if len(self.sides) == 2 and not any(problems.values()) and values["source"] != values["target"]:
            message = "the rotations differ; keys are mapped without rotation, so this costs nothing"
            self.notes.append(PairReason("rotary", **values, message=message, remedy="Nothing to do."))

    def check_tokenizers(self, source_tokenizer: Any, target_tokenizer: Any) -> None:
        """Same ids for the same text."""
        source, target = tokenizer_facts(source_tokenizer), tokenizer_facts(target_tokenizer)
        reasons, notes = compare_tokenizers(source, target)
        self.reasons += [PairReason(**entry) for entry in reasons]
        self.notes += [PairReason(**entry) for entry in notes]
        used = 1 + max((*source.vocabulary.values(), *target.vocabulary.values()), default=-1)
        bad = [role for role, side in self.sides.items() if side.vocab_size < used]
        if bad and not reasons:
            values = self.values(lambda side: side.vocab_size)
            message = f"{self._blame(bad)} no embedding for all of the tokenizer's {used} ids"
            remedy = "Call resize_token_embeddings on it, or use the tokenizer it was trained with."
            self.reasons.append(PairReason("vocab_size", **values, message=message, remedy=remedy))

    def check_vocabulary_sizes(self) -> None:
        """Without tokenizers, sizes that no padding explains mean two different tokenizers."""
        values = self.values(lambda side: side.vocab_size)
        if abs(values["source"] - values["target"]) > _VOCABULARY_PADDING:
            message = "vocabularies of so different sizes belong to different tokenizers"
            remedy = (
                "Use two models of one tokenizer family. If the tokenizers are in fact the same, pass both as "
                "source_tokenizer and target_tokenizer, and they are compared themselves."
            )
            self.reasons.append(PairReason("vocab_size", **values, message=message, remedy=remedy))
        else:
            message = "the tokenizers were not compared"
            remedy = "Pass source_tokenizer and target_tokenizer to be sure that both read the same token ids."
            self.notes.append(PairReason("tokenizer", **values, message=message, remedy=remedy))

    def note_sizes(self) -> None:
        """Differences that a mapper bridges."""
        bridged = {
            "num_layers": "each target layer reads the source layers selected for it",
            "num_kv_heads": "full-head maps read all source heads; head-local maps assign one to each target head",
            "head_dim": "the map's weights are rectangular",
            "hidden_size": "only keys and values are mapped, so the models' widths do not matter",
        }
        for name, message in bridged.items():
            values = self.values(attrgetter(name))
            if values["source"] != values["target"]:
                self.notes.append(PairReason(name, **values, message=message, remedy="Nothing to do."))
        limits = self.values(lambda side: side.max_position_embeddings)
        known = [limit for limit in limits.values() if limit is not None]
        if limits["source"] != limits["target"] and known:
            message = f"a handed-over context is limited by the shorter of the two, {min(known)} tokens"
            remedy = "Keep prompts below it."
            self.notes.append(PairReason("max_position_embeddings", **limits, message=message, remedy=remedy))


def _name_of(model_or_config: Any) -> str:
    """Model type of anything that `KVGeometry.of` takes."""
    config = getattr(model_or_config, "config", model_or_config)
    return str(getattr(config, "model_type", type(model_or_config).__name__))


def _value_head_dim(geometry: KVGeometry) -> int:
    return geometry.cache.get("value_head_dim", geometry.head_dim)


def _limiting_layers(geometry: KVGeometry) -> list[str]:
    """Layer types, with windows that never cut anything counted as full attention."""
    window, longest = geometry.cache.get("sliding_window"), geometry.max_position_embeddings
    never_cuts = window is not None and longest is not None and window >= longest
    return [FULL_ATTENTION if name == SLIDING_ATTENTION and never_cuts else name for name in geometry.layer_types]


def _describe_layers(geometry: KVGeometry) -> str:
    counts = ", ".join(f"{count} x {name}" for name, count in Counter(geometry.layer_types).items())
    window = geometry.cache.get("sliding_window")
    return f"{counts}, window {window}" if SLIDING_ATTENTION in geometry.layer_types else counts
