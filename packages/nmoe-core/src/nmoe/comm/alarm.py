# SPDX-License-Identifier: Apache-2.0
"""How all ranks of a machine end, at once and with one message, when one of them dies, hangs or goes wrong.

Every rank keeps a block of memory that its peers can write (a page, whatever device the rows are on). Whoever notices a
fault first writes the message into all blocks; a file lock decides who was first. Waits look into their own block while
they poll; a thread looks 20 times a second and ends the process where its main thread is stuck elsewhere, in a collective
or in a kernel. Who rings the alarm also kills the peers that do not hear it, because a stopped process would outlive them.

From the first ring a process has 4 seconds: 1.5 to hear, 2 to raise the error, 4 to be gone.
"""

import contextlib
import fcntl
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch.distributed as dist
from torch import Tensor

from nmoe.comm.descriptors import mapped, swap
from nmoe.errors import PeerFault

__all__ = ["LOST", "Alarm"]

_log = logging.getLogger(__name__)

LOST = 70
"""Exit status of a rank that ends because another one was lost."""
_TICK_S = 0.05
_NOTICE_S = 1.0  # a wait may say more about a dead peer than the thread can: layer, phase and epochs
_HEAR_S, _RAISE_S, _GONE_S = 1.5, 2.0, 4.0
_HEAD_WORDS, _TEXT_BYTES = 8, 960


class _Block:
    """A rank's block, as it is mapped here: who rang, the message, and three numbers of every rank."""

    def __init__(self, memory: Tensor, size: int) -> None:
        words = memory.numpy().view(np.int64)
        start = _HEAD_WORDS + _TEXT_BYTES // 8
        self._head, self._text = words[:_HEAD_WORDS], memory[_HEAD_WORDS * 8 : start * 8].numpy()
        self.heard_P, self.leaving_P, self.arrived_P = words[start : start + 3 * size].reshape(3, size)

    @property
    def reporter(self) -> int:
        """The rank that rang; -1: nobody did."""
        return int(self._head[0]) - 1

    @property
    def text(self) -> str:
        """The message of the one who rang."""
        return self._text[: int(self._head[1])].tobytes().decode(errors="replace")

    def ring(self, reporter: int, text: str) -> None:
        """Leave a message; who it is from is written last, so that the rest is there when that is seen."""
        encoded = text.encode()[:_TEXT_BYTES]
        self._text[: len(encoded)] = np.frombuffer(encoded, dtype=np.uint8)
        self._head[1] = len(encoded)
        self._head[0] = reporter + 1

    @staticmethod
    def nbytes(size: int) -> int:
        return 8 * (_HEAD_WORDS + 3 * size) + _TEXT_BYTES


