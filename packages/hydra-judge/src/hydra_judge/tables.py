# SPDX-License-Identifier: Apache-2.0
"""Corpora in columns: Parquet, Arrow, and data sets of the Hugging Face hub.

Rows come a batch at a time, so a file of any size takes the memory of one batch. The packages are imported when the
first such file is met: their import takes longer than scoring a small corpus.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nmoe.errors import DataError
from nmoe.formats.documents import Document, Reject, check_document

__all__ = ["check_row", "hub_parts", "parquet_blocks", "read_arrow", "read_hub", "read_parquet"]

_BATCH_ROWS = 256

Row = tuple[Any, Any] | str
"""(text, id), or "reason: detail" where the file has no row to give."""


def check_row(text: Any, id: Any, *, source: str, line: int, max_bytes: int) -> Document | Reject:
    """A row as a document, if it is one of at most `max_bytes` bytes of UTF-8."""
    if isinstance(text, str) and 4 * len(text) > max_bytes:
        size = len(text.encode("utf-8", "surrogatepass"))
        if size > max_bytes:
            return Reject(
                source=source, line=line, reason="too_large", detail=f"{size} bytes; the limit is {max_bytes}"
            )
    if text is None:
        return Reject(source=source, line=line, reason="not_text", detail="null")
    return check_document(text, id=id, source=source, line=line)


def parquet_blocks(path: Path, block_bytes: int) -> Iterator[tuple[int, int, int]]:
    """(first row group, one past the last, rows before) of stretches of about `block_bytes`; (0, 0, 0) if damaged."""
    import pyarrow
    from pyarrow import parquet

    try:
        metadata = parquet.read_metadata(path)
    except (pyarrow.ArrowException, OSError):
        yield 0, 0, 0  # reading it will say what is wrong
        return
    start = size = rows = rows_before = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        size, rows = size + group.total_byte_size, rows + group.num_rows
        if size >= block_bytes or number == metadata.num_row_groups - 1:
            yield start, number + 1, rows_before
            start, size, rows_before = number + 1, 0, rows


def read_parquet(path: Path, *, groups: range, keys: tuple[str, str]) -> Iterator[Row]:
    """Rows of the row groups (all if `groups` is empty)."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as table:
            missing = _missing(table.schema_arrow.names, keys[0])
            if missing:
                yield missing
                return
            columns = [key for key in keys if key in table.schema_arrow.names]
            batches = table.iter_batches(
                batch_size=_BATCH_ROWS, row_groups=list(groups) or list(range(table.num_row_groups)), columns=columns
            )
            for batch in batches:
                yield from _rows(batch, keys)
    except (pyarrow.ArrowException, OSError) as error:
        yield f"damaged: {error}"


def read_arrow(path: Path, *, keys: tuple[str, str]) -> Iterator[Row]:
    """Rows of an Arrow file, in the file format or the stream format."""
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as source:
            try:
                reader = pyarrow.ipc.open_file(source)
                batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
            except pyarrow.ArrowInvalid:
                source.seek(0)
                batches = reader = pyarrow.ipc.open_stream(source)
            missing = _missing(reader.schema.names, keys[0])
            if missing:
                yield missing
                return
            for batch in batches:
                for start in range(0, batch.num_rows, _BATCH_ROWS):
                    yield from _rows(batch.slice(start, _BATCH_ROWS), keys)
    except (pyarrow.ArrowException, OSError) as error:
        yield f"damaged: {error}"


def _missing(names: list[str], key: str) -> str:
    return "" if key in names else f"missing_text: no column {key!r} among {sorted(names)[:8]}"


def _rows(batch: Any, keys: tuple[str, str]) -> Iterator[Row]:
    """Rows of a batch. A string that is not UTF-8 spoils its own row alone."""
    names = batch.schema.names
    texts = batch.column(names.index(keys[0]))
    ids = batch.column(names.index(keys[1])) if keys[1] in names else None
    for number in range(batch.num_rows):
        try:
            yield texts[number].as_py(), None if ids is None else ids[number].as_py()
        except UnicodeDecodeError as error:
            yield error, None  # check_document calls it not_text


def hub_parts(address: str) -> tuple[str, str | None, str]:
    """Name, configuration and split of hf://OWNER/NAME[:CONFIG][/SPLIT] (default split: train).

    Raises:
        DataError: if the address is none.
    """
    parts = address.removeprefix("hf://").split("/")
    if len(parts) not in (2, 3) or not all(parts):
        raise DataError(f"{address}: expected hf://OWNER/NAME[:CONFIG][/SPLIT]")
    name, _, config = parts[1].partition(":")
    return f"{parts[0]}/{name}", config or None, parts[2] if len(parts) == 3 else "train"


def read_hub(address: str, *, keys: tuple[str, str]) -> Iterator[Row]:
    """Rows of a data set of the hub, streamed; for the address see `hub_parts`.

    Raises:
        DataError: if the data set cannot be read.
    """
    import datasets
    from datasets.exceptions import DatasetsError

    name, config, split = hub_parts(address)
    try:
        rows = datasets.load_dataset(name, config, split=split, streaming=True)
        for row in rows:
            if keys[0] not in row:
                yield _missing(list(row), keys[0])
                return
            yield row[keys[0]], row.get(keys[1])
    except (OSError, ValueError, DatasetsError) as error:
        raise DataError(f"{address}: cannot be read ({type(error).__name__}: {error})") from None
