# SPDX-License-Identifier: Apache-2.0
"""A document on a page: its text as the model sees it, token by token, and what the judge said."""

import html

import numpy as np
import streamlit as st

from nmoe.formats.shards import Shard, ShardSet
from nviz import corpus, ui
from nviz.corpus import Corpus, Piece

__all__ = ["judgement", "known_corpora", "text"]

MAX_TOKENS = 2_000
# Two tints that are seen on a light and on a dark page; neighbours differ, so every boundary shows.
_TINTS = ("rgba(0, 114, 178, 0.18)", "rgba(230, 159, 0, 0.18)")


@st.cache_data(ttl=10.0, show_spinner=False)
def _corpora(arguments: tuple[str, ...]) -> dict[str, Corpus]:
    return corpus.find_corpora(ui.settings())


def known_corpora() -> dict[str, Corpus]:
    """Every data set that may be shown, at most ten seconds old."""
    return _corpora(tuple(str(root) for root in ui.settings().data))


def text(shards: ShardSet, shard: Shard, piece: Piece) -> None:
    """The tokens of a piece, each on its own tint; ids where the tokenizer is not at hand."""
    ids = np.asarray(shard.tokens[piece.start : min(piece.end, piece.start + MAX_TOKENS)])
    tokenizer = corpus.fitting_tokenizer(shards, ui.settings())
    if tokenizer is None:
        st.caption(
            f"The tokenizer {shards.tokenizer_name!r} is not below the data folders, so these are ids: put its "
            "`tokenizer.json` beside the shards to read the text."
        )
        words = [f" {token} " for token in ids]
    else:
        words = [
            "⏹" if token == shards.eos_id else word
            for token, word in zip(ids, corpus.text_of(tokenizer, ids), strict=True)
        ]
    spans = "".join(
        f'<span style="background: {_TINTS[number % 2]}">{html.escape(word)}</span>'
        for number, word in enumerate(words)
    )
    st.html(
        f'<div role="region" aria-label="Tokens of the document" tabindex="0" style="max-height: 24rem; overflow: auto; '
        f'white-space: pre-wrap; overflow-wrap: anywhere; font: 0.85rem/1.6 monospace">{spans}</div>'
    )
    hidden = piece.end - piece.start - len(ids)
    more = f"; {hidden:,} more are not shown" if hidden else ""
    st.caption(f"Tokens {piece.start:,} to {piece.end:,} of {shard.name}{more}. Tints mark token boundaries.")


def judgement(piece: Piece) -> None:
    """Score and the judge's words, where scored documents lie below the data folders."""
    if piece.score is not None:
        st.markdown(f"Judge's score: **{piece.score:g}**")
    for scored in known_corpora().values():
        if scored.kind != "scored":
            continue
        with ui.guard(scored.key):
            verdict = corpus.verdicts(scored, {piece.id}).get(piece.id)
            if verdict is not None:
                axes = ", ".join(f"{name} {value:g}" for name, value in verdict.axes.items())
                st.caption(f"{scored.key}: {verdict.outcome}{f' ({axes})' if axes else ''}")
                if verdict.reason:
                    st.text(verdict.reason)
                return
