# SPDX-License-Identifier: Apache-2.0
"""Every run with its state: what runs, what died, how good it is; and what differs between the chosen ones."""

import time
from typing import Any

import streamlit as st

from nviz import ui
from nviz.catalog import Entry
from nviz.summary import Summary, config_difference, flatten, summarize

SUMMARY_BUDGET_S = 0.8


def _row(entry: Entry, summary: Summary) -> dict[str, Any]:
    info = entry.info
    return {
        "run": entry.key,
        "status": info.status,
        "last seen": "" if info.heartbeat_at is None else f"{ui.ago(time.time() - info.heartbeat_at)} ago",
        "progress": min(1.0, info.step / info.steps) if info.steps else None,
        "step": info.step,
        "loss": summary.loss,
        "best loss": summary.best_loss,
        "tokens": summary.tokens,
        "tokens/s": summary.tokens_per_second,
        "MFU": summary.mfu,
        "overload": summary.overload,
        "val loss": summary.val_loss,
        "best val loss": summary.best_val_loss,
        "started": None
        if info.started_at is None
        else time.strftime("%Y-%m-%d %H:%M", time.localtime(info.started_at)),
        "note": entry.brief(info.error or summary.error or "") or ("reading ..." if summary.pending else ""),
    }


def _number(label: str, format: str, width: int, help: str | None = None) -> Any:
    return st.column_config.NumberColumn(label, format=format, width=width, help=help)


# Pixels, so that a run's state, losses and speed fit a 1280 px window; the rest is a scroll away.
COLUMNS = {
    "run": st.column_config.TextColumn("run", pinned=True, width=130),
    "status": st.column_config.TextColumn("status", width=76),
    "last seen": st.column_config.TextColumn("last seen", width=88, help="Last sign of life."),
    "progress": st.column_config.ProgressColumn("progress", format="percent", min_value=0.0, max_value=1.0, width=104),
    "step": _number("step", "localized", 66),
    "loss": _number("loss", "%.4f", 66),
    "best loss": _number("best loss", "%.4f", 76),
    "tokens": _number("tokens", "compact", 66),
    "tokens/s": _number("tokens/s", "compact", 72),
    "MFU": _number("MFU", "percent", 68),
    "overload": _number(
        "overload",
        "%.2f",
        76,
        "Rows of the fullest rank over the mean: what an uneven router costs beside every tokens/s.",
    ),
    "val loss": _number("val loss", "%.4f", 80),
    "best val loss": _number("best val loss", "%.4f", 100),
}


def _choose() -> None:
    """Takes the marked rows as the runs in view."""
    rows = st.session_state["table"]["selection"]["rows"]
    shown = st.session_state["table_keys"]
    if chosen := [shown[row] for row in rows if row < len(shown)]:
        st.session_state["run"] = chosen


def _table() -> None:
    known = ui.entries()
    wanted = st.session_state.get("find", "").lower()
    listed = [entry for entry in known.values() if all(word in _haystack(entry) for word in wanted.split())]
    summaries = summarize(listed, budget_s=SUMMARY_BUDGET_S)
    counts = {status: sum(entry.info.status == status for entry in known.values()) for status in ui.ICONS}
    with st.container(horizontal=True):
        for status, count in counts.items():
            if count:
                st.badge(f"{count} {status}", icon=ui.ICONS[status], color=ui.COLORS[status])
    st.session_state["table_keys"] = [entry.key for entry in listed]
    st.dataframe(
        [_row(entry, summaries[entry.key]) for entry in listed],
        column_config=COLUMNS,
        hide_index=True,
        key="table",
        on_select=_choose,
        selection_mode="multi-row",
        placeholder="-",
        alt="Runs with status, progress, losses and speed",
    )
    for entry in listed:
        if fault := entry.info.error or summaries[entry.key].error:
            st.caption(f"{ui.ICONS[entry.info.status]} **{entry.key}** ({entry.info.status}): {entry.brief(fault)}")
    if any(summary.pending for summary in summaries.values()):
        # Stores that are read stay read, so this ends.
        st.rerun()


def _haystack(entry: Entry) -> str:
    info = entry.info
    return (
        f"{entry.key} {info.status} {info.host} {' '.join(f'{k}={v}' for k, v in flatten(info.config).items())}".lower()
    )


def _differences(chosen: list[Entry]) -> None:
    if len(chosen) < 2:
        st.caption("Mark two or more runs to see what differs between their configurations.")
        return
    st.subheader("Configuration, where it differs")
    rows = config_difference(chosen)
    if rows:
        st.dataframe(rows, hide_index=True, alt="Configuration keys that differ between the chosen runs")
    else:
        st.caption("The configurations are equal.")


def main() -> None:
    """The page."""
    st.title("Runs")
    st.text_input(
        "Find",
        key="find",
        bind="query-params",
        persist_state="session",
        placeholder="name, status, host, or a key as moe.top_k=8",
    )
    known = ui.entries()
    ui.live(_table, list(known.values()), what="Runs")()
    _differences(ui.runs_in_view())


if __name__ == "__main__":
    main()
