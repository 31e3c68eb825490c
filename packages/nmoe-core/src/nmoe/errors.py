# SPDX-License-Identifier: Apache-2.0
"""Faults that a user can mend.

A command line prints such an error as one line and exits with 2; everything else is a defect of this project and
keeps its traceback. A message says where, what was found, what was expected and what to do.
"""

import errno
import os
from pathlib import Path
from typing import Any

from nmoe import words

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "EnvironmentFault",
    "FormatError",
    "NmoeError",
    "PeerFault",
    "free_bytes",
    "is_of_the_disk",
    "is_out_of_memory",
    "line_of",
]


class NmoeError(Exception):
    """Base of every error that a user can mend."""


class ConfigError(NmoeError):
    """A configuration names an unknown key, or holds a value that cannot be."""


class DataError(NmoeError):
    """Data on disk is missing, damaged or does not fit the model."""


class FormatError(DataError):
    """A file is not of the expected format, or of a version newer than this program knows."""


class CheckpointError(NmoeError):
    """A checkpoint is missing, incomplete, damaged or belongs to another configuration."""


class EnvironmentFault(NmoeError):
    """This machine lacks a package, a device or a permission that the command needs."""


class PeerFault(NmoeError):
    """Another rank of the expert-parallel group died, hangs, or sent something else than it announced.

    All ranks end with the same message, that of the rank that noticed first.

    Attributes:
        heard: Another rank noticed and prints the message; here it would only be said again.
        awaited: The rank for whom a wait was in vain, where it may be without fault, since it waits itself.
    """

    def __init__(self, message: str, *, heard: bool = False, awaited: int | None = None) -> None:
        super().__init__(message)
        self.heard, self.awaited = heard, awaited


_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_MEMORY = ("can't allocate memory", "Storage size calculation overflowed")
_OF_THE_DISK = (*_FULL, errno.EFBIG, errno.EROFS, errno.EIO)


def line_of(error: BaseException, *, place: str | os.PathLike[str] | None = None) -> str | None:
    """What to print of an error that the user can mend, in one line; None for a defect, which keeps its traceback.

    Args:
        error: the error.
        place: where the command writes, for an error that does not know: a write has no name.
    """
    if isinstance(error, NmoeError):
        return " ".join(str(error).splitlines())
    if is_out_of_memory(error):
        said = " ".join(str(error).split()).partition("DefaultCPUAllocator: ")
        return f"out of memory: {said[2] or said[0] or 'no more was to be had'}"
    if not isinstance(error, OSError):
        return None
    where = error.filename if error.filename is not None else place
    if is_of_the_disk(error):
        return f"{'' if where is None else f'{where}: '}cannot write: {error.strerror}{_advice(error, where)}"
    if error.filename is not None:  # about a file of the user's
        return f"{error.filename}: {error.strerror}"
    return None


def _advice(error: OSError, where: Any) -> str:
    if error.errno not in _FULL:
        return "; choose another place" if error.errno == errno.EROFS else "; look at the disk, and try again"
    free = "" if where is None else f" ({words.size(free_bytes(where))} free there)"
    return f"{free}; make room, and give the same command again"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, NumPy or PyTorch (on a GPU, on the CPU) got no memory."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or (isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY))


def is_of_the_disk(error: BaseException) -> bool:
    """Whether a disk is full, read-only or broken, which no stack says more about."""
    return isinstance(error, OSError) and error.errno in _OF_THE_DISK


def free_bytes(place: str | os.PathLike[str]) -> int:
    """Room for this user on the disk of a path, or of the nearest folder above that is there, in bytes."""
    path = Path(place).resolve()
    disk = os.statvfs(next(folder for folder in (path, *path.parents) if folder.exists()))
    return disk.f_bavail * disk.f_frsize
