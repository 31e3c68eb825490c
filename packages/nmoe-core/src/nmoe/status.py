# SPDX-License-Identifier: Apache-2.0
"""Where every command of nmoe-core ends: one meaning of every exit status.

An error that the user can mend is one line and exit status 2 (a file system that refuses is one), failed work is 1, a
command that a signal stopped, or whose output nobody reads any more, is 128 plus the signal's number, as a shell says it.
"""

import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from nmoe.commands import close_stdout
from nmoe.errors import ConfigError, line_of

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
        close_stdout()
        return 128 + signal.SIGPIPE
    except Exception as error:
        line = line_of(error, place=place)
        if line is None:
            raise
        close_stdout()
        sys.stderr.write(f"error: {line}\n")
        return 2
    except KeyboardInterrupt:  # a run that trains stops with a checkpoint instead
        sys.stderr.write(f"{stopped}\n")
        return 128 + signal.SIGINT


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
