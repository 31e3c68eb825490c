# SPDX-License-Identifier: Apache-2.0
"""Small file operations that every format shares: durable replacement, hashing, paths that stay inside a root."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nmoe.errors import DataError, EnvironmentFault, FormatError

__all__ = [
    "in_turn",
    "inside",
    "json_lines",
    "json_text",
    "make_folder",
    "new_folder",
    "read_header",
    "replace_durably",
    "sha256_file",
    "sync_directory",
    "write_json",
    "write_text",
]


@contextlib.contextmanager
def in_turn(path: Path, *, patience_s: float = 60.0) -> Iterator[None]:
    """Processes that enter with the same file do so one after the other.

    Args:
        path: of the file, made if missing.
        patience_s: how long to wait for another process.

    Raises:
        DataError: another process was there for all that time.
    """
    deadline = time.monotonic() + patience_s
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DataError(
                        f"{path}: held for {patience_s:g} s by another process that starts here; "
                        f"end that one (`fuser {path}` names it) and try again"
                    ) from None
                time.sleep(0.02)
        yield


_UNFINISHED = ".unfinished"


def make_folder(path: Path, *, what: str) -> None:
    """Makes a folder and those above it; one that is there is good.

    Args:
        path: the folder.
        what: the key or option that names it, for the message ("run.root").

    Raises:
        EnvironmentFault: it cannot be made, or something else has the name.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        found = error.strerror
        for place in (path, *path.parents):
            if place.is_symlink() and not place.exists():
                found = f"{place} is a link to {place.readlink()}, which is not there"
            elif place.exists():
                found = found if place.is_dir() else f"{place} is not a folder"
                break
        raise EnvironmentFault(f"{what} {path}: cannot make this folder ({found}); name another place") from None


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[None]:
    """A folder that is whole or not there: made before the body, and undone where the body does not come to its end.

    What a killed process left is told from somebody's files by a mark, and removed by the next start.

    Raises:
        DataError: something is there already.
        EnvironmentFault: it cannot be made.
    """
    mark, was_there = path / _UNFINISHED, path.exists()
    if was_there and (not path.is_dir() or (not mark.exists() and any(path.iterdir()))):
        raise DataError(f"{path}: exists already; name a folder that does not")
    above = [folder for folder in path.parents if not folder.exists()]
    make_folder(path, what="output")
    try:
        _empty(path)
        mark.touch()
        yield
        mark.unlink()
    except BaseException:
        _empty(path)
        for folder in [] if was_there else [path, *above]:
            with contextlib.suppress(OSError):  # somebody else began to use it
                folder.rmdir()
        raise


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def sync_directory(path: Path) -> None:
    """Makes renames inside `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_durably(temporary: Path, target: Path) -> None:
    """Renames `temporary` over `target`; a reader sees the old file or the whole new one, also after a power cut."""
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.replace(target)
    sync_directory(target.parent)


def json_text(value: Mapping[str, Any]) -> str:
    """`value` as `write_json` writes it."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes `value` as indented JSON, as `write_text` does."""
    write_text(path, json_text(value))


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically and durably: what had the name stays until the new file is whole.

    A device or a pipe is written to, not replaced.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        replace_durably(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def json_lines(path: Path, *, what: str, advice: str) -> Iterator[dict[str, Any]]:
    """Objects of a file with one JSON object a line.

    Args:
        path: the file.
        what: what a line describes, for the messages ("a verdict").
        advice: what to do about a line that is none.

    Raises:
        DataError: if the file does not exist.
        FormatError: at a line that is no object, or not UTF-8: half a line is what a full disk leaves.
    """
    try:
        stream = path.open("rb")
    except FileNotFoundError:
        raise DataError(f"{path}: not found; {advice}") from None
    with stream:
        for number, line in enumerate(stream, start=1):
            try:
                yield dict(json.loads(line.decode("utf-8")))
            except (ValueError, TypeError, RecursionError):
                raise FormatError(f"{path}:{number}: not {what}; {advice}") from None


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def inside(root: Path, name: str) -> Path:
    """`root / name`, refused if it leaves `root` (absolute, `..`, or through a symbolic link).

    Raises:
        DataError: if the path would lie outside `root`.
    """
    path = root / name
    if not path.resolve().is_relative_to(root.resolve()):
        raise DataError(f"{root}: {name!r} points outside the folder; expected a file name inside it")
    return path


def read_header(path: Path, *, format_name: str, version: int, what: str) -> dict[str, Any]:
    """Reads the JSON file that describes a data set and checks that this program can read it.

    Args:
        path: the JSON file.
        format_name: expected value of its key `format`.
        version: newest version that the caller can read.
        what: what the file describes, for the messages ("token shards").

    Raises:
        DataError: if the file does not exist.
        FormatError: if it is not JSON, of another format, or of a newer version.
    """
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path}: not found; expected the file that completes a folder of {what}") from None
    except (OSError, ValueError) as error:
        raise FormatError(f"{path}: cannot be read as JSON ({error}); expected the description of {what}") from None
    if not isinstance(header, dict) or header.get("format") != format_name:
        found = header.get("format") if isinstance(header, dict) else type(header).__name__
        raise FormatError(f"{path}: format is {found!r}, expected {format_name!r}")
    found = header.get("version")
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise FormatError(f"{path}: version is {found!r}, expected an integer of 1 or more")
    if found > version:
        raise FormatError(
            f"{path}: {format_name} version {found} is newer than this program reads ({version}); update nmoe-core"
        )
    return header
