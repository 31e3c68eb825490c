# SPDX-License-Identifier: Apache-2.0
"""From a token of a shard back to its document, and to what the judge thought of it."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nmoe.errors import DataError
from nmoe.formats.documents import ScoredDocument
from nmoe.formats.files import json_lines
from nmoe.formats.shards import Location, ShardSet, open_shards
from nmoe.formats.tokenizers import load_tokenizer

__all__ = ["VERDICTS", "explain", "verdict"]

VERDICTS = "verdicts.jsonl"
"""File beside the shards: a line a document, in their order."""


def verdict(document: ScoredDocument) -> dict[str, Any]:
    """What `pack` keeps of a verdict."""
    return {
        "id": document.id,
        "source": document.source,
        "line": document.line,
        "score": document.score,
        "axes": document.axes,
        "reason": document.reason,
        "votes": document.votes,
    }


def _verdicts(path: Path) -> Iterator[dict[str, Any]]:
    return json_lines(path, what="a verdict", advice="`hydra-judge pack` makes it, with the shards")


def _number(opened: ShardSet, place: Location) -> int:
    """Number of a document in the set, from 0: ids need not be unique in a corpus."""
    before = (line for shard in opened.shards[: place.shard] for line in shard.lineages())
    here = itertools.islice(opened.shards[place.shard].lineages(), place.entry + 1)
    return sum(line.get("piece", 0) == 0 for line in itertools.chain(before, here)) - 1


def explain(shards: Path, *, offset: int, tokenizer: str | None) -> dict[str, Any]:
    """The document that holds a token, and its verdict.

    Args:
        shards: folder of shards.
        offset: token number, counted over all shards in order.
        tokenizer: what made the shards; None if that was "bytes".

    Returns:
        `text`, `shard`, `start` and `end` (tokens in it), `token` (number in the document), and all of the verdict.

    Raises:
        DataError: if there is no such token, or the tokenizer is another.
    """
    opened = open_shards(shards)
    spec = tokenizer or opened.tokenizer_name
    if tokenizer is None and spec != "bytes":
        raise DataError(f"{shards}: made with the tokenizer {spec}; name it with --tokenizer")
    loaded = load_tokenizer(spec)
    if loaded.sha256 != opened.tokenizer_sha256:
        raise DataError(
            f"{shards}: made with the tokenizer {opened.tokenizer_name}, not with {spec}; name that with --tokenizer"
        )
    place = opened.locate(offset)
    shard = opened.shards[place.shard]
    before = sum(len(one.tokens) for one in opened.shards[: place.shard])
    key, number = (place.lineage["id"], place.lineage["source"]), _number(opened, place)
    told = next(itertools.islice(_verdicts(shards / VERDICTS), number, None), {})
    if (told.get("id"), told.get("source")) != key:
        raise DataError(
            f"{shards / VERDICTS}: line {number + 1} is not of document {key[0]!r} of {key[1]}; pack the scores again"
        )
    return {
        **told,
        **{name: place.lineage[name] for name in ("piece", "pieces") if name in place.lineage},
        "shard": shard.name,
        "start": place.start,
        "end": place.end,
        "token": offset - before - place.start,
        "text": loaded.decode(np.asarray(shard.tokens[place.start : place.end])),
    }
