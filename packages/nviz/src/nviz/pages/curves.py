# SPDX-License-Identifier: Apache-2.0
"""Any metric of any chosen run against step, time, tokens or another metric."""

from typing import Any

import numpy as np
import streamlit as st

from nmoe.formats import NmoeError
from nviz import charts, series, tables, ui
from nviz.catalog import Entry
from nviz.points import Line
from nviz.queries import Measure

DEFAULT = ("train/loss", "val/loss", "speed/tokens_per_second", "train/grad_norm")


def _measures(chosen: list[Entry]) -> dict[str, Measure]:
    """Metrics that any of the runs has; a run that cannot be read says so and is left out."""
    found: dict[str, Measure] = {}
    for entry in chosen:
        with ui.guard(entry.key):
            found |= entry.measures()
    return dict(sorted(found.items()))


def _controls(known: dict[str, Measure]) -> tuple[list[Measure], series.View, dict[str, Any]]:
    names = st.multiselect(
        "Metrics",
        list(known),
        default=[name for name in DEFAULT if name in known],
        format_func=lambda name: known[name].label if name in known else name,
        key="metric",
        bind="query-params",
        persist_state="session",
        placeholder="Any metric that the runs have written",
    )
    chosen = [known[name] for name in names if name in known]
    scalars = [name for name, measure in known.items() if measure.scalar]
    left, middle, right, far = st.columns([2, 2, 1, 1], vertical_alignment="bottom")
    with left:
        x = st.selectbox("Against", [*series.AXES, *scalars], key="x", bind="query-params", persist_state="session")
    with middle:
        window = st.slider(
            "Smoothing (% of the range)", 0, 20, 0, key="smooth", bind="query-params", persist_state="session"
        )
    with right:
        log_x = st.toggle("log x", key="logx", bind="query-params", persist_state="session")
    with far:
        log_y = st.toggle("log y", key="logy", bind="query-params", persist_state="session")
    first, last = _range(known)
    view = series.View(x=x or "step", first=first, last=last, window=window / 100)
    return chosen, view, {"log_x": log_x, "log_y": log_y}


def _range(known: dict[str, Measure]) -> tuple[int | None, int | None]:
    """Range of steps; every point in it is asked for anew, so a narrow one shows full detail."""
    left, middle, right = st.columns([2, 2, 2], vertical_alignment="bottom")
    with left:
        first = st.number_input(
            "From step",
            min_value=0,
            value=None,
            step=1,
            key="from",
            bind="query-params",
            persist_state="session",
            placeholder="first",
        )
    with middle:
        last = st.number_input(
            "To step",
            min_value=0,
            value=None,
            step=1,
            key="to",
            bind="query-params",
            persist_state="session",
            placeholder="last",
        )
    with right:
        st.button("Whole range", on_click=_reset, icon=":material/zoom_out_map:", disabled=first is last is None)
    return first, last


def _reset() -> None:
    st.session_state["from"] = st.session_state["to"] = None


def _index(measure: Measure) -> Line:
    """The line of a metric with axes: asks which layer, expert or rank."""
    axes = {"layer": measure.layers, "expert": measure.experts, "rank": measure.ranks}
    chosen: dict[str, int] = {}
    with st.container(horizontal=True):
        for axis, size in axes.items():
            if size:
                chosen[axis] = st.number_input(
                    f"{measure.name}: {axis}",
                    min_value=0,
                    max_value=max(size - 1, 1),
                    key=f"{axis}:{measure.name}",
                    bind="query-params",
                    persist_state="session",
                )
    return Line(name=measure.name, **chosen)


