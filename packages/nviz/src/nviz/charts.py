# SPDX-License-Identifier: Apache-2.0
"""Figures: arrays in, Plotly out. Values travel as float32, steps as int32, so a trace of 2,000 points is 16 kB.

A figure is written down as one dict and checked by Plotly once: 1 ms, where changing one piece by piece takes 6.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from nviz.palette import ACCENT, BAD, line_style

__all__ = [
    "Curve",
    "Panel",
    "compact",
    "curves",
    "figure",
    "histogram",
    "panels",
    "scatter",
    "smooth",
    "stacked",
]

_MARGIN = {"l": 8, "r": 8, "t": 40, "b": 8}


def compact(values: np.ndarray) -> np.ndarray:
    """The smallest array that draws the same picture: int32 for integers, float32 for the rest, else float64."""
    if values.dtype.kind in "iu":
        return values.astype(np.int32) if not len(values) or values.max() < 2**31 else values.astype(np.float64)
    with np.errstate(over="ignore"):
        small = values.astype(np.float32)
    return values if (np.isinf(small) & np.isfinite(values)).any() else small


def smooth(values: np.ndarray, weights: np.ndarray, *, half_width: int) -> np.ndarray:
    """Mean over a window, weighted by how many values each entry stands for.

    Args:
        values: float64 [N], means of buckets.
        weights: float64 [N], values in each bucket.
        half_width: entries to each side.

    Returns:
        float64 [N].
    """
    sums = np.concatenate([[0.0], np.cumsum(values * weights)])
    counts = np.concatenate([[0.0], np.cumsum(weights)])
    place = np.arange(len(values))
    low, high = np.maximum(place - half_width, 0), np.minimum(place + half_width + 1, len(values))
    return (sums[high] - sums[low]) / (counts[high] - counts[low])


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One run's line in a chart.

    Attributes:
        label: name in the legend.
        number: place of the run in the selection; decides colour and dash.
        step: int64 [N], steps of the points.
        x, y: float64 or int64 [N], the points with the extremes.
        smooth_x, smooth_y: [M], the smoothed line; empty: none.
        broken_x: [B], where the value is NaN or infinite.
    """

    label: str
    number: int
    step: np.ndarray
    x: np.ndarray
    y: np.ndarray
    smooth_x: np.ndarray
    smooth_y: np.ndarray
    broken_x: np.ndarray


def figure(
    traces: list[dict[str, Any]],
    *,
    title: str,
    x_title: str,
    y_title: str,
    height: int,
    xaxis: dict[str, Any] | None = None,
    yaxis: dict[str, Any] | None = None,
    **layout: Any,
) -> go.Figure:
    """What all figures have in common, around traces as Plotly knows them."""
    return go.Figure(
        {
            "data": traces,
            "layout": {
                "title": {"text": title, "font": {"size": 15}},
                "height": height,
                "margin": _MARGIN,
                "xaxis": {"title": {"text": x_title}, **(xaxis or {})},
                "yaxis": {
                    "title": {"text": y_title},
                    "exponentformat": "SI" if y_title == "byte" else "B",
                    **(yaxis or {}),
                },
                # Below the title of the x axis, whatever the height.
                "legend": {"orientation": "h", "yanchor": "top", "y": -56 / (height - 90), "x": 0},
                "hovermode": "closest",
                **layout,
            },
        }
    )