class Alarm:
    """One rank's end of the alarm. Made by all ranks together.

    Args:
        group: The ranks, all on this machine, over gloo.

    Raises:
        EnvironmentFault: The ranks do not share a machine.

    Attributes:
        rank: Of this process in the group.
        size: Ranks of the group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        memory, process = os.memfd_create("nmoe-alarm", os.MFD_CLOEXEC), os.pidfd_open(os.getpid())
        nbytes = _Block.nbytes(self.size)
        os.ftruncate(memory, nbytes)
        found = swap([memory, process], group, what="the alarm between ranks")
        self._blocks = [_Block(mapped(descriptor, nbytes), self.size) for descriptor, _ in found]
        self._own = self._blocks[self.rank]
        self._arbiter = found[0][0]  # whose lock decides who was first
        self._descriptors = [descriptor for pair in found for descriptor in pair]
        self._processes = {peer: pair[1] for peer, pair in enumerate(found) if peer != self.rank}
        self._lock, self._closing = threading.RLock(), threading.Event()
        self._raised, self._rung_at, self._gone_at = False, 0.0, 0.0
        self._barriers = 0
        self.device_fault: Callable[[], PeerFault | None] = lambda: None
        """What the device reports; asked 20 times a second."""
        self._thread = threading.Thread(target=self._watch, name="alarm", daemon=True)
        self._thread.start()

    @property
    def arrivals(self) -> np.ndarray:
        """int64 [P]: barriers that each rank has come to."""
        return self._own.arrived_P

    def arrive(self) -> int:
        """Come to the next barrier; its number."""
        self._barriers += 1
        for block in self._blocks:
            block.arrived_P[self.rank] = self._barriers
        return self._barriers

    def check(self) -> None:
        """Return at once if all is well.

        Raises:
            PeerFault: Somebody rang.
        """
        if self.rung:
            raise self._fault()

    @property
    def awake(self) -> bool:
        """Whether this rank has not taken its leave."""
        return not self._closing.is_set()

    @property
    def rung(self) -> bool:
        """Whether somebody rang."""
        return self._own.reporter >= 0

    def gone(self) -> set[int]:
        """Peers whose process has ended although they did not take their leave."""
        return {peer for peer in self._ended() if not self._own.leaving_P[peer]}

    def ring(self, text: str) -> PeerFault:
        """Tell all ranks, unless somebody was faster; takes care that those who cannot hear do not live on.

        Args:
            text: The message, one line.

        Returns:
            The error to raise here: this one, or that of the rank that was faster.
        """
        self._raised = True  # in a moment; the thread is not to end the process before
        self._ring(text)
        return self._fault()

    @contextlib.contextmanager
    def told_of_errors(self) -> Iterator[None]:
        """Whatever is raised in the block ends the other ranks as well."""
        try:
            yield
        except PeerFault:
            raise
        except BaseException as error:
            if fault := self.device_fault():  # the error is what the driver made of it
                raise self.ring(str(fault)) from None
            self.ring(f"rank {self.rank} failed: {type(error).__name__}: {error}")
            raise

    def close(self) -> None:
        """Take leave: from now on the end of this process is no fault. Does nothing after a fault."""
        if self.rung or not self.awake:
            return
        for block in self._blocks:
            block.leaving_P[self.rank] = 1
        self._closing.set()
        self._thread.join()
        for descriptor in self._descriptors:
            os.close(descriptor)

    def _ended(self) -> set[int]:
        """Peers whose process has ended."""
        poll = select.poll()  # one a call: two threads may ask at once, which one object does not allow
        for descriptor in self._processes.values():
            poll.register(descriptor, select.POLLIN)
        ended = {descriptor for descriptor, _ in poll.poll(0)}
        return {peer for peer, descriptor in self._processes.items() if descriptor in ended}

    def _fault(self) -> PeerFault:
        self._raised = True
        self._hear()
        return PeerFault(self._own.text, heard=self._own.reporter != self.rank)

    def _ring(self, text: str) -> None:
        with self._lock:
            self._claim(text)
            if self._own.reporter == self.rank:
                self._end_the_deaf()

    def _hear(self) -> None:
        self._rung_at = self._rung_at or time.monotonic()
        for block in self._blocks:
            block.heard_P[self.rank] = 1

    def _claim(self, text: str) -> None:
        """Write the message everywhere, or wait until that of a faster rank is here."""
        deadline = time.monotonic() + _HEAR_S
        while not self.rung:
            late = time.monotonic() > deadline  # the faster one was stopped while it wrote
            try:
                fcntl.lockf(self._arbiter, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if not late:
                    time.sleep(0.001)
                    continue
            first = self._blocks[0]
            reporter, text = (self.rank, text) if first.reporter < 0 else (first.reporter, first.text)
            for block in self._blocks:
                if block.reporter < 0:
                    block.ring(reporter, text)
            fcntl.lockf(self._arbiter, fcntl.LOCK_UN)

    def _end_the_deaf(self) -> None:
        self._hear()
        deadline = time.monotonic() + _HEAR_S
        while deaf := {peer for peer in self._processes if not self._own.heard_P[peer]} - self._ended():
            if time.monotonic() > deadline:
                break
            time.sleep(0.005)
        for peer in deaf:
            _log.warning("rank %d does not answer: killed", peer)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._processes[peer], signal.SIGKILL)

    def _watch(self) -> None:
        while not self._closing.wait(_TICK_S):
            if self.rung:
                self._hear()
                late = time.monotonic() - self._rung_at
                if late > _GONE_S or (late > _RAISE_S and not self._raised):
                    self._end()
            elif fault := self.device_fault():
                self._ring(str(fault))
            elif gone := self.gone():
                self._gone_at = self._gone_at or time.monotonic()
                if time.monotonic() - self._gone_at > _NOTICE_S:
                    peer = min(gone)
                    self._ring(f"rank {self.rank}: lost rank {peer}: its process has ended; see its own last output")

    def _end(self) -> None:
        """End the process whose main thread does not."""
        if self._own.reporter == self.rank:
            sys.stderr.write(f"error: {self._own.text}\n")
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(LOST)
