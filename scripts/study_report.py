"""Tables and plots of study_methods.py."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from kvbridge_hf.evaluation.bootstrap import PairedBootstrap
from kvbridge_hf.evaluation.markdown import bracketed, number, table

PUBLISHED = ("paper", "cachebridge", "kvlrelay")
ORDER = (*PUBLISHED, "fast", "default", "quality", "question")
TITLES = {
    "preset": "Presets",
    "fraction": "Native fraction, tokens chosen by the question",
    "choice": "How the tokens to repair are chosen (a tenth of them)",
    "learned": "Native fraction, tokens chosen by a learned scorer, by number of source layers mapped",
    "layers": "Lowest layers native, maps above",
    "suffix": "Native suffix",
    "sinks": "Native sinks",
    "k": "Support and number of source layers",
    "lambda": "Ridge penalty",
    "calibration": "Calibration texts",
    "variant": "Variants of the fit",
    "methods": "Methods, alone and with the repair of `default`",
}
NOTES = {
    "fraction": "`native parts only` hides the mapped tokens from the target: what the map adds is the difference.",
    "choice": "Cost includes what a model reads for the choice alone; `random` and `recency` are the controls.",
}


def value(entry: dict[str, Any], metric: str, condition: str = "handoff") -> float | None:
    conditions = entry["report"]["conditions"]
    return conditions.get(condition, {}).get(metric, {}).get("estimate")


def line(entry: dict[str, Any]) -> str:
    """One result on one line of the terminal."""
    gap = entry["report"]["headline"]["gap_recovered"]["estimate"]
    return (
        f"{entry['pair']:<9} {entry['group']:<9} {entry['name']:<28} KL {value(entry, 'kl'):.4f}  accuracy "
        f"{value(entry, 'accuracy'):.3f}  gap {number(gap, percent=True):>8}  cost "
        f"{number(entry['report']['cost']['share_of_prefill'], percent=True)}  fit {entry['fit_seconds']:.0f} s"
    )


def write(entries: Iterable[dict[str, Any]], folder: Path, *, quick: bool) -> None:
    """Write methods.md and the plots beside it."""
    rows = sorted(entries, key=_place)
    command = "python scripts/study_methods.py" + (" --quick" if quick else "")
    lines = [
        "# Methods compared",
        "",
        f"Written by `{command}`; `--render` writes it again from the stored results.",
        "",
    ]
    findings = folder / "methods_findings.md"
    if findings.exists():
        lines += [findings.read_text().strip(), ""]
    for pair in dict.fromkeys(entry["pair"] for entry in rows):
        lines += _pair([entry for entry in rows if entry["pair"] == pair], folder, pair)
    (folder / "methods.md").write_text("\n".join(lines).rstrip() + "\n")


def _pair(rows: list[dict[str, Any]], folder: Path, pair: str) -> list[str]:
    first = rows[0]["report"]
    data, boot = first["data"], first["bootstrap"]
    source, target, floor = (
        number(value(rows[0], "accuracy", condition), percent=True) for condition in ("source", "target", "no_context")
    )
    drawn = f"({boot['num_resamples']} resamples, seed {boot['seed']})"
    lines = [
        f"## {pair}",
        "",
        f"{data['questions']} {rows[0]['split']} questions about {data['contexts']} contexts of "
        f"{data['context_tokens']:.0f} tokens, {data['documents']} documents (32 tokens scored after "
        f"{data['prefix_tokens']:.0f}). Target alone {target}, source alone {source}, no context {floor} (KL "
        f"{number(value(rows[0], 'kl', 'no_context'))}), chance {number(data['chance'], percent=True)}. "
        f"Brackets: {100 * boot['confidence']:g} % paired bootstrap {drawn}. Cost: "
        "share of the target's own prefill FLOPs of the prompt, for all that the handoff needs beside the source's "
        "reading.",
        "",
    ]
    for group in TITLES:
        members = [entry for entry in rows if entry["group"] == group]
        if members:
            lines += [f"### {TITLES[group]}", ""]
            lines += [NOTES[group], ""] if group in NOTES else []
            lines += _table(members, group)
    lines += _against_published(rows)
    plots = _plots(rows, folder, pair)
    return lines + [f"![{title}]({name})" for title, name in plots] + [""]


def _table(rows: list[dict[str, Any]], group: str) -> list[str]:
    header = ["", "cost", "accuracy", "gap recovered", "retention", "floor-norm.", "KL", "NLL", "top-1"]
    header += ["cosine mean / min", "native only", "size, KB", "fit, s"]
    cells = []
    for entry in sorted(rows, key=_order) if group in ("fraction", "suffix", "sinks", "calibration") else rows:
        report = entry["report"]
        conditions, headline = report["conditions"], report["headline"]
        handed = conditions["handoff"]
        cosine = handed.get("attention_cosine")
        seed = "" if entry["seed"] == 0 else f" (seed {entry['seed']})"
        cells.append(
            [
                entry["name"] + seed,
                number(report["cost"]["share_of_prefill"], percent=True),
                bracketed(handed["accuracy"], percent=True),
                bracketed(headline["gap_recovered"], percent=True),
                number(headline["retention"]["estimate"], percent=True),
                number(headline["floor_normalised_retention"]["estimate"], percent=True),
                bracketed(handed["kl"]),
                number(handed["nll"]["estimate"]),
                number(handed["top1"]["estimate"], percent=True),
                f"{cosine['mean']:.3f} / {cosine['min']:.3f}" if cosine else "-",
                number(value(entry, "accuracy", "native_only"), percent=True),
                f"{entry['bytes'] / 1024:.0f}",
                f"{entry['fit_seconds']:.0f}",
            ]
        )
    return table(header, cells)


def _place(entry: dict[str, Any]) -> tuple[Any, ...]:
    """The stored results have no order of their own."""
    name = entry["name"]
    known = ORDER.index(name) if name in ORDER else len(ORDER)
    return entry["pair"], entry["group"], known, name, entry["seed"]


def _order(entry: dict[str, Any]) -> float:
    return float(entry["name"])


def _against_published(rows: list[dict[str, Any]]) -> list[str]:
    """Paired differences between our presets and the published ones."""
    presets = {entry["name"]: entry for entry in rows if entry["group"] == "preset" and entry["seed"] == 0}
    cells = []
    for ours in ("default", "quality"):
        for theirs in PUBLISHED:
            if ours not in presets or theirs not in presets:
                continue
            differences = []
            for key in ("kl", "correct"):
                mine, other = (np.array(presets[name]["items"][key], dtype=float) for name in (ours, theirs))
                interval = PairedBootstrap(len(mine), None, 2000, 0.95, 0).difference_interval(mine, other, None)
                brief = {"estimate": interval.estimate, "low": interval.low, "high": interval.high}
                differences.append(bracketed(brief, 4 if key == "kl" else 3, percent=key == "correct"))
            cells.append([f"{ours} - {theirs}", *differences])
    if not cells:
        return []
    return ["### Against the published methods (paired differences)", "", *table(["", "KL", "accuracy"], cells)]


def _plots(rows: list[dict[str, Any]], folder: Path, pair: str) -> list[tuple[str, str]]:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "kvbridge"
    from matplotlib import pyplot as plt

    (folder / "methods").mkdir(exist_ok=True)
    plots = []

    def keep(figure: Any, title: str, name: str) -> None:
        figure.tight_layout()
        figure.savefig(folder / "methods" / f"{pair}_{name}.svg", metadata={"Date": None})
        plt.close(figure)
        plots.append((title, f"methods/{pair}_{name}.svg"))

    def point(entry: dict[str, Any]) -> tuple[float, float] | None:
        gap = entry["report"]["headline"]["gap_recovered"]["estimate"]
        cost = entry["report"]["cost"]["share_of_prefill"]
        return None if gap is None or cost is None else (100 * cost, 100 * gap)

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for entry in rows:
        place = point(entry) if entry["group"] == "preset" and entry["seed"] == 0 else None
        if place is not None:
            axes.scatter(*place, marker="s" if entry["name"] in PUBLISHED else "o", s=40)
            axes.annotate(entry["name"], place, textcoords="offset points", xytext=(5, 4), fontsize=8)
    mapped = max((e["fit"]["top_k"] for e in rows if e["group"] == "learned"), default=0)
    for group, colour, label in (("fraction", "grey", "by the question"), ("learned", "tab:green", "learned choice")):
        of_group = [e for e in rows if e["group"] == group and e["seed"] == 0]
        curve = sorted(p for e in of_group if (group == "fraction" or e["fit"]["top_k"] == mapped) and (p := point(e)))
        if curve:
            axes.plot(*zip(*curve, strict=True), marker=".", color=colour, label=f"native fraction, {label}")
    for name, marker in (("random", "x"), ("recency", "+")):
        for entry in rows:
            place = point(entry) if entry["group"] == "choice" and entry["name"] == name else None
            if place is not None:
                axes.scatter(*place, marker=marker, color="black", label=f"a tenth, {name}")
    axes.axhline(0, linestyle=":", color="grey")
    axes.axhline(100, linestyle=":", color="grey")
    axes.set_xlabel("share of the target's prefill FLOPs, %")
    axes.set_ylabel("share of the gap recovered, %")
    axes.set_title(f"{pair}: quality against cost (0 %: source alone, 100 %: target alone)", fontsize=9)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, loc="lower right")
    keep(figure, "Gap recovered against cost", "pareto")

    fractions = sorted((e for e in rows if e["group"] == "fraction" and e["seed"] == 0), key=_order)
    if len(fractions) > 1:
        figure, axes = plt.subplots(figsize=(7, 4))
        x = [100 * float(entry["name"]) for entry in fractions]
        for condition, label in (("handoff", "handoff"), ("native_only", "native parts only, mapped tokens hidden")):
            axes.plot(x, [100 * (value(e, "accuracy", condition) or 0) for e in fractions], marker="o", label=label)
        for condition in ("target", "source", "no_context"):
            level = 100 * (value(fractions[0], "accuracy", condition) or 0)
            axes.axhline(level, linestyle=":", color="grey")
            axes.annotate(condition.replace("_", " "), (x[-1], level), fontsize=8, ha="right", va="bottom")
        axes.set_xlabel("native fraction of the mapped tokens, %")
        axes.set_ylabel("right answers, %")
        axes.legend(fontsize=8)
        keep(figure, "Accuracy by native fraction", "fraction")
    return plots