def curves(
    lines: Sequence[Curve],
    *,
    title: str,
    x_title: str,
    y_title: str,
    log_x: bool = False,
    log_y: bool = False,
    dates: bool = False,
    marks: Sequence[int] = (),
    height: int = 340,
) -> go.Figure:
    """Several runs' lines of one metric.

    Args:
        lines: the lines.
        title, x_title, y_title: names with their units.
        log_x, log_y: logarithmic axes.
        dates: x is Unix milliseconds.
        marks: places on the x axis that a line is drawn across; the first 200 are.
        height: pixels.
    """
    shapes = [
        {
            "type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "y domain",
            "line": {"color": BAD, "width": 1, "dash": "dot"},
        }
        for at in marks[:200]
    ]  # fmt: skip
    return figure(
        [trace for line in lines for trace in _traces(line, dates=dates)],
        title=title,
        x_title=x_title,
        y_title=y_title,
        height=height,
        xaxis={"type": "date" if dates else "log" if log_x else "linear"},
        yaxis={"type": "log" if log_y else "linear", "range": None if log_y else _flat_range(lines)},
        showlegend=len(lines) > 1 or any(len(line.broken_x) for line in lines),
        shapes=shapes,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One of the small charts that stand side by side in a figure.

    Attributes:
        title: above it.
        unit: of its y axis; may be empty.
        line: what it shows.
    """

    title: str
    unit: str
    line: Curve


def panels(shown: Sequence[Panel], *, x_title: str, height: int = 260) -> go.Figure:
    """Small charts side by side in one figure, which a browser draws sooner than as many figures.

    Args:
        shown: from left to right; at least one.
        x_title: of each.
        height: pixels.
    """
    gap = 0.1
    width = (1 - gap * (len(shown) - 1)) / len(shown)
    traces, layout, titles = [], {}, []
    for number, panel in enumerate(shown):
        suffix, left = "" if number == 0 else str(number + 1), number * (width + gap)
        traces += [trace | {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"} for trace in _traces(panel.line, dates=False)]
        layout[f"xaxis{suffix}"] = {
            "title": {"text": x_title}, "domain": [left, left + width], "anchor": f"y{suffix}",
        }  # fmt: skip
        layout[f"yaxis{suffix}"] = {
            "title": {"text": panel.unit}, "anchor": f"x{suffix}", "range": _flat_range([panel.line]),
            "exponentformat": "SI" if panel.unit == "byte" else "B",
        }  # fmt: skip
        titles.append(
            {
                "text": panel.title, "x": left, "xref": "paper", "xanchor": "left", "y": 1, "yref": "paper",
                "yanchor": "bottom", "showarrow": False, "font": {"size": 15},
            }
        )  # fmt: skip
    common = {"height": height, "margin": _MARGIN, "hovermode": "closest", "showlegend": False}
    return go.Figure({"data": traces, "layout": {**common, **layout, "annotations": titles}})


def _traces(line: Curve, *, dates: bool) -> list[dict[str, Any]]:
    """The points, the smoothed line over them, and crosses where the value is not finite."""
    style = line_style(line.number)
    smoothed = len(line.smooth_x) > 0
    common = {"type": "scatter", "legendgroup": line.label}
    found: list[dict[str, Any]] = [
        common
        | {
            "x": _axis(line.x, dates=dates),
            "y": compact(line.y),
            "name": line.label,
            "mode": "lines" if len(line.x) > 1 else "markers",
            "line": {**style, "width": 1.0 if smoothed else 1.6},
            "opacity": 0.45 if smoothed else 1.0,
            "showlegend": not smoothed,
            "hovertemplate": f"%{{y:.6g}} at %{{x}}<extra>{line.label}</extra>",
        }
    ]
    if smoothed:
        found.append(
            common
            | {
                "x": _axis(line.smooth_x, dates=dates),
                "y": compact(line.smooth_y),
                "name": line.label,
                "mode": "lines",
                "line": {**style, "width": 2.2},
                "hovertemplate": f"mean %{{y:.6g}} at %{{x}}<extra>{line.label}</extra>",
            }
        )
    if len(line.broken_x):
        floor = float(line.y.min()) if len(line.y) else 1.0
        found.append(
            {
                "type": "scatter",
                "x": _axis(line.broken_x, dates=dates),
                "y": np.full(len(line.broken_x), floor, np.float32),
                "name": f"{line.label}: NaN or Inf",
                "mode": "markers",
                "marker": {"symbol": "x", "size": 8, "color": BAD},
                "hovertemplate": f"not finite at %{{x}}<extra>{line.label}</extra>",
            }
        )
    return found


def _flat_range(lines: Sequence[Curve]) -> list[float] | None:
    """A sober range around values that are all but equal, where Plotly would show their last digits; else None."""
    values = [line.y for line in lines if len(line.y)]
    if not values:
        return None
    low, high = min(float(y.min()) for y in values), max(float(y.max()) for y in values)
    size = max(abs(low), abs(high))
    return [low - 0.05 * size, high + 0.05 * size] if size > 0 and high - low < 1e-4 * size else None


def _axis(values: np.ndarray, *, dates: bool) -> np.ndarray:
    # Milliseconds of today do not fit float32.
    return values.astype(np.float64) if dates else compact(values)


def stacked(
    x: np.ndarray, parts: Mapping[str, np.ndarray], *, title: str, x_title: str, y_title: str, height: int = 340
) -> go.Figure:
    """Parts of a whole on top of each other.

    Args:
        x: [N].
        parts: float64 [N] by name, from the bottom up.
        title, x_title, y_title: names with their units.
        height: pixels.
    """
    traces = []
    for number, (name, values) in enumerate(parts.items()):
        color = line_style(number)["color"]
        traces.append(
            {
                "type": "scatter", "x": compact(x), "y": compact(values), "name": name, "mode": "lines",
                "stackgroup": "all", "line": {"width": 0.5, "color": color}, "fillcolor": color,
            }
        )  # fmt: skip
    return figure(traces, title=title, x_title=x_title, y_title=y_title, height=height, hovermode="x unified")


def scatter(x: np.ndarray, y: np.ndarray, *, title: str, x_title: str, y_title: str) -> go.Figure:
    """One point a step, of two metrics.

    Args:
        x, y: float64 [N]; points with a NaN are left out.
        title, x_title, y_title: names with their units.
    """
    keep = np.isfinite(x) & np.isfinite(y)
    trace = {
        "type": "scatter", "x": compact(x[keep]), "y": compact(y[keep]), "mode": "markers",
        "marker": {"size": 5, "opacity": 0.8, "color": ACCENT},
    }  # fmt: skip
    return figure([trace], title=title, x_title=x_title, y_title=y_title, height=320)


def histogram(values: Mapping[str, np.ndarray], *, title: str, x_title: str, y_title: str) -> go.Figure:
    """Distributions on common bins, counted here: only the counts are sent.

    Args:
        values: float64 [N] by name, each with at least one finite value.
        title, x_title, y_title: names with their units.
    """
    whole = np.concatenate([v[np.isfinite(v)] for v in values.values()])
    edges = np.histogram_bin_edges(whole, bins=min(40, max(10, int(np.sqrt(len(whole))))))
    traces = []
    for number, (name, mine) in enumerate(values.items()):
        counts, _ = np.histogram(mine[np.isfinite(mine)], bins=edges)
        traces.append(
            {
                "type": "bar", "x": compact((edges[:-1] + edges[1:]) / 2), "y": compact(counts), "name": name,
                "marker": {"color": line_style(number)["color"]},
            }
        )  # fmt: skip
    return figure(
        traces, title=title, x_title=x_title, y_title=y_title, height=300, barmode="stack", bargap=0.05, showlegend=True
    )
