# SPDX-License-Identifier: Apache-2.0
"""What the model is fed: shards, documents as tokens, judge scores, and how much of it a run has seen."""

from pathlib import Path
from typing import Any

import numpy as np
import streamlit as st

from nmoe.formats.documents import open_scored
from nmoe.formats.shards import ShardSet, open_shards, verify_shards
from nviz import charts, corpus, reading, series, ui
from nviz.catalog import Entry
from nviz.corpus import Corpus
from nviz.points import Line

VERIFY_LIMIT = 4 << 30  # bytes that a page re-reads on request
SHOWN_VERDICTS = 200
SHOWN_SOURCES = 6
SOURCE_LOSS = "val/source_loss"


def _seen(known: dict[str, Corpus]) -> None:
    """Tokens that the run has seen of each source of its mixture, how often over, and what the judge said of it."""
    entry = ui.focus(ui.runs_in_view())
    if entry is None:
        return
    with ui.guard(entry.key), entry.store().session():
        shards = entry.grown("seen", corpus.seen).shards
        ui.freshness(entry)
        total = sum(tokens for tokens, _ in shards.values())
        if not shards:
            st.info("This run has recorded no batches yet.", icon=":material/hourglass_empty:")
            return
        table: dict[str, dict[str, Any]] = {}
        sources: dict[str, Corpus] = {}
        for shard, (tokens, sequences) in shards.items():
            owner = corpus.owner(known, shard)
            key = owner[0].key if owner else shard
            line = table.setdefault(key, {"data": key, "tokens seen": 0, "rows": 0, "share": 0.0, "passes": None})
            line["tokens seen"] += tokens
            line["rows"] += sequences
            line["share"] = line["tokens seen"] / total
            if owner:
                sources[key] = owner[0]
                line["passes"] = line["tokens seen"] / max(1, _set(owner[0]).num_tokens)
        st.dataframe(
            list(table.values()),
            column_config={
                "tokens seen": st.column_config.NumberColumn(format="localized"),
                "rows": st.column_config.NumberColumn(format="localized"),
                "share": st.column_config.NumberColumn(format="percent"),
                "passes": st.column_config.NumberColumn(format="%.2f", help="Tokens seen over tokens there are."),
            },
            hide_index=True,
            placeholder="-",
            alt="Tokens that the run has seen of each source",
        )
        st.subheader("What the judge said, beside the loss")
        order = sorted(sources, key=lambda key: -table[key]["tokens seen"])
        for key in order[:SHOWN_SOURCES]:
            with ui.guard(key):
                _beside(entry, sources[key], share=table[key]["share"])
        if len(order) > SHOWN_SOURCES:
            st.caption(f"The {SHOWN_SOURCES} sources of which most was seen, of {len(order)}.")


def _beside(entry: Entry, source: Corpus, *, share: float) -> None:
    """Judge scores of one source of the mixture, and the held-out loss on it along the steps."""
    left, right = st.columns(2)
    shards = _set(source)
    with left:
        _histogram(corpus.scores(shards), f"{source.key}, {share:.0%} of the tokens: judge scores", f"mix-{source.key}")
    with right:
        measures = entry.measures()
        mine = [name for name in measures if _names(name, source, shards)]
        whole = [name for name in ("val/loss", "train/loss") if name in measures]
        lines = [
            series.curve(entry, Line(name=name), series.View(), number=number, label=_label(name))
            for number, name in enumerate(mine or whole)
        ]
        if not lines:
            st.caption("This run has written no loss yet.")
            return
        title = f"{source.key}: held-out loss" if mine else "Loss of the whole mixture"
        figure = charts.curves(lines, title=title, x_title="step", y_title="nat/token", height=300)
        ui.chart(figure, key=f"mix-loss-{source.key}", alt=title)
        if not mine:
            st.caption(
                f"The run writes no `{SOURCE_LOSS}` for this source, so the loss is that of all sources together."
            )


def _names(name: str, source: Corpus, shards: ShardSet) -> bool:
    """Whether a metric is the held-out loss on a data set, or on one of the sources that it was packed from."""
    if not (name.startswith(f"{SOURCE_LOSS}[") and name.endswith("]")):
        return False
    text = name[len(SOURCE_LOSS) + 1 : -1]
    parts = _whole(Path(text)).parts
    mine = _whole(source.path).parts
    return text in shards.manifest.get("sources", {}) or (bool(parts) and mine[-len(parts) :] == parts)


def _whole(folder: Path) -> Path:
    """The folder whose documents were divided into those to train on and those held out."""
    return folder.parent if folder.name in ("train", "val") else folder


def _label(name: str) -> str:
    return name[len(SOURCE_LOSS) + 1 : -1] if name.startswith(SOURCE_LOSS) else name


def _set(found: Corpus) -> ShardSet:
    return open_shards(found.path)


