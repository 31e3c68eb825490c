# SPDX-License-Identifier: Apache-2.0
"""The corpus as a list of blocks, each read on its own, whatever it holds.

A block is a file, a stretch of whole lines of a large plain one, or some row groups of a Parquet file. Blocks depend on
the corpus and on `block_bytes` alone, so any number of workers makes the same output files. What is not a document
becomes a `Reject` with file, line and reason, and reading goes on.
"""

import glob
import gzip
import io
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from hydra_judge.tables import check_row, hub_parts, parquet_blocks, read_arrow, read_hub, read_parquet
from hydra_judge.zst import ZstReader
from nmoe.errors import DataError
from nmoe.formats.documents import Document, Reject, check_document, parse_document, read_lines

__all__ = ["Block", "plan", "read_block"]

_KINDS = {
    "jsonl": "lines",
    "ndjson": "lines",
    "txt": "text",
    "md": "text",
    "parquet": "parquet",
    "arrow": "arrow",
    "feather": "arrow",
}
_COMPRESSED = ("gz", "zst")


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A part of the corpus that is scored as a unit.

    Attributes:
        path: file, "-" for standard input, or hf:// address.
        source: name to record.
        kind: "lines", "text", "parquet", "arrow" or "hub".
        start, end: bytes of a plain file of lines, row groups of a Parquet file; 0, 0 for all of it.
        first: number of lines or rows before it.
        size: bytes of the file; 0 where it is not known.
        stamp: modification time in ns; 0 if the block cannot be recognised again.
    """

    path: str
    source: str
    kind: str
    start: int = 0
    end: int = 0
    first: int = 0
    size: int = 0
    stamp: int = 0

    def fingerprint(self) -> dict[str, Any]:
        """What tells whether a scored block still is this one."""
        values = asdict(self)
        del values["path"]
        return values

    @property
    def bytes(self) -> int:
        """Bytes of the corpus in it, for the progress; 0 if unknown."""
        return self.end - self.start if self.kind == "lines" and self.end else self.size


def plan(inputs: Iterable[str], *, block_bytes: int = 256 << 20) -> list[Block]:
    """Lists the blocks of a corpus, in the order of the inputs and of names inside folders.

    Args:
        inputs: files, folders, globs, "-", or hf://OWNER/NAME[:CONFIG][/SPLIT].
        block_bytes: plain files of lines and Parquet files above this are split.

    Raises:
        DataError: if an input does not exist, holds nothing readable, or is of no known kind.
    """
    blocks: list[Block] = []
    files: dict[Path, str] = {}
    for one in dict.fromkeys(inputs):  # twice the same is once
        if one == "-":
            blocks.append(Block(path="-", source="stdin", kind="lines"))
        elif one.startswith("hf://"):
            hub_parts(one)
            blocks.append(Block(path=one, source=one, kind="hub"))
        else:
            for path, source in _files(one):
                files.setdefault(path, source)
    names = list(files.values())
    for path, source in files.items():
        # Two files of the same name are told apart by their whole paths.
        blocks += _file_blocks(path, source if names.count(source) == 1 else str(path), block_bytes)
    if not blocks:
        raise DataError("no input: expected files, folders, globs, hf:// addresses or - for standard input")
    return blocks


def _kind(path: Path) -> str | None:
    parts = path.name.lower().rsplit(".", 2)
    ending = parts[-2] if parts[-1] in _COMPRESSED and len(parts) == 3 else parts[-1]
    kind = _KINDS.get(ending) if len(parts) > 1 else None
    return None if kind in ("parquet", "arrow") and parts[-1] in _COMPRESSED else kind


def _files(one: str) -> list[tuple[Path, str]]:
    """Files that an input stands for, with the names to record."""
    path = Path(one)
    if path.is_dir():
        found = [entry for entry in sorted(path.rglob("*")) if entry.is_file() and _kind(entry)]
        if not found:
            raise DataError(f"{one}: holds no file that can be read; expected {_known()}")
        return [(entry, entry.relative_to(path).as_posix()) for entry in found]
    if path.exists():
        if _kind(path) is None:
            raise DataError(f"{one}: cannot tell what it is; expected {_known()}")
        return [(path, path.name)]
    names = glob.glob(one, recursive=True) if glob.has_magic(one) else []  # noqa: PTH207 - Path.glob takes no absolute pattern
    matches = [Path(name) for name in sorted(names)]
    found = [match for match in matches if match.is_file() and _kind(match)]
    if not found:
        raise DataError(f"{one}: not found; expected a file, a folder, a glob, hf://OWNER/NAME or -")
    return [(match, match.name) for match in found]


def _known() -> str:
    return ", ".join(f".{ending}" for ending in _KINDS) + " (text and lines also .gz and .zst)"


def _file_blocks(path: Path, source: str, block_bytes: int) -> list[Block]:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be opened ({error.strerror})") from None
    kind = cast(str, _kind(path))
    base = {"path": str(path), "source": source, "kind": kind, "size": status.st_size, "stamp": status.st_mtime_ns}
    if status.st_size <= block_bytes or path.suffix.lower().lstrip(".") in _COMPRESSED:
        return [Block(**base)]
    if kind == "lines":
        return [Block(**base, start=start, end=end, first=first) for start, end, first in _stretches(path, block_bytes)]
    if kind == "parquet":
        return [
            Block(**base, start=start, end=end, first=first) for start, end, first in parquet_blocks(path, block_bytes)
        ]
    return [Block(**base)]


def _stretches(path: Path, size: int) -> Iterator[tuple[int, int, int]]:
    """(start, end, lines before) of stretches of about `size` bytes that end where a line ends."""
    with path.open("rb") as stream:
        total = stream.seek(0, io.SEEK_END)
        start = lines = 0
        while start < total:
            stream.seek(min(start + size, total))
            while (rest := stream.readline(1 << 20)) and not rest.endswith(b"\n"):
                pass
            end = stream.tell()
            yield start, end, lines
            stream.seek(start)
            left = end - start
            while left and (chunk := stream.read(min(left, 1 << 20))):
                lines += chunk.count(b"\n")
                left -= len(chunk)
            start = end


class _Slice(io.RawIOBase):
    """The bytes [start, end) of a file."""

    def __init__(self, path: str, start: int, end: int):
        self._file = Path(path).open("rb")  # noqa: SIM115 - closed by close()
        self._file.seek(start)
        self._left = end - start

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(min(len(buffer), self._left))
        buffer[: len(data)] = data
        self._left -= len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def _open(block: Block) -> BinaryIO:
    """The block's bytes, decompressed.

    Raises:
        DataError: if the file cannot be opened.
    """
    try:
        if block.path == "-":
            return sys.stdin.buffer
        if block.path.lower().endswith(".gz"):
            return cast(BinaryIO, gzip.open(block.path))
        if block.path.lower().endswith(".zst"):
            return cast(BinaryIO, io.BufferedReader(ZstReader(Path(block.path)), buffer_size=1 << 20))
        if block.end:
            return cast(BinaryIO, io.BufferedReader(_Slice(block.path, block.start, block.end), buffer_size=1 << 20))
        return Path(block.path).open("rb")
    except OSError as error:
        raise DataError(f"{block.path}: cannot be opened ({error.strerror})") from None


def read_block(block: Block, *, text_key: str, id_key: str, max_bytes: int) -> Iterator[Document | Reject]:
    """Documents of a block, and what is none.

    Args:
        block: what to read.
        text_key: key or column of the text.
        id_key: key or column of the id; without one, an id is the hash of the text.
        max_bytes: larger documents are rejected.

    Raises:
        DataError: if the file cannot be opened.
    """
    if block.kind == "parquet":
        rows = read_parquet(Path(block.path), groups=range(block.start, block.end), keys=(text_key, id_key))
    elif block.kind == "arrow":
        rows = read_arrow(Path(block.path), keys=(text_key, id_key))
    elif block.kind == "hub":
        rows = read_hub(block.path, keys=(text_key, id_key))
    else:
        yield from _read_stream(block, text_key=text_key, id_key=id_key, max_bytes=max_bytes)
        return
    for number, row in enumerate(rows, start=block.first + 1):
        if isinstance(row, str):
            yield Reject(source=block.source, line=0, reason=row.partition(":")[0], detail=row.partition(": ")[2])
        else:
            yield check_row(*row, source=block.source, line=number, max_bytes=max_bytes)


def _read_stream(block: Block, *, text_key: str, id_key: str, max_bytes: int) -> Iterator[Document | Reject]:
    with _open(block) as stream:
        if block.kind == "text":
            yield _whole_text(stream, block.source, max_bytes)
            return
        for item in read_lines(stream, source=block.source, max_bytes=max_bytes):
            if isinstance(item, Reject):
                yield Reject(source=item.source, line=item.line + block.first, reason=item.reason, detail=item.detail)
                continue
            number = item[0] + block.first
            found = parse_document(item[1], source=block.source, number=number, text_key=text_key, id_key=id_key)
            if found is not None:
                yield found


def _whole_text(stream: BinaryIO, source: str, max_bytes: int) -> Document | Reject:
    """A text file as one document; its lines are kept as they are but for their ends."""
    lines: list[bytes] = []
    for item in read_lines(stream, source=source, max_bytes=max_bytes):
        if isinstance(item, Reject):
            return Reject(source=source, line=0, reason=item.reason, detail=item.detail)
        lines.append(item[1])
        max_bytes -= len(item[1]) + 1
        if max_bytes < -1:
            return Reject(source=source, line=0, reason="too_large", detail="the text is above the limit")
    try:
        text = b"\n".join(lines).decode("utf-8")
    except UnicodeDecodeError as error:
        return Reject(source=source, line=0, reason="bad_utf8", detail=str(error))
    return check_document(text, id=None, source=source, line=0)
