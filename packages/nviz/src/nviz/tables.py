# SPDX-License-Identifier: Apache-2.0
"""The stored values themselves, all of them, as CSV or Parquet: what a chart thins out, a download does not."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import duckdb

from nviz.catalog import Entry

__all__ = ["Kind", "table"]

Kind = Literal["csv", "parquet"]
_OPTIONS = {"csv": "FORMAT csv, HEADER", "parquet": "FORMAT parquet, COMPRESSION zstd"}


def table(chosen: Sequence[Entry], names: Sequence[str], *, first: int | None, last: int | None, kind: Kind) -> bytes:
    """Every value of some metrics of some runs: run, name, step, time, value, layer, expert, rank.

    Args:
        chosen: the runs.
        names: the metrics.
        first, last: range of steps, both included; None: open.
        kind: form of the file.

    Raises:
        DataError: if a run has no readable store.
    """
    with tempfile.TemporaryDirectory() as folder:
        for number, entry in enumerate(chosen):
            part = Path(folder) / f"{number:05d}.parquet"
            entry.store().once(
                lambda connection, part=part, key=entry.key: _copy(connection, part, key, names, first, last)
            )
        whole = Path(folder) / f"whole.{kind}"
        with duckdb.connect() as connection:
            connection.execute(
                f"COPY (SELECT * FROM read_parquet('{folder}/0*.parquet') ORDER BY ALL) TO '{whole}' ({_OPTIONS[kind]})"  # noqa: S608
            )
        return whole.read_bytes()


def _copy(
    connection: duckdb.DuckDBPyConnection,
    part: Path,
    key: str,
    names: Sequence[str],
    first: int | None,
    last: int | None,
) -> None:
    connection.execute(
        f"""
        COPY (
            SELECT ? AS run, name, step, time, value, layer, expert, rank FROM metrics
            WHERE name IN (SELECT unnest(?::VARCHAR[])) AND step >= ? AND step <= ?
        ) TO '{part}' (FORMAT parquet)
        """,  # noqa: S608 - a file in a folder made above
        [key, list(names), 0 if first is None else first, 2**62 if last is None else last],
    )
