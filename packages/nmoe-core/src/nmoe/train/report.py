# SPDX-License-Identifier: Apache-2.0
"""What a person sees of a run: one line a step, a progress bar on a terminal, `log.txt` in the run's folder."""

import contextlib
import logging
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

__all__ = ["ProgressBar", "StepFigures", "format_duration", "format_step", "log_to_file", "set_up_logging"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFigures:
    """The figures of one step's line; `eta_s` may be NaN before there is an estimate."""

    step: int
    steps: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens_per_second: float
    step_time: float
    mfu: float
    overload: float
    max_over_mean: float
    memory_bytes: int
    eta_s: float


def format_step(figures: StepFigures) -> str:
    """The line of a step: always the same fields in the same order, with units."""
    width = len(str(figures.steps))
    return (
        f"step {figures.step:{width}d}/{figures.steps}"
        f"  loss {figures.loss:.4f} nat/token"
        f"  grad_norm {figures.grad_norm:.3f}"
        f"  lr {figures.learning_rate:.2e}"
        f"  {figures.tokens_per_second:,.0f} token/s"
        f"  {figures.step_time:.3f} s/step"
        f"  mfu {100 * figures.mfu:.1f} %"
        f"  rank overload {figures.overload:.2f}"
        f"  fullest expert {figures.max_over_mean:.2f} x mean"
        f"  mem {figures.memory_bytes / 1e9:.2f} GB"
        f"  eta {format_duration(figures.eta_s)}"
    )


def format_duration(seconds: float) -> str:
    """`1:02:03`, `2:03` or `?`."""
    if not 0 <= seconds < 1e9:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class ProgressBar(logging.StreamHandler[TextIO]):
    """A log handler that keeps a progress bar below the lines where the stream is a terminal, and only there."""

    def __init__(self, stream: TextIO):
        super().__init__(stream)
        self._bar = ""
        self._is_terminal = stream.isatty()

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the line above the bar."""
        if not self._bar:
            super().emit(record)
            return
        self.stream.write("\r\x1b[K")
        super().emit(record)
        self.stream.write(self._bar)
        self.flush()

    def show(self, done: int, total: int, *, eta_s: float) -> None:
        """Draws the bar anew."""
        if not self._is_terminal:
            return
        columns = max(10, min(40, shutil.get_terminal_size().columns - 40))
        filled = columns * done // total
        bar = "#" * filled + "." * (columns - filled)
        self._bar = f"[{bar}] {done}/{total}  {100 * done // total} %  eta {format_duration(eta_s)}"
        self.stream.write(f"\r\x1b[K{self._bar}")
        self.flush()

    def clear(self) -> None:
        """Removes the bar."""
        if self._bar:
            self._bar = ""
            self.stream.write("\r\x1b[K")
            self.flush()


def set_up_logging() -> ProgressBar:
    """Logs of this package to the present stderr and to no earlier one; called by the command line, never on import."""
    handler = ProgressBar(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("nmoe")
    logger.setLevel(logging.INFO)
    for earlier in [known for known in logger.handlers if isinstance(known, ProgressBar)]:
        logger.removeHandler(earlier)  # its stream may be closed, and every line would be written twice
    logger.addHandler(handler)
    return handler


class _LogFile(logging.FileHandler):
    """A log file whose disk may be full: said once, and the lines are on the terminal all the same."""

    _is_lost = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name is logging's
        """Says why a line is not in the file."""
        del record
        if not self._is_lost:
            self._is_lost = True
            sys.stderr.write(f"{self.baseFilename}: not written ({sys.exc_info()[1]}); training goes on\n")

    def close(self) -> None:
        """Closes the file; what it had no room for is dropped."""
        with contextlib.suppress(OSError):
            super().close()


def log_to_file(path: Path) -> logging.FileHandler:
    """Adds the same lines, with UTC times, to a file; the caller removes and closes the handler."""
    handler = _LogFile(path, encoding="utf-8")
    formatter = logging.Formatter("%(asctime)s %(levelname)s %(message)s", datefmt="%Y-%m-%dT%H:%M:%SZ")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    logging.getLogger("nmoe").addHandler(handler)
    return handler
