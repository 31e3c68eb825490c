# SPDX-License-Identifier: Apache-2.0
"""Documents: whatever a corpus holds becomes a document or a counted reject, and scored documents come back whole."""

import gzip
import hashlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmoe.formats import DataError, FormatError
from nmoe.formats.documents import (
    Document,
    Reject,
    ScoredDocument,
    ScoredWriter,
    open_scored,
    read_documents,
    read_lines,
)

GOLDEN = Path(__file__).parent / "golden" / "scored"


def reasons(path: Path, **options: Any) -> list[tuple[int, str]]:
    """(line, reason) of each reject and (line, id) of each document, in order."""
    return [
        (item.line, item.reason if isinstance(item, Reject) else item.id) for item in read_documents(path, **options)
    ]


def test_jsonl_every_kind_of_bad_line_is_counted_and_the_rest_read(tmp_path):
    lines = [
        b'\xef\xbb\xbf{"id": "bom", "text": "a"}\r',
        b"",
        b'{"text": ',
        b'"text"',
        b'{"id": 1}',
        b'{"text": 5}',
        b'{"text": null}',
        b'{"text": " \\n"}',
        b'{"text": "a\\u0000b"}',
        b'{"text": "\\ud800"}',
        b'{"text": "\xe9"}',
        b"[" * 100_000,
        b'{"id": 7, "text": "number as id"}',
        b'{"id": "last", "text": "half',
    ]
    path = tmp_path / "c.jsonl"
    path.write_bytes(b"\n".join(lines))
    assert reasons(path) == [
        (1, "bom"),
        (3, "bad_json"),
        (4, "not_an_object"),
        (5, "missing_text"),
        (6, "not_text"),
        (7, "not_text"),
        (8, "empty_text"),
        (9, "nul_byte"),
        (10, "lone_surrogate"),
        (11, "bad_utf8"),
        (12, "bad_json"),
        (13, "7"),
        (14, "bad_json"),
    ]


def test_jsonl_ids_that_are_missing_become_hashes_of_the_text(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": "same"}\n{"id": "", "text": "same"}\n{"id": null, "body": "x", "text": "other"}\n')
    found = [item.id for item in read_documents(path) if isinstance(item, Document)]
    assert found[0] == found[1] == hashlib.sha256(b"same").hexdigest()[:16]
    assert found[2] != found[0]
    assert [item.text for item in read_documents(path, text_key="body") if isinstance(item, Document)] == ["x"]


def test_jsonl_a_long_line_is_skipped_with_bounded_memory(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"id": "a", "text": "' + b"x" * 5_000_000 + b'"}\n{"id": "b", "text": "y"}\n')
    assert reasons(path, max_bytes=1000) == [(1, "too_large"), (2, "b")]

    class Watched(io.BytesIO):
        largest = 0

        def readline(self, size: int | None = -1) -> bytes:
            assert size is not None
            assert size >= 0
            Watched.largest = max(Watched.largest, size)
            return super().readline(size)

    assert [
        item.reason
        for item in read_lines(Watched(path.read_bytes()), source="c", max_bytes=1000)
        if isinstance(item, Reject)
    ] == ["too_large"]
    assert Watched.largest <= 1 << 20


@given(
    lines=st.lists(st.binary(max_size=40).map(lambda data: data.replace(b"\n", b"").replace(b"\r", b"")), max_size=20),
    limit=st.integers(1, 30),
)
def test_lines_come_back_as_they_are_or_are_too_large(lines, limit):
    stream = io.BytesIO(b"\n".join(lines) + b"\n" if lines else b"")
    found = list(read_lines(stream, source="s", max_bytes=limit))
    assert len(found) == len(lines)
    for number, (item, line) in enumerate(zip(found, lines, strict=True), start=1):
        body = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if len(line) <= limit:
            assert item == (number, body)
        elif len(line) > limit + 3:
            assert isinstance(item, Reject)


@pytest.mark.parametrize(("cut", "reason"), [(slice(None, -20), "truncated"), (slice(4, None), "bad_compression")])
def test_gz_that_is_broken_is_reported_after_what_could_be_read(tmp_path, cut, reason):
    data = gzip.compress(
        b"".join(
            json.dumps({"id": str(i), "text": hashlib.sha256(bytes([i % 256])).hexdigest()}).encode() + b"\n"
            for i in range(2000)
        )
    )
    path = tmp_path / "c.jsonl.gz"
    path.write_bytes(data[cut])
    found = reasons(path)
    assert found[-1][1] == reason
    assert reason != "truncated" or len(found) > 1000


def test_txt_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfline one\r\nline two\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"caf\xe9"))
    (tmp_path / "c.txt").write_bytes(b"x" * 11)
    (found,) = read_documents(tmp_path / "a.txt")
    assert isinstance(found, Document)
    assert found.text == "line one\nline two\n"
    assert reasons(tmp_path / "b.txt.gz") == [(0, "bad_utf8")]
    assert reasons(tmp_path / "c.txt", max_bytes=10) == [(0, "too_large")]


