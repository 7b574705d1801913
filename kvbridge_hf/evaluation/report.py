"""A judgement as one JSON-able dict and as Markdown."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from ..geometry import KVGeometry
from .bootstrap import Interval, PairedBootstrap
from .controls import as_handoff
from .judge import CONDITIONS, Judge, Judgement
from .latency import measure_latency
from .retention import floor_normalised_retention, gap_recovered, retention
from .scoring import Scores

LABELS = {
    "target": "target alone",
    "handoff": "handoff",
    "source": "source alone",
    "unmapped": "unmapped control",
    "mismatched": "another prompt's cache",
    "native_only": "native parts only",
    "no_context": "no context",
}
# suite -> (metric in the report, column of the scores, whether more is better)
METRICS = {
    "documents": (("kl", "kl", False), ("nll", "nll", False), ("top1", "top1", True)),
    "questions": (
        ("accuracy", "correct", True),
        ("answer_kl", "kl", False),
        ("answer_nll", "nll", False),
        ("answer_top1", "top1", True),
    ),
}


def build_report(
    judgement: Judgement,
    *,
    latency: dict[str, Any] | None = None,
    num_resamples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
    include_items: bool = False,
) -> dict[str, Any]:
    """Makes intervals and ratios of what was measured.

    Args:
        judgement: from [`Judge.judge`].
        latency: from [`measure_latency`], to stand in the same report.
        num_resamples, confidence, seed: of the paired bootstrap. Documents are drawn one by one and weighted by their
            tokens; questions are drawn context by context.
        include_items: also give every question's and document's score.

    Returns:
        `pair`, `data`, `bootstrap`, `handoffs` (prompts per status), `headline` (share of the gap recovered,
        retention), `conditions` (every metric of every condition), `comparisons` (paired differences to the other
        conditions), `kinds` (accuracy by kind of question), `answers` (which answers changed), `cost` (shares of the
        target's prefill), `latency`, `r2`. What is undefined is None, or says why under `undefined`.
    """
    judge = judgement.judge
    report: dict[str, Any] = {
        "pair": {"source": _describe(judge.source_model), "target": _describe(judge.target_model)},
        "data": _describe_data(judgement),
        "bootstrap": {"num_resamples": num_resamples, "confidence": confidence, "seed": seed},
        "handoffs": dict(judgement.statuses),
        "headline": {},
        "conditions": {name: {} for name in CONDITIONS if _has(judgement, name)},
        "comparisons": {},
        "undefined": dict(judgement.undefined),
    }
    samplers: dict[str, tuple[PairedBootstrap, Any]] = {}
    for suite, scores in judgement.scores.items():
        if suite == "documents":
            groups, weights = None, scores["target"].items["tokens"]
        else:
            groups, weights = [question.context for question in judge.questions], None
        count = len(scores["target"].items["kl"])
        sampler = PairedBootstrap(count, groups, num_resamples, confidence, seed)
        samplers[suite] = (sampler, weights)
        for name, one in scores.items():
            entry = report["conditions"][name]
            for metric, column, _ in METRICS[suite]:
                entry[metric] = _brief(sampler.mean_interval(one.items[column], weights))
            entry["attention_cosine" if suite == "documents" else "answer_attention_cosine"] = one.cosine
        _add_headline(report["headline"], suite, scores, sampler, weights)
        _add_comparisons(report["comparisons"], suite, scores, sampler, weights)
        report["bootstrap"][f"{suite}_items"] = sampler.num_items
        report["bootstrap"][f"{suite}_groups"] = sampler.num_groups
    if "questions" in judgement.scores:
        sampler = samplers["questions"][0]
        report["kinds"] = _by_kind(judgement, num_resamples, confidence, seed)
        report["answers"] = _answer_changes(judgement.scores["questions"])
    report["cost"] = _cost(judgement)
    report["latency"] = latency
    if include_items:
        report["items"] = {
            suite: {name: {key: column.tolist() for key, column in one.items.items()} for name, one in scores.items()}
            for suite, scores in judgement.scores.items()
        }
    report["r2"] = judgement.r2
    return _plain(report)


def judge_handoff(
    source_model: Any,
    target_model: Any,
    handoff: Any,
    *,
    questions: Any = (),
    documents: Any = (),
    tokenizer: Any = None,
    latency_prompt: Any = None,
    latency_repeats: int = 20,
    batch_size: int = 32,
    num_resamples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
    include_items: bool = False,
) -> dict[str, Any]:
    """Judges one handoff and gives its report; to compare several of one pair, share a [`Judge`].

    Args:
        source_model, target_model: the pair.
        handoff: a mapper, a bridge, or any [`Handoff`].
        questions, documents, tokenizer, batch_size: see [`Judge`].
        latency_prompt: `(batch, tokens)` ids for which the four latency paths are timed; None leaves them out.
        latency_repeats, num_resamples, confidence, seed, include_items: see [`measure_latency`], [`build_report`].
    """
    handoff = as_handoff(source_model, target_model, handoff)
    judge = Judge(
        source_model,
        target_model,
        questions=questions,
        documents=documents,
        tokenizer=tokenizer,
        batch_size=batch_size,
    )
    judgement = judge.judge(handoff)
    latency = None
    if latency_prompt is not None:
        latency = measure_latency(source_model, target_model, handoff, latency_prompt, repeats=latency_repeats)
    return build_report(
        judgement,
        latency=latency,
        num_resamples=num_resamples,
        confidence=confidence,
        seed=seed,
        include_items=include_items,
    )


def _has(judgement: Judgement, condition: str) -> bool:
    return any(condition in scores for scores in judgement.scores.values())


def _describe(model: Any) -> dict[str, Any]:
    geometry = KVGeometry.from_model(model)
    return {
        "name": str(getattr(model, "name_or_path", "") or type(model).__name__),
        "architecture": type(model).__name__,
        "parameters": int(sum(parameter.numel() for parameter in model.parameters())),
        "layers": geometry.num_layers,
        "kv_heads": geometry.num_kv_heads,
        "head_dim": geometry.head_dim,
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def _describe_data(judgement: Judgement) -> dict[str, Any]:
    judge = judgement.judge
    data: dict[str, Any] = {}
    if judge.questions:
        contexts = {question.context for question in judge.questions}
        data["questions"] = len(judge.questions)
        data["contexts"] = len(contexts)
        data["context_tokens"] = sum(map(len, contexts)) / len(contexts)
        data["chance"] = sum(1 / len(question.choices) for question in judge.questions) / len(judge.questions)
        data["kinds"] = dict(Counter(question.kind for question in judge.questions))
    if judge.documents:
        count = len(judge.documents)
        data["documents"] = count
        data["prefix_tokens"] = sum(len(document.prefix) for document in judge.documents) / count
        data["continuation_tokens"] = sum(len(document.continuation) for document in judge.documents) / count
    return data


def _brief(interval: Interval) -> dict[str, Any]:
    """Estimate and bounds; seed and counts are the same for all and stand once, under `bootstrap`."""
    brief: dict[str, Any] = {"estimate": interval.estimate, "low": interval.low, "high": interval.high}
    if interval.undefined_resamples:
        brief["undefined_resamples"] = interval.undefined_resamples
    return brief


def _add_headline(
    headline: dict[str, Any], suite: str, scores: dict[str, Scores], sampler: PairedBootstrap, weights: Any
) -> None:
    """Share of the gap recovered and retention, with the scores they are made of beside them."""
    prefix = {"accuracy": "", "nll": "nll_", "answer_nll": "answer_nll_"}
    for metric, column, higher in METRICS[suite]:
        if metric not in prefix:
            continue
        columns = {name: scores[name].items[column] for name in ("handoff", "target", "source", "no_context")}
        beside = {name: sampler.mean(values, weights) for name, values in columns.items()}

        def ratio(statistic: Callable[..., Any], *names: str, columns=columns, beside=beside) -> dict[str, Any]:
            interval = sampler.interval(statistic, *[columns[name] for name in names], weights=weights)
            return {**_brief(interval), **{name: beside[name] for name in names}}

        headline[f"{prefix[metric]}gap_recovered"] = ratio(
            lambda h, t, s, higher=higher: gap_recovered(h, t, s, higher_is_better=higher),
            "handoff",
            "target",
            "source",
        )
        if metric == "accuracy":
            headline["retention"] = ratio(retention, "handoff", "target")
            headline["floor_normalised_retention"] = ratio(
                floor_normalised_retention, "handoff", "target", "no_context"
            )


def _add_comparisons(
    comparisons: dict[str, Any], suite: str, scores: dict[str, Scores], sampler: PairedBootstrap, weights: Any
) -> None:
    """Paired differences between the handoff and every other condition, and whether their interval excludes zero."""
    for metric, column, higher in METRICS[suite]:
        for name, other in scores.items():
            # The target's distance from itself is zero by definition and says nothing.
            if name == "handoff" or (name == "target" and column in ("kl", "top1")):
                continue
            difference = sampler.difference_interval(scores["handoff"].items[column], other.items[column], weights)
            entry = _brief(difference)
            if difference.low is not None and difference.high is not None:
                sign = 1.0 if higher else -1.0
                worst, best = sorted((sign * difference.low, sign * difference.high))
                entry["handoff_is"] = "better" if worst > 0 else "worse" if best < 0 else "not apart"
            comparisons.setdefault(name, {})[metric] = entry


def _by_kind(judgement: Judgement, num_resamples: int, confidence: float, seed: int) -> dict[str, Any]:
    """Accuracy of every condition on each kind of question, and the share of the gap recovered there."""
    questions, scores = judgement.judge.questions, judgement.scores["questions"]
    kinds: dict[str, Any] = {}
    for kind in sorted({question.kind for question in questions}):
        members = [index for index, question in enumerate(questions) if question.kind == kind]
        sampler = PairedBootstrap(
            len(members), [questions[index].context for index in members], num_resamples, confidence, seed
        )
        columns = {name: one.items["correct"][members] for name, one in scores.items()}
        kinds[kind] = {
            "questions": len(members),
            "accuracy": {name: _brief(sampler.mean_interval(column)) for name, column in columns.items()},
            "gap_recovered": _brief(
                sampler.interval(gap_recovered, *[columns[name] for name in ("handoff", "target", "source")])
            ),
        }
    return kinds


def _answer_changes(scores: dict[str, Scores]) -> dict[str, float]:
    """Equal accuracy hides answers that flipped both ways; these are counted here."""
    own, handed = scores["target"].items, scores["handoff"].items
    right, right_after = own["correct"] > 0, handed["correct"] > 0
    return {
        "same_choice": float(np.mean(own["choice"] == handed["choice"])),
        "lost": int((right & ~right_after).sum()),
        "gained": int((~right & right_after).sum()),
        "questions": int(right.size),
    }


def _cost(judgement: Judgement) -> dict[str, Any]:
    native = judgement.native
    cost: dict[str, Any] = {"native_token_share": native["tokens"] / native["of"] if native.get("of") else None}
    if judgement.cost is None:
        return {**cost, "share_of_prefill": None, "why": "the handoff has no flops(num_tokens)"}
    return {
        **cost,
        "share_of_prefill": judgement.cost["total"],
        "map_share": judgement.cost["map"],
        "native_share": judgement.cost["native"],
        "repair_share": judgement.cost["repair"],
        "choice_share": judgement.cost["choice"],
        "source_prefill_share": judgement.cost["source_prefill"],
    }


def _plain(value: Any) -> Any:
    """Plain JSON types; NaN and infinities, which JSON does not know, become None."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, (np.floating, float)):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, np.integer):
        return int(value)
    return value
