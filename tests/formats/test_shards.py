# SPDX-License-Identifier: Apache-2.0
"""Token shards: what is written can be read, traced and checked; what is damaged is named."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from nmoe.formats import DataError, FormatError
from nmoe.formats.shards import ShardWriter, open_shards, verify_shards
from nmoe.formats.tokenizers import ByteTokenizer

GOLDEN = Path(__file__).parent / "golden" / "shards"
TEXTS = ["one", "", "three and more", "four"]


def write(directory: Path, texts: list[str] = TEXTS, **limits: int) -> Path:
    tokenizer = ByteTokenizer()
    with ShardWriter(directory, tokenizer=tokenizer, **limits) as writer:
        for number, (text, tokens) in enumerate(zip(texts, tokenizer.encode_batch(texts), strict=True)):
            writer.add(
                tokens, id=f"d{number}", source="corpus.jsonl", score=float(number), text_bytes=len(text.encode())
            )
    return directory


def test_shards_hold_every_document_with_its_end(tmp_path):
    shards = open_shards(write(tmp_path / "s", shard_tokens=12))
    tokenizer = ByteTokenizer()
    found = [tokenizer.decode(shard.tokens[start:end]) for shard in shards.shards for start, end in shard.index]
    assert "".join(found) == "".join(TEXTS)
    assert shards.num_documents == 4
    assert shards.num_tokens == sum(len(text) + 1 for text in TEXTS)
    assert shards.text_bytes == sum(len(text) for text in TEXTS)
    assert all(len(shard.tokens) <= 12 for shard in shards.shards)
    assert sum(int((shard.tokens == 256).sum()) for shard in shards.shards) == 4
    assert list(verify_shards(tmp_path / "s")) == []


def test_shards_are_plain_npy_files(tmp_path):
    write(tmp_path / "s")
    array = np.load(tmp_path / "s" / "shard-00000.npy", allow_pickle=False)
    assert array.dtype == np.uint16
    assert array[:4].tolist() == [*b"one", 256]


def test_shards_of_a_large_vocabulary_are_32_bit(tmp_path):
    class Wide(ByteTokenizer):
        vocab_size, eos_id = 65_537, 65_536

    with ShardWriter(tmp_path / "s", tokenizer=Wide()) as writer:
        writer.add(np.array([65_535]), id="a", source="x", text_bytes=1)
    assert open_shards(tmp_path / "s").shards[0].tokens.tolist() == [65_535, 65_536]
    assert open_shards(tmp_path / "s").shards[0].tokens.dtype == np.uint32


def test_shards_golden_bytes_are_written_and_read(tmp_path):
    """Shards of this version must stay readable for ever, and a writer of this version must not change them."""
    write(tmp_path / "s", shard_tokens=12)
    names = sorted(path.name for path in GOLDEN.iterdir())
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == names
    for name in names:
        assert (tmp_path / "s" / name).read_bytes() == (GOLDEN / name).read_bytes(), name
    assert list(verify_shards(GOLDEN)) == []


def test_shards_split_a_long_document_at_the_limit(tmp_path):
    shards = open_shards(write(tmp_path / "s", ["x" * 25, "y"], shard_tokens=12, max_document_tokens=10))
    assert [len(shard.tokens) for shard in shards.shards] == [10, 10, 8]
    assert [
        (line["piece"], line["pieces"]) for shard in shards.shards for line in shard.lineages() if "piece" in line
    ] == [(0, 3), (1, 3), (2, 3)]
    assert shards.num_documents == 2
    assert shards.manifest["split_documents"] == 1
    assert list(verify_shards(tmp_path / "s")) == []


def test_locate_leads_from_every_token_to_its_document(tmp_path):
    shards = open_shards(write(tmp_path / "s", shard_tokens=12))
    expected = [f"d{number}" for number, text in enumerate(TEXTS) for _ in range(len(text) + 1)]
    assert [shards.locate(offset).lineage["id"] for offset in range(shards.num_tokens)] == expected
    where = shards.locate(4)
    assert (where.lineage["score"], where.end - where.start) == (1.0, 1)
    for outside in (-1, shards.num_tokens):
        with pytest.raises(DataError, match="token offset"):
            shards.locate(outside)


def test_writer_leaves_no_manifest_when_it_is_interrupted(tmp_path):
    with pytest.raises(RuntimeError), ShardWriter(tmp_path / "s", tokenizer=ByteTokenizer()):
        raise RuntimeError
    with pytest.raises(DataError, match="not found"):
        open_shards(tmp_path / "s")
    write(tmp_path / "s")
    assert sorted(path.suffix for path in (tmp_path / "s").iterdir()) == [".json", ".jsonl", ".npy", ".npy"]


def test_writer_refuses_a_finished_folder_and_foreign_ids(tmp_path):
    write(tmp_path / "s")
    with pytest.raises(DataError, match="finished shard set"):
        write(tmp_path / "s")
    with ShardWriter(tmp_path / "t", tokenizer=ByteTokenizer()) as writer:
        for bad, found in (([257], "257"), ([-1], "-1"), ([256], "end-of-document")):
            with pytest.raises(DataError, match=found):
                writer.add(np.array(bad), id="a", source="x", text_bytes=1)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda d: (d / "shard-00001.npy").unlink(), "shard-00001.npy: not found"),
        (
            lambda d: (d / "shard-00000.npy").write_bytes((d / "shard-00000.npy").read_bytes()[:-2]),
            "shard-00000.npy: damaged",
        ),
        (lambda d: (d / "shard-00000.npy").write_bytes(b""), "shard-00000.npy: damaged"),
        (lambda d: np.save(d / "shard-00000.npy", np.zeros(9, dtype=np.float32)), "shard-00000.npy: holds"),
        (lambda d: (d / "shard-00000.lineage.jsonl").unlink(), "lineage.jsonl: not found"),
        (lambda d: edit(d, version=2), "version 2 is newer"),
        (lambda d: edit(d, version="1"), "version is '1'"),
        (lambda d: edit(d, format="other"), "format is 'other'"),
        (lambda d: edit(d, dtype="object"), "dtype is 'object'"),
        (lambda d: edit(d, tokenizer=None), "incomplete"),
        (lambda d: edit_shard(d, sha256={"tokens": "0" * 64}), "incomplete .*index"),
        (lambda d: (d / "manifest.json").write_text("{"), "cannot be read as JSON"),
    ],
)
def test_open_names_the_damaged_file(tmp_path, damage, found):
    shutil.copytree(GOLDEN, tmp_path / "s")
    damage(tmp_path / "s")
    with pytest.raises(DataError, match=found):
        open_shards(tmp_path / "s")


def edit(directory: Path, **changes: object) -> None:
    path = directory / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_shard(directory: Path, **changes: object) -> None:
    shards = json.loads((directory / "manifest.json").read_text())["shards"]
    edit(directory, shards=[shards[0] | changes, *shards[1:]])


@pytest.mark.parametrize("name", ["../secret.npy", "/etc/hostname"])
def test_open_refuses_paths_outside_the_folder(tmp_path, name):
    shutil.copytree(GOLDEN, tmp_path / "s")
    edit_shard(tmp_path / "s", path=name)
    with pytest.raises(DataError, match="outside the folder"):
        open_shards(tmp_path / "s")


def test_open_refuses_a_link_that_leads_outside(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "s")
    (tmp_path / "s" / "shard-00000.npy").rename(tmp_path / "elsewhere.npy")
    (tmp_path / "s" / "shard-00000.npy").symlink_to(tmp_path / "elsewhere.npy")
    with pytest.raises(DataError, match="outside the folder"):
        open_shards(tmp_path / "s")


def flip(path: Path, offset: int, value: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] = value
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("name", "offset", "value", "found"),
    [
        ("shard-00000.npy", 128, 0x7A, "SHA-256"),
        ("shard-00000.npy", 129, 0x10, "token id"),  # 'o' becomes an id above the vocabulary
        ("shard-00000.npy", 135, 0x00, "EOS"),  # the first EOS becomes a byte
        ("shard-00000.index.npy", -8, 0x04, "without gaps"),
        ("shard-00000.lineage.jsonl", 0, 0x20, "lineage"),
    ],
)
def test_verify_finds_one_changed_byte(tmp_path, name, offset, value, found):
    shutil.copytree(GOLDEN, tmp_path / "s")
    flip(tmp_path / "s" / name, offset, value)
    problems = list(verify_shards(tmp_path / "s"))
    assert any("SHA-256" in problem and name in problem for problem in problems)
    assert any(found in problem for problem in problems)


def test_verify_compares_the_totals(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "s")
    edit(tmp_path / "s", tokens=99, documents=98)
    assert [problem.split("states ")[1] for problem in verify_shards(tmp_path / "s")] == [
        "99 tokens, the shards hold 25",
        "98 documents, the shards hold 4",
    ]


def test_newer_errors_are_of_their_family():
    assert issubclass(FormatError, DataError)
