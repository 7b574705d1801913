"""The page's charts. Plain Plotly on transparent ground, so that they suit the light and the dark page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

NATIVE, MAPPED, INK = "#3f7cac", "#e08e45", "#7d8590"
#: Cosine from bad to good.
GOOD_SCALE = [[0.0, "#7a1f3d"], [0.5, "#e08e45"], [0.85, "#f2dfb8"], [1.0, "#3f9a8c"]]

PATH_LABELS = {
    "target_prefill": "target reads<br>it itself",
    "source_prefill_handoff": "source reads,<br>then handoff",
    "handoff": "handoff of what<br>the source read",
    "target_cache": "target's own<br>cache (ideal)",
}
PATH_COLOURS = {
    "target_prefill": NATIVE,
    "source_prefill_handoff": "#efc08f",
    "handoff": MAPPED,
    "target_cache": "#b8c4ce",
}


def _dress(figure: go.Figure, height: int, **layout: Any) -> go.Figure:
    figure.update_layout(
        height=height,
        margin={"l": 54, "r": 16, "t": 16, "b": 44},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": INK, "size": 12},
        **layout,
    )
    figure.update_xaxes(fixedrange=True, gridcolor="rgba(125,133,144,.18)", zeroline=False)
    figure.update_yaxes(fixedrange=True, gridcolor="rgba(125,133,144,.18)", zeroline=False)
    return figure


def cosine_map(cosines: Sequence[Sequence[float]]) -> go.Figure:
    """Heat map of `[layer][head]` cosines, the deepest layer on top."""
    lowest = min(min(row) for row in cosines)
    floor = min(0.9, lowest)  # so that good maps do not look spotted by nothing
    figure = go.Figure(
        go.Heatmap(
            z=[list(row) for row in cosines],
            x=[str(head) for head in range(len(cosines[0]))],
            y=[str(layer) for layer in range(len(cosines))],
            zmin=floor,
            zmax=1.0,
            colorscale=GOOD_SCALE,
            xgap=2,
            ygap=2,
            colorbar={"thickness": 10, "outlinewidth": 0, "tickformat": ".2f"},
            hovertemplate="layer %{y}, head %{x}<br>cosine %{z:.4f}<extra></extra>",
        )
    )
    few = len(cosines) * len(cosines[0]) <= 96
    if few:
        figure.update_traces(texttemplate="%{z:.2f}", textfont={"size": 11})
    figure.update_xaxes(type="category")
    figure.update_yaxes(type="category")
    height = max(230, min(560, 90 + 34 * len(cosines)))
    return _dress(figure, height, xaxis_title="query head", yaxis_title="layer")


def latency_bars(result: dict[str, Any]) -> go.Figure:
    """Medians of the four paths, with whiskers to the 95th percentile."""
    paths = {name: result["paths"][name] for name in PATH_LABELS if name in result["paths"]}
    medians = [stats["median"] for stats in paths.values()]
    figure = go.Figure(
        go.Bar(
            x=[PATH_LABELS[name] for name in paths],
            y=medians,
            marker={"color": [PATH_COLOURS[name] for name in paths], "cornerradius": 5},
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [stats["p95"] - stats["median"] for stats in paths.values()],
                "arrayminus": [0] * len(paths),
                "color": INK,
                "thickness": 1.2,
            },
            text=[f"<b>{median:.1f} ms</b>" for median in medians],
            textposition="inside",
            insidetextanchor="middle",
            textfont={"color": "#ffffff", "size": 13},
            hovertemplate="median %{y:.2f} ms<extra></extra>",
        )
    )
    return _dress(figure, 340, yaxis_title="ms to the first logits", bargap=0.35)


def damage_curve(verdicts: Sequence[Any], now: float | None = None) -> go.Figure:
    """KL over damage without the guard and with it; marks show where the guard fell back."""
    damages = [verdict.damage for verdict in verdicts]
    # Zero has no place on a logarithmic axis; below this nobody sees a difference.
    floor = 1e-5
    figure = go.Figure()
    figure.add_scatter(
        x=damages,
        y=[max(verdict.kl_unguarded, floor) for verdict in verdicts],
        mode="lines+markers",
        name="guard off",
        line={"color": "#b23a48", "width": 6, "dash": "dot"},
        hovertemplate="damage %{x}<br>KL %{y:.4g}<extra>guard off</extra>",
    )
    figure.add_scatter(
        x=damages,
        y=[max(verdict.kl_guarded, floor) for verdict in verdicts],
        mode="lines+markers",
        name="guard on",
        line={"color": "#3f9a8c", "width": 3},
        marker={
            "size": 11,
            "symbol": ["x" if verdict.fell_back else "circle" for verdict in verdicts],
            "color": [NATIVE if verdict.fell_back else MAPPED for verdict in verdicts],
        },
        text=["fell back" if verdict.fell_back else "handed over" for verdict in verdicts],
        hovertemplate="damage %{x}: %{text}<br>KL %{y:.4g}<extra>guard on</extra>",
    )
    if now is not None:
        figure.add_vline(x=now, line={"color": INK, "width": 1, "dash": "dash"})
    figure.update_yaxes(type="log", exponentformat="power")
    legend = {"orientation": "h", "y": 1.14, "x": 0}
    return _dress(
        figure,
        330,
        xaxis_title="damage (noise, in units of each head's spread)",
        yaxis_title="KL, nats a token",
        legend=legend,
    )


__all__ = ["PATH_LABELS", "cosine_map", "damage_curve", "latency_bars"]