def _draw(lines: list[Line], known: dict[str, Measure], view: series.View, logs: dict[str, Any]) -> None:
    """The charts, two a row; every refresh asks only stores that were published anew."""
    if st.session_state.pop("zoomed", False):
        st.rerun()  # the range stands in widgets outside this fragment
    chosen = ui.runs_in_view()
    units = {name: measure.unit for name, measure in known.items()}
    with st.container(horizontal=True):
        for entry in chosen:
            with ui.guard(entry.key):
                ui.freshness(entry)
    readable = [entry for entry in chosen if _readable(entry, lines, view)]
    columns = st.columns(2) if len(lines) > 1 else [st.container()]
    for place, line in enumerate(lines):
        with columns[place % len(columns)], ui.guard(line.name):
            drawn = _lines(line, chosen, readable, view)
            height = 340 if len(lines) > 1 else 560
            _one(line, known[line.name], drawn, view, series.axis_title(view.x, units), {"height": height, **logs})


def _readable(entry: Entry, lines: list[Line], view: series.View) -> bool:
    """Whether the store can be read; why not was said once, above the charts. Reads all lines with one opening."""
    try:
        with entry.store().session():
            entry.measures()
            for line in lines:
                entry.points(line, first=view.first, last=view.last)
    except NmoeError:
        return False
    return True


def _lines(line: Line, chosen: list[Entry], readable: list[Entry], view: series.View) -> list[charts.Curve]:
    drawn = []
    for number, entry in enumerate(chosen):
        if entry not in readable:
            continue
        with ui.guard(f"{entry.key}: {line.name}"):
            drawn.append(series.curve(entry, line, view, number=number, label=entry.key))
    return drawn


def _one(
    line: Line, measure: Measure, drawn: list[charts.Curve], view: series.View, x_title: str, look: dict[str, Any]
) -> None:
    indices = ", ".join(
        f"{axis} {index}" for axis in ("layer", "expert", "rank") if (index := getattr(line, axis)) is not None
    )
    title = f"{line.name}, {indices}" if indices else line.name
    unit = measure.unit if measure.unit != "1" else ""
    figure = charts.curves(drawn, title=title, x_title=x_title, y_title=unit, dates=view.x == "clock", **look)

    def zoom(low: float, high: float) -> None:
        inside = np.concatenate([curve.step[(curve.x >= low) & (curve.x <= high)] for curve in drawn])
        if len(inside):
            st.session_state["from"], st.session_state["to"] = int(inside.min()), int(inside.max())
            st.session_state["zoomed"] = True

    ui.chart(
        figure,
        key=f"curve-{title}-{view.first}-{view.last}",
        alt=f"{title} against {view.x} of {len(drawn)} runs. {measure.meaning}",
        on_range=zoom,
    )


def _downloads(lines: list[Line], view: series.View) -> None:
    """Every stored value of what is shown, made when the button is pressed."""
    names = sorted({line.name for line in lines})

    def make(kind: tables.Kind) -> bytes:
        return tables.table(ui.runs_in_view(), names, first=view.first, last=view.last, kind=kind)

    with st.container(horizontal=True, vertical_alignment="center"):
        st.download_button(
            "CSV", lambda: make("csv"), "metrics.csv", "text/csv", icon=":material/download:", on_click="ignore",
            help="Every stored value of these metrics and runs in this range, none left out.",
        )  # fmt: skip
        st.download_button(
            "Parquet", lambda: make("parquet"), "metrics.parquet", "application/vnd.apache.parquet",
            icon=":material/download:", on_click="ignore",
        )  # fmt: skip
        st.caption("Drag over a chart to see that range in full detail.")


def main() -> None:
    """The page."""
    st.title("Curves")
    chosen = ui.runs_in_view()
    if not chosen:
        st.info("Choose runs in the sidebar.", icon=":material/arrow_back:")
        return
    known = _measures(chosen)
    if not known:
        st.info("None of the chosen runs has written a value yet.", icon=":material/hourglass_empty:")
        ui.live(_wait, chosen, what="Curves")()
        return
    wanted, view, logs = _controls(known)
    lines = [Line(name=measure.name) if measure.scalar else _index(measure) for measure in wanted]
    ui.live(_draw, chosen, what="Curves")(lines, known, view, logs)
    if lines:
        _downloads(lines, view)


def _wait() -> None:
    """Draws the page anew as soon as there is something to draw."""
    if _measures(ui.runs_in_view()):
        st.rerun()


if __name__ == "__main__":
    main()
