# SPDX-License-Identifier: Apache-2.0
"""Documents as they come (jsonl, plain text) and as the judge leaves them (scored).

Raw corpora are dirty, so the reader is a line reader over bytes with bounded memory: whatever it meets (broken UTF-8,
half a JSON line, a 200 MB line, a truncated .gz) it yields a `Reject` with a reason and goes on.

    DIR/part-00000.jsonl ...    scored documents, one JSON object a line
    DIR/scored.json             written last: rubric, judge, totals, and name, count and SHA-256 of every part
"""

import gzip
import hashlib
import json
import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO, Literal, Self, cast, get_args

from nmoe.errors import DataError, FormatError
from nmoe.formats.files import inside, read_header, replace_durably, sha256_file, write_json

__all__ = [
    "FORMAT",
    "HEADER",
    "MAX_DOCUMENT_BYTES",
    "VERSION",
    "Document",
    "Outcome",
    "Reject",
    "ScoredDocument",
    "ScoredSet",
    "ScoredWriter",
    "check_document",
    "open_scored",
    "parse_document",
    "read_documents",
    "read_lines",
]

FORMAT, VERSION = "nmoe-scored", 1
HEADER = "scored.json"
MAX_DOCUMENT_BYTES = 16 << 20

Outcome = Literal["ok", "unparsable", "refused", "filtered", "too_long", "failed"]
"""What came of judging a document; only "ok" carries a score."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A text with where it came from.

    Attributes:
        id: unique name; a prefix of the text's SHA-256 where the corpus gives none.
        text: the text, valid Unicode without NUL and without lone surrogates, not blank.
        source: name of the corpus file.
        line: 1-based line in it, 0 where lines mean nothing.
    """

    id: str
    text: str
    source: str
    line: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Reject:
    """A piece of input that is not a document.

    Attributes:
        source: name of the corpus file.
        line: 1-based line in it, 0 where it concerns the whole file.
        reason: `bad_utf8`, `bad_json`, `not_an_object`, `missing_text`, `not_text`, `empty_text`, `nul_byte`,
            `lone_surrogate`, `too_large`, `truncated` or `bad_compression`.
        detail: what was found.
    """

    source: str
    line: int
    reason: str
    detail: str = ""


def read_lines(
    stream: BinaryIO, *, source: str, max_bytes: int = MAX_DOCUMENT_BYTES
) -> Iterator[tuple[int, bytes] | Reject]:
    """Yields (1-based number, line without its end) and never holds more than `max_bytes` of a line.

    Handles a byte order mark, CRLF, a last line without an end, and streams that break off.
    """
    number = 0
    while True:
        number += 1
        try:
            line = stream.readline(max_bytes + 2)
            if not line:
                return
            size = len(line)
            while not line.endswith(b"\n") and (rest := stream.readline(1 << 20)):
                size += len(rest)
                line = line if size > max_bytes + 2 else line + rest
                if rest.endswith(b"\n"):
                    break
        except EOFError:
            yield Reject(source=source, line=number, reason="truncated", detail="the compressed file breaks off")
            return
        except (OSError, zlib.error) as error:
            yield Reject(source=source, line=number, reason="bad_compression", detail=str(error))
            return
        body = line.rstrip(b"\r\n").removeprefix(b"\xef\xbb\xbf" if number == 1 else b"")
        if size > max_bytes + 2 or len(body) > max_bytes:
            yield Reject(
                source=source, line=number, reason="too_large", detail=f"{size} bytes; the limit is {max_bytes}"
            )
        else:
            yield number, body


def parse_document(
    line: bytes, *, source: str, number: int, text_key: str = "text", id_key: str = "id"
) -> Document | Reject | None:
    """One line of a jsonl corpus as a document; None for a blank line."""

    def reject(reason: str, detail: str = "") -> Reject:
        return Reject(source=source, line=number, reason=reason, detail=detail)

    if not line.strip():
        return None
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return reject("bad_utf8", str(error))
    except (ValueError, RecursionError) as error:
        return reject("bad_json", str(error))
    if not isinstance(record, dict):
        return reject("not_an_object", type(record).__name__)
    if text_key not in record:
        return reject("missing_text", f"no key {text_key!r} among {sorted(record)[:8]}")
    return check_document(record[text_key], id=record.get(id_key), source=source, line=number)


