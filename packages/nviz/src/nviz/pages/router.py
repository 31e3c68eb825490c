# SPDX-License-Identifier: Apache-2.0
"""Router health: who receives the tokens, layer by layer, expert by expert, and whether it stays that way."""

import duckdb
import numpy as np
import streamlit as st

from nviz import charts, ranks, ui
from nviz.catalog import Entry
from nviz.heatmaps import heatmap, rank_profile
from nviz.points import Line, Values, values_at
from nviz.queries import Measure

LOAD = "router/load"


def _heatmap(key: str, name: str, relative: bool) -> None:
    """The layer x expert picture at the chosen step: the newest unless the slider was moved."""
    entry = ui.entry_now(key)
    steps = entry.steps(name)
    if not len(steps):
        st.info(f"{name} has no values yet.", icon=":material/hourglass_empty:")
        return
    step = _shown(steps)
    picture = entry.grid(name, step)
    ui.freshness(entry, step=step)
    experts = picture.shape[1]
    shown = picture * experts if relative else picture
    title = f"{name} at step {step:,}: {picture.shape[0]} layers x {experts} experts"
    figure = heatmap(
        shown,
        title=title,
        x_title="expert",
        y_title="layer",
        value_title="load over an even share" if relative else name,
        low=0.0 if name == LOAD else None,
        high=max(2.0, float(np.nanquantile(shown, 0.995))) if relative and shown.size else None,
        mark_zero=name == LOAD,
    )
    ui.chart(figure, key="router-grid", alt=title)
    if name == LOAD and picture.size:
        _facts(picture)


def _shown(steps: np.ndarray) -> int:
    """The step that the slider names, or the last written before it."""
    at = st.session_state.get("at")
    return int(steps[-1] if at is None else steps[max(0, int(np.searchsorted(steps, at, side="right")) - 1)])


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
            found = entry.picture(name, rows="expert", layer=layer)
            if found.values.size:
                title = f"{name} of layer {layer}, by expert"
                figure = heatmap(
                    found.values, title=title, x=found.first, x_title="step", y_title="expert",
                    value_title=measures[name].label, height=360,
                )  # fmt: skip
                ui.chart(figure, key="router-history", alt=title)
            else:
                st.caption(f"Layer {layer} has no experts.")
        columns = st.columns(2)
        others = [m for m in measures.values() if m.layers and not m.experts and not m.ranks]
        others.sort(key=lambda m: (m.name not in PER_LAYER, m.name))
        for place, measure in enumerate(others):
            with columns[place % 2], ui.guard(measure.name):
                _by_layer(entry, measure)
        st.subheader("What imbalance costs")
        with ui.guard("Ranks"):
            _ranks(entry, measures)
        with ui.guard("Cost of imbalance"):
            _cost(entry, measures)


def _by_layer(entry: Entry, measure: Measure) -> None:
    found = entry.picture(measure.name, rows="layer")
    figure = heatmap(
        found.values, title=measure.name, x=found.first, x_title="step", y_title="layer",
        value_title=measure.unit if measure.unit != "1" else "", height=300,
    )  # fmt: skip
    ui.chart(figure, key=f"router-{measure.name}", alt=f"{measure.name} by layer and step. {measure.meaning}")


def _ranks(entry: Entry, measures: dict[str, Measure]) -> None:
    """What each rank received, layer by layer, beside the time that it took."""
    measure = measures.get(ranks.RECEIVED)
    if measure is None or measure.ranks < 2:
        st.caption(f"This run has written no {ranks.RECEIVED}; a run on several ranks does.")
        return
    steps = entry.steps(ranks.RECEIVED)
    found = entry.store().read(
        "ranks",
        lambda connection: ranks.joined(connection, steps, layers=measure.layers, ranks=measure.ranks),
    )
    step = _shown(steps)
    received = ranks.over_mean(entry.grid(ranks.RECEIVED, step, columns="rank"))
    seconds = entry.store().read(
        ("rank-seconds", step), lambda connection: ranks.seconds_at(connection, step, ranks=measure.ranks)
    )
    title = f"What each rank received at step {step:,}, and how long it took"
    ui.chart(rank_profile(received, seconds, title=title), key="router-ranks", alt=title)
    left, right = st.columns(2)
    with left:
        over = entry.picture(ranks.RECEIVED, rows="layer", fullest="rank")
        title = "Fullest rank over the mean, by layer"
        figure = heatmap(
            over.values, title=title, x=over.first, x_title="step", y_title="layer", value_title="",
            height=320,
        )  # fmt: skip
        ui.chart(figure, key="router-overload", alt=title)
    with right:
        share, time = np.ma.masked_invalid(found.received_SLR).mean(axis=1).filled(np.nan), found.relative
        title = "Time of a rank against what it received"
        figure = charts.scatter(
            share.ravel(), time.ravel(), title=title, x_title="received over an even share, mean of layers",
            y_title="step time over the median",
        )  # fmt: skip
        ui.chart(
            figure, key="router-rank-time", alt=f"{title}: one point a rank and step, the newest {len(found.steps)}"
        )
    _layers(found)


def _routed(found: ranks.Joined) -> np.ndarray:
    """Layers that have a router."""
    return np.flatnonzero(np.isfinite(found.received_SLR).any(axis=(0, 2)))


def _layers(found: ranks.Joined) -> None:
    """Which layers the slow ranks are slow for."""
    layers = _routed(found)
    fullest = np.fmax.reduce(found.received_SLR[:, layers], axis=2)
    correlation = found.correlation()[layers]
    rows = [
        {
            "layer": int(layer),
            "overload now": float(fullest[-1, place]),
            "overload, mean": float(np.nanmean(fullest[:, place])),
            "fullest rank now": int(np.nan_to_num(found.received_SLR[-1, layer]).argmax()),
            "correlation with step time": float(correlation[place]),
        }
        for place, layer in enumerate(layers)
    ]
    rows.sort(key=lambda row: -np.nan_to_num(row["correlation with step time"], nan=-2.0))
    two = st.column_config.NumberColumn(format="%.2f")
    st.dataframe(
        rows,
        column_config={
            "overload now": two,
            "overload, mean": two,
            "correlation with step time": st.column_config.NumberColumn(
                format="%.2f",
                help=f"Over ranks and the newest {len(found.steps)} logged steps: whether a rank that receives more in this "
                "layer takes longer. 1: always; 0: not at all.",
            ),
        },
        hide_index=True,
        placeholder="-",
        height=min(280, 38 + 35 * len(rows)),
        alt="Layers by how much their imbalance goes with the time of a rank",
    )


def _cost(entry: Entry, measures: dict[str, Measure]) -> None:
    """Step time against the overload of the fullest rank: what imbalance costs, one point a logged step."""
    if not {"router/overload", "speed/step_time"} <= set(measures):
        return
    found = entry.points(Line(name="router/overload"))

    def ask(connection: duckdb.DuckDBPyConnection, earlier: Values | None) -> Values:
        return values_at(connection, "speed/step_time", found.step, earlier)

    seconds = entry.grown("cost", ask).at(found.step)
    if not len(found.step):
        return
    st.metric(
        "Overload: rows of the fullest rank over the mean",
        f"{found.value[-1]:.2f}",
        help="The time of a step is that of the fullest rank; 1 is perfect balance.",
    )
    figure = charts.scatter(
        found.value, seconds, title="Step time against overload", x_title="router/overload", y_title="s"
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
