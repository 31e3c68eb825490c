# SPDX-License-Identifier: Apache-2.0
"""The memory that the ranks of a machine share to tell each other of faults: who rang, and how far each has come."""

import contextlib
import fcntl
import mmap
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

__all__ = ["Page", "Word"]

_HEAD = np.dtype([("reporter", "i8"), ("status", "i8"), ("stacks", "i8"), ("text", "S1000")])
_SLOT = np.dtype(
    [
        ("heard", "i8"),
        ("leaving", "i8"),
        ("arrived", "i8"),  # barriers come to
        ("pulse", "i8"),  # ticks of the rank's watcher
        ("position", "i8"),
        ("waits", "i8"),
        ("limit_s", "f8"),
        ("patience_s", "f8"),
        ("doing", "S64"),
    ]
)


class Word(NamedTuple):
    """What is said when the alarm rings."""

    reporter: int
    """Rank that noticed first."""
    status: int
    """With which all processes end."""
    stacks: bool
    """Whether each is to show where its threads stand."""
    text: str


class Page:
    """That memory as it is mapped here.

    Args:
        descriptor: of a file of `nbytes(size)` bytes, zeroed before the first use.
        size: ranks of the machine.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        memory = mmap.mmap(descriptor, self.nbytes(size))
        self._descriptor = descriptor
        self._head = np.frombuffer(memory, _HEAD, count=1)
        self.slots = np.frombuffer(memory, _SLOT, count=size, offset=_HEAD.itemsize)
        """One record a rank of the machine."""

    @staticmethod
    def nbytes(size: int) -> int:
        """Of the memory."""
        return _HEAD.itemsize + size * _SLOT.itemsize

    @property
    def rung(self) -> bool:
        """Whether somebody rang."""
        return self._head["reporter"][0] > 0

    @property
    def word(self) -> Word:
        """What was said; only where somebody rang."""
        reporter, status, stacks, text = self._head[0].item()
        return Word(reporter - 1, status, bool(stacks), text.decode(errors="replace"))

    def ring(self, word: Word, *, patience_s: float) -> bool:
        """Leave the word unless there is one; whether it was left.

        Args:
            word: who, and what.
            patience_s: another rank that is about to leave one may have been stopped meanwhile.
        """
        with self.lock(patience_s):
            if self.rung:
                return False
            head = self._head
            head["status"], head["stacks"], head["text"] = word.status, word.stacks, word.text.encode()
            head["reporter"] = word.reporter + 1  # last: whoever sees it sees the rest
            return True

    @contextlib.contextmanager
    def lock(self, patience_s: float) -> Iterator[None]:
        """One rank at a time; after the patience is over, whoever still holds it is not waited for."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() < deadline:
                    time.sleep(0.001)
                    continue
            break
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
