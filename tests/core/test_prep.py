# SPDX-License-Identifier: Apache-2.0
"""`nmoe-prep`: text of every accepted form to shards, what is rejected, the split, token files of others, and what is refused."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nmoe import cli
from nmoe.formats.shards import open_shards, verify_shards
from nmoe.formats.tokenizers import ByteTokenizer


def documents(folder: Path) -> dict[str, tuple[str, str]]:
    """Text -> (source, id) of every document of a shard folder."""
    found = {}
    for shard in open_shards(folder).shards:
        for (start, end), line in zip(shard.index, shard.lineages(), strict=True):
            assert int(shard.tokens[end - 1]) == ByteTokenizer().eos_id
            found[ByteTokenizer().decode(shard.tokens[start : end - 1])] = (line["source"], line["id"])
    return found


def jsonl(*texts: str, **more: str) -> bytes:
    return "".join(json.dumps({"text": text} | more) + "\n" for text in texts).encode()


def refused(capsys, *arguments: object) -> str:
    """The one line that `nmoe-prep` ends with."""
    capsys.readouterr()
    assert cli.prep([str(argument) for argument in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("error: ")
    return printed.err[7:-1]


@pytest.fixture
def corpus(tmp_path) -> Path:
    root = tmp_path / "corpus"
    (root / "deep" / "er").mkdir(parents=True)
    (root / "a.txt").write_text("A text\r\nof two lines, é.\n", newline="")
    (root / "b.txt.gz").write_bytes(gzip.compress(b"packed"))
    (root / "deep" / "c.jsonl").write_bytes(jsonl("one", "two") + b'\n{"id": "mine", "text": "three"}\n')
    (root / "deep" / "er" / "d.ndjson.gz").write_bytes(gzip.compress(jsonl("four")))
    (root / "notes.md").write_text("not read")
    return root


def test_prep_reads_every_form_and_keeps_where_it_came_from(corpus, tmp_path, capsys):
    out = tmp_path / "shards"
    assert cli.prep([str(corpus), "--output", str(out)]) == 0
    found = documents(out)
    assert {text: source for text, (source, _) in found.items()} == {
        "A text\nof two lines, é.\n": "a.txt",
        "packed": "b.txt.gz",
        "one": "deep/c.jsonl",
        "two": "deep/c.jsonl",
        "three": "deep/c.jsonl",
        "four": "deep/er/d.ndjson.gz",
    }
    assert found["three"][1] == "mine"
    shards = open_shards(out)
    assert (shards.num_documents, shards.text_bytes) == (6, sum(len(text.encode()) for text in found))
    assert list(verify_shards(out)) == []
    assert capsys.readouterr().out == f"{out}: 6 documents, {shards.num_tokens} tokens\n"
    assert (out / "rejected.jsonl").read_text() == ""


def test_prep_as_a_process_splits_shards_at_the_limit(corpus, tmp_path):
    command = [Path(sys.executable).with_name("nmoe-prep"), corpus / "deep" / "c.jsonl", corpus / "a.txt"]
    options = ["--output", tmp_path / "out", "--shard-tokens", "16"]
    ended = subprocess.run([*command, *options], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    shards = open_shards(tmp_path / "out")
    assert len(shards.shards) > 2
    assert all(len(shard.tokens) <= 16 for shard in shards.shards)
    assert shards.num_documents == 4
    assert f"4 documents, {shards.num_tokens} tokens" in ended.stdout


def test_prep_lists_what_it_rejects_and_goes_on(tmp_path, capsys):
    (tmp_path / "x.jsonl").write_bytes(
        jsonl("good") + b'{"text": 5}\n{"body": "x"}\n{"text": "  "}\nhalf a line {\n\xff\xfe\n' + jsonl("also good")
    )
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"text " * 1000)[:40])
    out = tmp_path / "out"
    assert cli.prep([str(tmp_path / "x.jsonl"), str(tmp_path / "cut.txt.gz"), "--output", str(out)]) == 0
    assert set(documents(out)) == {"good", "also good"}
    rejected = [json.loads(line) for line in (out / "rejected.jsonl").read_text().splitlines()]
    assert [(entry["source"], entry["line"], entry["reason"]) for entry in rejected] == [
        ("x.jsonl", 2, "not_text"),
        ("x.jsonl", 3, "missing_text"),
        ("x.jsonl", 4, "empty_text"),
        ("x.jsonl", 5, "bad_json"),
        ("x.jsonl", 6, "bad_utf8"),
        ("cut.txt.gz", 0, "truncated"),
    ]
    assert f"{out}/rejected.jsonl: 1 truncated\n" in capsys.readouterr().err


def test_prep_split_depends_on_the_text_alone(tmp_path):
    texts = [f"document number {i}" for i in range(400)]
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    (tmp_path / "first" / "all.jsonl").write_bytes(jsonl(*texts))
    # The same texts in other files, in another order, twice, under other ids, among new ones.
    (tmp_path / "second" / "a.jsonl").write_bytes(jsonl(*reversed(texts[100:]), id="the same id"))
    (tmp_path / "second" / "z.jsonl").write_bytes(jsonl("new", *texts[:300], *(f"more {i}" for i in range(50))))
    held_out = []
    for name in ("first", "second"):
        out = tmp_path / f"{name}-shards"
        assert cli.prep([str(tmp_path / name), "--output", str(out), "--val-fraction", "0.2"]) == 0
        train, val = set(documents(out / "train")), set(documents(out / "val"))
        assert train & val == set()
        held_out.append(val & set(texts))
        assert (train | val) >= set(texts)
    assert held_out[0] == held_out[1]
    assert 40 < len(held_out[0]) < 120


def test_prep_refuses_what_it_would_overwrite(corpus, tmp_path, capsys):
    taken = tmp_path / "taken"
    taken.touch()
    assert f"--output '{taken}': expected a folder to make" in refused(capsys, corpus, "--output", taken)
    assert "--output '': expected a folder to make" in refused(capsys, corpus, "--output", "")
    out = tmp_path / "out"
    assert cli.prep([str(corpus), "--output", str(out)]) == 0
    before = (out / "manifest.json").read_bytes()
    assert f"{out}: holds shards already; choose another --output" in refused(capsys, corpus, "--output", out)
    assert (out / "manifest.json").read_bytes() == before
    split = tmp_path / "split"
    cli.prep([str(corpus), "--output", str(split), "--val-fraction", "0.5"])
    assert "train: holds shards already" in refused(capsys, corpus, "--output", split, "--val-fraction", "0.5")
    assert "train: holds shards already" in refused(
        capsys, corpus, "--output", split
    )  # it would hold its held-out part


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected either INPUT files or --builtin python-docs"),
        (["a.txt", "--builtin", "python-docs"], "expected either INPUT files or --builtin python-docs"),
        (["--builtin", "python-docs", "--val-fraction", "0"], "--val-fraction: has no effect with --builtin"),
        (["--builtin", "python-docs", "--tokenizer", "bytes"], "--tokenizer: has no effect with --builtin"),
        (["none.txt"], "none.txt: not found; expected a text file"),
        (["notes.md"], "notes.md: cannot tell what it is; expected a name that ends in .jsonl"),
        (["empty"], "empty: holds no file that ends in .jsonl"),
        (["blank.jsonl"], "out: no document to write; the input is empty"),
        (["bad.jsonl"], "out: no document to write (2 bad_json); out/rejected.jsonl names each"),
        (["a.txt", "--val-fraction", "0.5"], "none of the 1 documents read fell to it"),
        (["a.txt", "--val-fraction", "1"], "--val-fraction 1.0: expected 0 or more and less than 1"),
        (["a.txt", "--val-fraction", "nan"], "--val-fraction nan: expected 0 or more"),
        (["a.txt", "--val-fraction", "-0.1"], "--val-fraction -0.1: expected 0 or more"),
        (["a.txt", "--shard-tokens", "1"], "--shard-tokens 1: expected 2 or more"),
        (["a.txt", "--tokenizer", "nowhere.json"], "nowhere.json"),
        (["a.txt", "--output", "a.txt/out"], "--output a.txt/out: cannot make this folder (a.txt is not a folder)"),
    ],
)
def test_prep_refuses_in_one_line(arguments, message, corpus, monkeypatch, capsys):
    monkeypatch.chdir(corpus)
    (corpus / "empty").mkdir()
    (corpus / "blank.jsonl").write_text("\n\n")
    (corpus / "bad.jsonl").write_text("{\n{\n")
    assert message in refused(capsys, "--output", "out", *arguments)
    assert not list(corpus.rglob("manifest.json"))


def test_prep_goes_on_after_a_refusal(corpus, tmp_path, capsys):
    """What a failed attempt left in the folder is no part of the next one."""
    (tmp_path / "bad.jsonl").write_text("{\n")
    refused(capsys, tmp_path / "bad.jsonl", "--output", tmp_path / "out")
    assert cli.prep([str(corpus / "a.txt"), "--output", str(tmp_path / "out")]) == 0
    assert list(verify_shards(tmp_path / "out")) == []
    assert list((tmp_path / "out").glob("*.tmp")) == []


def test_prep_makes_the_builtin_corpus(tmp_path, capsys):
    assert cli.prep(["--builtin", "python-docs", "--output", str(tmp_path / "docs")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'docs'}\n"
    assert open_shards(tmp_path / "docs" / "val").tokenizer_name == "bytes"


TEXTS = [f"text {number}, ä" for number in range(40)]
EOS = 256


def ids(*, before: bool) -> np.ndarray:
    """All texts as bytes, the end-of-document id before or behind each."""
    rows = [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in TEXTS]
    return np.concatenate([np.append(EOS, row) if before else np.append(row, EOS) for row in rows])


def llmc(path: Path, tokens: np.ndarray, *, magic: int, version: int, dtype: str) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens)
    path.write_bytes(header.tobytes() + tokens.astype(dtype).tobytes())


def nanogpt(path: Path, tokens: np.ndarray) -> None:
    path.write_bytes(tokens.astype("<u2").tobytes())


FORMS = {
    "nanogpt.bin": ("uint16", nanogpt),
    "olmo.npy": ("uint32", lambda path, tokens: path.write_bytes(tokens.astype("<u4").tobytes())),
    "gpt2.bin": ("auto", lambda path, tokens: llmc(path, tokens, magic=20240520, version=1, dtype="<u2")),
    "llama3.bin": ("auto", lambda path, tokens: llmc(path, tokens, magic=20240801, version=7, dtype="<u4")),
    "numpy.npy": ("auto", lambda path, tokens: np.save(path, tokens.astype("<u2"))),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("before", [True, False])
def test_tokens_become_the_shards_of_their_text(name: str, before: bool, tmp_path: Path):
    width, write = FORMS[name]
    (tmp_path / "tokens").mkdir()
    write(tmp_path / "tokens" / name, ids(before=before))
    (tmp_path / "texts.jsonl").write_bytes(jsonl(*TEXTS))
    split = ["--val-fraction", "0.3", "--output"]
    assert cli.prep([str(tmp_path / "tokens"), "--tokens", width, *split, str(tmp_path / "a")]) == 0
    assert cli.prep([str(tmp_path / "texts.jsonl"), *split, str(tmp_path / "b")]) == 0
    for side in ("train", "val"):
        assert list(verify_shards(tmp_path / "a" / side)) == []
        assert list(documents(tmp_path / "a" / side)) == list(documents(tmp_path / "b" / side))
        assert open_shards(tmp_path / "a" / side).text_bytes == open_shards(tmp_path / "b" / side).text_bytes
    places = [int(place.removeprefix(f"{name}:")) for _, place in documents(tmp_path / "a" / "train").values()]
    assert all((ids(before=before)[place - 1] == EOS) for place in places if place)


def test_wrong_files_are_refused_in_one_line(tmp_path: Path, capsys):
    out = ["--output", tmp_path / "out"]
    for content, width, message in (
        (b"\1\0\2\0", "auto", "give --tokens uint16 or --tokens uint32"),
        (b"\1\0\0\1\5", "uint16", "cut off or not uint16: holds 2 ids and 1 bytes"),
        (b"\1\0\2\0", "uint16", "none of its 2 ids is 256"),
        (b"\0\1\1\0\2\2", "uint16", "id 514 at 2; expected [0, 257) of tokenizer bytes"),
        (b"\x93NUMPY", "auto", "damaged"),
        (b"", "uint16", "no document to write (1 empty_text)"),
    ):
        path = tmp_path / "x.bin"
        path.write_bytes(content)
        assert message in refused(capsys, path, "--tokens", width, *out), message
    llmc(path, ids(before=True), magic=20240520, version=1, dtype="<u2")
    assert "its header says uint16; --tokens says uint32" in refused(capsys, path, "--tokens", "uint32", *out)
    path.write_bytes(path.read_bytes()[:-2])
    assert "cut off" in refused(capsys, path, "--tokens", "auto", *out)
    np.save(tmp_path / "y.npy", np.zeros((2, 2), np.uint16))
    assert "expected one row" in refused(capsys, tmp_path / "y.npy", "--tokens", "auto", *out)
    (tmp_path / "z.txt").touch()
    assert "ends in .bin or .npy" in refused(capsys, tmp_path / "z.txt", "--tokens", "auto", *out)
    assert not list(tmp_path.rglob("manifest.json"))
