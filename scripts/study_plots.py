"""Plots of study_methods.py, as SVG files that depend on the results alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import study_report

Entry = dict[str, Any]


def draw(rows: list[Entry], folder: Path, pair: str) -> list[tuple[str, str]]:
    """Draw what there are rows for; gives titles and names."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "kvbridge"
    from matplotlib import pyplot as plt

    (folder / "methods").mkdir(exist_ok=True)
    rows = [entry for entry in rows if entry["seed"] == 0]
    drawn = []
    for name, title, figure in (
        ("pareto", "Quality against cost", _pareto(plt, rows, pair)),
        ("fraction", "Accuracy by native fraction", _fraction(plt, rows)),
        ("curves", "KL by single settings", _curves(plt, rows)),
    ):
        if figure is not None:
            figure.tight_layout()
            figure.savefig(folder / "methods" / f"{pair}_{name}.svg", metadata={"Date": None})
            plt.close(figure)
            drawn.append((title, f"methods/{pair}_{name}.svg"))
    return drawn


def _pareto(plt: Any, rows: list[Entry], pair: str) -> Any:
    """Share of the gap recovered against cost; right answers where there is no gap."""
    presets = [entry for entry in rows if entry["group"] == "preset"]
    if not presets:
        return None
    clear = study_report.gap_is_clear(presets[0])

    def point(entry: Entry) -> tuple[float, float]:
        quality = study_report.gap(entry)["estimate"] if clear else study_report.value(entry, "accuracy")  # type: ignore[index]
        return 100 * entry["report"]["cost"]["share_of_prefill"], 100 * (quality or 0.0)

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for entry in presets:
        if entry["name"] in study_report.ORDER:
            axes.scatter(*point(entry), marker="s" if entry["name"] in study_report.PUBLISHED else "o", s=40, zorder=3)
            # To the right and below, as the curves come from the left and go on above.
            axes.annotate(entry["name"], point(entry), textcoords="offset points", xytext=(6, -9), fontsize=8)
    for group, colour, label in (("fraction", "grey", "by the question"), ("learned", "tab:green", "learned choice")):
        curve = sorted(point(entry) for entry in rows if entry["group"] == group)
        if curve:
            axes.plot(*zip(*curve, strict=True), marker=".", color=colour, label=f"native fraction, {label}")
    cheaper = sorted(point(entry) for entry in rows if entry["group"] == "cheaper")
    if cheaper:
        axes.scatter(
            *zip(*cheaper, strict=True), marker="^", s=18, color="tab:green", label="the same, fewer source layers"
        )
    for name, marker in (("random", "x"), ("recency", "+")):
        for entry in rows:
            if entry["group"] == "choice" and entry["name"] == name:
                axes.scatter(*point(entry), marker=marker, color="black", label=f"a tenth, {name}")
    levels = (
        (0.0, 1.0) if clear else [study_report.value(presets[0], "accuracy", role) for role in ("source", "target")]
    )
    for level in levels:
        axes.axhline(100 * (level or 0.0), linestyle=":", color="grey")
    axes.set_xlim(0, 1.6 * max(point(entry)[0] for entry in presets))
    axes.set_xlabel("share of the target's prefill FLOPs, %")
    axes.set_ylabel("share of the gap recovered, %" if clear else "right answers, %")
    axes.set_title(f"{pair}: quality against cost (dotted: source alone, target alone)", fontsize=9)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, loc="lower right")
    return figure


def _fraction(plt: Any, rows: list[Entry]) -> Any:
    """Right answers by native fraction, with and without the map."""
    fractions = sorted((e for e in rows if e["group"] == "fraction"), key=lambda entry: float(entry["name"]))
    if len(fractions) < 2:
        return None
    figure, axes = plt.subplots(figsize=(7, 4))
    x = [100 * float(entry["name"]) for entry in fractions]
    for condition, label in (("handoff", "handoff"), ("native_only", "native parts only, mapped tokens hidden")):
        y = [100 * (study_report.value(entry, "accuracy", condition) or 0) for entry in fractions]
        axes.plot(x, y, marker="o", label=label)
    learned = sorted((e for e in rows if e["group"] == "learned"), key=lambda entry: float(entry["name"]))
    if learned:
        y = [100 * (study_report.value(entry, "accuracy") or 0) for entry in learned]
        axes.plot([100 * float(entry["name"]) for entry in learned], y, marker="o", label="handoff, learned choice")
    for condition in ("target", "source", "no_context"):
        level = 100 * (study_report.value(fractions[0], "accuracy", condition) or 0)
        axes.axhline(level, linestyle=":", color="grey")
        axes.annotate(condition.replace("_", " "), (x[-1], level), fontsize=8, ha="right", va="bottom")
    axes.set_xlabel("native fraction of the mapped tokens, %")
    axes.set_ylabel("right answers, %")
    axes.legend(fontsize=8)
    return figure


def _curves(plt: Any, rows: list[Entry]) -> Any:
    """KL by number of texts, source layers, penalty, sinks, suffix and length, one panel each."""

    def tail(name: str) -> float:
        return float(name.rsplit("=", 1)[1])

    def tokens(name: str) -> float:
        return float(name.split(", ")[1].split()[0])

    panels: list[tuple[str, str, bool, Callable[[str], str], Callable[[str], float]]] = [
        ("calibration", "calibration texts", True, lambda name: "fast", float),
        ("k", "source layers", False, lambda name: name.rsplit(",", 1)[0], tail),
        ("lambda", "ridge penalty", True, lambda name: "fast", float),
        ("sinks", "native sinks", False, lambda name: "fast", float),
        ("suffix", "native suffix, tokens", False, lambda name: "map of default", float),
        ("length", "tokens of context", True, lambda name: name.split(",")[0], tokens),
    ]
    figure, axes = plt.subplots(2, 3, figsize=(10, 5.5))
    filled = 0
    for (group, label, logarithmic, series_of, place_of), panel in zip(panels, axes.flat, strict=True):
        series: dict[str, list[tuple[float, float]]] = {}
        for entry in rows:
            name, kl = entry["name"], study_report.value(entry, "kl")
            if entry["group"] == group and kl is not None and name != "searched":
                series.setdefault(series_of(name), []).append((place_of(name), kl))
        for name, points in sorted(series.items()):
            panel.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=name)
            filled += 1
        places = sorted({place for points in series.values() for place, _ in points})
        if logarithmic and series:
            panel.set_xscale("log")
        if places:
            panel.set_xticks(places, [f"{place:g}" for place in places], minor=False)
            panel.set_xticks([], minor=True)
            panel.set_ylim(0, 1.15 * max(kl for points in series.values() for _, kl in points))
        panel.set_xlabel(label, fontsize=8)
        panel.tick_params(labelsize=7)
        if len(series) > 1:
            panel.legend(fontsize=6)
    for panel in axes[:, 0]:
        panel.set_ylabel("KL, nats a token", fontsize=8)
    if not filled:
        plt.close(figure)
        return None
    return figure
