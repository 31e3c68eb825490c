# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: text survives the round trip, and a document cannot forge an end of document."""

import json
import pydoc_data.topics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmoe.formats import DataError
from nmoe.formats.tokenizers import ByteTokenizer, HFTokenizer, load_tokenizer

tokenizers = pytest.importorskip("tokenizers")
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A small byte-level BPE with the special tokens of a published one."""
    folder = tmp_path_factory.mktemp("tokenizer")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<pad>", "<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(list(pydoc_data.topics.topics.values())[:20], trainer)
    model.save(str(folder / "tokenizer.json"))
    return folder


@given(text=TEXT)
def test_bytes_round_trip(text):
    ids = ByteTokenizer().encode_batch([text])[0]
    assert ByteTokenizer().decode(ids) == text
    assert b"".join(ByteTokenizer().token_bytes(int(token)) for token in ids) == text.encode()


def test_bytes_leave_out_eos_and_mend_broken_utf8():
    assert ByteTokenizer().decode([104, 256, 0xFF, 105]) == "h�i"
    assert ByteTokenizer().token_bytes(256) == b""


@given(text=TEXT)
def test_hf_round_trip(trained, text):
    tokenizer = load_tokenizer(str(trained))
    ids = tokenizer.encode_batch([text])[0]
    assert ids.dtype == np.uint32
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes(int(token)) for token in ids) == text.encode()


@pytest.mark.parametrize("forged", ["<|endoftext|>", "a<|endoftext|>b", "<pad><|endoftext|>"])
def test_hf_text_that_spells_a_special_token_stays_text(trained, forged):
    tokenizer = load_tokenizer(str(trained / "tokenizer.json"))
    ids = tokenizer.encode_batch([forged])[0]
    assert tokenizer.eos_id == 1
    assert tokenizer.eos_id not in ids
    assert 0 not in ids
    assert tokenizer.decode(ids) == forged


def test_hf_identity_is_that_of_the_definition(trained, tmp_path):
    first = load_tokenizer(str(trained))
    changed = json.loads((trained / "tokenizer.json").read_text())
    changed["model"]["merges"].pop()
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
    assert load_tokenizer(str(tmp_path)).sha256 != first.sha256
    assert not first.name.startswith("/")
    assert first.vocab_size == 600


def test_hf_takes_the_declared_end_token(trained, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((trained / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<pad>"}}')
    assert load_tokenizer(str(tmp_path)).eos_id == 0


def test_load_names_what_is_missing(tmp_path):
    with pytest.raises(DataError, match="not found"):
        load_tokenizer(str(tmp_path / "none"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="not a tokenizer definition"):
        load_tokenizer(str(tmp_path))
    bare = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    bare.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="no end-of-document token"):
        HFTokenizer(tmp_path / "tokenizer.json")
