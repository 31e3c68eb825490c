# SPDX-License-Identifier: Apache-2.0
"""Faults that a user can mend.

A command line prints such an error as one line and exits with 2; everything else is a defect of this project and
keeps its traceback. A message says where, what was found, what was expected and what to do.
"""

import errno

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "EnvironmentFault",
    "FormatError",
    "NmoeError",
    "PeerFault",
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
    """

    def __init__(self, message: str, *, heard: bool = False) -> None:
        super().__init__(message)
        self.heard = heard


_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def line_of(error: BaseException) -> str | None:
    """What to print of an error that the user can mend, in one line; None for a defect, which keeps its traceback."""
    if isinstance(error, NmoeError):
        return " ".join(str(error).splitlines())
    if isinstance(error, OSError) and error.filename is not None:  # about a file of the user's
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno in _OF_THE_DISK:  # a write knows no name
        return f"cannot write: {error.strerror}; make room, and give the same command again"
    return None
