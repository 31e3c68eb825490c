# SPDX-License-Identifier: Apache-2.0
"""Token shards and scored documents below the folders that may be shown, and the way from a step to its documents.

Only what was found by walking those folders can be opened: a path that a run or a URL names is looked up among them.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import duckdb
import numpy as np

from nmoe.formats import DataError
from nmoe.formats.documents import ScoredDocument, open_scored
from nmoe.formats.shards import MANIFEST, Shard, ShardSet
from nmoe.formats.tokenizers import Tokenizer, load_tokenizer
from nviz.settings import Settings

__all__ = [
    "Corpus",
    "Piece",
    "Scores",
    "Seen",
    "corpus_at",
    "find_corpora",
    "fitting_tokenizer",
    "owner",
    "pieces",
    "scores",
    "seen",
    "text_of",
    "verdicts",
]

SCORED_DOCUMENTS = 200_000  # after which no further shard is looked into for scores
DEPTH = 4  # folders below a root that are looked into
SCORED = "scored.json"
Connection = duckdb.DuckDBPyConnection


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """A finished folder of shards or of scored documents."""

    key: str
    """Root's name and path below it, as a URL calls it."""
    path: Path
    kind: Literal["shards", "scored"]


def find_corpora(settings: Settings) -> dict[str, Corpus]:
    """Every finished data set below the data roots, by key; symbolic links are not followed."""
    found: dict[str, Corpus] = {}
    for root in settings.data:
        for folder, names in _walk(root):
            kind = "shards" if MANIFEST in names else "scored" if SCORED in names else None
            if kind is not None:
                below = folder.relative_to(root).as_posix()
                key = root.name if below == "." else f"{root.name}/{below}"
                if key in found:
                    key = str(folder)
                found[key] = Corpus(key=key, path=folder, kind=kind)
    return dict(sorted(found.items()))


def _walk(root: Path) -> Iterator[tuple[Path, list[str]]]:
    for folder, folders, names in os.walk(root):
        if len(Path(folder).relative_to(root).parts) >= DEPTH:
            folders.clear()
        yield Path(folder), names


def owner(corpora: dict[str, Corpus], shard: str) -> tuple[Corpus, str] | None:
    """The shard set that a path in a run's `batches` belongs to, and the shard's name; None if it may not be shown.

    A trainer may have been started elsewhere, so a relative path is matched by its end.
    """
    path = Path(shard)
    found = corpus_at(corpora, path.parent)
    return None if found is None else (found, path.name)


def corpus_at(corpora: dict[str, Corpus], folder: Path) -> Corpus | None:
    """The shard set in a folder that a run or its configuration names; None if it may not be shown."""
    sets = [corpus for corpus in corpora.values() if corpus.kind == "shards"]
    if folder.is_absolute():
        return next((corpus for corpus in sets if corpus.path == folder), None)
    wanted = folder.parts
    fitting = [corpus for corpus in sets if wanted and corpus.path.parts[-len(wanted) :] == wanted]
    return fitting[0] if len(fitting) == 1 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A document, or the part of it, that a range of tokens covers.

    Attributes:
        entry: row of the shard's index.
        start, end: range in the shard.
        id, source: of the document.
        score: the judge's, if there is one.
    """

    entry: int
    start: int
    end: int
    id: str
    source: str
    score: float | None


def pieces(shard: Shard, start: int, end: int) -> list[Piece]:
    """Documents that a range of a shard touches, cut to the range, in order."""
    first = int(np.searchsorted(shard.index[:, 1], start, side="right"))
    last = int(np.searchsorted(shard.index[:, 0], end, side="left"))
    lineages = _lines_of(shard)
    found = []
    for entry in range(first, last):
        low, high = (int(bound) for bound in shard.index[entry])
        lineage = lineages[entry]
        score = lineage.get("score")
        found.append(
            Piece(
                entry=entry,
                start=max(low, start),
                end=min(high, end),
                id=str(lineage.get("id")),
                source=str(lineage.get("source")),
                score=None if score is None else float(score),
            )
        )
    return found


_lineages: OrderedDict[Path, list[dict[str, Any]]] = OrderedDict()
_lineages_lock = threading.Lock()


def _lines_of(shard: Shard) -> list[dict[str, Any]]:
    """All lineage lines of a shard; those of the shards looked at last are kept."""
    with _lineages_lock:
        lines = _lineages.get(shard.path)
        if lines is None or len(lines) != len(shard.index):
            try:
                lines = list(shard.lineages())
            except (OSError, ValueError) as error:
                raise DataError(f"{shard.path}: its lineage cannot be read ({error}); make the shards again") from None
            if len(lines) != len(shard.index):
                raise DataError(f"{shard.path}: {len(lines)} lineage lines, expected {len(shard.index)}")
            _lineages[shard.path] = lines
            while len(_lineages) > 4:
                _lineages.popitem(last=False)
        return lines


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Judge scores of a shard set.

    Attributes:
        by_source: float64 [N], scores of the documents of each source; documents without a score are left out.
        looked_at: documents looked at.
        total: documents of the set.
    """

    by_source: dict[str, np.ndarray]
    looked_at: int
    total: int


