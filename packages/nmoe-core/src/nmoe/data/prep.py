# SPDX-License-Identifier: Apache-2.0
"""Text files -> token shards, for corpora that need no judge.

Documents are split into training and held-out ones by a hash of their text, so a text that occurs twice is never on
both sides, and the split does not change when files are added or renamed.
"""

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from nmoe.data.inputs import Inputs, search
from nmoe.errors import DataError
from nmoe.formats.documents import Document, Reject, read_documents
from nmoe.formats.files import make_folder
from nmoe.formats.shards import MANIFEST, ShardWriter
from nmoe.formats.tokenizers import Tokenizer

__all__ = ["PrepSummary", "Sides", "find_inputs", "open_sides", "prepare"]

_ENDINGS = (".jsonl", ".ndjson", ".txt", ".jsonl.gz", ".ndjson.gz", ".txt.gz")
_BATCH_BYTES = 4 << 20
_REJECT_BYTES = 400  # what a reject takes in memory: a file of nothing else must not fill it


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepSummary:
    """What was made.

    Attributes:
        documents, tokens: written, by folder name ("train", "val", or "" for the output itself).
        rejected: documents that could not be read, by reason.
    """

    documents: Counter[str]
    tokens: Counter[str]
    rejected: Counter[str]


def find_inputs(paths: Sequence[str | Path]) -> Inputs:
    """Text files among what a user names. Raises like `search`."""
    return search(paths, endings=_ENDINGS, what="a text file, a jsonl file")


def prepare(
    inputs: Sequence[tuple[Path, str]],
    *,
    tokenizer: Tokenizer,
    output: Path,
    val_fraction: float = 0.0,
    shard_tokens: int = 100_000_000,
    report: Callable[[int, int], None] = lambda documents, size: None,
) -> PrepSummary:
    """Tokenizes documents and writes shards.

    Args:
        inputs: files and their names, as from `find_inputs(...).files`.
        tokenizer: what makes the tokens.
        output: folder to make; with a `val_fraction`, its folders `train` and `val`.
        val_fraction: share of the documents held out, in [0, 1).
        shard_tokens: largest shard, in tokens.
        report: called after each batch with the documents and bytes done.

    Returns:
        Counts. Documents that could not be read are listed in `output/rejected.jsonl`.

    Raises:
        DataError: the output holds shards already, or no document could be read.
    """
    with open_sides(output, tokenizer=tokenizer, val_fraction=val_fraction, shard_tokens=shard_tokens) as sides:
        for batch in _batches(inputs):
            documents = [item for item in batch if isinstance(item, Document)]
            for item in batch:
                if isinstance(item, Reject):
                    sides.reject(item)
            for document, tokens in zip(documents, tokenizer.encode_batch([d.text for d in documents]), strict=True):
                sides.add(tokens, text=document.text.encode("utf-8"), id=document.id, source=document.source)
            report(sides.documents, sides.text_bytes)
    return sides.summary


@contextlib.contextmanager
def open_sides(output: Path, *, tokenizer: Tokenizer, val_fraction: float, shard_tokens: int) -> Iterator["Sides"]:
    """Opens the shard folders of a preparation: `train` and `val` with a `val_fraction`, else the output itself.

    Raises:
        DataError: the output holds shards already, or, in the end, a folder would have no document.
    """
    names = ["train", "val"] if val_fraction else [""]
    for name in ("", "train", "val"):  # on top of these or beside them: a set would hold its own held-out part
        if (output / name / MANIFEST).exists():
            raise DataError(f"{output / name}: holds shards already; choose another --output or remove it")
    make_folder(output, what="--output")
    with contextlib.ExitStack() as stack:
        rejects = stack.enter_context((output / "rejected.jsonl").open("w", encoding="utf-8"))
        writers = {
            name: stack.enter_context(ShardWriter(output / name, tokenizer=tokenizer, shard_tokens=shard_tokens))
            for name in names
        }
        sides = Sides(output, writers, rejects, val_fraction)
        yield sides
        sides.refuse_empty()


class Sides:
    """Writes documents to one side or the other, and lists what is none; made by `open_sides`."""

    def __init__(self, output: Path, writers: dict[str, ShardWriter], rejects: IO[str], val_fraction: float):
        self._output, self._writers, self._rejects, self._val_fraction = output, writers, rejects, val_fraction
        self.summary = PrepSummary(documents=Counter(), tokens=Counter(), rejected=Counter())
        self.text_bytes = 0

    @property
    def documents(self) -> int:
        """Written so far."""
        return sum(self.summary.documents.values())

    def add(self, tokens: np.ndarray, *, text: bytes, id: str, source: str) -> None:
        """One document: its tokens without EOS, its text in UTF-8, which decides the side, and where it came from."""
        name = "val" if self._val_fraction and _share(text) < self._val_fraction else next(iter(self._writers))
        self._writers[name].add(tokens, id=id, source=source, text_bytes=len(text))
        self.summary.documents[name] += 1
        self.summary.tokens[name] += len(tokens) + 1
        self.text_bytes += len(text)

    def reject(self, item: Reject) -> None:
        """Counts and lists what is no document."""
        self.summary.rejected[item.reason] += 1
        line = {"source": item.source, "line": item.line, "reason": item.reason, "detail": item.detail}
        self._rejects.write(json.dumps(line, ensure_ascii=False) + "\n")

    def refuse_empty(self) -> None:
        """Raises where a folder would get no document: shards without a token help nobody."""
        if not self.documents:
            counts = ", ".join(f"{count} {reason}" for reason, count in sorted(self.summary.rejected.items()))
            raise DataError(
                f"{self._output}: no document to write"
                + (f" ({counts}); {self._output / 'rejected.jsonl'} names each" if counts else "; the input is empty")
            )
        for name in self._writers:
            if not self.summary.documents[name]:
                raise DataError(
                    f"{self._output / name}: none of the {self.documents} documents read fell to it; "
                    "use more documents or another --val-fraction"
                )


def _batches(inputs: Sequence[tuple[Path, str]]) -> Iterator[list[Document | Reject]]:
    """Documents and rejects of all files, in lists of about `_BATCH_BYTES` of text."""
    batch: list[Document | Reject] = []
    size = 0
    for path, name in inputs:
        for item in read_documents(path, source=name):
            batch.append(item)
            size += len(item.text) if isinstance(item, Document) else _REJECT_BYTES
            if size >= _BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _share(data: bytes) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(data).digest()[:6], "big") / (1 << 48)
