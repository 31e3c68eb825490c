# SPDX-License-Identifier: Apache-2.0
"""Router health: who receives the tokens, layer by layer, expert by expert, and whether it stays that way."""

import numpy as np
import streamlit as st

from nviz import charts, queries, ui
from nviz.catalog import Entry
from nviz.points import Line, values_at
from nviz.queries import Measure

LOAD = "router/load"


def _heatmap(key: str, name: str, relative: bool) -> None:
    """The layer x expert picture at the chosen step: the newest unless the slider was moved."""
    entry = ui.entry_now(key)
    store = entry.store()
    steps = entry.steps(name)
    if not len(steps):
        st.info(f"{name} has no values yet.", icon=":material/hourglass_empty:")
        return
    at = st.session_state.get("at")
    step = int(steps[-1]) if at is None else int(steps[max(0, int(np.searchsorted(steps, at, side="right")) - 1)])
    picture = store.read(("grid", name, step), lambda connection: queries.grid(connection, name, step))
    ui.freshness(entry, step=step)
    experts = picture.shape[1]
    shown = picture * experts if relative else picture
    title = f"{name} at step {step:,}: {picture.shape[0]} layers x {experts} experts"
    figure = charts.heatmap(
        shown,
        title=title,
        x_title="expert",
        y_title="layer",
        value_title="load over an even share" if relative else name,
        low=0.0 if name == LOAD else None,
        high=max(2.0, float(np.nanquantile(shown, 0.995))) if relative and shown.size else None,
        mark_zero=name == LOAD,
        view=f"{key} {name}",
    )
    ui.chart(figure, key="router-grid", alt=title)
    if name == LOAD and picture.size:
        _facts(picture)


def _facts(picture: np.ndarray) -> None:
    """The figures that tell a healthy router from a collapsed one, over all layers that have one."""
    routed = picture[np.isfinite(picture).any(axis=1)]
    over = np.nanmax(routed, axis=1) / np.nanmean(routed, axis=1)
    layers = np.flatnonzero(np.isfinite(picture).any(axis=1))
    with st.container(horizontal=True):
        st.metric(
            "Fullest expert over the mean", f"{over.max():.2f}", help=f"In layer {layers[over.argmax()]}.", border=True
        )
        st.metric(
            "Experts that received nothing",
            f"{int((routed == 0).sum()):,} of {np.isfinite(routed).sum():,}",
            border=True,
        )
        share = np.where(routed > 0, routed, 1.0)
        entropy = -(np.nan_to_num(routed) * np.log(np.nan_to_num(share, nan=1.0))).sum(axis=1) / np.log(routed.shape[1])
        st.metric("Lowest entropy of a layer", f"{entropy.min():.3f}", help="1 is an even load.", border=True)


def _slider(entry: Entry, name: str) -> None:
    """Which step is shown; at the right end the newest, and it moves on with the run."""
    steps = entry.steps(name)
    if len(steps) < 2:
        return
    left, right = st.columns([5, 1], vertical_alignment="bottom")
    with right:
        newest = st.toggle("Newest", value=True, key="newest", bind="query-params", persist_state="session")
    with left:
        low, high = int(steps[0]), int(steps[-1])
        width = int(np.gcd.reduce(np.diff(steps))) or 1
        at = st.slider(
            "Step",
            low,
            high,
            high,
            step=width,
            key="step",
            disabled=newest,
            bind="query-params",
            persist_state="session",
        )
    st.session_state["at"] = None if newest else at


PER_LAYER = ("router/max_over_mean", "router/dead_experts", "router/entropy", "router/bias_range")


def _history(key: str, name: str, layer: int) -> None:
    """Along the steps: the experts of one layer, every figure by layer, and what imbalance costs."""
    entry = ui.entry_now(key)
    store = entry.store()
    with store.session():
        measures = entry.measures()
        with ui.guard(name):
            picture, first = store.read(
                ("history", name, layer), lambda connection: queries.per_layer(connection, name, layer=layer)
            )
            if picture.size:
                title = f"{name} of layer {layer}, by expert"
                figure = charts.heatmap(
                    picture, title=title, x=first, x_title="step", y_title="expert", value_title=measures[name].label,
                    view=f"{key} {layer}", height=360,
                )  # fmt: skip
                ui.chart(figure, key="router-history", alt=title)
            else:
                st.caption(f"Layer {layer} has no experts.")
        columns = st.columns(2)
        others = [m for m in measures.values() if m.layers and not m.experts]
        others.sort(key=lambda m: (m.name not in PER_LAYER, m.name))
        for place, measure in enumerate(others):
            with columns[place % 2], ui.guard(measure.name):
                _by_layer(entry, measure)
        with ui.guard("Cost of imbalance"):
            _cost(entry, measures)


def _by_layer(entry: Entry, measure: Measure) -> None:
    picture, first = entry.store().read(
        ("layers", measure.name), lambda connection: queries.per_layer(connection, measure.name)
    )
    figure = charts.heatmap(
        picture, title=measure.name, x=first, x_title="step", y_title="layer",
        value_title=measure.unit if measure.unit != "1" else "", view=entry.key, height=300,
    )  # fmt: skip
    ui.chart(figure, key=f"router-{measure.name}", alt=f"{measure.name} by layer and step. {measure.meaning}")


def _cost(entry: Entry, measures: dict[str, Measure]) -> None:
    """Step time against the overload of the fullest rank: what imbalance costs, one point a logged step."""
    if not {"router/overload", "speed/step_time"} <= set(measures):
        return

    found = entry.points(Line(name="router/overload"))
    seconds = entry.store().read("cost", lambda connection: values_at(connection, "speed/step_time", found.step))
    if not len(found.step):
        return
    st.metric(
        "Overload: rows of the fullest rank over the mean",
        f"{found.value[-1]:.2f}",
        help="The time of a step is that of the fullest rank; 1 is perfect balance.",
    )
    figure = charts.scatter(
        found.value, seconds, title="Step time against overload", x_title="router/overload", y_title="s", view=entry.key
    )
    ui.chart(figure, key="router-cost", alt="Step time against the overload of the fullest rank")


def _grids(measures: dict[str, Measure]) -> list[str]:
    return [name for name, measure in measures.items() if measure.layers and measure.experts]


def main() -> None:
    """The page."""
    st.title("Router")
    entry = ui.focus(ui.runs_in_view())
    if entry is None:
        return
    measures = entry.measures()
    names = _grids(measures)
    if not names:
        st.info("This run has written no value by layer and expert yet.", icon=":material/hourglass_empty:")
        return
    left, right = st.columns([3, 1], vertical_alignment="bottom")
    with left:
        name = st.selectbox(
            "Metric",
            names,
            index=names.index(LOAD) if LOAD in names else 0,
            key="grid",
            bind="query-params",
            format_func=lambda name: measures[name].label if name in measures else name,
        )
    with right:
        relative = st.toggle(
            "Over an even share",
            value=True,
            key="relative",
            bind="query-params",
            persist_state="session",
            help="1 is an even load: every expert receives the same share of its layer's assignments.",
        )
    name = name or names[0]
    _slider(entry, name)
    ui.live(_heatmap, [entry], what=name)(entry.key, name, relative and measures[name].unit == "fraction")
    st.subheader("Along the steps")
    layer = st.number_input(
        "Layer", min_value=0, max_value=max(measures[name].layers - 1, 1), value=None, key="layer", bind="query-params",
        persist_state="session", placeholder="last layer",
    )  # fmt: skip
    ui.live(_history, [entry], what=name)(entry.key, name, measures[name].layers - 1 if layer is None else layer)


if __name__ == "__main__":
    main()
