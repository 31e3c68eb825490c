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
    "find_corpora",
    "fitting_tokenizer",
    "owner",
    "pieces",
    "scores",
    "seen",
    "text_of",
    "verdicts",
]

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
    sets = [corpus for corpus in corpora.values() if corpus.kind == "shards"]
    for corpus in sets:
        if path.is_absolute() and path.parent == corpus.path:
            return corpus, path.name
    wanted = path.parent.parts
    fitting = [c for c in sets if not path.is_absolute() and wanted and c.path.parts[-len(wanted) :] == wanted]
    return (fitting[0], path.name) if len(fitting) == 1 else None


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


def scores(shard: Shard) -> dict[str, list[float]]:
    """Judge scores of a shard's documents by source; documents without a score are left out."""
    found: dict[str, list[float]] = {}
    for line in _lines_of(shard):
        if line.get("score") is not None and line.get("piece", 0) == 0:
            found.setdefault(str(line.get("source")), []).append(float(line["score"]))
    return found


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


def seen(connection: Connection) -> list[tuple[str, int, int]]:
    """What a run has seen so far: (shard, tokens, rows) for each shard."""
    return connection.execute(
        'SELECT shard, sum("end" - "start")::BIGINT, count(*) FROM batches GROUP BY shard ORDER BY shard'
    ).fetchall()


def verdicts(scored: Corpus, ids: set[str]) -> dict[str, ScoredDocument]:
    """The judge's verdicts on some documents, by id."""
    return {document.id: document for document in open_scored(scored.path) if document.id in ids}
