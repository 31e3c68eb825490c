# SPDX-License-Identifier: Apache-2.0
"""The alarm from machine to machine: a few keys of the store through which the processes found each other.

The first rank of each machine that is alive speaks for all of its ranks, twice a second: one write and one look for an
alarm; what the other machines say it reads every two seconds, and each time while nothing moves. All of it on a thread of
its own, because a store whose machine is gone may never answer; that, too, is noticed by its silence.
"""

import json
import threading
import time
from collections.abc import Callable

from torch.distributed.distributed_c10d import Store

from nmoe.comm.page import Word
from nmoe.comm.standing import Standing

__all__ = ["Carrier"]

_EVERY_S = 0.5
_ANSWER_S = 1.0
_READ_EVERY = 4  # rounds


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
        self._heard: list[tuple[str, float]] = []
        """What each of the other machines said last, and for how long it has said nothing else."""
        self._read_at = 0.0
        if (own := speak()) is not None:
            self._store.set(self._own, json.dumps([-1, own]))
        self._thread = threading.Thread(target=self._run, name="carrier", daemon=True)
        self._thread.start()

    def standings(self, *, limit_s: float) -> list[Standing]:
        """The ranks of the other machines; none before these were asked for the first time.

        Args:
            limit_s: of this rank: a machine that says nothing cannot say that it has another one.
        """
        return [
            one._replace(
                still_s=one.still_s + unchanged_s,
                silent_s=one.silent_s + unchanged_s,
                limit_s=min(one.limit_s, limit_s),
            )
            for text, unchanged_s in self._heard
            for one in _standings(text)
        ]

    @property
    def has_read(self) -> bool:
        """Whether the other machines were asked."""
        return bool(self._heard)

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
        if self.rounds % _READ_EVERY == 0 or any(2 * one.still_s > one.limit_s for one in own):
            self._read()

    def _read(self) -> None:
        texts = [text.decode() for text in self._store.multi_get(self._others)]
        now = time.monotonic()
        gap_s = min(now - self._read_at, 2 * _READ_EVERY * _EVERY_S)  # longer: this process was stopped
        known = self._heard or [("", 0.0)] * len(texts)
        self._heard = [
            (text, before_s + gap_s if text == before else 0.0)
            for text, (before, before_s) in zip(texts, known, strict=True)
        ]
        self._read_at = now


def _word(text: bytes) -> Word:
    return Word(*json.loads(text))


def _standings(text: str) -> list[Standing]:
    return [Standing(*fields) for fields in json.loads(text)[1]]