def _manifest(shards: ShardSet) -> None:
    with st.container(horizontal=True):
        st.metric("Tokens", f"{shards.num_tokens:,}", border=True)
        st.metric("Documents", f"{shards.num_documents:,}", border=True)
        st.metric("Shards", f"{len(shards.shards):,}", border=True)
        st.metric("Bytes a token", f"{shards.text_bytes / max(1, shards.num_tokens):.2f}", border=True)
        st.metric(
            "Tokenizer",
            shards.tokenizer_name,
            f"{shards.vocab_size:,} ids",
            delta_color="off",
            delta_arrow="off",
            border=True,
        )
    sources = shards.manifest.get("sources", {})
    st.dataframe(
        [
            {"source": name, **counts, "share": counts.get("tokens", 0) / max(1, shards.num_tokens)}
            for name, counts in sources.items()
        ],
        column_config={
            "documents": st.column_config.NumberColumn(format="localized"),
            "tokens": st.column_config.NumberColumn(format="localized"),
            "text_bytes": st.column_config.NumberColumn("bytes of text", format="localized"),
            "share": st.column_config.NumberColumn(format="percent"),
        },
        hide_index=True,
        alt="Documents and tokens by source",
    )


def _histogram(found: corpus.Scores, title: str, key: str) -> None:
    """Distribution of the judge's scores by source."""
    if not found.by_source:
        st.caption(f"{title}: these documents carry none.")
        return
    figure = charts.histogram(found.by_source, title=title, x_title="score", y_title="documents")
    ui.chart(figure, key=key, alt=title)
    if found.looked_at < found.total:
        st.caption(f"Of the first {found.looked_at:,} of {found.total:,} documents.")


def _browse(shards: ShardSet) -> None:
    left, right = st.columns(2)
    names = [shard.name for shard in shards.shards]
    with left:
        name = st.selectbox("Shard", names, key="shard", bind="query-params")
    shard = shards.shards[names.index(name) if name in names else 0]
    if not len(shard.index):
        st.info("This shard is empty.")
        return
    with right:
        entry = st.number_input(
            f"Document, 0 to {len(shard.index) - 1:,}", min_value=0, max_value=max(len(shard.index) - 1, 1), key="entry",
            bind="query-params",
        )  # fmt: skip
    start, end = (int(bound) for bound in shard.index[min(entry, len(shard.index) - 1)])
    piece = corpus.pieces(shard, start, end)[0]
    st.markdown(f"`{piece.id}` from `{piece.source}`")
    reading.judgement(piece)
    reading.text(shards, shard, piece)


def _verification(found: Corpus, shards: ShardSet) -> None:
    size = sum(shard.path.stat().st_size for shard in shards.shards)
    results: dict[str, list[str]] = st.session_state.setdefault("verified", {})
    if size > VERIFY_LIMIT:
        st.caption(f"{size / 1e9:.0f} GB are too much to re-read from a page: run `hydra-judge verify {found.path}`.")
    elif st.button("Verify every byte", icon=":material/verified:"):
        results[found.key] = list(verify_shards(found.path))
    if found.key not in results:
        st.caption("Sizes and types agree with the manifest; the contents were not re-read on this page.")
    elif results[found.key]:
        st.error("\n".join(f"- {line}" for line in results[found.key]), icon=":material/error:")
    else:
        st.success("Every checksum, index and end of document is as the manifest says.", icon=":material/verified:")


def _scored(found: Corpus) -> None:
    scored = open_scored(found.path)
    header = scored.header
    st.caption(f"Rubric {header.get('rubric', {}).get('name', '?')}, judge {header.get('model', '?')}")
    with st.container(horizontal=True):
        for outcome, count in header.get("outcomes", {}).items():
            st.metric(outcome, f"{count:,}", border=True)
    by_source: dict[str, list[float]] = {}
    rows = []
    outcomes = list(header.get("outcomes", {}))
    wanted = st.selectbox("Outcome", ["all", *outcomes], key="outcome", bind="query-params")
    for document in scored:
        if document.score is not None:
            by_source.setdefault(document.source, []).append(document.score)
        if len(rows) < SHOWN_VERDICTS and wanted in (None, "all", document.outcome):
            rows.append(
                {
                    "document": document.id,
                    "source": document.source,
                    "line": document.line,
                    "outcome": document.outcome,
                    "score": document.score,
                    "reason": document.reason,
                    "text": document.text[:200],
                }
            )
    if by_source:
        figure = charts.histogram(
            {name: np.asarray(values) for name, values in by_source.items()},
            title="Judge scores by source", x_title="score", y_title="documents",
        )  # fmt: skip
        ui.chart(figure, key="scored-scores", alt="Distribution of judge scores by source")
    st.dataframe(rows, hide_index=True, placeholder="-", alt="Documents with the judge's words")
    st.caption(f"The first {len(rows):,} documents of this outcome.")


def main() -> None:
    """The page."""
    st.title("Data")
    known = reading.known_corpora()
    st.subheader("Seen by the run")
    ui.live(_seen, ui.runs_in_view(), what="Seen by the run")(known)
    st.subheader("Data sets")
    if not known:
        roots = ", ".join(f"`{root}`" for root in ui.settings().data)
        st.info(f"No finished shards or scored documents below {roots}; name other folders with `--data DIR`.")
        return
    key = st.selectbox("Data set", list(known), key="corpus", bind="query-params", persist_state="session")
    found = known[key] if key in known else next(iter(known.values()))
    with ui.guard(found.key):
        if found.kind == "scored":
            _scored(found)
            return
        shards = open_shards(found.path)
        _manifest(shards)
        _verification(found, shards)
        _histogram(corpus.scores(shards), "Judge scores by source", "data-scores")
        st.subheader("Documents")
        _browse(shards)


if __name__ == "__main__":
    main()
