# SPDX-License-Identifier: Apache-2.0
"""`run.json`: what a run is, what it is doing, and when it last said so.

Written by rank 0 alone, replaced atomically, so a reader never sees half of it. A heartbeat tells a run that trains
from one that was killed: status "running" with an old heartbeat reads as "stale".
"""

import fcntl
import os
import platform
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from nmoe.errors import DataError, FormatError
from nmoe.formats.files import read_header, write_json

__all__ = ["RUN_FILE", "RunInfo", "RunLock", "RunRecord", "RunStatus", "git_state", "list_runs", "read_run"]

FORMAT, VERSION = "nmoe-run", 1
RUN_FILE = "run.json"
RunStatus = Literal["running", "stale", "stopped", "finished", "failed", "unreadable"]
"""As a reader sees it: "stopped" ended early on request and can go on, "stale" ended without a word."""
_WRITTEN = ("running", "stopped", "finished", "failed")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """A run as a reader sees it.

    Attributes:
        path: the run's folder.
        id: unique and lasting: a resumed run keeps it.
        name: the folder's name.
        status: see `RunStatus`.
        started_at, heartbeat_at, finished_at: Unix seconds; None where it has not happened.
        step: last step trained.
        steps: steps planned.
        error: what ended it, or why `run.json` cannot be read.
        config: the resolved configuration, a table for each section.
        git: commit and whether the tree had changes; empty outside a repository.
        host, pid: where the process ran.
    """

    path: Path
    id: str
    name: str
    status: RunStatus
    started_at: float | None = None
    heartbeat_at: float | None = None
    finished_at: float | None = None
    step: int = 0
    steps: int = 0
    error: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    git: dict[str, Any] = field(default_factory=dict)
    host: str = ""
    pid: int = 0


class RunRecord:
    """Writer of a run's `run.json`.

    Args:
        run_dir: the run's folder; must exist.
        heartbeat_s: least seconds between two writes by `heartbeat`.
    """

    def __init__(self, run_dir: str | Path, *, heartbeat_s: float = 5.0):
        self._path = Path(run_dir) / RUN_FILE
        self._heartbeat_s = heartbeat_s
        self._facts: dict[str, Any] = {}
        self._beat_at = 0.0
        self._lock = threading.Lock()

    def start(self, *, id: str, config: Mapping[str, Any], steps: int, step: int = 0) -> None:
        """Writes the record of a run that begins or goes on.

        Args:
            id: the run's id; that of the earlier process when a run goes on.
            config: the resolved configuration as nested tables.
            steps: steps planned.
            step: steps done before.
        """
        now = time.time()
        earlier = _load(self._path) if self._path.exists() else {}
        self._facts = {
            "format": FORMAT,
            "version": VERSION,
            "id": id,
            "status": "running",
            "started_at": earlier.get("started_at", now) if earlier.get("id") == id else now,
            "heartbeat_at": now,
            "heartbeat_s": self._heartbeat_s,
            "finished_at": None,
            "step": step,
            "steps": steps,
            "error": None,
            "host": platform.node(),
            "pid": os.getpid(),
            "git": git_state(),
            "config": dict(config),
        }
        self._beat_at = time.monotonic()
        write_json(self._path, self._facts)

    def heartbeat(self, step: int) -> None:
        """Says that the run is alive at this step; writes at most every `heartbeat_s` seconds."""
        now = time.monotonic()  # the clock of the day may be set back, and would then be waited for
        with self._lock:
            self._facts["step"] = step
            if now - self._beat_at >= self._heartbeat_s:
                self._beat_at, self._facts["heartbeat_at"] = now, time.time()
                write_json(self._path, self._facts)

    def finish(self, status: Literal["finished", "stopped", "failed"], *, step: int, error: str | None = None) -> None:
        """Writes how the run ended; `error` is one line."""
        now = time.time()
        with self._lock:
            self._facts |= {"status": status, "step": step, "error": error, "heartbeat_at": now, "finished_at": now}
            write_json(self._path, self._facts)


class RunLock:
    """Keeps a second process from training in the same folder; released when the process ends, however it ends.

    Raises:
        DataError: if another process holds it.
    """

    def __init__(self, run_dir: str | Path):
        self._file: IO[str] = (Path(run_dir) / ".lock").open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise DataError(
                f"{run_dir}: another process is training there; wait for it, stop it, or choose another run.name"
            ) from None

    def release(self) -> None:
        """Lets the next process in."""
        self._file.close()


def read_run(run_dir: str | Path) -> RunInfo:
    """Reads a run's record.

    Raises:
        DataError: if there is none.
        FormatError: if it is damaged or of a newer version.
    """
    path = Path(run_dir)
    facts = _load(path / RUN_FILE)
    try:
        status = facts["status"]
        if status not in _WRITTEN:
            raise ValueError(f"status {status!r}, expected one of {_WRITTEN}")
        silence = time.time() - float(facts["heartbeat_at"])
        if status == "running" and silence > max(60.0, 5 * float(facts["heartbeat_s"])):
            status = "stale"
        return RunInfo(
            path=path,
            id=str(facts["id"]),
            name=path.name,
            status=status,
            started_at=float(facts["started_at"]),
            heartbeat_at=float(facts["heartbeat_at"]),
            finished_at=None if facts["finished_at"] is None else float(facts["finished_at"]),
            step=int(facts["step"]),
            steps=int(facts["steps"]),
            error=None if facts["error"] is None else str(facts["error"]),
            config=dict(facts["config"]),
            git=dict(facts["git"]),
            host=str(facts["host"]),
            pid=int(facts["pid"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{path / RUN_FILE}: incomplete ({type(error).__name__}: {error})") from None


def _load(path: Path) -> dict[str, Any]:
    return read_header(path, format_name=FORMAT, version=VERSION, what="a run")


def list_runs(root: str | Path) -> list[RunInfo]:
    """Every run directly below `root`, newest first; a broken one is listed as "unreadable" and breaks nothing.

    Folders without a `run.json` and symbolic links that lead out of `root` are left out.
    """
    root = Path(root)
    found: list[RunInfo] = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if not (path / RUN_FILE).is_file() or not (path / RUN_FILE).resolve().is_relative_to(root.resolve()):
            continue
        try:
            found.append(read_run(path))
        except DataError as error:
            found.append(RunInfo(path=path, id="", name=path.name, status="unreadable", error=str(error)))
    return sorted(found, key=lambda run: (run.started_at or 0.0, run.name), reverse=True)


def git_state() -> dict[str, Any]:
    """Commit and dirtiness of the working directory's repository; empty where there is none."""
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        changes = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"commit": commit, "dirty": bool(changes.strip())}