def check_document(text: Any, *, id: Any, source: str, line: int) -> Document | Reject:
    """A document, if `text` is a text that can be judged and tokenized."""
    reason, detail = "", ""
    if not isinstance(text, str):
        reason, detail = "not_text", type(text).__name__
    elif not text.strip():
        reason = "empty_text"
    elif "\0" in text:
        reason, detail = "nul_byte", f"at character {text.index(chr(0))}"
    else:
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            reason, detail = "lone_surrogate", f"at character {error.start}"
        else:
            name = hashlib.sha256(data).hexdigest()[:16] if id is None or id == "" else str(id)
            return Document(id=name.encode("utf-8", "replace").decode("utf-8"), text=text, source=source, line=line)
    return Reject(source=source, line=line, reason=reason, detail=detail)


def read_documents(
    path: str | Path,
    *,
    source: str | None = None,
    text_key: str = "text",
    id_key: str = "id",
    max_bytes: int = MAX_DOCUMENT_BYTES,
) -> Iterator[Document | Reject]:
    """Documents of a `.jsonl`/`.ndjson` or `.txt` file, plain or `.gz`. A text file is one document.

    Args:
        path: the file.
        source: name to record (default: the file's name).
        text_key: key of the text in a jsonl record.
        id_key: key of the id; where it is missing, the id is a hash of the text.
        max_bytes: larger lines and text files are rejected as `too_large`.

    Raises:
        DataError: if the file does not exist, cannot be opened, or its ending is none of these.
    """
    path = Path(path)
    name = source if source is not None else path.name
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if kind not in ("jsonl", "ndjson", "txt"):
        raise DataError(f"{path}: cannot tell what it is; expected .jsonl, .ndjson or .txt, plain or .gz")
    try:
        stream = cast(BinaryIO, gzip.open(path) if path.name.endswith(".gz") else path.open("rb"))  # noqa: SIM115 - closed by `with` below
    except OSError as error:
        raise DataError(f"{path}: cannot be opened ({error.strerror})") from None
    with stream:
        if kind == "txt":
            yield _whole_text(stream, name, max_bytes)
            return
        for item in read_lines(stream, source=name, max_bytes=max_bytes):
            document = (
                item
                if isinstance(item, Reject)
                else parse_document(item[1], source=name, number=item[0], text_key=text_key, id_key=id_key)
            )
            if document is not None:
                yield document


