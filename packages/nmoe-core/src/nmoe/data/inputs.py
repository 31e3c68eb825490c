# SPDX-License-Identifier: Apache-2.0
"""Files and folders that a user names -> the files to read, each once, and a count of what is left out."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nmoe.errors import DataError

__all__ = ["Inputs", "search"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What a search found.

    Attributes:
        files: each with the name under which it is recorded.
        skipped: what else was there, by kind: ".pdf", "linked folder", "given twice".
    """

    files: list[tuple[Path, str]]
    skipped: Counter[str]


def search(paths: Sequence[str | Path], *, endings: tuple[str, ...], what: str) -> Inputs:
    """Files as given; folders are searched in sorted order, links to folders in them are not followed: they may go round.

    Args:
        paths: files and folders.
        endings: of the names of files that are read.
        what: such a file in words, for messages.

    Raises:
        DataError: a path does not exist, its ending is not a known one, or a folder holds no file with a known ending.
        OSError: a folder cannot be read.
    """
    found = Inputs(files=[], skipped=Counter())
    seen: set[Path] = set()
    expected = f"{', '.join(endings[:-1])} or {endings[-1]}"
    for path in map(Path, paths):
        if path.is_dir():
            inside = list(_inside(path, endings, found.skipped))
            if not inside:
                raise DataError(f"{path}: holds no file that ends in {expected}")
        elif not path.exists():
            raise DataError(f"{path}: not found; expected {what} or a folder of them")
        elif not path.name.endswith(endings):
            raise DataError(f"{path}: cannot tell what it is; expected a name that ends in {expected}")
        else:
            inside = [(path, path.name)]
        for file, name in inside:
            if (real := file.resolve()) in seen:
                found.skipped["given twice"] += 1
            else:
                seen.add(real)
                found.files.append((file, name))
    return found


def _inside(folder: Path, endings: tuple[str, ...], skipped: Counter[str]) -> Iterator[tuple[Path, str]]:
    """Files below a folder and their names in it; what is none of them is counted."""
    names: list[Path] = []
    for place, folders, files in os.walk(folder, onerror=_raise):
        for _ in filter(Path.is_symlink, (Path(place, name) for name in folders)):
            skipped["linked folder"] += 1
        names += [Path(place, name) for name in files]
    for path in sorted(names):
        if not path.is_file():
            skipped["broken link" if path.is_symlink() else "no plain file"] += 1
        elif not path.name.endswith(endings):
            skipped[path.suffix or "name without an ending"] += 1
        else:
            name = os.fsencode(path.relative_to(folder).as_posix())
            yield path, name.decode(errors="backslashreplace")  # it is recorded as text


def _raise(error: OSError) -> None:
    raise error
