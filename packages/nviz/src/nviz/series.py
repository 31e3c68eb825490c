# SPDX-License-Identifier: Apache-2.0
"""A run's line against any x axis: step, time, tokens, or another metric."""

from dataclasses import dataclass

import duckdb
import numpy as np

from nviz.catalog import Entry
from nviz.charts import Curve, smooth
from nviz.points import Line, Points, Values, values_at

__all__ = ["AXES", "View", "axis_title", "curve"]

AXES = ("step", "time since start", "clock", "tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """How lines are drawn.

    Attributes:
        x: one of `AXES`, or the name of a scalar metric.
        first, last: range of steps, both included; None: open.
        window: width of the smoothing window as a fraction of the shown range; 0: none.
    """

    x: str = "step"
    first: int | None = None
    last: int | None = None
    window: float = 0.0


def axis_title(x: str, units: dict[str, str]) -> str:
    """Title of the x axis with its unit."""
    match x:
        case "step" | "clock":
            return x
        case "time since start":
            return "time since start (h)"
        case "tokens":
            return "tokens (token)"
        case _:
            unit = units.get(x, "")
            return x if unit in ("", "1") else f"{x} ({unit})"


def curve(entry: Entry, line: Line, view: View, *, number: int, label: str) -> Curve:
    """The line of a run.

    Args:
        entry: the run.
        line: which series.
        view: how it is drawn.
        number: place of the run in the selection.
        label: name in the legend.

    Raises:
        DataError: if there is no readable store.
    """

    found = entry.points(line, first=view.first, last=view.last)
    x, mean_x, broken_x = found.step, found.mean_step, found.broken_step
    if view.x not in ("step", "clock", "time since start"):
        x, mean_x, broken_x = _against(entry, found, "train/tokens" if view.x == "tokens" else view.x, line, view)
    if view.x in ("clock", "time since start"):
        x, mean_x, broken_x = _clock(entry, found, elapsed=view.x != "clock")
    half_width = round(len(found.mean) * view.window / 2)
    smooth_y = smooth(found.mean, found.weight, half_width=half_width) if half_width else np.empty(0)
    keep, keep_mean = np.isfinite(x), np.isfinite(mean_x)
    return Curve(
        label=label,
        number=number,
        step=found.step[keep],
        x=x[keep],
        y=found.value[keep],
        smooth_x=mean_x[keep_mean] if half_width else np.empty(0),
        smooth_y=smooth_y[keep_mean] if half_width else smooth_y,
        broken_x=broken_x[np.isfinite(broken_x)],
    )


def _against(
    entry: Entry, found: Points, name: str, line: Line, view: View
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Another metric's values at the points, the means and the steps that are not finite."""
    wanted = (found.step, found.mean_step, found.broken_step)

    def ask(connection: duckdb.DuckDBPyConnection, earlier: Values | None) -> Values:
        return values_at(connection, name, np.concatenate(wanted), earlier)

    values = entry.grown(("against", name, line, view.first, view.last), ask)
    return values.at(found.step), values.at(found.mean_step), values.at(found.broken_step)


def _clock(entry: Entry, found: Points, *, elapsed: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Times of the points: hours since the run's start, or Unix milliseconds, which is what Plotly takes for dates."""
    start = (entry.info.started_at or (found.time[0] if len(found.time) else 0.0)) if elapsed else 0.0
    scale = 1 / 3600 if elapsed else 1000.0
    if not len(found.step):
        return (np.empty(0), np.empty(len(found.mean_step)), np.full(len(found.broken_step), np.nan))
    # Between two drawn points time is as good as linear.
    mean_time, broken_time = (
        np.interp(steps, found.step, found.time) for steps in (found.mean_step, found.broken_step)
    )
    return (found.time - start) * scale, (mean_time - start) * scale, (broken_time - start) * scale
