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

from nmoe.errors import DataError
from nmoe.formats.documents import Document, Reject, read_documents
from nmoe.formats.shards import MANIFEST, ShardWriter
from nmoe.formats.tokenizers import Tokenizer

__all__ = ["PrepSummary", "find_inputs", "prepare"]

_ENDINGS = (".jsonl", ".ndjson", ".txt", ".jsonl.gz", ".ndjson.gz", ".txt.gz")
_BATCH_BYTES = 4 << 20


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


def find_inputs(paths: Sequence[str | Path]) -> list[tuple[Path, str]]:
    """Files to read and the name under which each is recorded: files as given, folders searched in sorted order.

    Raises:
        DataError: a path does not exist, its ending is not a known one, or a folder holds no file with a known ending.
    """
    found = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(_ENDINGS))
            if not inside:
                raise DataError(f"{path}: holds no file that ends in {', '.join(_ENDINGS)}")
            found += [(file, file.relative_to(path).as_posix()) for file in inside]
        elif not path.exists():
            raise DataError(f"{path}: not found; expected a text file, a jsonl file or a folder of them")
        elif not path.name.endswith(_ENDINGS):
            raise DataError(f"{path}: cannot tell what it is; expected a name that ends in {', '.join(_ENDINGS)}")
        else:
            found.append((path, path.name))
    return found


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
        inputs: files and their names, as from `find_inputs`.
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
    sides = ["train", "val"] if val_fraction else [""]
    for side in sides:
        if (output / side / MANIFEST).exists():
            raise DataError(f"{output / side}: holds shards already; choose another --output or remove it")
    output.mkdir(parents=True, exist_ok=True)
    summary = PrepSummary(documents=Counter(), tokens=Counter(), rejected=Counter())
    with contextlib.ExitStack() as stack:
        rejects = stack.enter_context((output / "rejected.jsonl").open("w", encoding="utf-8"))
        writers = {
            side: stack.enter_context(ShardWriter(output / side, tokenizer=tokenizer, shard_tokens=shard_tokens))
            for side in sides
        }
        size = 0
        for batch in _batches(inputs):
            documents = [item for item in batch if isinstance(item, Document)]
            for item in batch:
                if isinstance(item, Reject):
                    summary.rejected[item.reason] += 1
                    line = {"source": item.source, "line": item.line, "reason": item.reason, "detail": item.detail}
                    rejects.write(json.dumps(line, ensure_ascii=False) + "\n")
            for document, tokens in zip(documents, tokenizer.encode_batch([d.text for d in documents]), strict=True):
                data = document.text.encode("utf-8")
                side = "val" if val_fraction and _share(data) < val_fraction else sides[0]
                writers[side].add(tokens, id=document.id, source=document.source, text_bytes=len(data))
                summary.documents[side] += 1
                summary.tokens[side] += len(tokens) + 1
                size += len(data)
            report(sum(summary.documents.values()), size)
        _refuse_empty(summary, sides, output)
    return summary


def _refuse_empty(summary: PrepSummary, sides: Sequence[str], output: Path) -> None:
    """Raises where a folder would get no document: shards without a token help nobody."""
    read = sum(summary.documents.values())
    if not read:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(summary.rejected.items()))
        raise DataError(
            f"{output}: no document to write"
            + (f" ({reasons}); {output / 'rejected.jsonl'} names each" if reasons else "; the input is empty")
        )
    for side in sides:
        if not summary.documents[side]:
            raise DataError(
                f"{output / side}: none of the {read} documents read fell to it; "
                "use more documents or another --val-fraction"
            )


def _batches(inputs: Sequence[tuple[Path, str]]) -> Iterator[list[Document | Reject]]:
    """Documents and rejects of all files, in lists of about `_BATCH_BYTES` of text."""
    batch: list[Document | Reject] = []
    size = 0
    for path, name in inputs:
        for item in read_documents(path, source=name):
            batch.append(item)
            size += len(item.text) if isinstance(item, Document) else 0
            if size >= _BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _share(data: bytes) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(data).digest()[:6], "big") / (1 << 48)
