# SPDX-License-Identifier: Apache-2.0
"""A corpus that every Python has: the language reference behind `help()`, as byte shards.

Some 470 kB of English. Topics quote each other, so a held-out topic would often be known from training; every paragraph
of a held-out topic is therefore removed from the training topics. One topic in eight is held out, about 36 kB.
"""

import shutil
from pathlib import Path

from nmoe.errors import DataError
from nmoe.formats.files import in_turn, make_folder
from nmoe.formats.shards import MANIFEST, ShardWriter, open_shards
from nmoe.formats.tokenizers import ByteTokenizer

__all__ = ["make_python_docs"]

_HELD_OUT_EVERY = 8


def make_python_docs(directory: str | Path = Path("data/python-docs")) -> Path:
    """Makes the shards `train` and `val` under `directory`, unless they are there already.

    Two processes that start together make them once: the second waits for the first.

    Returns:
        `directory`.

    Raises:
        DataError: the shards that are there cannot be opened, or something else is there in their place.
    """
    directory = Path(directory)
    make_folder(directory, what="output")
    with in_turn(directory / ".lock"):
        missing = [name for name in ("train", "val") if not (directory / name / MANIFEST).exists()]
        if missing:
            for name, documents in zip(("train", "val"), _split_topics(), strict=True):
                if name in missing:
                    _write(directory / name, documents)
        for name in ("train", "val"):
            open_shards(directory / name)
    return directory


def _split_topics() -> tuple[dict[str, str], dict[str, str]]:
    """Topics to train on and topics held out, by name; no paragraph is in both."""
    from pydoc_data.topics import topics

    names = sorted(topics)
    held_out = names[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]
    val = {name: topics[name] for name in held_out}
    known = {_plain(paragraph) for text in val.values() for paragraph in text.split("\n\n")}
    train = {}
    for name in names:
        if name not in val:
            kept = [paragraph for paragraph in topics[name].split("\n\n") if _plain(paragraph) not in known]
            train[name] = "\n\n".join(kept)
    return train, val


def _plain(paragraph: str) -> str:
    """A paragraph without its indentation and line breaks, which differ between quotations."""
    return " ".join(paragraph.split())


def _write(directory: Path, documents: dict[str, str]) -> None:
    """Makes one folder of shards; it gets its name when it is complete, so what has the name already is not ours."""
    if directory.exists():
        raise DataError(f"{directory}: is there and holds no shards; move it away or choose another folder")
    tokenizer = ByteTokenizer()
    building = directory.with_name(f".{directory.name}.making")
    shutil.rmtree(building, ignore_errors=True)  # of a process that was killed; the lock keeps others out
    with ShardWriter(building, tokenizer=tokenizer) as writer:
        for name, text in documents.items():
            if text.strip():
                (tokens,) = tokenizer.encode_batch([text])
                size = len(text.encode("utf-8"))
                writer.add(tokens, id=name, source="pydoc_data.topics", text_bytes=size)
    building.replace(directory)
