# SPDX-License-Identifier: Apache-2.0
"""Plotly pages that need no network: the library stands in the file."""

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

if TYPE_CHECKING:
    from hydra_judge.calibrate import Calibration, Pairs

__all__ = ["bars", "calibration_page", "page"]

_BLUE, _ORANGE = "#1f6feb", "#d9730d"


def page(title: str, parts: Sequence[str | go.Figure]) -> str:
    """An HTML page of headings, text (HTML) and figures.

    Args:
        title: of the page, plain text.
        parts: HTML fragments, already escaped, and figures.
    """
    body, first = [f"<h1>{html.escape(title)}</h1>"], True
    for part in parts:
        if isinstance(part, go.Figure):
            body.append(part.to_html(full_html=False, include_plotlyjs=first, config={"displaylogo": False}))
            first = False
        else:
            body.append(part)
    style = "body{font:16px/1.5 system-ui;max-width:60em;margin:2em auto;padding:0 1em}td,th{padding:.2em 1em .2em 0;text-align:left}"
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{style}</style>'
    return f"<!doctype html><html><head>{head}</head><body>{''.join(body)}</body></html>\n"


def bars(title: str, names: Sequence[str], values: Sequence[float], *, unit: str) -> go.Figure:
    """A bar for each name."""
    figure = go.Figure(go.Bar(x=list(names), y=list(values), marker_color=_BLUE))
    return figure.update_layout(title=title, yaxis_title=unit, height=380, template="plotly_white")


def calibration_page(result: "Calibration", pairs: "Pairs") -> str:
    """Labels against scores, and precision over the threshold on each half."""
    levels = [str(level) for level in range(pairs.low, pairs.high + 1)]
    matrix = go.Figure(go.Heatmap(z=result.confusion, x=levels, y=levels, colorscale="Blues", texttemplate="%{z}"))
    matrix.update_layout(
        title="Documents by label and score", xaxis_title="score of the judge", yaxis_title="label", height=420
    )
    curve = go.Figure()
    for half, name, colour in (
        (pairs.first_half, "half that chooses", _ORANGE),
        (~pairs.first_half, "half that is reported", _BLUE),
    ):
        cuts = np.unique(pairs.scores[half])
        right = [float((pairs.labels[half][pairs.scores[half] >= cut] >= result.good).mean()) for cut in cuts]
        curve.add_scatter(x=cuts, y=right, name=name, mode="lines+markers", line={"color": colour})
    curve.update_layout(
        title=f"Precision (label >= {result.good:g}) of what is kept",
        xaxis_title="lowest score kept",
        yaxis_title="share",
        height=420,
        template="plotly_white",
    )
    told = "".join(f"<li>{html.escape(line)}</li>" for line in result.lines())
    return page("The judge against the labels", [f"<ul>{told}</ul>", matrix, curve])
