# SPDX-License-Identifier: Apache-2.0
"""Token shards: what the judge's `pack` and `nmoe-prep` write and the loader reads.

    DIR/shard-00000.npy              1-D little-endian token ids, uint16 below 65,537 ids, else uint32; EOS after every document
    DIR/shard-00000.index.npy        int64 [documents, 2]: first token, one past the last (EOS included)
    DIR/shard-00000.lineage.jsonl    a line a document: id, source, score, and the piece's number where it was split
    DIR/manifest.json                written last: tokenizer, totals, and name, counts and SHA-256 of every file above

Plain `.npy`, so any NumPy maps them. A folder without a manifest is unfinished and is never read, and a reader opens
only files that the manifest names, so stale files of an earlier run do no harm.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np

from nmoe.errors import DataError, FormatError
from nmoe.formats.files import inside, json_lines, read_header, replace_durably, sha256_file, write_json
from nmoe.formats.tokenizers import Tokenizer

__all__ = ["MANIFEST", "Location", "Shard", "ShardSet", "ShardWriter", "open_shards", "verify_shards"]

FORMAT, VERSION = "nmoe-shards", 1
MANIFEST = "manifest.json"
_NPY_HEADER_BYTES = 128


def _npy_header(dtype: np.dtype, length: int) -> bytes:
    """A version 1.0 `.npy` header of a fixed size, so that the length can be filled in when the shard is complete.

    Source: numpy.lib.format, "Format Version 1.0".
    """
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({length},), }}"
    return (
        b"\x93NUMPY\x01\x00"
        + (_NPY_HEADER_BYTES - 10).to_bytes(2, "little")
        + text.ljust(_NPY_HEADER_BYTES - 11).encode()
        + b"\n"
    )


class ShardWriter:
    """Writes documents as token shards; use as a context manager.

    Leaving the block normally completes the folder; leaving it by an exception leaves no manifest.

    Args:
        directory: folder to fill; it must not hold a finished shard set.
        tokenizer: what made the tokens; stands in the manifest.
        shard_tokens: a new shard is begun before one would grow past this many tokens.
        max_document_tokens: a longer document is split into pieces of this many tokens (default: `shard_tokens` - 1).
            Only the last piece ends with EOS.

    Raises:
        DataError: if the folder holds a manifest already, or a limit is out of range.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        tokenizer: Tokenizer,
        shard_tokens: int = 100_000_000,
        max_document_tokens: int | None = None,
    ):
        self._dir = Path(directory)
        self._limit = shard_tokens - 1 if max_document_tokens is None else max_document_tokens
        if not 1 <= self._limit < shard_tokens:
            raise DataError(
                f"{directory}: max_document_tokens is {self._limit}; expected 1 to shard_tokens - 1 = {shard_tokens - 1}"
            )
        if (self._dir / MANIFEST).exists():
            raise DataError(f"{directory}: holds a finished shard set already; choose another folder or remove it")
        self._dir.mkdir(parents=True, exist_ok=True)
        for stale in self._dir.glob("shard-*"):
            stale.unlink()
        self._tokenizer = tokenizer
        self._dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        self._shard_tokens = shard_tokens
        self._shards: list[dict[str, Any]] = []
        self._sources: dict[str, dict[str, int]] = {}
        self._documents = self._split = self._text_bytes = 0
        self._open()

    def _open(self) -> None:
        self._name = f"shard-{len(self._shards):05d}"
        self._tokens: IO[bytes] = (self._dir / f"{self._name}.npy.tmp").open("wb")
        self._tokens.write(bytes(_NPY_HEADER_BYTES))
        self._lineage: IO[str] = (self._dir / f"{self._name}.lineage.jsonl.tmp").open(
            "w", encoding="utf-8", newline="\n"
        )
        self._length = 0
        self._index: list[tuple[int, int]] = []

    def add(self, tokens: np.ndarray, *, id: str, source: str, text_bytes: int, score: float | None = None) -> None:
        """Appends one document and its EOS.

        Args:
            tokens: ids [N], integers in [0, vocab_size), without EOS; N may be 0.
            id: the document's id in its source.
            source: name of the file or data set it came from.
            text_bytes: UTF-8 bytes of the text, for losses per byte.
            score: the judge's score, if there is one.

        Raises:
            DataError: if an id is outside the vocabulary, or is EOS.
        """
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._tokenizer.vocab_size:
            raise DataError(
                f"document {id!r} of {source}: token ids {int(tokens.min())} to {int(tokens.max())}; expected [0, {self._tokenizer.vocab_size})"
            )
        if (tokens == self._tokenizer.eos_id).any():
            raise DataError(
                f"document {id!r} of {source}: holds the end-of-document id {self._tokenizer.eos_id}; only the writer may add it"
            )
        whole = np.append(tokens, self._tokenizer.eos_id).astype(self._dtype)
        pieces = max(1, -(-len(tokens) // self._limit))
        for piece in range(pieces):
            end = len(whole) if piece == pieces - 1 else (piece + 1) * self._limit
            self._write(whole[piece * self._limit : end], id, source, score, piece if pieces > 1 else None, pieces)
        self._documents += 1
        self._split += pieces > 1
        self._text_bytes += text_bytes
        totals = self._sources.setdefault(source, {"documents": 0, "tokens": 0, "text_bytes": 0})
        totals["documents"] += 1
        totals["tokens"] += len(whole)
        totals["text_bytes"] += text_bytes

    def _write(
        self, tokens: np.ndarray, id: str, source: str, score: float | None, piece: int | None, pieces: int
    ) -> None:
        if self._length and self._length + len(tokens) > self._shard_tokens:
            self._finish_shard()
            self._open()
        self._tokens.write(tokens.tobytes())
        self._index.append((self._length, self._length + len(tokens)))
        self._length += len(tokens)
        lineage: dict[str, Any] = {"id": id, "source": source, "score": score}
        if piece is not None:
            lineage |= {"piece": piece, "pieces": pieces}
        self._lineage.write(json.dumps(lineage, ensure_ascii=False) + "\n")

    def _finish_shard(self) -> None:
        self._tokens.seek(0)
        self._tokens.write(_npy_header(self._dtype, self._length))
        self._tokens.close()
        self._lineage.close()
        index = self._dir / f"{self._name}.index.npy"
        temporary = index.with_name(index.name + ".tmp")
        with temporary.open("wb") as stream:
            np.save(stream, np.asarray(self._index, dtype="<i8").reshape(-1, 2))
        replace_durably(temporary, index)
        names = {"tokens": f"{self._name}.npy", "index": index.name, "lineage": f"{self._name}.lineage.jsonl"}
        for kind in ("tokens", "lineage"):
            replace_durably(self._dir / f"{names[kind]}.tmp", self._dir / names[kind])
        self._shards.append(
            {
                "path": names["tokens"],
                "index": names["index"],
                "lineage": names["lineage"],
                "tokens": self._length,
                "entries": len(self._index),
                "sha256": {kind: sha256_file(self._dir / name) for kind, name in names.items()},
            }
        )

    def close(self) -> None:
        """Completes the folder: the last shard, then the manifest."""
        self._finish_shard()
        write_json(
            self._dir / MANIFEST,
            {
                "format": FORMAT,
                "version": VERSION,
                "tokenizer": {
                    "name": self._tokenizer.name,
                    "sha256": self._tokenizer.sha256,
                    "vocab_size": self._tokenizer.vocab_size,
                    "eos_id": self._tokenizer.eos_id,
                },
                "dtype": self._dtype.name,
                "tokens": sum(shard["tokens"] for shard in self._shards),
                "documents": self._documents,
                "split_documents": self._split,
                "max_document_tokens": self._limit,
                "text_bytes": self._text_bytes,
                "sources": self._sources,
                "shards": self._shards,
            },
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._tokens.close()
            self._lineage.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """Where a token of a shard set comes from.

    Attributes:
        shard: number of the shard.
        entry: row of the shard's index: a document, or a piece of a split one.
        start: first token of that entry in the shard.
        end: one past its last token.
        lineage: id, source and score of the document.
    """

    shard: int
    entry: int
    start: int
    end: int
    lineage: dict[str, Any]


class Shard:
    """One shard of an opened set; its arrays are mapped, not read."""

    def __init__(self, directory: Path, entry: Mapping[str, Any], dtype: np.dtype):
        self.name = str(entry["path"])
        self.path = inside(directory, self.name)
        self._lineage_path = inside(directory, str(entry["lineage"]))
        self.tokens = _map(self.path, dtype, (int(entry["tokens"]),))
        self.index = _map(inside(directory, str(entry["index"])), np.dtype("<i8"), (int(entry["entries"]), 2))
        self.sha256 = {kind: str(entry["sha256"][kind]) for kind in ("tokens", "index", "lineage")}
        if not self._lineage_path.is_file():
            raise DataError(f"{self._lineage_path}: not found; the manifest names it. Make the shards again")

    def lineages(self) -> Iterator[dict[str, Any]]:
        """Lineage of every entry, in order: id, source, score (piece, pieces)."""
        return json_lines(self._lineage_path, what="the lineage of a document", advice="make the shards again")

    def lineage(self, entry: int) -> dict[str, Any]:
        """Lineage of one entry of the index."""
        for number, line in enumerate(self.lineages()):
            if number == entry:
                return line
        raise DataError(
            f"{self._lineage_path}: has no line {entry + 1}; expected {len(self.index)} lines. Make the shards again"
        )


def _map(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Maps a `.npy` file after checking that it holds what the manifest says."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise DataError(f"{path}: not found; the manifest names it. Make the shards again") from None
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: damaged ({error}); expected {shape} of {dtype}. Make the shards again") from None
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != shape:
        raise DataError(
            f"{path}: holds {getattr(array, 'shape', '?')} of {getattr(array, 'dtype', '?')}; the manifest says {shape} of {dtype}"
        )
    return array


class ShardSet:
    """An opened folder of shards.

    Attributes:
        directory: the folder.
        manifest: the manifest as read.
        shards: the shards in order.
        vocab_size, eos_id, tokenizer_name, tokenizer_sha256: of the tokenizer that made it.
        num_tokens, num_documents, text_bytes: totals; text_bytes counts UTF-8 bytes of the documents.
    """

    def __init__(self, directory: Path, manifest: dict[str, Any]):
        path = directory / MANIFEST
        try:
            tokenizer = manifest["tokenizer"]
            self.tokenizer_name, self.tokenizer_sha256 = str(tokenizer["name"]), str(tokenizer["sha256"])
            self.vocab_size, self.eos_id = int(tokenizer["vocab_size"]), int(tokenizer["eos_id"])
            self.num_tokens, self.num_documents = int(manifest["tokens"]), int(manifest["documents"])
            self.text_bytes = int(manifest["text_bytes"])
            if manifest["dtype"] not in ("uint16", "uint32"):
                raise FormatError(f"{path}: dtype is {manifest['dtype']!r}, expected 'uint16' or 'uint32'")
            dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
            self.shards = [Shard(directory, entry, dtype) for entry in manifest["shards"]]
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{path}: incomplete ({type(error).__name__}: {error}); make the shards again") from None
        self.directory, self.manifest = directory, manifest
        self._first = np.concatenate([[0], np.cumsum([len(shard.tokens) for shard in self.shards])]).astype(np.int64)

    def locate(self, offset: int) -> Location:
        """The document that holds a token.

        Args:
            offset: token number counted over all shards in order, in [0, num_tokens).

        Raises:
            DataError: if there is no such token.
        """
        if not 0 <= offset < int(self._first[-1]):
            raise DataError(f"{self.directory}: token offset {offset}; expected [0, {int(self._first[-1])})")
        number = int(np.searchsorted(self._first, offset, side="right")) - 1
        shard, within = self.shards[number], offset - int(self._first[number])
        entry = int(np.searchsorted(shard.index[:, 0], within, side="right")) - 1
        start, end = (int(bound) for bound in shard.index[entry])
        return Location(shard=number, entry=entry, start=start, end=end, lineage=shard.lineage(entry))


def open_shards(directory: str | Path) -> ShardSet:
    """Opens a finished folder of shards and checks that every named file is there with the right size and type.

    Contents are not hashed here (a corpus can hold terabytes): `verify_shards` does that.

    Raises:
        DataError: if the folder is unfinished or a file is missing or damaged.
        FormatError: if the manifest is of a newer version or not one.
    """
    root = Path(directory)
    return ShardSet(root, read_header(root / MANIFEST, format_name=FORMAT, version=VERSION, what="token shards"))


def verify_shards(directory: str | Path) -> Iterator[str]:
    """Re-reads every byte of a shard set and yields one line for each problem found; nothing if all is well.

    Checked: the SHA-256 of every file, ids below the vocabulary size, the index (in order, without gaps, to the end),
    EOS at the end of every whole document and nowhere else but there, the number of lineage lines, and the totals.

    Raises:
        DataError: if the set cannot be opened at all.
    """
    shards = open_shards(directory)
    tokens = documents = 0
    for shard, entry in zip(shards.shards, shards.manifest["shards"], strict=True):
        for kind, key in (("tokens", "path"), ("index", "index"), ("lineage", "lineage")):
            found, stated = sha256_file(shards.directory / entry[key]), shard.sha256[kind]
            if found != stated:
                yield f"{shards.directory / entry[key]}: SHA-256 is {found[:12]}..., the manifest says {stated[:12]}..."
        yield from _verify_contents(shards, shard)
        tokens += len(shard.tokens)
        documents += sum(line.get("piece", 0) == 0 for line in _readable_lineages(shard))
    for what, counted, stated in (
        ("tokens", tokens, shards.num_tokens),
        ("documents", documents, shards.num_documents),
    ):
        if counted != stated:
            yield f"{shards.directory / MANIFEST}: states {stated} {what}, the shards hold {counted}"


def _readable_lineages(shard: Shard) -> list[dict[str, Any]]:
    """All lines, or none where one is damaged."""
    try:
        return list(shard.lineages())
    except FormatError:
        return []


def _verify_contents(shards: ShardSet, shard: Shard) -> Iterator[str]:
    index, tokens = np.asarray(shard.index), np.asarray(shard.tokens)
    lineages = _readable_lineages(shard)
    if len(lineages) != len(index):
        yield f"{shard.path}: {len(lineages)} readable lineage lines for {len(index)} index entries"
        return
    if len(tokens) and int(tokens.max()) >= shards.vocab_size:
        yield f"{shard.path}: holds token id {int(tokens.max())}; the vocabulary has {shards.vocab_size}"
    bounds = np.append(index[:, 0], len(tokens))
    if len(index) and (index[0, 0] != 0 or (index[:, 1] <= index[:, 0]).any() or (index[:, 1] != bounds[1:]).any()):
        yield f"{shard.path}: the index does not cover the tokens without gaps"
        return
    whole = np.array([line.get("piece", 0) == line.get("pieces", 1) - 1 for line in lineages], dtype=bool)
    ends = np.zeros(len(tokens), dtype=bool)
    ends[index[whole, 1] - 1] = True
    if ((tokens == shards.eos_id) != ends).any():
        where = int(np.flatnonzero((tokens == shards.eos_id) != ends)[0])
        yield f"{shard.path}: token {where} is {int(tokens[where])}; EOS ({shards.eos_id}) must end every document and stand nowhere else"
