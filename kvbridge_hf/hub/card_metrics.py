"""What a card says about results, taken from `config.evaluation` and nowhere else.

`config.evaluation` is a report of `kvbridge_hf.evaluation` (or the parts `headline`, `conditions`, `cost`, `data` and
`bootstrap` of one), a list of single results under `metrics`, or both. `dataset`, `dataset_id`, `dataset_revision`,
`split`, `verdict` and `command` say what it was measured on, what was concluded and how to measure it again.

A single result is a dict with `type` (the metric's name in lower case, such as `"retention"`), `value`, and where
known `name`, `low` and `high` (a confidence interval), `confidence`, `num_items`, `dataset`, `dataset_id`,
`dataset_revision`, `split`, `task`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from huggingface_hub import EvalResult

_NAMES = {
    "gap_recovered": "Share of the gap recovered",
    "retention": "Retention",
    "floor_normalised_retention": "Floor-normalised retention",
    "nll_gap_recovered": "Share of the NLL gap recovered",
    "answer_nll_gap_recovered": "Share of the answers' NLL gap recovered",
    "accuracy": "Answers right",
    "kl": "KL to the target, documents (nats a token)",
    "nll": "NLL, documents (nats a token)",
    "top1": "Top-1 agreement, documents",
    "answer_kl": "KL to the target, answers (nats a token)",
    "answer_nll": "NLL, answers (nats a token)",
    "answer_top1": "Top-1 agreement, answers",
    "share_of_prefill": "Cost as a share of the target's own prefill FLOPs",
}
_CONDITIONS = ("target", "handoff", "source", "unmapped", "mismatched", "native_only", "no_context")
# Metrics of a report that were taken on documents; the others are taken on questions.
_ON_DOCUMENTS = ("kl", "nll", "top1", "nll_gap_recovered")


def results_of(evaluation: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Single results of an evaluation, those with a finite value only.

    Of a report, these are the headline (share of the gap recovered, retention), the handoff's own scores and its cost.
    """
    facts = {name: evaluation.get(name) for name in ("dataset", "dataset_id", "dataset_revision", "split")}
    results = [{**facts, **result} for result in evaluation.get("metrics", [])]
    handoff = (evaluation.get("conditions") or {}).get("handoff") or {}
    for metric, entry in {**(evaluation.get("headline") or {}), **handoff}.items():
        if metric in _NAMES and isinstance(entry, Mapping):
            results.append({**facts, **_of_report(metric, entry, evaluation)})
    cost = (evaluation.get("cost") or {}).get("share_of_prefill")
    results.append({**facts, "type": "share_of_prefill", "value": cost})
    for result in results:
        result["name"] = result.get("name") or _NAMES.get(result["type"], result["type"])
        result["dataset"] = result.get("dataset") or "Evaluation data, not named"
    return [result for result in results if is_number(result.get("value"))]


def condition_table(evaluation: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Every metric of a report (rows) under every condition (columns), as text."""
    conditions = evaluation.get("conditions") or {}
    columns = [name for name in _CONDITIONS if name in conditions]
    metrics = [name for name in _NAMES if any(name in conditions[condition] for condition in columns)]
    rows = []
    for metric in metrics:
        entries = [conditions[condition].get(metric) or {} for condition in columns]
        rows.append([_NAMES[metric], *(_number(entry.get("estimate")) for entry in entries)])
    return ["", *(name.replace("_", " ") for name in columns)], rows


def to_eval_result(result: Mapping[str, Any]) -> EvalResult:
    """One result as the Hub's model-index has it; the interval goes into the metric's arguments."""
    interval = {key: result[key] for key in ("low", "high", "confidence", "num_items") if result.get(key) is not None}
    return EvalResult(
        task_type=result.get("task") or "text-generation",
        dataset_type=result.get("dataset_id") or _slug(result["dataset"]),
        dataset_name=result["dataset"],
        dataset_revision=result.get("dataset_revision"),
        dataset_split=result.get("split"),
        metric_type=result["type"],
        metric_name=result["name"],
        metric_value=result["value"],
        metric_args=interval or None,
    )


def to_row(result: Mapping[str, Any]) -> dict[str, str]:
    """One result as a row of the card's table."""
    low, high, confidence = result.get("low"), result.get("high"), result.get("confidence")
    interval = ""
    if is_number(low) and is_number(high):
        interval = f"{low:.4g} to {high:.4g}" + (f" ({confidence:.0%})" if confidence else "")
    return {
        "name": result["name"],
        "value": _number(result["value"]),
        "interval": interval,
        "dataset": result["dataset"] + (f", {result['split']}" if result.get("split") else ""),
        "count": str(result.get("num_items") or ""),
    }


def is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _of_report(metric: str, entry: Mapping[str, Any], evaluation: Mapping[str, Any]) -> dict[str, Any]:
    bootstrap = evaluation.get("bootstrap") or {}
    suite = "documents" if metric in _ON_DOCUMENTS else "questions"
    return {
        "type": metric,
        "value": entry.get("estimate"),
        "low": entry.get("low"),
        "high": entry.get("high"),
        "confidence": bootstrap.get("confidence"),
        "num_items": bootstrap.get(f"{suite}_items"),
    }


def _number(value: Any) -> str:
    return f"{value:.4g}" if is_number(value) else "undefined"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9/]+", "-", name.lower()).strip("-") or "unnamed"
