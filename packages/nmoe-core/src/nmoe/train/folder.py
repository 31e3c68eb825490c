# SPDX-License-Identifier: Apache-2.0
"""Which folder a start trains in: what the same command does the second time.

| latest run of this name | config | what happens |
|---|---|---|
| none, or finished | any | a new folder |
| unfinished | the same | it goes on from its newest complete checkpoint |
| unfinished | changed | an error that names the change; a new folder if there is no checkpoint to go on from |
| any, with `--fresh` | any | a new folder |

The first folder is `ROOT/NAME`, later ones `ROOT/NAME-2` and so on, unless another run is called so. Keys that only decide how long or how closely a run
is watched (`nmoe.config.rules.FREE_KEYS`) may change.
"""

import contextlib
import logging
import re
import shutil
import tomllib
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from nmoe.checkpoint.store import CheckpointInfo, list_checkpoints, read_checkpoint, remove_leftovers
from nmoe.config import Config, changed_keys
from nmoe.errors import ConfigError, DataError, line_of
from nmoe.formats.files import in_turn, make_folder, replace_durably
from nmoe.formats.runs import RUN_FILE, RunInfo, RunLock, RunRecord, read_run

__all__ = ["RunFolder", "open_folder", "run_folders"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFolder:
    """A run's folder, locked by this process or, on other ranks, by rank 0's.

    Attributes:
        path: the folder.
        checkpoint: what to go on from; None: from the beginning.
        resumed: whether the run was begun by an earlier process.
        record: its `run.json`, status "running"; None on other ranks.
        lock: held until `release()` or the end of the process; None on other ranks.
    """

    path: Path
    checkpoint: CheckpointInfo | None
    resumed: bool
    record: RunRecord | None = None
    lock: RunLock | None = None

    @property
    def first_step(self) -> int:
        """Number of the first step to train, from 1."""
        return self.checkpoint.step + 1 if self.checkpoint else 1

    def seen_by_others(self) -> "RunFolder":
        """The same folder for the other ranks."""
        return replace(self, record=None, lock=None)

    def finish(self, status: Literal["finished", "stopped", "failed"], *, step: int, error: str | None = None) -> None:
        """Writes into the record how the run ended; a disk that refuses is logged and changes nothing about the end."""
        try:
            if self.record:
                self.record.finish(status, step=step, error=error)
        except OSError as failure:
            _log.error("%s", line_of(failure, place=self.path / RUN_FILE))

    def release(self) -> None:
        """Lets the next process in."""
        if self.lock:
            self.lock.release()


def open_folder(config: Config, *, fresh: bool) -> RunFolder:
    """Chooses and locks the folder of this start, and writes `config.toml` and `run.json` in it.

    Raises:
        ConfigError: an unfinished run of the name has another config.
        EnvironmentFault: the root cannot be made.
        OSError: the disk is full; nothing of a new run is left.
        DataError: another process trains there, or the latest run's record cannot be read.
        CheckpointError: the newest checkpoint's manifest is damaged.
    """
    root, name = Path(config.run.root), config.run.name
    make_folder(root, what="run.root =")
    with in_turn(root / ".lock"), contextlib.ExitStack() as undo:  # two starts at once choose one after the other
        latest, lock, checkpoint = None if fresh else _latest(root, name), None, None
        if latest is not None and latest.status != "finished":
            lock = RunLock(latest.path)
            undo.callback(lock.release)
            checkpoint = _newest(latest.path)
            changes = _changes(latest.path, config)
            if changes and checkpoint is None:
                lock.release()
                lock = None
                _log.info("%s has no checkpoint and another config (%s): a new run", latest.path, "; ".join(changes))
            elif changes:
                raise ConfigError(
                    f"{latest.path}: this unfinished run has another config: {'; '.join(changes)}. "
                    "Undo the change to go on, or start anew with --fresh or another run.name"
                )
        if latest is not None and lock is not None:
            path, run_id = latest.path, latest.id
        else:
            path, run_id = _new_path(root, name), uuid.uuid4().hex[:12]
            path.mkdir()
            undo.callback(shutil.rmtree, path, ignore_errors=True)
            lock = RunLock(path)
        tables = _write_config(path, config)
        record = RunRecord(path)
        step = checkpoint.step if checkpoint else 0
        record.start(id=run_id, config=tables, steps=config.train.steps, step=step)
        undo.pop_all()  # the folder is a run's from here on
    resumed = latest is not None and path == latest.path
    return RunFolder(path=path, record=record, checkpoint=checkpoint, resumed=resumed, lock=lock)


def run_folders(root: Path, name: str) -> list[Path]:
    """Folders of a run's name, oldest first: `name`, and those of `name-2`, `name-3`, ... that no other run is called."""
    return [path for _, path in _numbered(root, name) if path.name == name or not _is_called(path, path.name)]


def _numbered(root: Path, name: str) -> list[tuple[int, Path]]:
    """Folders `name`, `name-2`, `name-3`, ... that exist, by number."""
    pattern = re.compile(re.escape(name) + r"(?:-([1-9]\d*))?")
    found = [(int(match[1] or 1), path) for path in root.iterdir() if (match := pattern.fullmatch(path.name))]
    return sorted(found)


def _is_called(path: Path, name: str) -> bool:
    """Whether `run.name` of the run in a folder is this."""
    try:
        section = read_run(path).config.get("run")
    except DataError:
        return False
    return isinstance(section, dict) and section.get("name") == name


def _latest(root: Path, name: str) -> RunInfo | None:
    for path in reversed(run_folders(root, name)):
        if (path / RUN_FILE).exists():
            try:
                return read_run(path)
            except DataError as error:
                raise DataError(f"{error}; mend it or start anew with --fresh") from None
    return None


def _new_path(root: Path, name: str) -> Path:
    taken = _numbered(root, name)
    return root / (f"{name}-{taken[-1][0] + 1}" if run_folders(root, name) else name)


def _newest(path: Path) -> CheckpointInfo | None:
    """The newest complete checkpoint of a run; what a killed process left half-written is removed."""
    remove_leftovers(path / "checkpoints")
    found = list_checkpoints(path / "checkpoints")
    return read_checkpoint(found[-1]) if found else None


def _changes(path: Path, config: Config) -> list[str]:
    """What a run's recorded config and a new one differ in and a resume may not change."""
    recorded = path / "config.toml"
    try:
        old = tomllib.loads(recorded.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{recorded}: cannot be read ({error}); start anew with --fresh") from None
    return changed_keys(old, config)


def _write_config(path: Path, config: Config) -> dict[str, Any]:
    text = config.to_toml()
    temporary = path / ".config.toml.tmp"
    temporary.write_text(text, encoding="utf-8")
    replace_durably(temporary, path / "config.toml")
    return tomllib.loads(text)
