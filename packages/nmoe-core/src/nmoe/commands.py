# SPDX-License-Identifier: Apache-2.0
"""Where every command of nmoe-core begins and ends: entry points, and one meaning of every exit status.

An error that the user can mend is one line and exit status 2 (a file system that refuses is one), failed work is 1, a
command that a signal stopped, or whose output nobody reads any more, is 128 plus the signal's number, as a shell says it.
Nothing but this file is imported before an interrupt is understood: the rest takes a second or more to load.
"""

import importlib
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from nmoe.errors import ConfigError, NmoeError, line_of

__all__ = ["exit_status"]


def exit_status(
    work: Callable[[Namespace], int], options: Namespace, *, place: Path | None = None, stopped: str = "stopped"
) -> int:
    """Runs `work` on the options of a command; turns what the user can mend into one line and status 2.

    Args:
        work: what the command does; its result is the status.
        options: from `argparse`; text that is no text is refused.
        place: where the command writes, for errors that name no file.
        stopped: the line after an interrupt.
    """
    try:
        _refuse_broken_text(options)
        status = work(options)
        place = None  # what fails from here on is stdout
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read the output, such as `head`, has seen enough
        _close_stdout()
        return 128 + signal.SIGPIPE
    except (NmoeError, OSError) as error:
        line = line_of(error, place=place)
        if line is None:
            raise
        _close_stdout()
        sys.stderr.write(f"error: {line}\n")
        return 2
    except KeyboardInterrupt:  # a run that trains stops with a checkpoint instead
        sys.stderr.write(f"{stopped}\n")
        return 128 + signal.SIGINT


def _close_stdout() -> None:
    """Sends what is left in stdout's buffer, or, where that cannot be, to nowhere: the interpreter would try again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse_broken_text(options: Namespace) -> None:
    """Raises for an argument that is not UTF-8: it could be neither stored nor printed."""
    for value in vars(options).values():
        for text in map(str, value if isinstance(value, list) else [value]):
            if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
                shown = os.fsencode(text) if _from_bytes(text) else text
                raise ConfigError(f"argument {shown!r}: not UTF-8 text; write it, or rename the file, in UTF-8")


def _from_bytes(text: str) -> bool:
    """Whether the broken characters of a text stand for bytes, as Python reads them from a command line."""
    return not any("\ud800" <= character <= "\udfff" and not "\udc80" <= character <= "\udcff" for character in text)


def _command(module: str, name: str, *, stopped: str = "stopped") -> int:
    """Loads a command and runs it."""
    try:
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  a terminal may lack characters
        try:
            return getattr(importlib.import_module(module), name)()
        finally:
            sys.stdout.flush()  # argparse ends the process after `--help`
    except BrokenPipeError:
        _close_stdout()
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:  # while modules load
        sys.stderr.write(f"{stopped}\n")
        return 128 + signal.SIGINT


def train() -> int:
    """`nmoe-train`."""
    return _command("nmoe.cli", "train", stopped="stopped before the run began")


def prep() -> int:
    """`nmoe-prep`."""
    return _command("nmoe.cli", "prep")


def convert() -> int:
    """`nmoe-convert`."""
    return _command("nmoe.convert", "main")


def checkpoint() -> int:
    """`nmoe-checkpoint`."""
    return _command("nmoe.checkpoint.cli", "main")


def generate() -> int:
    """`nmoe-generate`."""
    return _command("nmoe.sample", "main")


def doctor() -> int:
    """`nmoe-doctor`."""
    return _command("nmoe.doctor", "main")
