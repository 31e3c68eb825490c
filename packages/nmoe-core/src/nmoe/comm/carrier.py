# SPDX-License-Identifier: Apache-2.0
"""The alarm from machine to machine: a few keys of the store through which the processes found each other.

The first rank of each machine that is alive speaks for all of its ranks, twice a second: one write, one look for an
alarm, and, only while nothing moves, a look at every other machine. All of it on a thread of its own, because a store
whose machine is gone may never answer; that, too, is noticed by its silence.
"""

import json
import threading
from collections.abc import Callable

from torch.distributed.distributed_c10d import Store

from nmoe.comm.page import Word
from nmoe.comm.standing import Standing

__all__ = ["Carrier"]

_EVERY_S = 0.5
_ANSWER_S = 1.0
_UNCHANGED_S = 4 * _EVERY_S  # of what a machine says, after which none of its ranks is taken to run


class Carrier:
    """One rank's line to the other machines.

    Args:
        store: of all ranks; a connection of its own is made.
        name: of this run's keys.
        here: number of this machine.
        machines: how many there are.
        speak: the ranks of this machine as this rank sees them; None while another one speaks for them.

    Attributes:
        word: what was said on any machine, if the alarm rang.
        rounds: asked and answered so far.
        error: why there will be no further ones; empty while all is well.
    """

    def __init__(
        self, store: Store, *, name: str, here: int, machines: int, speak: Callable[[], list[Standing] | None]
    ) -> None:
        self._store, self._speak = store.clone(), speak
        keys = [f"{name}/machine-{number}" for number in range(machines)]
        self._alarm, self._own, self._others = f"{name}/alarm", keys[here], keys[:here] + keys[here + 1 :]
        self._due, self._answered, self._closing, self._claim = threading.Event(), threading.Event(), False, ""
        self.word: Word | None = None
        self.rounds, self.error = 0, ""
        self._heard: list[str] = []
        """What the other machines said last; empty where they were not asked."""
        self._before, self._unchanged_s = self._heard, [0.0] * len(self._others)
        self._store.set(self._own, "[0, []]")
        self._thread = threading.Thread(target=self._run, name="carrier", daemon=True)
        self._thread.start()

    def standings(self, elapsed_s: float, *, still_s: float) -> list[Standing] | None:
        """The ranks of the other machines; None where these were not asked.

        Args:
            elapsed_s: since the call before.
            still_s: for how long nothing has moved here: also in a machine that says nothing any more.
        """
        heard, before, self._before = self._heard, self._before, self._heard
        if not heard:
            return None
        found = []
        for number, text in enumerate(heard):
            unchanged_s = self._unchanged_s[number] + elapsed_s if before and before[number] == text else 0.0
            self._unchanged_s[number] = unchanged_s
            for one in [Standing(*fields) for fields in json.loads(text)[1]]:
                later = one._replace(still_s=one.still_s + unchanged_s, silent_s=one.silent_s + unchanged_s)
                dead = later._replace(still_s=max(still_s, later.still_s), silent_s=max(still_s, later.silent_s))
                found.append(dead if unchanged_s > _UNCHANGED_S else later)
        return found

    def claim(self, word: Word) -> Word:
        """Ring on all machines; the word that all will hear, which is the fastest rank's. This one where nobody answers."""
        self._claim = json.dumps(word)
        self._due.set()
        self._answered.wait(_ANSWER_S)
        return self.word or word

    def close(self) -> None:
        """Ends the thread; one that waits for the store is left alone."""
        self._closing = True
        self._due.set()
        self._thread.join(_ANSWER_S)

    def _run(self) -> None:
        while not self._closing:
            self._due.wait(_EVERY_S)
            self._due.clear()
            try:
                self._round()
            except RuntimeError as error:  # the store's host has ended the connection
                self.error = str(error).splitlines()[0]
                self._answered.set()
                return
            self.rounds += 1

    def _round(self) -> None:
        if self._claim and self.word is None:
            self.word = _word(self._store.compare_set(self._alarm, "", self._claim))
            self._answered.set()
        own = self._speak()
        if own is None or self.word:
            return
        self._store.set(self._own, json.dumps([self.rounds, own]))
        if self._store.check([self._alarm]):
            self.word = _word(self._store.get(self._alarm))
        curious = any(2 * one.still_s > one.patience_s for one in own)
        self._heard = [text.decode() for text in self._store.multi_get(self._others)] if curious else []


def _word(text: bytes) -> Word:
    return Word(*json.loads(text))
