# SPDX-License-Identifier: Apache-2.0
"""The shard folders of a config, opened and checked against the model before anything is computed."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nmoe.config import Config
from nmoe.data.builtin import make_python_docs
from nmoe.errors import DataError
from nmoe.formats.files import sha256_file
from nmoe.formats.shards import Shard, ShardSet, open_shards

__all__ = ["check_row", "open_train", "open_val"]

# Sets up to this size are hashed at the start: a second or two on one core. Larger ones are left to `verify_shards`.
_HASHED_BYTES = 2 << 30

_log = logging.getLogger(__name__)


def open_train(config: Config, *, hashed: bool = True) -> tuple[list[ShardSet], list[int]]:
    """Opens the training sources.

    Args:
        config: names them.
        hashed: whether their checksums are read, up to a size; not where another rank does.

    Returns:
        The sets, and the weight of each.

    Raises:
        DataError: a folder is missing, unfinished or damaged, holds ids that the model's vocabulary lacks, or two
            sources were made by different tokenizers.
    """
    if config.data.builtin:
        sets, weights = [open_shards(make_python_docs() / "train")], [1]
    else:
        sets = [open_shards(source.path) for source in config.data.train]
        weights = [source.weight for source in config.data.train]
    _check(config, sets, like=sets[0], hashed=hashed)
    return sets, weights


def open_val(config: Config, *, like: ShardSet, hashed: bool = True) -> list[ShardSet]:
    """Opens the held-out sets, which must be made by the tokenizer of the set `like`. Raises like `open_train`."""
    folders = [make_python_docs() / "val"] if config.data.builtin else config.data.val
    val = [open_shards(folder) for folder in folders]
    _check(config, val, like=like, hashed=hashed)
    return val


def _check(config: Config, sets: Sequence[ShardSet], *, like: ShardSet, hashed: bool) -> None:
    for shards in sets:
        if shards.vocab_size > config.model.vocab_size:
            raise DataError(
                f"{shards.directory}: token ids go up to {shards.vocab_size - 1} (tokenizer {shards.tokenizer_name}), "
                f"model.vocab_size = {config.model.vocab_size}; set model.vocab_size to {shards.vocab_size} or more"
            )
        if shards.tokenizer_sha256 != like.tokenizer_sha256:
            raise DataError(
                f"{shards.directory}: made by tokenizer {shards.tokenizer_name} ({shards.tokenizer_sha256[:12]}), "
                f"but {like.directory} by {like.tokenizer_name} ({like.tokenizer_sha256[:12]}); "
                "make both with one tokenizer"
            )
        if hashed:
            _verify_checksums(shards)


def _verify_checksums(shards: ShardSet) -> None:
    size = sum(shard.tokens.nbytes for shard in shards.shards)
    if size > _HASHED_BYTES:
        _log.info("%s: %.1f GB, checksums not read; `hydra-judge verify` reads them", shards.directory, size / 1e9)
        return
    for shard in shards.shards:
        found, stated = sha256_file(shard.path), shard.sha256["tokens"]
        if found != stated:
            raise DataError(
                f"{shard.path}: damaged: SHA-256 is {found[:12]}..., the manifest says {stated[:12]}...; "
                "make the shards again"
            )


def check_row(shard: Shard, start: int, end: int, *, vocab_size: int) -> np.ndarray:
    """Tokens [start, end) of a shard, checked to be ids of the model.

    Raises:
        DataError: an id is outside the vocabulary, so the file was damaged after its manifest was written.
    """
    row = np.asarray(shard.tokens[start:end])
    largest = int(row.max())
    if largest >= vocab_size:
        where = start + int(row.argmax())
        path: Path = shard.path
        raise DataError(f"{path}: damaged: token {where} is {largest}; expected ids below {vocab_size}")
    return row
