# SPDX-License-Identifier: Apache-2.0
"""Every paid answer, on disk before it counts: a content-addressed SQLite store that all runs of a host share.

The key is the hash of everything that decides the answer, never of where a document came from, so an identical text
is judged once, ever. One thread writes: it commits what has gathered since its last commit (one fsync for many
answers), and only then are the waiting requests told that they have an answer.
"""

import asyncio
import hashlib
import json
import os
import queue
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

from hydra_judge.verdict import Reply
from nmoe.errors import DataError, EnvironmentFault

__all__ = ["Cache", "cache_key", "default_cache_path"]

_SCHEMA_VERSION = 1
_CREATE = """
CREATE TABLE IF NOT EXISTS answers (
    key BLOB PRIMARY KEY, model TEXT NOT NULL, reply TEXT NOT NULL, created INTEGER NOT NULL
) WITHOUT ROWID
"""

_Job = tuple[bytes, str, str, asyncio.Future[None]]
"""Key, model and answer, and who waits for them to be on disk."""


def default_cache_path() -> Path:
    """$XDG_CACHE_HOME/hydra-judge/answers.sqlite, by default under ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "hydra-judge" / "answers.sqlite"


def cache_key(values: dict[str, Any]) -> bytes:
    """SHA-256 of the canonical JSON of what decides an answer."""
    text = json.dumps(values, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).digest()


class Cache:
    """Answers by key.

    Args:
        path: the SQLite file, made with its folder if missing. It must lie on a file system of this host: SQLite's
            write-ahead log does not work over a network.

    Raises:
        DataError: if the file is not such a store, or is damaged.
        EnvironmentFault: if it cannot be written.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._reader = self._connect()
            version = self._reader.execute("PRAGMA user_version").fetchone()[0]
            if version > _SCHEMA_VERSION:
                raise DataError(f"{path}: cache version {version}, this program knows {_SCHEMA_VERSION}; update it")
            self._reader.execute(_CREATE)
            self._reader.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        except sqlite3.DatabaseError as error:
            raise DataError(f"{path}: not a usable cache ({error}); name another with --cache") from None
        except OSError as error:
            raise EnvironmentFault(f"{path}: cannot make the cache ({error.strerror})") from None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=120.0, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        return connection

    def get(self, key: bytes) -> Reply | None:
        """The answer stored under `key`, if any."""
        row = self._reader.execute("SELECT reply FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else Reply.from_json(row[0])

    def __len__(self) -> int:
        return self._reader.execute("SELECT count(*) FROM answers").fetchone()[0]

    async def put(self, key: bytes, reply: Reply, *, model: str) -> None:
        """Stores an answer; returns when it is on disk.

        Raises:
            EnvironmentFault: if it cannot be written (disk full, for one): the run must stop, for nothing that is
                paid from here on would be kept.
        """
        if self._writer is None:
            self._writer = threading.Thread(target=self._write, name="judge-cache", daemon=True)
            self._writer.start()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._jobs.put((key, model, reply.to_json(), done))
        await done

    def _write(self) -> None:
        connection: sqlite3.Connection | None = None
        is_last = False
        while not is_last:
            jobs = [self._jobs.get()]
            while not self._jobs.empty():
                jobs.append(self._jobs.get())
            batch = [job for job in jobs if job is not None]
            is_last = len(batch) < len(jobs)
            if not batch:
                continue
            fault: Exception | None = None
            try:
                connection = connection or self._connect()
                _keep(connection, batch)
            except sqlite3.Error as error:  # whatever it was, they wait to hear of it
                fault = EnvironmentFault(f"{self.path}: cannot keep answers ({error})")
            _tell(batch, fault)
        if connection:
            connection.close()

    def close(self) -> None:
        """Waits for what is being written and closes the file."""
        if self._writer is not None:
            self._jobs.put(None)
            self._writer.join()
            self._writer = None
        self._reader.close()


def _keep(connection: sqlite3.Connection, batch: list[_Job]) -> None:
    """Writes a batch to the disk, all of it or nothing."""
    rows = [(key, model, reply, int(time.time())) for key, model, reply, _ in batch]
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.executemany("INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?)", rows)
        connection.execute("COMMIT")
    except sqlite3.Error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _tell(batch: list[_Job], fault: Exception | None) -> None:
    """Resolves the futures of a batch on their loop, in one call."""

    def resolve() -> None:
        for _, _, _, done in batch:
            if done.done():  # its task was cancelled meanwhile; the answer is kept all the same
                continue
            if fault is None:
                done.set_result(None)
            else:
                done.set_exception(fault)

    loop = batch[0][3].get_loop()
    if not loop.is_closed():
        loop.call_soon_threadsafe(resolve)