@pytest.mark.parametrize("name", ["missing.jsonl", "folder.txt", "unknown.bin"])
def test_a_path_that_cannot_be_read_is_one_clear_error(tmp_path, name):
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "unknown.bin").write_bytes(b"")
    with pytest.raises(DataError, match=name):
        list(read_documents(tmp_path / name))


SCORED = [
    ScoredDocument(
        id="a",
        text="text — one\u2028two",
        source="c.jsonl",
        line=1,
        outcome="ok",
        score=3.5,
        axes={"depth": 3.0},
        reason="good",
        windows=[[0, 8]],
    ),
    ScoredDocument(id="b", text="x", source="c.jsonl", line=2, outcome="refused", reason="no"),
    ScoredDocument(id="c", text="y", source="c.jsonl", line=3, outcome="ok", score=0.0, votes=[0.0, 0.0]),
]


def write(directory: Path) -> None:
    with ScoredWriter(
        directory, rubric={"name": "educational", "sha256": "ab"}, model="judge", part_documents=2
    ) as writer:
        for document in SCORED:
            writer.add(document)


def test_scored_golden_bytes_are_written_and_read(tmp_path):
    write(tmp_path / "s")
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == sorted(path.name for path in GOLDEN.iterdir())
    for path in GOLDEN.iterdir():
        assert (tmp_path / "s" / path.name).read_bytes() == path.read_bytes()
    found = open_scored(GOLDEN)
    assert list(found) == SCORED
    assert len(found) == 3
    assert found.header["outcomes"]["refused"] == 1


def test_scored_score_belongs_to_ok_alone():
    with pytest.raises(ValueError, match="belongs to 'ok' alone"):
        ScoredDocument(id="a", text="x", source="c", outcome="failed", score=0.0)
    with pytest.raises(ValueError, match="belongs to 'ok' alone"):
        ScoredDocument(id="a", text="x", source="c", outcome="ok")
    with pytest.raises(ValueError, match="outcome 'fine'"):
        ScoredDocument(id="a", text="x", source="c", outcome="fine")  # type: ignore[arg-type]


def test_scored_unfinished_and_newer_folders_are_refused(tmp_path):
    writer = ScoredWriter(tmp_path / "s", rubric={}, model="m")
    writer.add(SCORED[0])
    writer.__exit__(RuntimeError, RuntimeError(), None)
    with pytest.raises(DataError, match="not found"):
        open_scored(tmp_path / "s")
    write(tmp_path / "s")
    with pytest.raises(DataError, match="finished scores"):
        write(tmp_path / "s")
    header = json.loads((tmp_path / "s" / "scored.json").read_text())
    (tmp_path / "s" / "scored.json").write_text(json.dumps(header | {"version": 2}))
    with pytest.raises(FormatError, match="version 2 is newer"):
        open_scored(tmp_path / "s")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"id": 1', "part-00000.jsonl:1"),
        ('{"id": "a"}', "missing"),
        ('{"id":"a","text":"t","source":"s","outcome":"ok"}', "belongs"),
    ],
)
def test_scored_damaged_line_is_named(tmp_path, line, found):
    shutil.copytree(GOLDEN, tmp_path / "s")
    (tmp_path / "s" / "part-00000.jsonl").write_text(line + "\n")
    with pytest.raises(FormatError, match=found):
        list(open_scored(tmp_path / "s"))
