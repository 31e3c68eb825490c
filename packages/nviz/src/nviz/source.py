# SPDX-License-Identifier: Apache-2.0
"""Published metric stores, opened read-only and their answers remembered until the file is replaced.

A trainer replaces `metrics.duckdb` by an atomic rename. DuckDB keeps one instance per path and process, so a
connection that lives on answers from the old file: here a path is open only while somebody asks, one at a time.
Answers are kept until the file changes, so ten open pages cost what one costs. All stores are attached to one database
in memory, which shares its threads and its memory limit among them; attaching takes 1 ms.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import duckdb

from nmoe.formats import DataError, FormatError, NmoeError
from nmoe.formats.metrics import open_store

__all__ = ["Stamp", "Store", "UnpublishedError", "store_at"]

T = TypeVar("T")

ANSWERS = 512  # remembered per store


class UnpublishedError(DataError):
    """The run has no store yet; not a fault."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Identity of one published file; another publication has another one."""

    inode: int
    mtime_ns: int
    size: int

    @property
    def published_at(self) -> float:
        """Unix seconds of the publication."""
        return self.mtime_ns / 1e9


class Store:
    """One published store; safe to use from many threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._open = ExitStack()
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._depth = 0
        self._stamp: Stamp | None = None
        self._answers: OrderedDict[Hashable, Any] = OrderedDict()
        self._grown: OrderedDict[Hashable, tuple[Hashable, Any]] = OrderedDict()

    def stamp(self) -> Stamp:
        """Identity of the file as it is now.

        Raises:
            UnpublishedError: if there is no file.
        """
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            raise UnpublishedError("no metrics published yet") from None
        except OSError as error:
            raise DataError(f"{self.path.name}: cannot be looked at ({error.strerror})") from None
        return Stamp(stat.st_ino, stat.st_mtime_ns, stat.st_size)

    @contextmanager
    def session(self) -> Iterator[None]:
        """Keeps one publication open for all reads of the block: they agree with each other, and open it once."""
        with self._lock:
            if self._depth == 0:
                stamp = self.stamp()
                if stamp != self._stamp:
                    self._answers.clear()
                    self._stamp = stamp
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self._connection = None
                    self._open.close()

    def read(self, key: Hashable, query: Callable[[duckdb.DuckDBPyConnection], T]) -> T:
        """The answer of `query` on the newest publication, from memory if this file was asked `key` before.

        Args:
            key: names the question; equal keys must mean equal queries.
            query: called with an open read-only connection; must fetch all it needs before it returns.

        Raises:
            UnpublishedError: if there is no file.
            FormatError: if it is no metric store, is damaged, or is of a newer version.
        """
        with self.session():
            if key not in self._answers:
                self._answers[key] = self._ask(query)
                while len(self._answers) > ANSWERS:
                    self._answers.popitem(last=False)
            self._answers.move_to_end(key)
            answer = self._answers[key]
            # A failure is remembered too: a damaged file is not read again by every refresh.
            if isinstance(answer, NmoeError):
                raise answer
            return answer

    def grow(self, key: Hashable, query: Callable[[duckdb.DuckDBPyConnection, T | None], T], *, epoch: Hashable) -> T:
        """As `read`, but `query` is also given its answer on an earlier publication, so that it asks only what is new.

        Args:
            key: names the question.
            query: called with an open connection and the earlier answer, None if there is none.
            epoch: identity of the process that writes; rows of an earlier one may have been replaced by a resume, so
                what was answered then is not built upon.
        """

        def ask(connection: duckdb.DuckDBPyConnection) -> T:
            known, earlier = self._grown.get(key, (None, None))
            answer = query(connection, earlier if known == epoch else None)
            self._grown[key] = (epoch, answer)
            self._grown.move_to_end(key)
            while len(self._grown) > ANSWERS:
                self._grown.popitem(last=False)
            return answer

        return self.read(key, ask)

    def once(self, query: Callable[[duckdb.DuckDBPyConnection], T]) -> T:
        """The answer of `query`, not remembered: for large answers. Raises as `read` does."""
        with self.session():
            answer = self._ask(query)
            if isinstance(answer, NmoeError):
                raise answer
            return answer

    def knows(self, key: Hashable) -> bool:
        """Whether `read` would answer `key` from memory."""
        with self._lock:
            return self.stamp() == self._stamp and key in self._answers

    def _ask(self, query: Callable[[duckdb.DuckDBPyConnection], Any]) -> Any:
        try:
            if self._connection is None:
                self._connection = self._open.enter_context(open_store(self.path, within=_database()))
            return query(self._connection)
        except NmoeError as error:
            return error
        except duckdb.Error as error:
            return FormatError(f"{self.path.name}: cannot be read ({str(error).splitlines()[0]})")


_memory: duckdb.DuckDBPyConnection | None = None
_memory_lock = threading.Lock()


def _database() -> duckdb.DuckDBPyConnection:
    """The database that stores are attached to; a new one, if a damaged store has brought the last one down."""
    global _memory
    with _memory_lock:
        try:
            if _memory is not None:
                _memory.execute("SELECT 1")
        except duckdb.Error:
            _memory = None
        if _memory is None:
            _memory = duckdb.connect()
        return _memory


_stores: dict[Path, Store] = {}
_stores_lock = threading.Lock()


def store_at(path: Path) -> Store:
    """The process's one `Store` of a path."""
    with _stores_lock:
        return _stores.setdefault(path, Store(path))
