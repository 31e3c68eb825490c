# SPDX-License-Identifier: Apache-2.0
"""Rows for the model, and the checks of shards before training."""

import json
import shutil

import numpy as np
import pytest

from nmoe.data.packing import IGNORED, pack_rows
from nmoe.data.sources import open_train, open_val
from nmoe.errors import DataError
from nmoe.formats.shards import ShardWriter, open_shards
from nmoe.formats.tokenizers import ByteTokenizer
from nmoe.train.evaluate import byte_entropy

EOS = 9


def test_packing_starts_positions_and_documents_anew_after_eos_and_ignores_padding():
    row = np.array([1, 2, EOS, 3, 4, EOS, 5], dtype=np.uint16)
    packed = pack_rows([row], seq_len=8, eos_id=EOS)
    assert packed.tokens_BT.tolist() == [[1, 2, EOS, 3, 4, EOS, EOS, EOS]]
    assert packed.targets_BT.tolist() == [[2, EOS, 3, 4, EOS, 5, IGNORED, IGNORED]]
    assert packed.positions_BT.tolist() == [[0, 1, 0, 1, 2, 0, 0, 0]]
    assert packed.document_BT.tolist() == [[0, 0, 1, 1, 1, 2, 3, 4]]


def test_packing_trains_on_the_end_of_every_document():
    rng = np.random.default_rng(0)
    row = rng.integers(0, EOS + 1, size=65)
    packed = pack_rows([row], seq_len=64, eos_id=EOS)
    assert packed.targets_BT[0].tolist() == row[1:].tolist()
    assert (packed.targets_BT == EOS).sum() == (row[1:] == EOS).sum()


def test_byte_entropy_of_a_known_distribution(tmp_path):
    with ShardWriter(tmp_path / "s", tokenizer=ByteTokenizer()) as writer:
        writer.add(np.array([65, 65, 66, 67], dtype=np.uint32), id="a", source="s", text_bytes=4)
    assert byte_entropy([open_shards(tmp_path / "s")], ByteTokenizer()) == pytest.approx(1.5 * np.log(2))


def test_sources_refuse_a_vocabulary_smaller_than_the_shards(tiny):
    with pytest.raises(
        DataError, match=r"token ids go up to 256 .* model.vocab_size = 256; set model.vocab_size to 257"
    ):
        open_train(tiny("model.vocab_size=256"))


def test_sources_refuse_a_flipped_bit_by_name(tiny, python_docs, tmp_path):
    copy = shutil.copytree(python_docs / "train", tmp_path / "train")
    path = copy / "shard-00000.npy"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"shard-00000.npy: damaged: SHA-256"):
        open_train(tiny(f'data.train=["{copy}"]'))


def test_sources_refuse_shards_of_two_tokenizers(tiny, python_docs, tmp_path):
    copy = shutil.copytree(python_docs / "val", tmp_path / "val")
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["tokenizer"]["sha256"] = "0" * 64
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="make both with one tokenizer"):
        open_train(tiny(f'data.train=["{python_docs / "train"}", "{copy}"]'))
    config = tiny(f"data.val={copy}")
    (train,), _ = open_train(config)
    with pytest.raises(DataError, match="make both with one tokenizer"):
        open_val(config, like=train)
