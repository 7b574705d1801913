"""Tables of study_methods.py."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import study_plots

from kvbridge_hf.evaluation.bootstrap import Interval, PairedBootstrap
from kvbridge_hf.evaluation.markdown import bracketed, number, table

PUBLISHED = ("paper", "cachebridge", "kvlrelay")
OURS = ("default", "quality")
ORDER = (*PUBLISHED, "fast", *OURS, "question")
TITLES = {
    "preset": "Presets",
    "fraction": "Native fraction, tokens chosen by the question",
    "choice": "How the tokens to repair are chosen (a tenth of them)",
    "learned": "Native fraction, tokens chosen by a learned scorer",
    "depth": "Lowest layers in which 15 % of the tokens, chosen by the question, are recomputed",
    "cheaper": "Native fraction, learned scorer, repair in the lowest layers alone, maps of fewer source layers",
    "layers": "Lowest layers native, maps above",
    "suffix": "Native suffix",
    "sinks": "Native sinks",
    "k": "Support and number of source layers",
    "lambda": "Ridge penalty",
    "calibration": "Calibration texts",
    "variant": "Variants of the fit",
    "length": "Context beyond the fitted length",
    "domain": "Text of another kind",
    "methods": "Methods",
}
NOTES = {
    "preset": "`front`: no other preset answers more for as little. `native only` hides the mapped tokens from the "
    "target: what the map adds is the difference.",
    "choice": "Cost includes what a model reads for the choice alone; `random` and `recency` are the controls.",
    "k": "These rows share one pass over the data; their fit time is that of selection and solve.",
    "lambda": "Fit time as in the table above.",
    "length": "The calibration texts have up to about 400 tokens. Texts joined to the given length, 32 tokens "
    "scored; `long questions` are about contexts of some 900 tokens, cost there as everywhere.",
    "domain": "The calibration texts are of six genres, `diary` and `story` among them. `judged on shuffled words`: "
    "the test texts with the words of the prefix in disorder.",
    "methods": "At most two source layers, equal texts; trainings of 120 steps at a fixed rate. `, repair`: 15 % of "
    "the tokens, chosen by the question.",
}
NUMBERED = ("fraction", "depth", "learned", "suffix", "sinks", "calibration")
Entry = dict[str, Any]


def value(entry: Entry, metric: str, condition: str = "handoff") -> float | None:
    conditions = entry["report"]["conditions"]
    return conditions.get(condition, {}).get(metric, {}).get("estimate")


def gap_is_clear(entry: Entry) -> bool:
    """Whether the target answers more than the source beyond the interval; else there is no gap to recover."""
    low = entry["report"]["headline"].get("gap", {}).get("low")
    return low is not None and low > 0


def gap(entry: Entry) -> dict[str, Any] | None:
    return entry["report"]["headline"].get("gap_recovered") if gap_is_clear(entry) else None


def line(entry: Entry) -> str:
    """One result on one line of the terminal."""
    recovered = (gap(entry) or {}).get("estimate")
    return (
        f"{entry['pair']:<12} {entry['group']:<11} {entry['name']:<28} {entry['seed']}  KL "
        f"{number(value(entry, 'kl'), 4)}  accuracy {number(value(entry, 'accuracy'), percent=True):>6}  gap "
        f"{number(recovered, percent=True):>7}  cost "
        f"{number(entry['report']['cost']['share_of_prefill'], percent=True):>7}  fit {entry['fit_seconds']:.0f} s"
    )


def write(entries: Iterable[Entry], folder: Path, *, quick: bool) -> None:
    """Write methods.md and the plots beside it."""
    rows = sorted(entries, key=_place)
    command = "python scripts/study_methods.py" + (" --quick" if quick else "")
    lines = [
        "# Methods compared",
        "",
        f"Written by `{command}`; `--render` writes it again from the stored results (`methods.json`). Each table "
        f"below is one group of rows: `{command} --pairs PAIR --groups GROUP` measures it alone.",
        "",
    ]
    findings = folder / "methods_findings.md"
    if findings.exists():
        lines += [findings.read_text().strip(), ""]
    pairs = list(dict.fromkeys(entry["pair"] for entry in rows))
    lines += _summary({pair: [entry for entry in rows if entry["pair"] == pair] for pair in pairs})
    for pair in pairs:
        lines += _pair([entry for entry in rows if entry["pair"] == pair], folder, pair)
    (folder / "methods.md").write_text("\n".join(lines).rstrip() + "\n")


# ---- all pairs ------------------------------------------------------------------------------------------------------


def _summary(rows: dict[str, list[Entry]]) -> list[str]:
    """Our presets against the best published one on each pair."""
    cells = []
    for pair, entries in rows.items():
        presets = _presets(entries)
        theirs = [name for name in PUBLISHED if name in presets]
        for name in (name for name in OURS if name in presets and theirs):
            best = min(theirs, key=lambda other: _mean(presets[other], "kl"))
            ours, other = _mean(presets[name], "kl"), _mean(presets[best], "kl")
            first = presets[name][0]
            apart = _difference(presets[name], presets[best], "kl")
            size = f"{first['bytes'] / presets['paper'][0]['bytes']:.2f}" if "paper" in presets else "-"
            cells.append(
                [
                    f"{pair}, {name}",
                    f"{ours:.4f}",
                    f"{other:.4f} ({best})",
                    f"{ours / other:.2f}",
                    _interval(apart, 4),
                    size,
                    number(first["report"]["cost"]["share_of_prefill"], percent=True),
                    bracketed(first["report"]["conditions"]["handoff"].get("accuracy"), percent=True),
                    number(value(first, "accuracy", "source"), percent=True),
                    bracketed(gap(first), percent=True),
                ]
            )
    if not cells:
        return []
    header = [
        "",
        "KL",
        "best published",
        "ratio",
        "difference, paired",
        "size / paper's",
        "cost",
        "accuracy",
        "source",
    ]
    return [
        "## Ours against the published methods, on every pair",
        "",
        "KL in nats a token to the target's own predictions on running text, mean over the seeds (each draws its own "
        "calibration texts); a paired difference takes the mean over seeds of each document first. A dash in the last "
        "column: the target is not clearly better than the source there.",
        "",
        *table([*header, "gap recovered"], cells),
    ]


def _presets(rows: list[Entry]) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {}
    for entry in rows:
        if entry["group"] == "preset":
            found.setdefault(entry["name"], []).append(entry)
    return found


def _mean(entries: list[Entry], metric: str) -> float:
    return float(np.mean([value(entry, metric) for entry in entries]))


def _difference(ours: list[Entry], theirs: list[Entry], column: str) -> Interval:
    """Paired difference over documents or questions, each with its mean over the seeds."""
    mine, other = (np.mean([entry["items"][column] for entry in entries], axis=0) for entries in (ours, theirs))
    items = ours[0]["items"]
    weights, groups = (items["tokens"], None) if column == "kl" else (None, items["contexts"])
    return PairedBootstrap(len(mine), groups, 2000, 0.95, 0).difference_interval(mine, other, weights)


def _interval(interval: Interval, digits: int = 3, percent: bool = False) -> str:
    brief = {"estimate": interval.estimate, "low": interval.low, "high": interval.high}
    return bracketed(brief, digits, percent=percent)


# ---- one pair -------------------------------------------------------------------------------------------------------


def _pair(rows: list[Entry], folder: Path, pair: str) -> list[str]:
    main = next((entry for entry in rows if entry["group"] in ("preset", "fraction")), rows[0])
    first = main["report"]
    data, boot = first["data"], first["bootstrap"]
    source, target, floor = (
        number(value(main, "accuracy", condition), percent=True) for condition in ("source", "target", "no_context")
    )
    drawn = f"({boot['num_resamples']} resamples, seed {boot['seed']})"
    lines = [
        f"## {pair}",
        "",
        f"{data.get('questions')} {main['split']} questions about {data.get('contexts')} contexts of "
        f"{data.get('context_tokens') or 0:.0f} tokens, {data.get('documents')} documents (32 tokens scored after "
        f"{data.get('prefix_tokens') or 0:.0f}). Target alone {target}, source alone {source}, no context {floor} (KL "
        f"{number(value(main, 'kl', 'no_context'))}), chance {number(data.get('chance'), percent=True)}. "
        f"Brackets: {100 * boot['confidence']:g} % paired bootstrap {drawn}. Cost: "
        "share of the target's own prefill FLOPs of the prompt, for all that the handoff needs beside the source's "
        "reading.",
        "",
    ]
    for group, title in TITLES.items():
        members = [entry for entry in rows if entry["group"] == group and (group != "preset" or entry["seed"] == 0)]
        if members:
            lines += [f"### {title}", ""]
            lines += [NOTES[group], ""] if group in NOTES else []
            lines += _table(members, group)
        if group == "preset":
            lines += _over_seeds(rows) + _against_published(rows)
    plots = study_plots.draw(rows, folder, pair)
    return lines + [f"![{title}]({name})" for title, name in plots] + [""]


def _table(rows: list[Entry], group: str) -> list[str]:
    header = ["", "cost", "accuracy", "gap recovered", "retention", "floor-norm.", "KL", "NLL", "top-1"]
    header += ["cosine mean / min", "native only", "size, KB", "fit, s"]
    header += ["front"] if group == "preset" else []
    front = front_of(rows)
    cells = []
    for entry in sorted(rows, key=lambda entry: float(entry["name"])) if group in NUMBERED else rows:
        report = entry["report"]
        conditions, headline = report["conditions"], report["headline"]
        handed = conditions["handoff"]
        cosine = handed.get("attention_cosine")
        cells.append(
            [
                entry["name"],
                number(report["cost"]["share_of_prefill"], percent=True),
                bracketed(handed.get("accuracy"), percent=True),
                bracketed(gap(entry), percent=True),
                number(headline.get("retention", {}).get("estimate"), percent=True),
                number(headline.get("floor_normalised_retention", {}).get("estimate"), percent=True),
                bracketed(handed.get("kl")),
                number(value(entry, "nll")),
                number(value(entry, "top1"), percent=True),
                f"{cosine['mean']:.3f} / {cosine['min']:.3f}" if cosine else "-",
                number(value(entry, "accuracy", "native_only"), percent=True),
                f"{entry['bytes'] / 1024:.0f}",
                f"{entry['fit_seconds']:.0f}",
                *(["yes" if entry["name"] in front else "no"] if group == "preset" else []),
            ]
        )
    return table(header, cells)


def front_of(rows: list[Entry]) -> set[str]:
    """Names of the rows that no other one beats in accuracy at no higher cost."""
    points = {
        entry["name"]: (entry["report"]["cost"]["share_of_prefill"], value(entry, "accuracy") or 0.0) for entry in rows
    }
    return {
        name
        for name, (cost, right) in points.items()
        if not any(c <= cost and r >= right and (c, r) != (cost, right) for c, r in points.values())
    }


def _place(entry: Entry) -> tuple[Any, ...]:
    """The stored results have no order of their own."""
    name = entry["name"]
    known = ORDER.index(name) if name in ORDER else len(ORDER)
    return entry["pair"], entry["group"], known, name, entry["seed"]


def _over_seeds(rows: list[Entry]) -> list[str]:
    """Mean and standard error over the seeds, where there are several."""
    cells = []
    for name, entries in _presets(rows).items():
        if len(entries) < 2:
            continue
        columns = [name, str(len(entries))]
        for metric, scale, digits in (("kl", 1, 4), ("accuracy", 100, 1)):
            values = np.array([value(entry, metric) for entry in entries])
            error = values.std(ddof=1) / np.sqrt(len(values))
            columns.append(f"{scale * values.mean():.{digits}f} ± {scale * error:.{digits}f}")
        cells.append(columns)
    if not cells:
        return []
    return ["Over seeds (mean and standard error):", "", *table(["", "seeds", "KL", "accuracy, %"], cells)]


def _against_published(rows: list[Entry]) -> list[str]:
    """Paired differences between our presets and the published ones."""
    presets = _presets(rows)
    cells = []
    for ours in OURS:
        for theirs in PUBLISHED:
            if ours in presets and theirs in presets:
                both = presets[ours], presets[theirs]
                differences = [_interval(_difference(*both, "kl"), 4)]
                differences.append(_interval(_difference(*both, "correct"), percent=True))
                cells.append([f"{ours} - {theirs}", *differences])
    if not cells:
        return []
    return ["Against the published methods (paired differences):", "", *table(["", "KL", "accuracy"], cells)]
