# SPDX-License-Identifier: Apache-2.0
"""What every page shares: the runs in view, how stale they are, and errors as one line.

View state lives in the address: widgets bind themselves to it, and the selection of runs is written to it always, so
an address that is copied shows the same view elsewhere.
"""

import functools
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, ParamSpec

import numpy as np
import plotly.graph_objects as go
import streamlit as st

from nmoe.formats import DataError, NmoeError
from nviz.catalog import Entry, list_entries
from nviz.settings import Settings, parse_settings
from nviz.source import UnpublishedError

__all__ = [
    "COLORS",
    "ICONS",
    "REFRESH_S",
    "ago",
    "chart",
    "choose_runs",
    "entries",
    "entry_now",
    "focus",
    "freshness",
    "guard",
    "live",
    "refreshed",
    "runs_in_view",
    "settings",
]

REFRESH_S = 5.0
ICONS = {
    "running": ":material/play_circle:",
    "stale": ":material/help:",
    "finished": ":material/check_circle:",
    "stopped": ":material/pause_circle:",
    "failed": ":material/error:",
    "unreadable": ":material/broken_image:",
}
_log = logging.getLogger(__name__)
P = ParamSpec("P")
Color = Literal["red", "orange", "green", "gray"]
COLORS: dict[str, Color] = {
    "running": "green",
    "stale": "orange",
    "finished": "gray",
    "stopped": "gray",
    "failed": "red",
    "unreadable": "red",
}


@st.cache_resource(show_spinner=False)
def _settings(arguments: tuple[str, ...]) -> Settings:
    return parse_settings(arguments)


def settings() -> Settings:
    """The folders this dashboard was started with."""
    return _settings(tuple(sys.argv[1:]))


@st.cache_data(ttl=1.0, show_spinner=False)
def _entries(known: Settings) -> dict[str, Entry]:
    return list_entries(known)


def entries() -> dict[str, Entry]:
    """Every run by its key, at most a second old, newest first."""
    return _entries(settings())


def entry_now(key: str) -> Entry:
    """A run as it is now.

    Raises:
        DataError: if its folder is gone.
    """
    known = entries()
    if key not in known:
        raise DataError(f"the run {key!r} is gone; its folder was removed or renamed")
    return known[key]


def choose_runs(known: dict[str, Entry]) -> list[Entry]:
    """The selection of runs in the sidebar, kept in the address as `run`."""
    if "run" not in st.session_state:
        asked = st.query_params.get_all("run")
        if missing := [key for key in asked if key not in known]:
            st.warning(
                f"No run {', '.join(repr(key) for key in missing)} below the folders of this dashboard.",
                icon=":material/search_off:",
            )
        st.session_state["run"] = [key for key in asked if key in known] or list(known)[:1]
    else:
        st.session_state["run"] = [key for key in st.session_state["run"] if key in known]
    chosen = st.sidebar.multiselect(
        "Runs",
        list(known),
        key="run",
        placeholder="Choose runs to see",
        help="The pages show these runs; the first is the one looked at where a page shows a single run.",
    )
    if st.query_params.get_all("run") != chosen:
        st.query_params["run"] = chosen
    return [known[key] for key in chosen]


def runs_in_view() -> list[Entry]:
    """The chosen runs as they are now; read anew in every refresh."""
    known = entries()
    return [known[key] for key in st.session_state.get("run", []) if key in known]


def focus(chosen: Sequence[Entry]) -> Entry | None:
    """The one run that a page shows; asks which if several are chosen."""
    if not chosen:
        st.info("Choose a run in the sidebar.", icon=":material/arrow_back:")
        return None
    if len(chosen) == 1:
        return chosen[0]
    keys = [entry.key for entry in chosen]
    key = st.selectbox("Run", keys, key="focus", bind="query-params", persist_state="session")
    return chosen[keys.index(key)] if key in keys else chosen[0]


def refreshed(chosen: Sequence[Entry]) -> float | None:
    """Seconds between refreshes: None, never, once none of the runs is being written."""
    return REFRESH_S if any(entry.live for entry in chosen) else None


@contextmanager
def guard(what: str) -> Iterator[None]:
    """Shows a fault that a user can mend as one line in place of `what`; the rest of the page stands."""
    try:
        yield
    except UnpublishedError as error:
        st.info(f"{what}: {error}.", icon=":material/hourglass_empty:")
    except NmoeError as error:
        _log.warning("%s: %s", what, error)
        st.error(f"{what}: {error}", icon=":material/error:")


def live(function: Callable[P, None], chosen: Sequence[Entry], *, what: str) -> Callable[P, None]:
    """`function` as a part of the page that draws itself anew while one of the runs is being written.

    Args:
        function: draws the part.
        chosen: the runs it shows.
        what: names the part where it cannot be drawn; Streamlit would show a fault in it before the page could.
    """

    keys, interval = [entry.key for entry in chosen], refreshed(chosen)

    @functools.wraps(function)
    def guarded(*arguments: P.args, **named: P.kwargs) -> None:
        with guard(what):
            function(*arguments, **named)
        if interval is not None and refreshed([known for known in map(entries().get, keys) if known]) is None:
            st.rerun()  # the last of the runs has ended: the page is drawn once more, without a timer

    return st.fragment(guarded, run_every=interval)


def ago(seconds: float) -> str:
    """A length of time in the largest unit that fits, as "12 s" or "3 h"."""
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def freshness(entry: Entry, *, step: int | None = None) -> None:
    """A badge that says how old what is drawn is, and whether more is to come.

    Args:
        entry: the run.
        step: last step drawn.
    """
    info, now = entry.info, time.time()
    at_step = "" if step is None else f", step {step:,}"
    color = COLORS[info.status]
    silence = ago(now - info.heartbeat_at) if info.heartbeat_at is not None else "ever"
    text = f"stale, silent for {silence}" if info.status == "stale" else f"{info.status} {silence} ago"
    if entry.live:
        published = entry.store().stamp().published_at
        text = f"live, published {ago(now - published)} ago"
        # A store is published every 10 s, or 50 times its cost: two minutes of silence are no accident.
        if now - published > 120:
            text, color = f"running, but nothing published for {ago(now - published)}", "orange"
    st.badge(f"{entry.key}: {text}{at_step}", icon=ICONS[info.status], color=color)


def chart(figure: go.Figure, *, key: str, alt: str, on_range: Callable[[float, float], None] | None = None) -> None:
    """Shows a figure. Streamlit draws a chart anew when its data changed, and leaves it alone when it did not.

    Args:
        figure: the figure.
        key: the same for the same chart in every refresh.
        alt: the chart in one sentence, for those who cannot see it.
        on_range: called with the ends of a range of x that the reader marked by dragging.
    """
    config = {"displaylogo": False, "responsive": True}
    if on_range is None:
        st.plotly_chart(figure, key=key, alt=alt, config=config)
        return

    def marked() -> None:
        boxes = st.session_state[key]["selection"]["box"]
        if boxes and len(boxes[-1].get("x", ())) == 2:
            low, high = sorted(_number(x) for x in boxes[-1]["x"])
            on_range(low, high)

    figure.update_layout(dragmode="select", selectdirection="h")
    st.plotly_chart(figure, key=key, alt=alt, config=config, on_select=marked, selection_mode="box")


def _number(x: float | str) -> float:
    """A place on an x axis; dates, which Plotly gives as text in UTC, as Unix milliseconds."""
    return float(np.datetime64(x.replace(" ", "T"), "us").astype(np.int64)) / 1000 if isinstance(x, str) else float(x)
