# SPDX-License-Identifier: Apache-2.0
"""Watching a run from beside it: heartbeat, stop on a signal, stacks of a run that hangs.

The heartbeat is on its own thread, so that a long step does not make a run look dead; it stops when the run makes no
progress for far longer than its steps take, so that a hung run does not look alive.
"""

import faulthandler
import logging
import signal
import sys
import threading
import time
from collections import deque
from statistics import median
from types import FrameType
from typing import IO, Any

from nmoe.formats.runs import RunRecord

__all__ = ["StopSignal", "Watch"]

_log = logging.getLogger(__name__)
_BEAT_S = 2.0


class StopSignal:
    """Turns the first SIGTERM or SIGINT into a request to stop after the step; a second one ends the process at once.

    Use as a context manager on the main thread. A launcher may pass on what the terminal has sent already, so a second
    signal counts only after a second.

    Attributes:
        number: the signal that came, or 0.
    """

    def __init__(self) -> None:
        self.number, self._came_at = 0, 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.number:
            if time.monotonic() - self._came_at > 1.0:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        self.number, self._came_at = number, time.monotonic()
        _log.warning(
            "%s: stopping after this step with a checkpoint; once more ends at once", signal.Signals(number).name
        )


class Watch:
    """Beats the heart of a run and notices when it hangs; use as a context manager.

    Args:
        record: the run's record; None on a rank that does not write it.
        least_s: a run is never called hung before this many seconds without progress.
        factor: nor before this many times the median of its recent steps.
        output: open file for the stacks (default: stderr).
    """

    def __init__(
        self, record: RunRecord | None, *, least_s: float = 300.0, factor: float = 20.0, output: IO[str] | None = None
    ):
        self._record, self._least_s, self._factor = record, least_s, factor
        self._output = output or sys.stderr
        self._step, self._moved_at = 0, time.monotonic()
        self._times: deque[float] = deque(maxlen=32)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.hangs = 0

    def progress(self, step: int) -> None:
        """Says that `step` steps are done, or that something else moved on (an evaluation, a checkpoint)."""
        now = time.monotonic()
        if step != self._step:
            self._times.append(now - self._moved_at)
        self._step, self._moved_at = step, now

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        hung = False
        while not self._stopping.wait(min(_BEAT_S, self._least_s / 4)):
            silence = time.monotonic() - self._moved_at
            limit = max(self._least_s, self._factor * median(self._times or [0.0]))
            if silence < limit:
                hung = False
                self._beat()
            elif not hung:
                hung = True
                self.hangs += 1
                _log.error("no progress for %.0f s after step %d: stacks of all threads follow", silence, self._step)
                faulthandler.dump_traceback(file=self._output, all_threads=True)

    def _beat(self) -> None:
        if self._record is None:
            return
        try:
            self._record.heartbeat(self._step)
        except OSError as error:  # a full disk: the next beat may succeed
            _log.warning("heartbeat not written; training goes on (%s)", error)
