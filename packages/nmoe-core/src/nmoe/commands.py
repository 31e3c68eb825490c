# SPDX-License-Identifier: Apache-2.0
"""Where every command begins: Ctrl-C is one line from the first moment on, though the rest takes 0.1 to 3 s to load.

Only what Python has loaded by itself is imported before an interrupt is understood. What comes before this file, the start of
the interpreter (some 15 ms), is out of reach of a program that is written in Python.
"""

import sys

try:
    import os
    import signal
    from importlib import import_module
except KeyboardInterrupt:
    sys.stderr.write("stopped\n")
    raise SystemExit(130) from None

__all__ = ["close_stdout", "enter", "find_empty"]


def enter(module: str, name: str, *, stopped: str = "stopped", status: int = 130) -> int | None:
    """Loads a command and runs it; the end of a program, since Ctrl-C is not what it was afterwards.

    While modules load, an interrupt ends the process where it is. An exception would meet code that is not made for it:
    it is printed and forgotten in a callback, or comes out of an extension as something else.

    Args:
        module: where the command is.
        name: its function, without arguments.
        stopped: the line after an interrupt that the command did not take itself.
        status: the exit status then.
    """

    def end(*_: object) -> None:
        os.write(2, f"{stopped}\n".encode())
        os._exit(status)

    heeds = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell's background job does not
    _open_streams()
    if fault := find_empty(sys.argv[1:]):
        sys.stderr.write(f"error: {fault}\n")
        return 2
    try:
        if heeds:
            signal.signal(signal.SIGINT, end)
        run = getattr(import_module(module), name)
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  a terminal may lack characters
        if heeds:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return run()
        finally:
            sys.stdout.flush()  # argparse ends the process after `--help`
    except BrokenPipeError:
        close_stdout()
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        sys.stderr.write(f"{stopped}\n")
        return status
    finally:
        if heeds:  # while the interpreter ends nobody is left to take the exception
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _open_streams() -> None:
    """Gives a process that was started with stdin, stdout or stderr closed /dev/null in their place.

    Python has None there, which nothing can print to. Worse, the next file that is opened, a checkpoint, would get the
    number of stdout or stderr, and whatever a library or a child prints would be written into it.
    """
    while (nowhere := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(nowhere, True)
    os.close(nowhere)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - to the end
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def find_empty(words: list[str]) -> str:
    """What to say of an argument that is empty, or ends with `=`; nothing where there is none.

    Mostly it is a variable of the shell that is not set. As a path it would be the current folder, whose every file would be
    judged, for money, or written over. A prompt alone may be empty.
    """
    for number, (before, word) in enumerate(zip(["", *words], words, strict=False), 1):
        ends = word[:2] == "--" and word.find("=") == len(word) - 1
        if (ends or not word) and "--prompt" not in (before, word[:-1]):
            where = word if ends else f"argument {number}" + (f", behind {before}," if before else "")
            return f"{where} is empty; expected a value, and a variable of the shell may not be set"
    return ""


def close_stdout() -> None:
    """Sends what is left in stdout's buffer, or, where that cannot be, to nowhere: the interpreter would try again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def train() -> int | None:
    """`nmoe-train`."""
    return enter("nmoe.cli", "train", stopped="stopped before the run began")


def prep() -> int | None:
    """`nmoe-prep`."""
    return enter("nmoe.cli", "prep")


def convert() -> int | None:
    """`nmoe-convert`."""
    return enter("nmoe.convert", "main")


def checkpoint() -> int | None:
    """`nmoe-checkpoint`."""
    return enter("nmoe.checkpoint.cli", "main")


def generate() -> int | None:
    """`nmoe-generate`."""
    return enter("nmoe.sample", "main")


def doctor() -> int | None:
    """`nmoe-doctor`."""
    return enter("nmoe.doctor", "main")
