# SPDX-License-Identifier: Apache-2.0
"""Where the time goes: parts of a step, throughput, memory, the devices, and which rank the others wait for."""

import numpy as np
import streamlit as st

from nviz import charts, series, ui
from nviz.catalog import Entry
from nviz.heatmaps import heatmap
from nviz.points import Line
from nviz.queries import Measure

PARTS = ("speed/data_wait", "speed/forward_time", "speed/backward_time", "speed/optimizer_time")
WHOLE = "speed/step_time"
GROUPS = {
    "Throughput": ("speed/tokens_per_second", "speed/mfu", "router/overload"),
    "Memory": ("memory/gpu_peak", "memory/host_rss"),
    "Devices": ("gpu/utilisation", "gpu/power", "gpu/temperature"),
    "Pauses": ("speed/checkpoint_time", "speed/eval_time"),
}
RANK_TIME = "speed/rank_step_time"


def _parts(entry: Entry, measures: dict[str, Measure]) -> None:
    """Parts of the step stacked below its whole time; what no part accounts for is shown as the rest."""
    if WHOLE not in measures:
        return
    names = [name for name in PARTS if name in measures]
    whole = entry.points(Line(name=WHOLE))
    steps = whole.mean_step
    stack = {}
    for name in names:
        found = entry.points(Line(name=name))
        if len(found.mean):
            stack[name] = np.interp(steps, found.mean_step, found.mean)
    rest = np.maximum(whole.mean - sum(stack.values(), np.zeros(len(steps))), 0.0)
    stack["rest of the step"] = rest
    ui.chart(
        charts.stacked(steps, stack, title="Parts of a step, mean of each bucket", x_title="step", y_title="s"),
        key="speed-parts",
        alt="Time of a step by part",
    )


def _ranks(entry: Entry, measures: dict[str, Measure]) -> None:
    """Step time by rank, and who is slow how often."""
    if RANK_TIME not in measures:
        return
    found = entry.picture(RANK_TIME, rows="rank", columns=300)
    if found.values.shape[0] < 2:
        return
    means = found.means
    slowest = int(np.nanargmax(means))
    st.metric(
        "Slowest rank on average",
        f"rank {slowest}",
        f"{means[slowest] / np.nanmedian(means) - 1:+.1%} of the median",
        delta_color="off",
        delta_arrow="off",
        help="All ranks wait for the slowest in every step.",
    )
    ui.chart(
        heatmap(
            found.values, title="Step time by rank", x=found.first, x_title="step", y_title="rank", value_title="s",
            height=260 + 4 * min(len(found.values), 64),
        ),
        key="speed-ranks",
        alt="Step time by rank and step",
    )  # fmt: skip


def _draw(key: str) -> None:
    entry = ui.entry_now(key)
    store = entry.store()
    with store.session():
        measures = entry.measures()
        ui.freshness(entry, step=max((measure.last_step for measure in measures.values()), default=0))
        with ui.guard("Parts of a step"):
            _parts(entry, measures)
        for title, names in GROUPS.items():
            _group(entry, title, [measures[name] for name in names if name in measures and measures[name].scalar])
        with ui.guard("Ranks"):
            _ranks(entry, measures)
    missing = [name for names in GROUPS.values() for name in names if name not in measures]
    if missing:
        st.caption(f"Not written by this run: {', '.join(missing)}.")


def _group(entry: Entry, title: str, wanted: list[Measure]) -> None:
    if not wanted:
        return
    st.subheader(title)
    with ui.guard(title):
        shown = [
            charts.Panel(
                title=measure.name,
                unit=measure.unit if measure.unit != "1" else "",
                line=series.curve(entry, Line(name=measure.name), series.View(), number=0, label=entry.key),
            )
            for measure in wanted
        ]
        ui.chart(
            charts.panels(shown, x_title="step"),
            key=f"speed-{title}",
            alt="; ".join(f"{measure.name}: {measure.meaning}" for measure in wanted),
        )


def main() -> None:
    """The page."""
    st.title("Speed")
    entry = ui.focus(ui.runs_in_view())
    if entry is not None:
        ui.live(_draw, [entry], what="Speed")(entry.key)


if __name__ == "__main__":
    main()
