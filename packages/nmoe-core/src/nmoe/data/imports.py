# SPDX-License-Identifier: Apache-2.0
"""Token files of other trainers -> token shards.

They are one long row of ids, with the end-of-document id between documents, before or behind each:

- nanoGPT's `.bin` and OLMo's `.npy`: ids and nothing else (the latter has no NumPy header, whatever its name);
- llm.c's `.bin`: a header of 256 int32 (20240520, version 1: uint16; 20240801, version 7: uint32; third word: ids);
- `.npy` as NumPy writes it.

Sources: llm.c, dev/data/data_common.py; OLMo-core, "Data loading".
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from nmoe.data.inputs import Inputs, search
from nmoe.data.prep import PrepSummary, open_sides
from nmoe.errors import DataError
from nmoe.formats.documents import Reject
from nmoe.formats.tokenizers import Tokenizer

__all__ = ["DTYPES", "find_token_files", "import_tokens", "open_tokens"]

DTYPES = ("auto", "uint16", "uint32")
_ENDINGS = (".bin", ".npy")
_NPY_MAGIC = b"\x93NUMPY"
_LLMC_HEADER_BYTES = 1024
_LLMC = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
_REPORT_EVERY = 1000
_WINDOW = 1 << 24


def find_token_files(paths: Sequence[str | Path]) -> Inputs:
    """Token files among what a user names. Raises like `nmoe.data.inputs.search`."""
    return search(paths, endings=_ENDINGS, what="a file of token ids")


def open_tokens(path: Path, *, dtype: str = "auto") -> np.ndarray:
    """Maps the ids of a file.

    Args:
        path: the file.
        dtype: of a file without a header, "uint16" or "uint32"; "auto" takes only files that say so themselves.

    Returns:
        uint16 or uint32 [N], N may be 0.

    Raises:
        DataError: the file is cut off, of another type than asked for, or does not say its type and none was given.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        head = stream.read(12)
    offset, found, length = 0, None, None
    if head.startswith(_NPY_MAGIC):
        return _checked(path, _load_npy(path), dtype)
    if len(head) == 12:
        magic, version, count = (int(word) for word in np.frombuffer(head, dtype="<i4"))
        if found := _LLMC.get((magic, version)):
            offset, length = _LLMC_HEADER_BYTES, count
    if found is None:
        if dtype == "auto":
            raise DataError(f"{path}: no header says how wide its ids are; give --tokens uint16 or --tokens uint32")
        found = np.dtype(dtype).newbyteorder("<")
    whole, rest = divmod(max(0, size - offset), found.itemsize)
    if rest or length not in (None, whole):
        stated = "whole ids alone" if length is None else f"{length:,} ids"
        raise DataError(f"{path}: cut off or not {found.name}: holds {whole:,} ids and {rest} bytes, expected {stated}")
    if whole == 0:
        return np.empty(0, dtype=found)
    return _checked(path, np.memmap(path, dtype=found, mode="r", offset=offset, shape=(whole,)), dtype)


def _load_npy(path: Path) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: damaged ({error})") from None
    if array.ndim != 1 or array.dtype not in (np.dtype("<u2"), np.dtype("<u4")):
        raise DataError(f"{path}: holds {array.shape} of {array.dtype}; expected one row of uint16 or uint32")
    return array


def _checked(path: Path, tokens: np.ndarray, dtype: str) -> np.ndarray:
    if dtype not in ("auto", tokens.dtype.name):
        raise DataError(f"{path}: its header says {tokens.dtype.name}; --tokens says {dtype}. Leave it at auto")
    return tokens


def import_tokens(
    inputs: Sequence[tuple[Path, str]],
    *,
    dtype: str,
    tokenizer: Tokenizer,
    output: Path,
    val_fraction: float = 0.0,
    shard_tokens: int = 100_000_000,
    report: Callable[[int, int], None] = lambda documents, size: None,
) -> PrepSummary:
    """Cuts rows of ids into documents and writes them as shards, each with the bytes of its text.

    Args:
        inputs: files and their names, as from `find_token_files`.
        dtype: see `open_tokens`.
        tokenizer: what made the ids; its EOS stands between documents.
        output, val_fraction, shard_tokens, report: as of `nmoe.data.prep.prepare`.

    Raises:
        DataError: a file holds ids outside the vocabulary or no end of a document, which says that another tokenizer
            made it; the output holds shards already; no document was found.
    """
    opened = [(path, name, open_tokens(path, dtype=dtype)) for path, name in inputs]
    with open_sides(output, tokenizer=tokenizer, val_fraction=val_fraction, shard_tokens=shard_tokens) as sides:
        for path, name, tokens in opened:
            if not len(tokens):
                sides.reject(Reject(source=name, line=0, reason="empty_text", detail="a file without ids"))
            for first, document in _documents(path, tokens, tokenizer):
                text = tokenizer.decode(document).encode("utf-8")
                sides.add(document, text=text, id=f"{name}:{first}", source=name)
                if sides.documents % _REPORT_EVERY == 0:
                    report(sides.documents, sides.text_bytes)
    return sides.summary


def _documents(path: Path, tokens: np.ndarray, tokenizer: Tokenizer) -> Iterator[tuple[int, np.ndarray]]:
    """Place and ids of each document that is not empty."""
    # In windows: a row can be larger than memory.
    windows = [(at, tokens[at : at + _WINDOW]) for at in range(0, len(tokens), _WINDOW)]
    ends = np.concatenate([np.empty(0, np.int64), *(at + np.flatnonzero(w == tokenizer.eos_id) for at, w in windows)])
    if len(tokens) and not len(ends):
        raise DataError(
            f"{path}: none of its {len(tokens):,} ids is {tokenizer.eos_id}, the end of a document of tokenizer "
            f"{tokenizer.name}; was it made by another tokenizer, or by ids of another width?"
        )
    for start, end in zip(np.append(0, ends + 1), np.append(ends, len(tokens)), strict=True):
        document = np.asarray(tokens[start:end])
        if not len(document):
            continue
        if int(document.max()) >= tokenizer.vocab_size:
            place = int(start) + int(document.argmax())
            raise DataError(
                f"{path}: id {int(document.max())} at {place:,}; expected [0, {tokenizer.vocab_size}) of tokenizer "
                f"{tokenizer.name}. Was it made by another tokenizer, or by ids of another width?"
            )
        yield int(start), document
