"""The model card of a mapper, made from its config and from nothing else.

No number stands in a card that does not stand in the config: sizes follow from the geometries, the fit's facts are
`config.fit`, results are `config.evaluation` (see `card_metrics`), thresholds are `config.gates`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from ..bundled import folder_of
from ..configuration_kvbridge import KVBridgeConfig
from .card_metrics import condition_table, is_number, results_of, to_eval_result, to_row

LIBRARY_NAME = "kvbridge_hf"
TAGS = ("kvbridge", "kv-cache")
CITATIONS = {
    "ridge": "Affine maps between KV caches by ridge regression on content-space keys: Heo et al., arXiv:2608.03893.",
    "head_local": "Head-local support: Qu et al., arXiv:2609.00891.",
    "sensitivity": "Receiver-sensitivity weights: Qu et al., arXiv:2609.00891.",
    "fuser": "A learned fuser of source's and target's caches: C2C (Cache-to-Cache), Fu et al., arXiv:2510.03215.",
    "repair": "Recomputing single tokens of a cache in one pass: CacheBlend, Yao et al., arXiv:2405.16444.",
}

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_REPO_ID_PLACEHOLDER = "path/or/id/of/this/mapper"
_TEMPLATE = "mapper_card.md.jinja"
_EXAMPLE = "The keeper of the lighthouse writes in his diary every evening. Tonight"


def create_model_card(
    config: KVBridgeConfig,
    *,
    repo_id: str | None = None,
    source_id: str | None = None,
    target_id: str | None = None,
    num_parameters: int | None = None,
    num_bytes: int | None = None,
    has_custom_generate: bool = False,
    license: str | None = None,
    tags: Sequence[str] = (),
    example: str = _EXAMPLE,
) -> ModelCard:
    """Build the card of a mapper.

    Args:
        config: the mapper's config.
        repo_id: where the mapper will live; stands in the snippets.
        source_id, target_id: Hub ids of the two models, where the fingerprints know them under another name.
        num_parameters, num_bytes: size of the mapper.
        has_custom_generate: whether the artifact carries `custom_generate/generate.py`.
        license: licence of the mapper's weights; it depends on those of the two models, so there is no default.
        tags: further tags.
        example: the prompt in the snippets.
    """
    source = _describe_model(config.source_fingerprint, config.source_geometry, source_id)
    target = _describe_model(config.target_fingerprint, config.target_geometry, target_id)
    results = results_of(config.evaluation)
    conditions, condition_rows = condition_table(config.evaluation)
    title = f"{source['short_name']} to {target['short_name']}"
    base_models = [model["name"] for model in (source, target) if model["is_known"]]
    card_data = ModelCardData(
        library_name=LIBRARY_NAME,
        license=license,
        base_model=base_models or None,
        base_model_relation="adapter" if base_models else None,
        tags=[*TAGS, *tags],
        model_name=title if results else None,
        eval_results=[to_eval_result(result) for result in results] or None,
        # The tags that the Hub makes of base_model do not say which of the two is which.
        kvbridge={"source": source["name"], "target": target["name"], "method": config.method},
    )
    return ModelCard.from_template(
        card_data,
        template_path=str(template_path()),
        title=title,
        repo_id=repo_id or _REPO_ID_PLACEHOLDER,
        source=source,
        target=target,
        has_custom_generate=has_custom_generate,
        map_facts=_map_facts(config, num_parameters, num_bytes),
        # Settings of networks say nothing about another map.
        fit_facts=[fact for fact in _facts(config.fit) if config.method == "mlp" or not fact[0].startswith("mlp_")],
        results=[to_row(result) for result in results],
        conditions=conditions,
        condition_rows=condition_rows,
        evaluation_command=config.evaluation.get("command"),
        gate_facts=_facts(config.gates),
        verdict=config.evaluation.get("verdict"),
        position_limit=(
            f"Positions from {config.max_calibrated_positions:,} on were not seen in calibration."
            if config.max_calibrated_positions
            else "It is not recorded up to which position this mapper was calibrated."
        ),
        num_sinks=config.num_sinks,
        num_native_suffix=config.num_native_suffix,
        native_fraction=config.native_fraction,
        native_layers=config.native_layers,
        citations=_citations(config) or ["See the documentation of the method."],
    )


def template_path() -> Path:
    """The card's Jinja template, in `hub_cards/` of a checkout or in the installed package.

    Raises:
        BundledFileError: the installation lacks it.
    """
    return folder_of("hub_cards", "hub_cards/templates", _TEMPLATE, "the templates of model cards") / _TEMPLATE


def _citations(config: KVBridgeConfig) -> list[str]:
    repairs = "repair" if config.native_fraction > 0 else None
    keys = (config.method, config.support, config.fit.get("weighting"), repairs)
    return [CITATIONS[key] for key in keys if key in CITATIONS]


def public_name(name: str | None) -> tuple[str, bool]:
    """Return a model's name as the world may see it, and whether it looks like a Hub id.

    A model that was loaded from a folder is known by the folder's path. Only its last part is shown.
    """
    if name and _REPO_ID.fullmatch(name):
        return name, "/" in name
    last = re.split(r"[/\\]", name.rstrip("/\\"))[-1] if name else ""
    return last or "unnamed model", False


def _describe_model(
    fingerprint: Mapping[str, Any], geometry: Mapping[str, Any], known_id: str | None
) -> dict[str, Any]:
    name, is_known = (known_id, True) if known_id else public_name(fingerprint.get("name_or_path"))
    revision = fingerprint.get("revision")
    return {
        "name": name,
        "is_known": is_known,
        "short_name": name.rsplit("/", 1)[-1],
        "link": f"[{name}](https://huggingface.co/{name})" if is_known else f"`{name}`",
        "revision": f"`{revision}`" if revision else "not recorded",
        "revision_argument": f', revision="{revision}"' if revision and is_known else "",
        "architecture": fingerprint.get("architecture") or geometry.get("model_type") or "not recorded",
        "shape": " x ".join(str(geometry.get(field)) for field in ("num_layers", "num_kv_heads", "head_dim")),
        "digest": f"`{str(fingerprint['kv_projections'])[:16]}`"
        if fingerprint.get("kv_projections")
        else "not recorded",
    }


def _map_facts(config: KVBridgeConfig, num_parameters: int | None, num_bytes: int | None) -> list[tuple[str, str]]:
    supports = {"full_head": "all source heads feed every target head", "head_local": "assigned source heads only"}
    facts = [
        ("method", config.method),
        ("support", f"{config.support}: {supports.get(config.support, '')}"),
        ("source layers per target layer", str(config.top_k)),
    ]
    if num_parameters is not None:
        facts.append(("parameters", f"{num_parameters:,}"))
    if num_bytes is not None:
        facts.append(("size", f"{num_bytes / 2**20:,.2f} MiB"))
    return facts


def _facts(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            facts += [(f"{name}: {inner}", _text(entry)) for inner, entry in value.items() if _is_plain(entry)]
            facts += [(f"{name}: {inner}", _summary(entry)) for inner, entry in value.items() if _is_numbers(entry)]
        elif _is_plain(value):
            facts.append((name, _text(value)))
        elif _is_numbers(value):
            facts.append((name, _summary(value)))
    return facts


def _is_plain(value: Any) -> bool:
    return value is not None and isinstance(value, (str, bool, int, float))


def _is_numbers(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0 and all(map(is_number, value))


def _summary(values: Sequence[float]) -> str:
    return f"mean {sum(values) / len(values):.4f}, minimum {min(values):.4f} over {len(values)} values"


def _text(value: Any) -> str:
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
