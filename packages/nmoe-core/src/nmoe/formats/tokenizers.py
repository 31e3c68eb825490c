# SPDX-License-Identifier: Apache-2.0
"""Tokenizers behind one small interface: text to token ids and back.

Text that spells a special token ("<|endoftext|>") stays text: a document must not be able to end itself. A tokenizer's
SHA-256 stands in every shard manifest, so shards of another vocabulary cannot be trained on by mistake.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from nmoe.errors import DataError, EnvironmentFault

__all__ = ["ByteTokenizer", "HFTokenizer", "Tokenizer", "load_tokenizer"]

# Names of the token that ends a document, as the published vocabularies spell it; the first that exists is taken.
_END_NAMES = (
    "<｜end▁of▁sentence｜>",  # DeepSeek
    "<|endoftext|>",  # GPT-2, o200k, Qwen
    "<|end_of_text|>",  # Llama 3
    "[EOS]",  # Moonlight
    "</s>",  # Llama 2, Mistral
    "<eos>",  # Gemma
)


class Tokenizer(Protocol):
    """What the project needs of a tokenizer.

    Attributes:
        name: "bytes", or the definition's file name behind that of its folder ("gpt2/tokenizer.json"), never a whole path.
        sha256: hex SHA-256 of the definition.
        vocab_size: ids lie in [0, vocab_size).
        eos_id: id written after every document.
    """

    name: str
    sha256: str
    vocab_size: int
    eos_id: int

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """One uint32 array of ids a text, without EOS."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of the ids; broken UTF-8 becomes U+FFFD, EOS is left out."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """UTF-8 bytes that one id stands for (empty for EOS), to show token boundaries."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0-255, EOS as 256."""

    name = "bytes"
    sha256 = hashlib.sha256(b"utf-8 bytes 0-255, end of document 256").hexdigest()
    vocab_size = 257
    eos_id = 256

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint32) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        values = np.asarray(ids, dtype=np.int64)
        return values[values < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""


class HFTokenizer:
    """A Hugging Face `tokenizer.json`, run by the `tokenizers` package.

    The end-of-document token is the `eos_token` of a `tokenizer_config.json` beside it, else the first known name that
    the vocabulary has.
    """

    def __init__(self, path: Path):
        try:
            import tokenizers
        except ModuleNotFoundError:
            raise EnvironmentFault(f"{path}: needs the package 'tokenizers'; install nmoe-core[tokenizers]") from None
        try:
            definition = path.read_bytes()
            self._tokenizer = tokenizers.Tokenizer.from_str(definition.decode("utf-8"))
        except Exception as error:  # noqa: BLE001 - the package raises plain Exception for a definition it cannot parse
            raise DataError(f"{path}: not a tokenizer definition ({error})") from None
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.name = path.name if path.parent.name == "" else f"{path.parent.name}/{path.name}"
        self.sha256 = hashlib.sha256(definition).hexdigest()
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.eos_id = self._find_end(path)
        self._special = set(self._tokenizer.get_added_tokens_decoder())

    def _find_end(self, path: Path) -> int:
        names: list[Any] = list(_END_NAMES)
        config = path.with_name("tokenizer_config.json")
        if config.is_file():
            try:
                declared = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
            except (ValueError, AttributeError) as error:
                raise DataError(f"{config}: not a JSON object ({error})") from None
            names.insert(0, declared.get("content") if isinstance(declared, dict) else declared)
        for name in names:
            token = self._tokenizer.token_to_id(name) if isinstance(name, str) else None
            if token is not None:
                return token
        raise DataError(
            f"{path}: no end-of-document token; expected 'eos_token' in {config.name} or one of {', '.join(_END_NAMES)}"
        )

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(one.ids, dtype=np.uint32) for one in encoded]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        kept = [int(token) for token in ids if int(token) != self.eos_id and int(token) < self.vocab_size]
        return self._tokenizer.decode(kept, skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        if token == self.eos_id:
            return b""
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if token in self._special or not all(mark in _BYTE_OF_MARK for mark in piece):
            return self._tokenizer.decode([token], skip_special_tokens=False).encode("utf-8")
        return bytes(_BYTE_OF_MARK[mark] for mark in piece)


def _byte_marks() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary.

    Source: Radford et al. 2019 (GPT-2): printable Latin-1 characters stand for themselves, the other 68 bytes for the
    code points from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF_MARK = _byte_marks()


def load_tokenizer(spec: str) -> Tokenizer:
    """Loads the tokenizer that `spec` names.

    Args:
        spec: "bytes", the path of a `tokenizer.json`, or of a folder that holds one.

    Raises:
        DataError: if there is no such tokenizer.
        EnvironmentFault: if the package that runs it is not installed.
    """
    if spec == "bytes":
        return ByteTokenizer()
    path = Path(spec)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise DataError(f"tokenizer {spec!r}: not found; expected 'bytes', a tokenizer.json or a folder that holds one")
    return HFTokenizer(path)
