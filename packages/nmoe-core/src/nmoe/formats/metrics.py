# SPDX-License-Identifier: Apache-2.0
"""The metric store of a run: written by one process, read by anyone at any time.

DuckDB lets no second process open a file that one holds for writing, not even to read, and a reader would block the
writer. So the writer's file is private, and every few seconds a copy is published by an atomic rename. The training
thread only puts values on a queue: a log step of 200 metrics costs it some 30 microseconds, whatever the disk does.

    RUN/metrics.duckdb              published; open it read-only with any DuckDB
    RUN/.metrics.working.duckdb     the writer's own

    metrics(name, step, time, value, layer, expert, rank)    one row a value; the last three NULL where they mean nothing
    catalogue(name, unit, kind, meaning)
    batches(step, shard, start, end)                         the tokens that a step saw: [start, end) of a shard's file
    store(key, value)                                        format and version
"""

import contextlib
import logging
import os
import queue
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import duckdb
import numpy as np

from nmoe.errors import DataError, FormatError
from nmoe.formats.catalogue import CATALOGUE, Metric

__all__ = ["CATALOGUE", "STORE", "Metric", "MetricWriter", "open_store"]

FORMAT, VERSION = "nmoe-metrics", 1
STORE = "metrics.duckdb"
WORKING = ".metrics.working.duckdb"
Axis = Literal["layer", "expert", "rank"]

# A storage version that DuckDB 1.0 and everything since can read.
_CONNECTION = {"storage_compatibility_version": "v1.0.0"}
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS metrics(name VARCHAR, step BIGINT, time DOUBLE, value DOUBLE, layer INTEGER, expert INTEGER, rank INTEGER);
CREATE TABLE IF NOT EXISTS batches(step BIGINT, shard VARCHAR, "start" BIGINT, "end" BIGINT);
CREATE TABLE IF NOT EXISTS store(key VARCHAR, value VARCHAR);
CREATE OR REPLACE TABLE catalogue(name VARCHAR, unit VARCHAR, kind VARCHAR, meaning VARCHAR);
DELETE FROM store;
INSERT INTO store VALUES ('format', '{FORMAT}'), ('version', '{VERSION}');
"""  # noqa: S608 - both are constants of this file
_PENDING_LIMIT = 4_000_000  # rows on the queue; 60 bytes each
_COMPLAIN_S = 60.0  # between two lines about rows that were lost
_GATHER_S = 0.2
"""Seconds that the thread sleeps before it looks what has come: a step's figures are one insert, and logging wakes nobody."""
_log = logging.getLogger(__name__)