_scores: OrderedDict[tuple[Path, int], Scores] = OrderedDict()
_scores_lock = threading.Lock()


def scores(shards: ShardSet) -> Scores:
    """Scores of a set's documents, of its first shards if it is large; those of the sets looked at last are kept."""
    key = (shards.directory, (shards.directory / MANIFEST).stat().st_mtime_ns)
    with _scores_lock:
        if key not in _scores:
            _scores[key] = _read_scores(shards)
            while len(_scores) > 32:
                _scores.popitem(last=False)
        return _scores[key]


def _read_scores(shards: ShardSet) -> Scores:
    found: dict[str, list[float]] = {}
    documents = 0
    for shard in shards.shards:
        if documents >= SCORED_DOCUMENTS:
            break
        for line in _lines_of(shard):
            if line.get("piece", 0) == 0:
                documents += 1
                if line.get("score") is not None:
                    found.setdefault(str(line.get("source")), []).append(float(line["score"]))
    by_source = {source: np.asarray(values) for source, values in sorted(found.items())}
    return Scores(by_source=by_source, looked_at=documents, total=shards.num_documents)


def fitting_tokenizer(shards: ShardSet, settings: Settings) -> Tokenizer | None:
    """The tokenizer that made a shard set, if its definition is at hand: built in, or a file beside the data."""
    specs = ["bytes"] if shards.tokenizer_name == "bytes" else []
    for root in settings.data:
        specs += [str(folder / "tokenizer.json") for folder, names in _walk(root) if "tokenizer.json" in names]
    for spec in specs:
        try:
            tokenizer = load_tokenizer(spec)
        except DataError:
            continue
        if tokenizer.sha256 == shards.tokenizer_sha256:
            return tokenizer
    return None


def text_of(tokenizer: Tokenizer, ids: np.ndarray) -> list[str]:
    """Each token as text; bytes that are no whole character stand as escapes, so every token can be seen."""
    found = []
    for token in ids:
        data = tokenizer.token_bytes(int(token))
        try:
            found.append(data.decode("utf-8"))
        except UnicodeDecodeError:
            found.append("".join(f"\\x{byte:02x}" for byte in data))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What a run has read of each shard up to a step: (tokens, rows) by path."""

    shards: dict[str, tuple[int, int]]
    last: int


def seen(connection: Connection, earlier: Seen | None = None) -> Seen:
    """What a run has seen so far.

    Args:
        connection: an open store.
        earlier: the answer on an earlier publication of the same run; only steps after it are asked for.
    """
    shards, last = ({}, -1) if earlier is None else (dict(earlier.shards), earlier.last)
    rows = connection.execute(
        'SELECT shard, sum("end" - "start")::BIGINT, count(*), max(step) FROM batches WHERE step > ? GROUP BY shard',
        [last],
    ).fetchall()
    for shard, tokens, count, step in rows:
        known = shards.get(shard, (0, 0))
        shards[shard], last = (known[0] + tokens, known[1] + count), max(last, step)
    return Seen(shards=dict(sorted(shards.items())), last=last)


def verdicts(scored: Corpus, ids: set[str]) -> dict[str, ScoredDocument]:
    """The judge's verdicts on some documents, by id."""
    return {document.id: document for document in open_scored(scored.path) if document.id in ids}
