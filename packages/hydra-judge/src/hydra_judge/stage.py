# SPDX-License-Identifier: Apache-2.0
"""Packing in many processes: each tokenizes some parts of the scores, one cuts what they leave into shards.

    SHARDS/parts/00000/tokens.bin        token ids of the kept documents, one after the other
    SHARDS/parts/00000/documents.jsonl   for each: tokens, bytes of text, verdict
    SHARDS/parts/00000/part.json         written when the part is complete: its marker

Tokenizing is the work; cutting is as fast as the disk. Where a shard ends depends on every document before it, so it is
done in one place, in order, and the shards are those that a single process makes.
"""

import fcntl
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nmoe.errors import DataError
from nmoe.formats.files import json_lines, replace_durably, write_json

__all__ = ["STAGE", "Packed", "only_one", "read_part", "remove_stage", "stage_part", "staged"]

STAGE = "parts"
_MARKER, _TOKENS, _DOCUMENTS = "part.json", "tokens.bin", "documents.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A document that is kept.

    Attributes:
        tokens: ids [N] without EOS, integers.
        text_bytes: UTF-8 bytes of its text.
        verdict: what `explain` tells of it, with its id, source and score.
    """

    tokens: np.ndarray
    text_bytes: int
    verdict: dict[str, Any] = field(repr=False)


def _folder(output: Path, number: int) -> Path:
    return output / STAGE / f"{number:05d}"


def stage_part(
    output: Path, number: int, documents: Iterator[Packed], *, dropped: Counter[str], made: dict[str, Any]
) -> int:
    """Writes one part and returns how many documents it holds.

    Args:
        output: folder for the shards.
        number: of the part.
        documents: what is kept of it.
        dropped: documents left out by reason, complete when `documents` has ended.
        made: what decides the content; see `staged`.
    """
    folder = _folder(output, number)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARKER).unlink(missing_ok=True)
    kept = 0
    temporary = [folder / f"{name}.tmp" for name in (_TOKENS, _DOCUMENTS)]
    with temporary[0].open("wb") as tokens, temporary[1].open("w", encoding="utf-8", newline="\n") as lines:
        for document in documents:
            tokens.write(document.tokens.astype("<u4").tobytes())
            line = {"tokens": len(document.tokens), "text_bytes": document.text_bytes, "verdict": document.verdict}
            lines.write(json.dumps(line, ensure_ascii=False) + "\n")
            kept += 1
    for path in temporary:
        replace_durably(path, path.with_suffix(""))
    write_json(folder / _MARKER, {"made": made, "kept": kept, "dropped": dict(dropped)})
    return kept


def staged(output: Path, number: int, *, made: dict[str, Any]) -> dict[str, Any] | None:
    """The marker of a part that was made by `made`; None if there is none."""
    try:
        marker = json.loads((_folder(output, number) / _MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return marker if marker.get("made") == made else None


def read_part(output: Path, number: int) -> Iterator[Packed]:
    """Documents of a complete part.

    Raises:
        DataError: if it is damaged.
    """
    folder = _folder(output, number)
    with (folder / _TOKENS).open("rb") as tokens:
        for values in json_lines(folder / _DOCUMENTS, what="a document", advice=f"remove {folder} and pack again"):
            ids = np.fromfile(tokens, dtype="<u4", count=values["tokens"])
            if len(ids) != values["tokens"]:
                raise DataError(f"{folder / _TOKENS}: breaks off; remove {folder} and pack again")
            yield Packed(tokens=ids, text_bytes=values["text_bytes"], verdict=values["verdict"])


@contextmanager
def only_one(output: Path) -> Iterator[bool]:
    """True for one process at a time; the system ends the claim of a process that dies."""
    try:
        stream = (output / STAGE / "lock").open("w")
    except FileNotFoundError:  # another has finished and cleared up
        yield False
        return
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def remove_stage(output: Path) -> None:
    """Removes all parts."""
    shutil.rmtree(output / STAGE, ignore_errors=True)