def _whole_text(stream: BinaryIO, source: str, max_bytes: int) -> Document | Reject:
    try:
        data = stream.read(max_bytes + 1)
    except EOFError:
        return Reject(source=source, line=0, reason="truncated", detail="the compressed file breaks off")
    except (OSError, zlib.error) as error:
        return Reject(source=source, line=0, reason="bad_compression", detail=str(error))
    if len(data) > max_bytes:
        return Reject(source=source, line=0, reason="too_large", detail=f"more than {max_bytes} bytes")
    try:
        text = data.removeprefix(b"\xef\xbb\xbf").decode("utf-8")
    except UnicodeDecodeError as error:
        return Reject(source=source, line=0, reason="bad_utf8", detail=str(error))
    return check_document(text.replace("\r\n", "\n"), id=None, source=source, line=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredDocument:
    """A document with the judge's verdict.

    Attributes:
        id, text, source, line: of the document.
        outcome: what came of judging it.
        score: the overall score on the rubric's scale; None unless the outcome is "ok".
        axes: score of each axis of the rubric.
        reason: the judge's words, or why there is no score.
        windows: [start, end) character ranges of the text that were shown to the judge.
        votes: overall score of each vote, where several were taken.
    """

    id: str
    text: str
    source: str
    line: int = 0
    outcome: Outcome
    score: float | None = None
    axes: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    windows: list[list[int]] = field(default_factory=list)
    votes: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.outcome not in get_args(Outcome):
            raise ValueError(f"outcome {self.outcome!r}, expected one of {get_args(Outcome)}")
        if (self.score is None) != (self.outcome != "ok"):
            raise ValueError(f"outcome {self.outcome!r} with score {self.score}; a score belongs to 'ok' alone")


class ScoredWriter:
    """Writes scored documents in the order they are added; use as a context manager.

    Args:
        directory: folder to fill.
        rubric: name and version (hash) of the rubric, and whatever else explains the scores.
        model: name of the judge.
        part_documents: documents a part.

    Raises:
        DataError: if the folder holds a finished set already.
    """

    def __init__(self, directory: str | Path, *, rubric: Mapping[str, Any], model: str, part_documents: int = 100_000):
        self._dir = Path(directory)
        if (self._dir / HEADER).exists():
            raise DataError(f"{directory}: holds finished scores already; choose another folder or remove it")
        self._dir.mkdir(parents=True, exist_ok=True)
        for stale in self._dir.glob("part-*.jsonl*"):
            stale.unlink()
        self._rubric, self._model, self._part_documents = dict(rubric), model, part_documents
        self._parts: list[dict[str, Any]] = []
        self._outcomes: Counter[str] = Counter()
        self._stream: IO[str] | None = None
        self._count = 0

    def add(self, document: ScoredDocument) -> None:
        """Appends a document."""
        if self._stream is None:
            self._stream = self._temporary().open("w", encoding="utf-8", newline="\n")
        self._stream.write(json.dumps(asdict(document), ensure_ascii=False) + "\n")
        self._outcomes[document.outcome] += 1
        self._count += 1
        if self._count == self._part_documents:
            self._finish_part()

    def _temporary(self) -> Path:
        return self._dir / f"part-{len(self._parts):05d}.jsonl.tmp"

    def _finish_part(self) -> None:
        if self._stream is None:
            return
        self._stream.close()
        temporary = self._temporary()
        path = temporary.with_suffix("")
        replace_durably(temporary, path)
        self._parts.append({"path": path.name, "documents": self._count, "sha256": sha256_file(path)})
        self._stream, self._count = None, 0

    def close(self) -> None:
        """Completes the folder: the last part, then `scored.json`."""
        self._finish_part()
        write_json(
            self._dir / HEADER,
            {
                "format": FORMAT,
                "version": VERSION,
                "rubric": self._rubric,
                "model": self._model,
                "documents": sum(self._outcomes.values()),
                "outcomes": {outcome: self._outcomes[outcome] for outcome in get_args(Outcome)},
                "parts": self._parts,
            },
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self._stream is not None:
            self._stream.close()


class ScoredSet:
    """A finished folder of scored documents: iterate over it, in order.

    Attributes:
        directory: the folder.
        header: `scored.json` as read.
    """

    def __init__(self, directory: Path, header: dict[str, Any]):
        self.directory, self.header = directory, header

    def __len__(self) -> int:
        return int(self.header["documents"])

    def __iter__(self) -> Iterator[ScoredDocument]:
        for number in range(len(self.header["parts"])):
            yield from self.part(number)

    def part(self, number: int) -> Iterator[ScoredDocument]:
        """Documents of one of the files that the header names, by its number."""
        path = inside(self.directory, str(self.header["parts"][number]["path"]))
        try:
            with path.open("rb") as stream:
                for line_number, line in enumerate(stream, start=1):
                    yield _parse_scored(line, path, line_number)
        except FileNotFoundError:
            raise DataError(f"{path}: not found; {HEADER} names it. Score the corpus again") from None


_KINDS = dict.fromkeys(("id", "text", "source", "reason"), str) | {
    "line": int,
    "axes": dict,
    "windows": list,
    "votes": list,
}


def _parse_scored(line: bytes, path: Path, number: int) -> ScoredDocument:
    try:
        found = ScoredDocument(**json.loads(line.decode("utf-8")))
        for key, kind in _KINDS.items():
            if not isinstance(getattr(found, key), kind):
                raise TypeError(f"{key} is {getattr(found, key)!r}, expected {kind.__name__}")
        for value in (found.score, *found.votes, *found.axes.values()):
            if value is not None and not math.isfinite(value):
                raise ValueError(f"a score is {value}")
        return found
    except (ValueError, TypeError) as error:
        raise FormatError(f"{path}:{number}: not a scored document ({error})") from None


def open_scored(directory: str | Path) -> ScoredSet:
    """Opens a finished folder of scored documents.

    Raises:
        DataError: if the folder is unfinished.
        FormatError: if its header is of a newer version or not one.
    """
    root = Path(directory)
    header = read_header(root / HEADER, format_name=FORMAT, version=VERSION, what="scored documents")
    for key, kind in {"documents": int, "rubric": dict, "model": str, "outcomes": dict, "parts": list}.items():
        if not isinstance(header.get(key), kind):
            raise FormatError(f"{root / HEADER}: {key} is {header.get(key)!r}, expected {kind.__name__}")
    if not all(isinstance(part, dict) and {"path", "documents", "sha256"} <= set(part) for part in header["parts"]):
        raise FormatError(f"{root / HEADER}: a part lacks path, documents or sha256")
    return ScoredSet(root, header)