class MetricWriter:
    """Writes a run's metrics from a background thread; use as a context manager.

    A store is published before the constructor returns, so a reader finds one from before the first step on. Nothing
    that goes wrong with the disk is raised into training: lost rows are counted in `dropped_rows`, logged, and written
    as the metric `metrics/dropped_rows` as soon as writing works again.

    Args:
        run_dir: the run's folder; must exist.
        publish_s: seconds between publications; lengthened to 50 times the cost of the last one.
        resume_step: first step that this process will train; rows of an interrupted process from that step on are
            removed. None starts an empty store.

    Raises:
        DataError: if the store of the run to be resumed is damaged, or the folder cannot be written.
    """

    def __init__(self, run_dir: str | Path, *, publish_s: float = 10.0, resume_step: int | None = None):
        self._published = Path(run_dir) / STORE
        self._working = Path(run_dir) / WORKING
        self._publish_s, self._publish_cost = publish_s, 0.0
        self._queue: queue.SimpleQueue[_Rows | threading.Event | None] = queue.SimpleQueue()
        self._hurry = threading.Event()
        self._pending = 0
        self._count_lock = threading.Lock()
        self._dropped = self._dropped_written = 0
        self._complain_at = 0.0
        self._last_step = 0
        try:
            self._connection = self._open(resume_step)
            self._publish()
        except (OSError, duckdb.Error) as error:
            advice = f"if it is damaged remove {WORKING}*, {STORE} too if that is, and start again"
            raise DataError(f"{self._working}: cannot be written ({error}); {advice}") from None
        self._thread = threading.Thread(target=self._run, name="metric-writer", daemon=True)
        self._thread.start()

    def _open(self, resume_step: int | None) -> duckdb.DuckDBPyConnection:
        if resume_step is None:
            for stale in (self._working, self._working.with_name(WORKING + ".wal")):
                stale.unlink(missing_ok=True)
        elif not self._working.exists() and self._published.exists():
            shutil.copyfile(self._published, self._working)  # the run's folder was copied here without hidden files
        connection = duckdb.connect(str(self._working), config=dict(_CONNECTION))
        connection.execute(_SCHEMA)
        connection.executemany(
            "INSERT INTO catalogue VALUES (?, ?, ?, ?)",
            [(m.name, m.unit, m.kind, m.meaning) for m in CATALOGUE.values()],
        )
        if resume_step is not None:
            connection.execute("DELETE FROM metrics WHERE step >= ?", [resume_step])
            connection.execute("DELETE FROM batches WHERE step >= ?", [resume_step])
        return connection

    @property
    def dropped_rows(self) -> int:
        """Rows lost so far."""
        return self._dropped

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Takes scalar metrics of a step; returns at once.

        Args:
            step: training step.
            values: value by name; NaN and infinities are kept as they are.

        Raises:
            KeyError: if a name is not in the catalogue.
        """
        for name in values:
            _known(name)
        count = len(values)
        self._put(_Rows(step=step, names=list(values), values=np.fromiter(values.values(), np.float64, count)))

    def log_array(
        self, step: int, name: str, values: np.ndarray, *, axes: Sequence[Axis], layers: Sequence[int] | None = None
    ) -> None:
        """Takes one metric with a value for each layer, expert or rank.

        Args:
            step: training step.
            name: its name.
            values: one dimension for each of `axes`.
            axes: meaning of the dimensions, such as ("layer", "expert").
            layers: number in the model of each entry on the layer axis (default: 0, 1, 2, ...).

        Raises:
            KeyError: if the name is not in the catalogue.
        """
        _known(name)
        assert values.ndim == len(axes), f"{name}: {values.ndim} dimensions for axes {axes}"
        places: dict[str, np.ndarray] = dict(
            zip(axes, (grid.ravel() for grid in np.indices(values.shape, dtype=np.int32)), strict=True)
        )
        if layers is not None:
            places["layer"] = np.asarray(layers, dtype=np.int32)[places["layer"]]
        self._put(_Rows(step=step, names=[name] * values.size, values=values.astype(np.float64).ravel(), places=places))

    def log_batches(self, step: int, spans: Sequence[tuple[str, int, int]]) -> None:
        """Takes the (shard file, start, end) ranges of tokens that a step sees."""
        self._put(_Rows(step=step, spans=list(spans)))

    def flush(self) -> None:
        """Waits until everything logged so far is published."""
        done = threading.Event()
        self._queue.put(done)
        self._hurry.set()
        while not done.wait(1.0):
            if not self._thread.is_alive():
                raise RuntimeError("the thread that writes metrics has ended; its traceback is above")

    def close(self) -> None:
        """Writes and publishes what is left and ends the thread."""
        self._queue.put(None)
        self._hurry.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _put(self, rows: "_Rows") -> None:
        with self._count_lock:
            if self._pending + len(rows) > _PENDING_LIMIT:
                self._dropped += len(rows)
                return
            self._pending += len(rows)
        self._queue.put(rows)

    def _run(self) -> None:
        """The thread: insert what has come, publish when it is time."""
        published_at, dirty, open_ = time.monotonic(), False, True
        while open_:
            due = published_at + max(self._publish_s, 50 * self._publish_cost)
            rows, waiting, open_ = self._take(due - time.monotonic())
            dirty |= bool(rows)
            self._insert(rows)
            with self._count_lock:
                self._pending -= sum(len(row) for row in rows)
            if not open_ or waiting or (dirty and time.monotonic() >= due):
                self._publish_or_complain()
                published_at, dirty = time.monotonic(), False
            elif time.monotonic() >= due:
                published_at = time.monotonic()
            for event in waiting:
                event.set()
        with contextlib.suppress(duckdb.Error):
            self._connection.close()

    def _take(self, timeout: float) -> tuple[list["_Rows"], list[threading.Event], bool]:
        """Sleeps, but not while someone waits; then takes all that is on the queue."""
        rows: list[_Rows] = []
        waiting: list[threading.Event] = []
        self._hurry.wait(min(max(0.0, timeout), _GATHER_S))
        self._hurry.clear()
        with contextlib.suppress(queue.Empty):
            while (item := self._queue.get_nowait()) is not None:
                (waiting if isinstance(item, threading.Event) else rows).append(item)  # type: ignore[arg-type]
            return rows, waiting, False
        return rows, waiting, True

    def _insert(self, rows: list["_Rows"]) -> None:
        if not rows:
            return
        count = sum(len(row) for row in rows)
        self._last_step = max(self._last_step, *(row.step for row in rows))
        lost = self._dropped
        if lost > self._dropped_written:
            rows = [*rows, _Rows(step=self._last_step, names=["metrics/dropped_rows"], values=np.array([float(lost)]))]
        try:
            self._connection.execute("BEGIN")
            _insert_values(self._connection, [row for row in rows if row.names])
            _insert_spans(self._connection, [row for row in rows if row.spans])
            self._connection.execute("COMMIT")
            self._dropped_written = lost
        except duckdb.Error as error:
            with self._count_lock:
                self._dropped += count
            if time.monotonic() >= self._complain_at:  # a full disk stays so for a while
                self._complain_at = time.monotonic() + _COMPLAIN_S
                text = str(error).splitlines()[0]
                _log.warning("metrics: %d rows lost so far; training goes on (%s)", self._dropped, text)
            with contextlib.suppress(duckdb.Error):
                self._connection.execute("ROLLBACK")

    def _publish_or_complain(self) -> None:
        try:
            cost = self._publish()
        except (OSError, duckdb.Error) as error:
            _log.warning(
                "metrics: %s not published, the old one stays; training goes on (%s)",
                self._published,
                str(error).splitlines()[0],
            )
        else:
            self._insert([_Rows(step=self._last_step, names=["metrics/publish_time"], values=np.array([cost]))])

    def _publish(self) -> float:
        """Publishes a copy of the working file; returns the seconds it took."""
        began = time.monotonic()
        self._connection.execute("CHECKPOINT")
        temporary = self._published.with_name(".metrics.publishing.duckdb")
        shutil.copyfile(self._working, temporary)
        os.replace(temporary, self._published)  # noqa: PTH105 - not synced: a power cut may cost the last copy, never the working file
        self._publish_cost = time.monotonic() - began
        return self._publish_cost


class _Rows:
    """What one call logged: values (with places) or spans of one step."""

    __slots__ = ("names", "places", "spans", "step", "time", "values")

    def __init__(
        self,
        *,
        step: int,
        names: list[str] | None = None,
        values: np.ndarray | None = None,
        places: Mapping[str, np.ndarray] | None = None,
        spans: list[tuple[str, int, int]] | None = None,
    ):
        self.step, self.time = step, time.time()
        self.names, self.values, self.places, self.spans = names or [], values, places or {}, spans or []

    def __len__(self) -> int:
        return len(self.names) + len(self.spans)

    def place(self, axis: str) -> np.ndarray:
        """Index on one axis for each value; -1 where the axis means nothing."""
        return self.places.get(axis, np.full(len(self.names), -1, dtype=np.int32))


def _known(name: str) -> None:
    # "val/source_loss[web]" is a value of "val/source_loss" for what has no number: the source named "web".
    if name.partition("[")[0] not in CATALOGUE:
        raise KeyError(f"metric {name!r} is not in the catalogue (nmoe/formats/catalogue.py)")


def _insert_values(connection: duckdb.DuckDBPyConnection, rows: list[_Rows]) -> None:
    if not rows:
        return
    values = np.concatenate([row.values for row in rows if row.values is not None])
    columns: dict[str, Any] = {
        "name": np.array([name for row in rows for name in row.names], dtype=object),
        "step": np.repeat([row.step for row in rows], [len(row.names) for row in rows]),
        "time": np.repeat([row.time for row in rows], [len(row.names) for row in rows]),
        "value": values,
        "is_nan": np.isnan(values),  # DuckDB takes a NaN of a NumPy column for NULL
    } | {axis: np.concatenate([row.place(axis) for row in rows]) for axis in ("layer", "expert", "rank")}
    connection.register("incoming", columns)
    connection.execute(
        "INSERT INTO metrics SELECT name, step, time, CASE WHEN is_nan THEN 'nan'::DOUBLE ELSE value END,"
        " nullif(layer, -1), nullif(expert, -1), nullif(rank, -1) FROM incoming"
    )
    connection.unregister("incoming")


def _insert_spans(connection: duckdb.DuckDBPyConnection, rows: list[_Rows]) -> None:
    if not rows:
        return
    columns: dict[str, Any] = {
        "step": np.repeat([row.step for row in rows], [len(row.spans) for row in rows]),
        "shard": np.array([span[0] for row in rows for span in row.spans], dtype=object),
        "start": np.array([span[1] for row in rows for span in row.spans], dtype=np.int64),
        "end": np.array([span[2] for row in rows for span in row.spans], dtype=np.int64),
    }
    connection.register("incoming", columns)
    connection.execute('INSERT INTO batches SELECT step, shard, "start", "end" FROM incoming')
    connection.unregister("incoming")


@contextlib.contextmanager
def open_store(
    path: str | Path, *, within: duckdb.DuckDBPyConnection | None = None
) -> Iterator[duckdb.DuckDBPyConnection]:
    """Opens a published store read-only, for as long as the block runs.

    DuckDB gives two connections of one process to the same path the same database, so a connection that is kept would
    hide newer publications from everyone in the process: open, query, leave.

    Args:
        path: a `metrics.duckdb`, or the run's folder.
        within: an open database that the store is attached to, which takes 1 ms where a database of its own takes 15;
            what is yielded is a cursor of it. A store can be attached once at a time.

    Raises:
        DataError: if there is no such file.
        FormatError: if it is damaged, not a metric store, or of a newer version.
    """
    path = Path(path)
    if path.is_dir():
        path = path / STORE
    if not path.is_file():
        raise DataError(f"{path}: not found; expected a published metric store")
    with contextlib.ExitStack() as stack:
        try:
            if within is None:
                connection = stack.enter_context(duckdb.connect(str(path), read_only=True))
            else:
                connection = stack.enter_context(within.cursor())
                stack.enter_context(_attached(connection, path))
        except (duckdb.Error, OSError) as error:
            raise FormatError(f"{path}: cannot be opened as a metric store ({str(error).splitlines()[0]})") from None
        _check_version(connection, path)
        yield connection


@contextlib.contextmanager
def _attached(connection: duckdb.DuckDBPyConnection, path: Path) -> Iterator[None]:
    """Makes a store the default database of a connection."""
    name, quoted = f"store_{uuid.uuid4().hex}", str(path).replace("'", "''")
    connection.execute(f"ATTACH '{quoted}' AS {name} (READ_ONLY)")
    try:
        connection.execute(f"USE {name}")
        yield
    finally:
        connection.execute("USE memory")
        connection.execute(f"DETACH {name}")


def _check_version(connection: duckdb.DuckDBPyConnection, path: Path) -> None:
    try:
        facts = dict(connection.execute("SELECT key, value FROM store").fetchall())
    except duckdb.Error as error:
        raise FormatError(f"{path}: not a metric store ({str(error).splitlines()[0]})") from None
    version = facts.get("version", "")
    if facts.get("format") != FORMAT or not version.isdigit():
        raise FormatError(
            f"{path}: format is {facts.get('format')!r}, version {version!r}; expected {FORMAT!r} and a number"
        )
    if int(version) > VERSION:
        raise FormatError(
            f"{path}: {FORMAT} version {version} is newer than this program reads ({VERSION}); update nmoe-core"
        )
