# SPDX-License-Identifier: Apache-2.0
"""Dirty corpora: every kind of dirt is set aside with path, line and reason, and everything else is scored."""

import asyncio
import gzip
import json
import random
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from hydra_judge.cache import Cache
from hydra_judge.corpus import plan
from hydra_judge.estimate import survey
from hydra_judge.rubric import load_rubric
from hydra_judge.score import Reading
from hydra_judge.session import default_judge

GOOD = json.dumps({"id": "good", "text": "A sentence that can be judged. [[score=4]]"}).encode()


def dirty_corpus(folder: Path) -> dict[str, list[tuple[int, str]]]:
    """Writes a folder of dirt; returns (line, reason) that must be quarantined, by file. Each file has a good document."""
    folder.mkdir()
    body = b"\n".join(
        [
            b"\xef\xbb\xbf" + GOOD + b"\r",
            b'{"id": "2", "text": ""}',
            b'{"id": "3", "text": null}',
            b'{"id": "4", "text": 17}',
            b'{"id": "5", "text": "\xff\xfe broken"}',
            b'{"id": "6", "text": "nul \\u0000 byte"}',
            b'{"id": "7", "text": "half \\ud800 a pair"}',
            b'{"id": "good", "text": "Another text of the same id."}',
            b'["no object"]',
            b'{"id": "10", "body": "no text"}',
            b"[" * 100_000,
            b"",
            b'{"id": "13", "text": "' + b"x" * 5000 + b'"}',
            b'{"id": "14", "text": "half a li',
        ]
    )
    (folder / "a.jsonl").write_bytes(body)
    packed = gzip.compress((GOOD + b"\n") + b"".join(b'{"text": "filler %d"}\n' % n for n in range(600)))
    (folder / "b.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    noise = random.Random(0)
    lines = GOOD + b"\n" + b"".join(b'{"text": "filler %x"}\n' % noise.getrandbits(1000) for _ in range(1500))
    packed = zstandard.compress(lines)
    (folder / "c.jsonl.zst").write_bytes(packed[: len(packed) // 2])
    (folder / "d.jsonl.gz").write_bytes(b"this is no gzip")
    (folder / "e.jsonl.zst").write_bytes(b"this is no zstd")
    table = pyarrow.table({"id": ["good", "r2", "r3", "r4"], "text": ["A row. [[score=4]]", None, "", "y" * 5000]})
    pyarrow.parquet.write_table(table, folder / "f.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"id": ["1"], "body": ["no text"]}), folder / "g.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2]}), folder / "h.parquet")
    (folder / "i.parquet").write_bytes(b"PAR1 no parquet PAR1")
    (folder / "j.arrow").write_bytes(b"ARROW1 no arrow")
    (folder / "k.jsonl").write_bytes(b"")
    (folder / "l.txt").write_bytes(b"latin \xe9\xe8")
    (folder / "m.txt").write_bytes(b" \n ")
    (folder / "n.txt.gz").write_bytes(gzip.compress(b"A packed text. [[score=1]]"))
    (folder / "o.txt").write_bytes(b"z" * 5000)
    return {
        "a.jsonl": [
            (2, "empty_text"), (3, "not_text"), (4, "not_text"), (5, "bad_utf8"), (6, "nul_byte"), (7, "lone_surrogate"),
            (8, "duplicate_id"), (9, "not_an_object"), (10, "missing_text"), (11, "too_large"), (13, "too_large"), (14, "bad_json"),
        ],
        "d.jsonl.gz": [(1, "bad_compression")],
        "e.jsonl.zst": [(1, "bad_compression")],
        "f.parquet": [(2, "not_text"), (3, "empty_text"), (4, "too_large")],
        "g.parquet": [(0, "missing_text")],
        "h.parquet": [(1, "not_text"), (2, "not_text")],
        "i.parquet": [(0, "damaged")],
        "j.arrow": [(0, "damaged")],
        "l.txt": [(0, "bad_utf8")],
        "m.txt": [(0, "empty_text")],
        "o.txt": [(0, "too_large")],
    }  # fmt: skip


