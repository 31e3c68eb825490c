# SPDX-License-Identifier: Apache-2.0
"""Pictures with one row for each layer, expert or rank."""

from typing import Any

import numpy as np
import plotly.graph_objects as go

from nviz.charts import compact, figure
from nviz.palette import ACCENT, BAD, MUTED, SEQUENTIAL

__all__ = ["heatmap", "rank_profile"]


def heatmap(
    picture: np.ndarray,
    *,
    title: str,
    x_title: str,
    y_title: str,
    value_title: str,
    x: np.ndarray | None = None,
    low: float | None = None,
    high: float | None = None,
    mark_zero: bool = False,
    height: int = 460,
) -> go.Figure:
    """A picture with one row for each layer (or expert, or rank).

    Args:
        picture: float64 [rows, columns], NaN where there is no value.
        title, x_title, y_title, value_title: names with their units.
        x: [columns], position of each column; None: 0, 1, ...
        low, high: ends of the colour scale; None: of the values.
        mark_zero: put a cross on every zero.
        height: pixels.
    """
    columns = np.arange(picture.shape[1]) if x is None else x
    traces: list[dict[str, Any]] = [
        {
            "type": "heatmap",
            "z": compact(picture),
            "x": compact(columns),
            "colorscale": SEQUENTIAL,
            "zmin": low,
            "zmax": high,
            "colorbar": {"title": {"text": value_title, "side": "right"}, "thickness": 12},
            "hovertemplate": f"{y_title} %{{y}}, {x_title} %{{x}}: %{{z:.4g}}<extra></extra>",
        }
    ]
    rows, places = np.nonzero(picture == 0)
    if mark_zero and len(rows):
        traces.append(
            {
                "type": "scatter",
                "x": compact(columns[places]),
                "y": compact(rows),
                "mode": "markers",
                "marker": {"symbol": "x-thin", "size": 6, "line": {"width": 1.5, "color": BAD}},
                "name": "received nothing",
                "hoverinfo": "skip",
            }
        )
    return figure(
        traces,
        title=title,
        x_title=x_title,
        y_title=y_title,
        height=height,
        xaxis={"showgrid": False, "zeroline": False},
        yaxis={
            "autorange": "reversed",
            "dtick": max(1, -(-len(picture) // 12)),
            "gridcolor": MUTED,
            "showgrid": False,
            "zeroline": False,
        },
    )


def rank_profile(received: np.ndarray, seconds: np.ndarray, *, title: str) -> go.Figure:
    """What each rank received in each layer, and below it how long its step took: a bright column over a tall bar.

    Args:
        received: float64 [layers, ranks], over an even share.
        seconds: float64 [ranks]; drawn against their median.
        title: title of the chart.
    """
    profile = heatmap(
        received, title=title, x_title="rank", y_title="layer", value_title="over an even share", height=460
    )
    profile.update_traces(colorbar={"len": 0.66, "y": 1.0, "yanchor": "top"}, selector={"type": "heatmap"})
    known = seconds[np.isfinite(seconds)]
    percent = 100 * (seconds / np.median(known) - 1) if len(known) else seconds
    profile.add_bar(
        x=compact(np.arange(len(seconds))), y=compact(percent), customdata=compact(seconds), yaxis="y2",
        marker={"color": ACCENT}, name="step time",
        hovertemplate="rank %{x}: %{customdata:.4g} s, %{y:+.2f} % of the median<extra></extra>",
    )  # fmt: skip
    profile.update_layout(
        showlegend=False,
        xaxis={"anchor": "y2", "dtick": max(1, -(-received.shape[1] // 16))},
        yaxis={"domain": [0.34, 1.0]},
        yaxis2={"domain": [0.0, 0.26], "title": "step time<br>off the median (%)", "zeroline": True},
    )
    return profile
