# SPDX-License-Identifier: Apache-2.0
"""Loss and gradient spikes, each traced to the step, its batch, the shards and the documents."""

import math
from typing import Any

import streamlit as st

from nmoe.formats.shards import open_shards
from nviz import charts, corpus, reading, series, spikes, ui
from nviz.catalog import Entry
from nviz.points import Line
from nviz.spikes import Spike

MAX_STEPS = 8
MAX_DOCUMENTS = 500


def _name(spike: Spike) -> str:
    return f"{spike.name} at step {spike.peak}"


def _overview(key: str) -> None:
    """The curves with their spikes; follows a run that is being written."""
    entry = ui.entry_now(key)
    found = entry.spikes()
    if len(found) != st.session_state.get("spikes_known"):
        first_time = "spikes_known" not in st.session_state
        st.session_state["spikes_known"] = len(found)
        if not first_time:
            st.rerun()
    ui.freshness(entry)
    columns = st.columns(2)
    for column, name in zip(columns, spikes.METRICS, strict=True):
        with column, ui.guard(name):
            line = series.curve(entry, Line(name=name), series.View(), number=0, label=key)
            marks = [spike.peak for spike in found if spike.name == name]
            figure = charts.curves([line], title=name, x_title="step", y_title="", height=280, marks=marks)
            ui.chart(figure, key=f"spikes-{name}", alt=f"{name} with its spikes")


def _documents(entry: Entry, spike: Spike) -> list[tuple[dict[str, Any], str, corpus.Piece]]:
    """Rows of the table, the shard set's key and the piece, for every document in the steps of a spike."""
    known = reading.known_corpora()
    found: list[tuple[dict[str, Any], str, corpus.Piece]] = []
    hidden: set[str] = set()
    for step in range(spike.first, min(spike.last, spike.first + MAX_STEPS - 1) + 1):
        rows = entry.store().read(("spans", step), lambda connection, step=step: spikes.spans(connection, step))
        for shard_path, start, end in rows:
            owner = corpus.owner(known, shard_path)
            if owner is None:
                hidden.add(shard_path)
                continue
            shards = open_shards(owner[0].path)
            shard = next((shard for shard in shards.shards if shard.name == owner[1]), None)
            if shard is None:
                hidden.add(shard_path)
                continue
            for piece in corpus.pieces(shard, start, end):
                row = {
                    "step": step, "document": piece.id, "source": piece.source, "score": piece.score,
                    "tokens": piece.end - piece.start, "shard": shard.name, "data": owner[0].key,
                }  # fmt: skip
                found.append((row, owner[0].key, piece))
    for path in sorted(hidden):
        st.warning(
            f"`{path}` is not below the data folders of this dashboard; name them with `--data DIR`.",
            icon=":material/folder_off:",
        )
    return found


def _trace(entry: Entry, spike: Spike) -> None:
    if not math.isfinite(spike.value):
        st.markdown(f"**{spike.name}** was not finite from step {spike.first:,} to {spike.last:,}.")
    else:
        st.markdown(
            f"**{spike.name}** rose to **{spike.value:.4g}** at step {spike.peak:,}; the {spikes.WINDOW} values before had "
            f"the median {spike.usual:.4g} ({spike.severity:.0f} robust deviations)."
        )
    found = _documents(entry, spike)
    if not found:
        st.info(
            "No documents are known for these steps: the run recorded no batches for them.", icon=":material/link_off:"
        )
        return
    steps = sorted({row["step"] for row, _, _ in found})
    st.markdown(
        f"Steps {steps[0]:,} to {steps[-1]:,} saw **{len(found):,} pieces of documents** "
        f"({sum(row['tokens'] for row, _, _ in found):,} tokens)."
    )
    st.dataframe(
        [row for row, _, _ in found[:MAX_DOCUMENTS]],
        hide_index=True,
        placeholder="-",
        height=320,
        alt="Documents that the steps of the spike saw",
    )
    if len(found) > MAX_DOCUMENTS:
        st.caption(f"The first {MAX_DOCUMENTS} of {len(found):,}.")
    names = [
        f"{number}: {row['document']} (step {row['step']})" for number, (row, _, _) in enumerate(found[:MAX_DOCUMENTS])
    ]
    chosen = st.selectbox("Read a document", names, key="document", bind="query-params")
    row, key, piece = found[names.index(chosen) if chosen in names else 0]
    shards = open_shards(reading.known_corpora()[key].path)
    reading.judgement(piece)
    reading.text(shards, next(shard for shard in shards.shards if shard.name == row["shard"]), piece)


def main() -> None:
    """The page."""
    st.title("Spikes")
    entry = ui.focus(ui.runs_in_view())
    if entry is None:
        return
    found = entry.spikes()
    ui.live(_overview, [entry], what="Spikes")(entry.key)
    if not found:
        st.info("No spike of loss or gradient norm so far.", icon=":material/check:")
        return
    names = [_name(spike) for spike in found]
    chosen = st.selectbox("Spike, the most severe first", names, key="spike", bind="query-params")
    with ui.guard("Documents of the spike"):
        _trace(entry, found[names.index(chosen) if chosen in names else 0])


if __name__ == "__main__":
    main()