def test_every_kind_of_dirt_is_quarantined_with_line_and_reason(tmp_path, serve, score, scored):
    expected = dirty_corpus(tmp_path / "in")
    score(serve(), "in", "--max-document-bytes", "4000", "--concurrency", "64")
    found: dict[str, list[tuple[int, str]]] = {}
    for line in (tmp_path / "scored" / "quarantine.jsonl").read_text().splitlines():
        record = json.loads(line)
        found.setdefault(record["path"], []).append((record["line"], record["reason"]))
    for name in ("b.jsonl.gz", "c.jsonl.zst"):
        ((line, reason),) = found.pop(name)
        assert (reason, line > 1) == ("truncated", True)
    assert found == expected
    documents = scored()
    good = [one["source"] for one in documents if one["id"] == "good"]
    assert good == ["a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "f.parquet"]
    assert sum(1 for one in documents if one["source"] == "c.jsonl.zst") > 200
    assert all(one["outcome"] == "ok" for one in documents)

    judge = default_judge(load_rubric("educational"), model="m", votes=1, temperature=None, options={})
    ahead = survey(
        plan([str(tmp_path / "in")]),
        judge=judge,
        cache=Cache(tmp_path / "none"),
        reading=Reading(max_bytes=4000),
        pilot=0,
    )
    told = asyncio.run(ahead)
    assert (told.documents, told.quarantined) == (len(documents), sum(map(len, expected.values())) + 2)


@pytest.mark.parametrize("body", [b"", b"\n\n", b'{"text": ""}\n'])
def test_a_corpus_without_documents_is_an_error(body, tmp_path, serve, score):
    (tmp_path / "in.jsonl").write_bytes(body)
    assert "no document" in score(serve(), "in.jsonl", expect=2).stderr


def test_standard_input_and_other_keys(serve, score, scored):
    lines = "".join(json.dumps({"key": f"s{n}", "body": f"Piped text {n}. [[score=2]]"}) + "\n" for n in range(5))
    score(serve(), "-", "--text-key", "body", "--id-key", "key", stdin=lines)
    assert [(one["id"], one["source"], one["line"], one["score"]) for one in scored()] == [
        (f"s{n}", "stdin", n + 1, 2.0) for n in range(5)
    ]


def test_an_input_that_is_named_twice_is_read_once(serve, score, scored):
    score(serve(), "-", "-", "--answer", "json_schema", stdin='{"text": "Piped. [[score=2]]"}\n')
    assert [one["score"] for one in scored()] == [2.0]
    assert "expected hf://OWNER/NAME" in score(serve(), "hf://nobody", output="hub", expect=2).stderr


def test_two_files_of_one_name_are_told_apart(tmp_path, serve, score, scored):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.jsonl").write_bytes(GOOD)
    score(serve(), "one/x.jsonl", "two/x.jsonl", "one/*.jsonl")
    assert [one["source"] for one in scored()] == ["one/x.jsonl", "two/x.jsonl"]


def test_a_data_set_of_a_hub_is_read_over_its_protocol(tmp_path, serve, score, scored, environment):
    """`hf://` as it is used: `datasets` streams from a server that speaks the hub's protocol."""
    folder = tmp_path / "hub/acme/corpus"
    folder.mkdir(parents=True)
    lines = [{"id": f"h{n}", "text": f"Text {n} of a hub. [[score={n % 6}]]"} for n in range(8)] + [
        {"id": "h8", "text": " "}
    ]
    (folder / "held-out.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = "configs:\n- config_name: small\n  data_files:\n  - split: test\n    path: held-out.jsonl\n"
    (folder / "README.md").write_text(f"---\n{files}---\n")
    server = Path(__file__).with_name("hub_server.py")
    hub = subprocess.Popen(
        [sys.executable, server, tmp_path / "hub"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert hub.stdout is not None
    environment |= {"HF_ENDPOINT": hub.stdout.readline().strip(), "HF_HOME": str(tmp_path / "hf")}
    try:
        said = score(serve(), "hf://acme/corpus:small/test", "--answer", "json_schema")
    finally:
        hub.kill()
        hub.wait()
        hub.stdout.close()
    assert "8 documents: 8 ok; quarantined: 1 empty_text" in said.stdout
    assert [(one["id"], one["score"]) for one in scored()] == [(f"h{n}", float(n % 6)) for n in range(8)]
    assert {one["source"] for one in scored()} == {"hf://acme/corpus:small/test"}
