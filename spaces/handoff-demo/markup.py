"""The page's own pieces of HTML. Everything that a visitor or a model wrote is escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Any

#: KL in nats up to which a token has each colour of the strip; class names of style.css.
KL_STEPS = ((0.01, "k0"), (0.05, "k1"), (0.2, "k2"), (1.0, "k3"), (float("inf"), "k4"))


def seconds(value: float | None) -> str:
    """A time for people: `4.2 ms`, `1.31 s`, or a dash."""
    if value is None:
        return "–"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def message(text: str, kind: str = "error") -> str:
    """A line for the visitor; kinds: error, note."""
    return f'<div class="kv-message kv-{kind}" role="status">{escape(text)}</div>' if text else ""


def counter(tokens: int, most: int, answer: str = "") -> str:
    """Under the prompt: its length, and what an example's text says."""
    says = f"The text says: <b>{escape(answer)}</b> · " if answer else ""
    return f'<div class="kv-counter">{says}{tokens:,} of {most:,} tokens</div>'


def pane(lane: Any, kind: str, title: str, model: str, note: str = "", answer: str = "") -> str:
    """One pane of the race. `lane` is None before the first run; `answer` is how a right text begins, where known."""
    mark = _mark(lane.text, answer) if lane is not None and answer and len(lane.tokens) > 1 else ""
    if lane is None:
        body, stats, state = '<span class="kv-ghost">The answer appears here.</span>', "", ""
    else:
        speed = "–" if lane.tokens_per_second is None else f"{lane.tokens_per_second:,.0f}"
        stats = (
            '<div class="kv-stats">'
            f'<div><b class="kv-ttft">{seconds(lane.first_token)}</b><span>to first token</span></div>'
            f'<div><b class="kv-speed">{speed}</b><span>tokens/s after it</span></div>'
            f'<div><b class="kv-count">{len(lane.tokens)}</b><span>tokens</span></div>{mark}</div>'
        )
        text = escape(lane.text)
        cursor = "" if lane.done else '<span class="kv-cursor"></span>'
        body = f"{text}{cursor}" if text or not lane.done else '<span class="kv-ghost">Nothing was written.</span>'
        if lane.error:
            body += message(lane.error)
        state = "done" if lane.done else "running"
    foot = f'<div class="kv-foot">{note}</div>' if note else ""
    return (
        f'<section class="kv-pane kv-{kind}" data-state="{state}"><header><span class="kv-dot"></span>'
        f"<b>{escape(title)}</b><small>{escape(model)}</small></header>{stats}"
        f'<div class="kv-text">{body}</div>{foot}</section>'
    )


def _mark(text: str, answer: str) -> str:
    right = re.match(rf"\W*{re.escape(answer)}\b", text) is not None
    return f'<span class="kv-mark {"kv-right" if right else "kv-wrong"}">{"✓ right" if right else "✗ wrong"}</span>'


def report_note(report: Any, source_seconds: float | None, source_counted: bool) -> str:
    """What a handoff did, in one line."""
    parts = []
    if report is not None:
        if report.status == "fallback":
            reason = escape(report.reason or "no reason given")
            parts.append(f"<b>Fell back:</b> the target read the prompt itself. {reason}")
        elif report.tokens_mapped == 0:
            parts.append("The text is so short that the target read all of it itself.")
        else:
            parts.append(
                f'<span class="kv-chip kv-mapped">{report.tokens_mapped:,} mapped</span> '
                f'<span class="kv-chip kv-native">{report.tokens_native:,} native</span>'
            )
    if source_seconds is not None:
        when = "counted in the time above" if source_counted else "before the clock started"
        parts.append(f"The source read the prompt in {seconds(source_seconds)}, {when}.")
    return " ".join(parts)


def kl_class(kl: float) -> str:
    return next(name for limit, name in KL_STEPS if kl < limit or limit == float("inf"))


def strip(tokens: Sequence[Any]) -> str:
    """The answer, each token coloured by its KL; where the two disagree it is framed."""
    cells = []
    for token in tokens:
        said = (
            f"both caches: {token.own}"
            if token.agree
            else f"own cache: {token.own} · handed-over cache: {token.other}"
        )
        tip = f"KL {token.kl:.4f} nats · {said} · p {token.probability:.2f}"
        framed = "" if token.agree else " kv-disagree"
        shown = escape(token.text).replace("\n", "⏎") or "·"
        cells.append(f'<span class="kv-cell {kl_class(token.kl)}{framed}" title="{escape(tip)}">{shown}</span>')
    mean = sum(token.kl for token in tokens) / len(tokens)
    agreed = sum(token.agree for token in tokens)
    names = ("&lt; 0.01", "&lt; 0.05", "&lt; 0.2", "&lt; 1", "more")
    legend = "".join(f'<i class="{kind}"></i>{name}' for (_, kind), name in zip(KL_STEPS, names, strict=True))
    return (
        '<div class="kv-strip"><div class="kv-stats">'
        f'<div><b class="kv-kl">{mean:.4f}</b><span>mean KL, nats a token</span></div>'
        f'<div><b class="kv-agree">{agreed} of {len(tokens)}</b><span>same first choice</span></div></div>'
        f'<p class="kv-cells">{"".join(cells)}</p>'
        f'<p class="kv-legend">KL {legend} <em>framed: another first choice. Point at a token to see more.</em></p>'
        "</div>"
    )


