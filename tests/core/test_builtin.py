# SPDX-License-Identifier: Apache-2.0
"""The corpus that every Python has: the same bytes at every call, nothing held out is known, safe beside others."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nmoe.data.builtin import make_python_docs
from nmoe.errors import DataError
from nmoe.formats.shards import open_shards, verify_shards
from nmoe.formats.tokenizers import ByteTokenizer


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return make_python_docs(tmp_path_factory.mktemp("corpus") / "python-docs")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def paragraphs(folder: Path) -> set[str]:
    shards = open_shards(folder)
    texts = [ByteTokenizer().decode(shard.tokens[a : b - 1]) for shard in shards.shards for a, b in shard.index]
    return {" ".join(part.split()) for text in texts for part in text.split("\n\n")} - {""}


def test_builtin_corpus_is_english_text_in_good_shards(corpus):
    for name in ("train", "val"):
        assert list(verify_shards(corpus / name)) == []
    train, val = open_shards(corpus / "train"), open_shards(corpus / "val")
    assert 300_000 < train.num_tokens < 900_000
    assert 0.03 < val.num_tokens / train.num_tokens < 0.2
    assert val.num_tokens == val.text_bytes + val.num_documents
    assert train.shards[0].lineage(0)["source"] == "pydoc_data.topics"


def test_builtin_corpus_has_no_paragraph_on_both_sides(corpus):
    train, val = paragraphs(corpus / "train"), paragraphs(corpus / "val")
    assert len(train) > 1000
    assert len(val) > 100
    assert train & val == set()


def test_builtin_corpus_is_made_once_and_the_same_everywhere(corpus, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in corpus.rglob("*") if path.is_file()}
    assert make_python_docs(corpus) == corpus
    assert {path: path.stat().st_mtime_ns for path in corpus.rglob("*") if path.is_file()} == before
    assert contents(make_python_docs(tmp_path / "again")) == contents(corpus)


def test_builtin_corpus_is_completed_after_a_kill(corpus, tmp_path):
    building = tmp_path / ".val.making"
    building.mkdir()
    (building / "shard-00000.npy.tmp").write_bytes(b"half")
    (building / "manifest.json").write_text("{}")
    assert contents(make_python_docs(tmp_path)) == contents(corpus)


def test_builtin_corpus_leaves_foreign_files_alone(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "mine.txt").write_text("do not delete")
    with pytest.raises(DataError, match="train: is there and holds no shards"):
        make_python_docs(tmp_path)
    assert (tmp_path / "train" / "mine.txt").read_text() == "do not delete"


def test_builtin_corpus_that_is_damaged_is_refused(tmp_path):
    make_python_docs(tmp_path)
    path = tmp_path / "train" / "shard-00000.npy"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"shard-00000\.npy: damaged"):
        make_python_docs(tmp_path)


def test_builtin_corpus_survives_makers_at_once(corpus, tmp_path):
    command = "import sys; from nmoe.data.builtin import make_python_docs as m; print(m(sys.argv[1]))"
    makers = [
        subprocess.Popen([sys.executable, "-c", command, tmp_path / "data"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(4)
    ]  # fmt: skip
    for maker in makers:
        _, errors = maker.communicate(timeout=60)
        assert maker.returncode == 0, errors.decode()
    assert contents(tmp_path / "data") == contents(corpus)
    assert np.load(tmp_path / "data/train/shard-00000.npy").dtype == np.uint16
