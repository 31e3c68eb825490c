# SPDX-License-Identifier: Apache-2.0
"""The end of one rank is the end of all: a collective whose peer has died may never return.

Each rank holds a descriptor of every other process of its node, which the kernel makes readable when that process ends,
however it ends. Ranks on other nodes are watched by the launcher there. A rank that fails leaves a last word, and those
that end because of it say the same, so that it does not matter whom the launcher asks.
"""

import json
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from torch.distributed.distributed_c10d import Store

from nmoe.comm.alarm import LOST

__all__ = ["LOST", "Peers"]

_WORD, _WORD_S = "nmoe/last-word", 1.0


class Peers:
    """Watches the other ranks of this node from a thread.

    Args:
        store: where a rank leaves a last word.
        processes: process id by rank, of the other ranks of this node.
    """

    def __init__(self, store: Store, processes: Mapping[int, int]):
        self._store = store
        self._ranks: dict[int, int] = {}
        self._gone: list[int] = []
        for rank, process in processes.items():
            try:
                self._ranks[os.pidfd_open(process)] = rank
            except ProcessLookupError:  # it has ended already
                self._gone.append(rank)
        self._stopping = threading.Event()
        self.on_loss: Callable[[str], None] = lambda _: None
        """Called with one line when a rank was lost, before this process ends."""
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)
        self._thread.start()

    @property
    def stopped(self) -> bool:
        """Whether the ranks have met for the last time."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """From now on any rank may end. Called before the ranks meet for the last time."""
        self._stopping.set()
        self._thread.join()

    def give_up(self, status: int, line: str) -> None:
        """Ends this process, and so all: something went wrong here that the others cannot know."""
        self._store.set(_WORD, json.dumps([status, line]))
        _end(status, line)

    def wait_for_loss(self) -> None:
        """Where a collective failed because its peer has died, this process ends here, before it tells a wrong story."""
        if not self.stopped:
            time.sleep(2.0)

    def _run(self) -> None:
        poll = select.poll()
        for descriptor in self._ranks:
            poll.register(descriptor, select.POLLIN)
        while not self.stopped:
            ended = self._gone or [self._ranks[descriptor] for descriptor, _ in poll.poll(200)]
            if ended and not self.stopped:
                status, line = self._awaited_word() or (LOST, f"rank {ended[0]} died")
                try:
                    self.on_loss(line)
                finally:
                    _end(status, line)

    def _awaited_word(self) -> tuple[int, str] | None:
        """A rank that waited for the lost one in a layer can say more, but has to notice first."""
        deadline = time.monotonic() + _WORD_S
        while (word := self._word()) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return word

    def _word(self) -> tuple[int, str] | None:
        try:
            if self._store.check([_WORD]):
                status, line = json.loads(self._store.get(_WORD))
                return status, line
        except RuntimeError:  # the store has ended with the process that held it
            pass
        return None


def _end(status: int, line: str) -> None:
    """Leaves the line where PyTorch's launcher looks for it, and ends the process."""
    place = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if place:
        Path(place).write_text(json.dumps({"message": line, "timestamp": int(time.time())}), encoding="utf-8")
    os._exit(status)