def cache_strip(pieces: Sequence[Any], model: str) -> str:
    """The conversation as it stands in a model's cache."""
    counts = {kind: sum(piece.origin == kind for piece in pieces) for kind in ("native", "mapped", "unread")}
    cells = "".join(
        f'<span class="kv-cell kv-{piece.origin}" title="{piece.origin}">{escape(piece.text) or "·"}</span>'
        for piece in pieces
    )
    return (
        f'<div class="kv-strip"><p class="kv-legend">In the cache of <b>{escape(model)}</b>: '
        f'<span class="kv-chip kv-native">{counts["native"]} native</span> '
        f'<span class="kv-chip kv-mapped">{counts["mapped"]} mapped</span></p><p class="kv-cells">{cells}</p></div>'
    )


def switch_line(switch: Any, names: dict[str, str], first: float | None, speed: float | None) -> str:
    """How a model was brought up to date for its answer."""
    if switch is None:
        return ""
    target = escape(names[switch.target])
    if switch.status == "fallback":
        how = f"<b>{target}</b> fell back and read by itself. {escape(switch.reason or '')}"
    elif switch.source is not None and switch.tokens_mapped > 0:
        how = f"<b>{escape(names[switch.source])} → {target}</b>"
    else:
        how = f"<b>{target}</b> read what was new"
    rate = "" if speed is None else f" · {speed:,.0f} tokens/s"
    return (
        f'<div class="kv-switch">{how} <span class="kv-chip kv-mapped">{switch.tokens_mapped} mapped</span> '
        f'<span class="kv-chip kv-native">{switch.tokens_native} read</span> '
        f'<span class="kv-chip">{switch.tokens_kept} kept</span> '
        f"<small>up to date after {seconds(switch.seconds)} · first token after {seconds(first)}{rate}</small></div>"
    )


def signature(name: str, switch: Any) -> str:
    """Under an answer: who wrote it, and from what (Markdown)."""
    if switch is None or switch.tokens_mapped == 0:
        return f"{name}, all read by itself" if switch is not None and switch.tokens_kept == 0 else name
    return f"{name}, {switch.tokens_mapped} tokens taken over"


def verdict_card(verdict: Any, own: str, unguarded: str, guarded: str) -> str:
    """The guard's word on one damage, with the three answers."""
    report = verdict.report
    if verdict.fell_back:
        gate = f"the gate <b>{escape(report.gate)}</b>" if report.gate else "an error"
        head = f'<div class="kv-verdict kv-no"><b>Fell back.</b> Stopped by {gate}: the target read the prompt itself.'
    else:
        head = '<div class="kv-verdict kv-yes"><b>Handed over.</b> Every gate that was asked let it pass.'
    rows = []
    for name, seen in report.gates.items():
        numbers = ", ".join(
            f"{key} {value:.3g}" for key, value in seen.items() if isinstance(value, (int, float)) and key != "status"
        )
        status = escape(str(seen.get("status", "")))
        rows.append(f'<tr class="kv-{status}"><td>{escape(name)}</td><td>{status}</td><td>{escape(numbers)}</td></tr>')
    answers = "".join(
        f'<div class="kv-answer"><span>{label}</span><p>{escape(text) or "–"}</p></div>'
        for label, text in (
            ("target, own cache", own),
            (f"damaged, guard off · KL {verdict.kl_unguarded:.4f}", unguarded),
            (f"damaged, guard on · KL {verdict.kl_guarded:.4f}", guarded),
        )
    )
    return f'{head}</div><div class="kv-answers">{answers}</div><table class="kv-gates">{"".join(rows)}</table>'


def latency_note(result: dict[str, Any]) -> str:
    """Under the chart: what was timed, and how steady the machine was."""
    settings, paths = result["settings"], result["paths"]
    speedup = result["speedup"]["handoff"]
    noise = max(stats["cv"] for stats in paths.values())
    unsteady = " The machine was busy; take the numbers with care." if noise > 0.25 else ""
    relation = f"{speedup:.2f} times as fast as" if speedup >= 1 else f"{1 / speedup:.2f} times slower than"
    return (
        f'<p class="kv-legend">A prompt of <b>{settings["tokens"]:,} tokens</b>, {settings["repeats"]} rounds on '
        f"{escape(', '.join(settings['device']))}. Handing over what the source has read is <b>{relation}</b> the "
        f"target's own reading. Bars are medians, whiskers reach the 95th percentile; the largest coefficient of "
        f"variation is {noise:.2f}.{unsteady}</p>"
    )


def pair_card(facts: Sequence[tuple[str, str]]) -> str:
    """Facts of a pair: label and value."""
    cells = "".join(f"<div><span>{escape(label)}</span><b>{escape(value)}</b></div>" for label, value in facts)
    return f'<div class="kv-pair">{cells}</div>'


__all__ = [
    "cache_strip",
    "counter",
    "kl_class",
    "latency_note",
    "message",
    "pair_card",
    "pane",
    "report_note",
    "seconds",
    "signature",
    "strip",
    "switch_line",
    "verdict_card",
]
