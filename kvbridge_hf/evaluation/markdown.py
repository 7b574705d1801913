"""A report in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .report import LABELS


def to_markdown(report: dict[str, Any], title: str | None = None) -> str:
    """Renders a report of [`build_report`] (or the same read back from JSON)."""
    pair, data, bootstrap = report["pair"], report["data"], report["bootstrap"]
    confidence = f"{100 * bootstrap['confidence']:g} %"
    lines = [f"## {title or pair['source']['name'] + ' -> ' + pair['target']['name']}", ""]
    lines += [
        f"{_data_line(data)} Brackets: {confidence} paired bootstrap intervals "
        f"({bootstrap['num_resamples']} resamples, seed {bootstrap['seed']}).",
        "",
    ]
    if fallbacks := {status: count for status, count in report["handoffs"].items() if status != "ok"}:
        told = ", ".join(f"{count} {status}" for status, count in fallbacks.items())
        lines += [f"**Not every prompt was handed over: {told} of {sum(report['handoffs'].values())}.**", ""]
    lines += _headline(report)
    lines += _conditions(report)
    lines += _kinds(report)
    if any("[no interval]" in line for line in lines):
        lines += ["No interval: in too many resamples the ratio has no positive denominator.", ""]
    lines += _rest(report)
    return "\n".join(lines).rstrip() + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; the first column is text, the others numbers."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return ["| " + " | ".join(cells) + " |" for cells in [header, rule, *rows]] + [""]


def number(value: float | None, digits: int = 3, percent: bool = False) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.1f} %" if percent else f"{value:.{digits}f}"


def bracketed(entry: dict[str, Any] | None, digits: int = 3, percent: bool = False) -> str:
    """`estimate [low, high]`, or a dash where there is no estimate."""
    if entry is None or entry.get("estimate") is None:
        return "-"
    estimate = number(entry["estimate"], digits, percent)
    if entry.get("low") is None:
        return f"{estimate} [no interval]"
    scale = 100 if percent else 1
    digits = 1 if percent else digits
    return f"{estimate} [{scale * entry['low']:.{digits}f}, {scale * entry['high']:.{digits}f}]"


def _repair(cost: dict[str, Any]) -> str:
    """What repair adds; reports from before it have no such entry."""
    if not cost.get("repair_share"):
        return ""
    return (
        f"; repair {number(cost['repair_share'], percent=True)}, choosing what to repair "
        f"{number(cost['choice_share'], percent=True)}"
    )


def _data_line(data: dict[str, Any]) -> str:
    parts = []
    if "questions" in data:
        parts.append(
            f"{data['questions']} questions about {data['contexts']} contexts of {data['context_tokens']:.0f} tokens "
            f"on average (chance {number(data['chance'], percent=True)})"
        )
    if "documents" in data:
        parts.append(
            f"{data['documents']} documents, {data['continuation_tokens']:.0f} tokens scored after "
            f"{data['prefix_tokens']:.0f}"
        )
    return "; ".join(parts) + "."


def _headline(report: dict[str, Any]) -> list[str]:
    names = {
        "gap_recovered": "Share of the gap recovered (accuracy)",
        "answer_nll_gap_recovered": "Share of the gap recovered (NLL of the answers)",
        "nll_gap_recovered": "Share of the gap recovered (NLL of the text)",
        "retention": "Retention",
        "floor_normalised_retention": "Floor-normalised retention",
    }
    rows = []
    for key, label in names.items():
        if (entry := report["headline"].get(key)) is None:
            continue
        percent = "nll" not in key
        beside = [number(entry.get(name), percent=percent) for name in ("handoff", "target", "source", "no_context")]
        rows.append([label, bracketed(entry, percent=True), *beside])
    lines = table(["", "value", "handoff", "target", "source", "no context"], rows)
    gap = report["headline"].get("gap_recovered")
    if gap is not None and gap["estimate"] is None:
        lines += ["There is no gap in accuracy to recover: the target alone is not better than the source alone.", ""]
    return lines


def _conditions(report: dict[str, Any]) -> list[str]:
    columns: list[tuple[str, str, bool]] = []
    if "documents" in report["data"]:
        columns += [("kl", "KL to target", False), ("nll", "NLL", False), ("top1", "top-1 agreement", True)]
    if "questions" in report["data"]:
        columns += [("accuracy", "accuracy", True), ("answer_kl", "KL at the answer", False)]
    cosine = "attention_cosine" if "documents" in report["data"] else "answer_attention_cosine"
    rows = []
    for name, label in LABELS.items():
        if name in report["undefined"]:
            rows.append([label, report["undefined"][name], *[""] * len(columns)])
        elif name in report["conditions"]:
            entry = report["conditions"][name]
            cells = [bracketed(entry.get(metric), percent=percent) for metric, _, percent in columns]
            heads = entry.get(cosine)
            cells.append(f"{heads['mean']:.3f} / {heads['min']:.3f}" if heads else "-")
            rows.append([label, *cells])
    return table(["", *[label for _, label, _ in columns], "attention cosine (mean / min)"], rows)


def _kinds(report: dict[str, Any]) -> list[str]:
    kinds = report.get("kinds") or {}
    if not kinds:
        return []
    names = [name for name in LABELS if name in next(iter(kinds.values()))["accuracy"]]
    rows = [
        [
            kind,
            str(entry["questions"]),
            *[number(entry["accuracy"][name]["estimate"], percent=True) for name in names],
            bracketed(entry["gap_recovered"], percent=True),
        ]
        for kind, entry in kinds.items()
    ]
    return table(["accuracy by kind", "questions", *[LABELS[name] for name in names], "gap recovered"], rows)


def _rest(report: dict[str, Any]) -> list[str]:
    lines = []
    if answers := report.get("answers"):
        lines += [
            f"Answers: {number(answers['same_choice'], percent=True)} as the target alone; of {answers['questions']}, "
            f"{answers['lost']} right ones lost and {answers['gained']} gained.",
            "",
        ]
    cost = report["cost"]
    if cost["share_of_prefill"] is None:
        lines += [f"Cost: not known ({cost['why']}).", ""]
    else:
        lines += [
            f"Cost: {number(cost['share_of_prefill'], percent=True)} of the target's own prefill FLOPs "
            f"(map {number(cost['map_share'], percent=True)}, native parts "
            f"{number(cost['native_share'], percent=True)}, which are "
            f"{number(cost['native_token_share'], percent=True)} of the tokens{_repair(cost)}). "
            f"The source's own prefill is {number(cost['source_prefill_share'], percent=True)}.",
            "",
        ]
    if latency := report.get("latency"):
        settings = latency["settings"]
        rows = [
            [name, *[f"{stats[key]:.2f}" for key in ("median", "p95", "p99", "cv")]]
            for name, stats in latency["paths"].items()
        ]
        lines += table(["ms to the first logits", "median", "p95", "p99", "coefficient of variation"], rows)
        lines += [
            f"{settings['tokens']} tokens, batch {settings['batch']}, {settings['repeats']} repeats after "
            f"{settings['warmup']}, {', '.join(settings['device'])}, {settings['threads']} threads.",
            "",
        ]
    r2 = {name: entry["mean"] for name, entry in report["r2"].items() if entry}
    if r2:
        told = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in r2.items())
        lines += [f"R^2 of the entries (a diagnostic; it does not predict retention): {told}.", ""]
    return lines
