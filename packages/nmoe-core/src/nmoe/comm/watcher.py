# SPDX-License-Identifier: Apache-2.0
"""How all ranks of a run end, at once and with one message, when one of them dies, hangs or goes wrong.

The ranks of a machine share a page (`nmoe.comm.page`). Whoever notices a fault first leaves the message there; waits look
at it while they poll, and a thread of each rank looks 20 times a second and ends the process where its main thread is stuck
elsewhere, in a collective or in a kernel. Between machines the message goes through the store (`nmoe.comm.carrier`).

The thread sees the end of a process of its machine through a descriptor that the kernel makes readable. Ranks that hang
it finds by what each writes into the page: its place in the program, at each beat, and a pulse, while its thread runs
(`nmoe.comm.standing`). Who rings also kills the processes of its machine that do not hear it: a stopped one would
outlive them. From the first ring a process has 3 seconds: 1 to raise the error, 1.5 to hear, 3 to be gone.
"""

import contextlib
import faulthandler
import json
import logging
import os
import secrets
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from nmoe.comm.carrier import Carrier
from nmoe.comm.descriptors import swap
from nmoe.comm.foreign import agree
from nmoe.comm.page import Page, Word
from nmoe.comm.standing import Observer, Standing, verdict
from nmoe.errors import EnvironmentFault, PeerFault

__all__ = ["LOST", "OTHERS_S", "PATIENCE_S", "Watcher", "end_process"]

_log = logging.getLogger(__name__)

LOST = 70
"""Exit status of a rank that ends because another one was lost."""
PATIENCE_S = 1800.0
"""How long ranks may read, compile and write while others wait for them."""
OTHERS_S = 2.5
"""More time for a peer that waits for others itself: the watcher finds out for whom."""
_TICK_S, _LONGEST_TICK_S = 0.05, 1.0
_NOTICE_S = 0.5  # a wait may say more about a dead peer than the thread can: layer, phase and epochs
_RAISE_S, _HEAR_S, _GONE_S = 1.0, 1.5, 3.0
_TELL_S, _RING_S = 1.0, 4.0
_WAITING, _WAIT_DEPTH = ("/torch/distributed/", "/nmoe/comm/"), 3
_BOOT_ID, _NETWORK = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
_NONCE = 16  # bytes that tell the keys of one start in a store from those of another


class Watcher:
    """One rank's end of the alarm. Made by all ranks together.

    Args:
        group: all ranks, over a backend that moves CPU tensors (gloo).
        store: of these ranks; needed where they are on several machines.
        place: ranks of one machine that name different places are treated as if they were on several.

    Raises:
        EnvironmentFault: the ranks are on several machines and there is no store.

    Attributes:
        rank: of this process, its global number, as in all messages.
    """

    def __init__(self, group: dist.ProcessGroup, *, store: Store | None = None, place: str = "") -> None:
        self.rank = dist.get_rank()
        ranks = dist.get_process_group_ranks(group)
        told = agree(("", secrets.token_bytes(_NONCE) + _machine() + place.encode()), group, what="the alarm")
        places = [text[_NONCE:] for text in told]
        mine = places[ranks.index(self.rank)]
        self._ranks = [rank for rank, one in zip(ranks, places, strict=True) if one == mine]
        self._me, size = self._ranks.index(self.rank), len(self._ranks)
        local = group
        if size < len(ranks):
            local = dist.new_group(self._ranks, backend="gloo", use_local_synchronization=True)
            assert isinstance(local, dist.ProcessGroup)  # this process is in it
        self._open(local, size)
        self._set(limit_s=PATIENCE_S, patience_s=PATIENCE_S, doing="the start")

        self._observer = Observer(self._page, ranks=self._ranks, me=self._me)
        self._step, self._beats, self._barriers = 0, 0, 0
        self._lock, self._closing = threading.RLock(), threading.Event()
        self._raised, self._showed, self._rung_at = False, False, 0.0
        self._gone_s, self._silent_s, self._rounds = 0.0, 0.0, 0
        self.device_fault: Callable[[], PeerFault | None] = lambda: None
        """What the device reports; asked 20 times a second."""
        self._reported_at = 0.0
        self.on_end: Callable[[str], None] = lambda _: None
        """Called with the message before this process ends, for a second at most."""
        agree(("", b""), group, what="the alarm")  # all have written their first lines before anybody judges them
        machines = list(dict.fromkeys(places))
        self._carrier: Carrier | None = None
        if len(machines) > 1:
            if store is None:
                raise EnvironmentFault(f"the alarm: {len(ranks)} ranks on {len(machines)} machines without a store")
            name = f"nmoe/{told[0][:_NONCE].hex()}"
            here, speak = machines.index(mine), self._spoken
            self._carrier = Carrier(store, name=name, here=here, machines=len(machines), speak=speak)
            agree(("", b""), group, what="the alarm")  # each machine has spoken before another asks
        self._thread = threading.Thread(target=self._watch, name="watcher", daemon=True)
        self._thread.start()

    def _open(self, local: dist.ProcessGroup, size: int) -> None:
        memory, process = os.memfd_create("nmoe-alarm", os.MFD_CLOEXEC), os.pidfd_open(os.getpid())
        os.ftruncate(memory, Page.nbytes(size))
        found = swap([memory, process], local, what="the alarm")
        self._descriptors = [descriptor for pair in found for descriptor in pair]
        self._page = Page(found[0][0], size)
        self._slots = self._page.slots
        self._processes = {index: pair[1] for index, pair in enumerate(found) if index != self._me}

    # What a rank tells.

    def beat(self, doing: str, *, step: int | None = None, patience_s: float = 0.0) -> None:
        """This rank has come to its next place in the program; all ranks beat in the same places.

        Args:
            doing: the place, in words.
            step: where it is the first place of a training step: its number.
            patience_s: how long this rank may stay there, where that is more than its limit.
        """
        if step is not None:
            self._step, self._beats = step, 0
        self._beats += 1
        self._set(position=(self._step << 32) + self._beats)  # first: see `Observer.look`
        self._set(patience_s=patience_s, doing=f"step {self._step}, {doing}" if self._step else doing)

    def _set(self, **fields: Any) -> None:
        for name, value in fields.items():
            self._slots[name][self._me] = value if isinstance(value, int | float) else value.encode()

    def limit(self, limit_s: float) -> None:
        """From now on this rank counts as lost where it stays in one place for longer, or its process does not run."""
        self._set(limit_s=limit_s)

    def arrive(self) -> int:
        """Come to the next barrier of the ranks of a machine; its number."""
        self._barriers += 1
        self._set(arrived=self._barriers)
        return self._barriers

    def leave(self) -> None:
        """From now on the end of this process is no fault."""
        self._set(leaving=1)

    def close(self) -> None:
        """Take leave, and do not watch any longer. Does nothing after a fault."""
        if self.rung or not self.awake:
            return
        self.leave()
        self._closing.set()
        self._thread.join()
        if self._carrier:
            self._carrier.close()
        for descriptor in self._descriptors:
            os.close(descriptor)

    # What a rank learns.

    @property
    def awake(self) -> bool:
        """Whether this rank still watches."""
        return not self._closing.is_set()

    @property
    def rung(self) -> bool:
        """Whether somebody rang."""
        return self._page.rung

    def sees(self, ranks: Sequence[int]) -> bool:
        """Whether all of these are on this machine."""
        return set(ranks) <= set(self._ranks)

    def arrivals(self, ranks: Sequence[int]) -> np.ndarray:
        """int64: barriers that each of these ranks of this machine has come to."""
        return self._slots["arrived"][[self._ranks.index(rank) for rank in ranks]]

    def waits(self, rank: int) -> bool:
        """Whether this rank of this machine has stood for a while in a call that waits for others: it is not the cause.

        One that is stopped there is: what it wrote before says nothing of it.
        """
        if rank not in self._ranks:
            return False
        index = self._ranks.index(rank)
        return bool(self._slots["waits"][index]) and self._observer.runs(index)

    def gone(self) -> set[int]:
        """Ranks of this machine whose process has ended although they did not take their leave."""
        return {self._ranks[index] for index in self._ended() if not self._slots["leaving"][index]}

    def check(self) -> None:
        """Return at once if all is well.

        Raises:
            PeerFault: Somebody rang.
        """
        if self.rung:
            raise self._fault()

    # What happens then.

    def ring(self, text: str, *, status: int = LOST, stacks: bool = False) -> PeerFault:
        """Tell all ranks, unless somebody was faster; takes care that those who cannot hear do not live on.

        Args:
            text: The message, one line.
            status: With which all processes end.
            stacks: Whether each is to show where its threads stand.

        Returns:
            The error to raise here: this one, or that of the rank that was faster.
        """
        self._raised = True  # in a moment; the thread is not to end the process before
        self._ring(Word(self.rank, status, stacks, text))
        return self._fault()

    def fail(self, text: str, *, status: int) -> NoReturn:
        """Ring, and end this process."""
        self.ring(text, status=status)
        self.end()

    def end(self) -> NoReturn:
        """End this process with the word of the one who rang."""
        word = self._page.word
        teller = threading.Thread(target=self.on_end, args=(word.text,), daemon=True)  # its disk may hang
        teller.start()
        teller.join(_TELL_S)
        end_process(word.text, status=word.status, say=word.reporter == self.rank)

    def await_ring(self) -> None:
        """What went wrong here may be what the end of another rank looks like; returns when somebody rang, or nobody does."""
        deadline = time.monotonic() + _RING_S
        while self.awake and not self.rung and time.monotonic() < deadline:
            time.sleep(_TICK_S)

    def await_report(self) -> PeerFault | None:
        """What the device reports, if anything; returns when it is to be told, or somebody rang."""
        while (fault := self.device_fault()) and self.awake and not self.rung and not self._report():
            time.sleep(_TICK_S)
        return fault

    def _report(self) -> PeerFault | None:
        """What the device reports, unless it names a rank that waits for others itself: those are looked for first."""
        fault = self.device_fault()
        if fault is None:
            return None
        self._reported_at = self._reported_at or time.monotonic()
        waits = fault.awaited is not None and self.waits(fault.awaited)
        return None if waits and time.monotonic() - self._reported_at < OTHERS_S else fault

    def _ended(self) -> set[int]:
        """Processes of this machine that have ended."""
        poll = select.poll()  # one a call: two threads may ask at once, which one object does not allow
        for descriptor in self._processes.values():
            poll.register(descriptor, select.POLLIN)
        ended = {descriptor for descriptor, _ in poll.poll(0)}
        return {index for index, descriptor in self._processes.items() if descriptor in ended}

    def _fault(self) -> PeerFault:
        self._raised = True
        self._hear()
        with self._lock:  # this process may end now, and with it its thread, which may be about to end the deaf
            word = self._page.word
        return PeerFault(word.text, heard=word.reporter != self.rank)

    def _ring(self, word: Word) -> None:
        with self._lock:
            if self._carrier and not self.rung:
                word = self._carrier.claim(word)
            if self._page.ring(word, patience_s=_HEAR_S):
                self._end_the_deaf()

    def _hear(self) -> None:
        self._rung_at = self._rung_at or time.monotonic()
        self._set(heard=1)
        if self._page.word.stacks and not self._showed:
            self._showed = True
            with self._page.lock(_RAISE_S / 2):  # one after the other
                os.write(2, f"rank {self.rank}: stacks of all threads\n".encode())
                faulthandler.dump_traceback(file=2, all_threads=True)

    def _end_the_deaf(self) -> None:
        self._hear()
        deadline = time.monotonic() + _HEAR_S
        while deaf := {index for index in self._processes if not self._slots["heard"][index]} - self._ended():
            if time.monotonic() > deadline:
                break
            time.sleep(0.005)
        for index in deaf:
            _log.warning("rank %d does not answer: killed", self._ranks[index])
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._processes[index], signal.SIGKILL)

    # What the thread sees.

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._closing.wait(_TICK_S):
            now = time.monotonic()
            elapsed_s = min(now - before, _LONGEST_TICK_S)  # a time in which this process was stopped proves nothing
            before = now
            self._observer.look(elapsed_s)
            if self.rung:
                self._hear()
                late = now - self._rung_at
                if late > _GONE_S or (late > _RAISE_S and not self._raised):
                    self.end()
            elif self._carrier and self._carrier.word:
                self._ring(self._carrier.word)
            elif fault := self._report():
                self._ring(Word(self.rank, LOST, stacks=False, text=str(fault)))
            elif loss := self._loss(elapsed_s):
                text, stacks = loss
                self._ring(Word(self.rank, LOST, stacks, text))

    def _spoken(self) -> list[Standing] | None:
        return self._observer.standings() if self._observer.speaks else None

    def _loss(self, elapsed_s: float) -> tuple[str, bool] | None:
        """Who is lost, as far as it is seen from here, and whether stacks may say why."""
        self._slots["waits"][self._me] = self._observer.still_s > _NOTICE_S and _waits()
        gone = self.gone()
        self._gone_s = self._gone_s + elapsed_s if gone else 0.0
        if self._gone_s > _NOTICE_S:
            return f"rank {self.rank}: lost rank {min(gone)}: its process has ended; see its own last output", False
        if not self._observer.speaks:
            return None
        standings, whole = self._observer.standings(), True
        if self._carrier and not self._slots["leaving"][self._me]:
            if unanswered := self._unanswered(self._carrier, elapsed_s):
                return unanswered, False
            limit_s = float(self._slots["limit_s"][self._me])
            standings, whole = standings + self._carrier.standings(limit_s=limit_s), self._carrier.has_read
        text = verdict(standings, whole=whole)
        return (text, True) if text else None

    def _unanswered(self, carrier: Carrier, elapsed_s: float) -> str:
        """What to say where the store is lost."""
        rounds, self._rounds = self._rounds, carrier.rounds
        self._silent_s = 0.0 if rounds != carrier.rounds else self._silent_s + elapsed_s
        lost = f"rank {self.rank}: lost the store of the run, through which machines hear of faults"
        if carrier.error and self._silent_s > _NOTICE_S:
            return f"{lost}: {carrier.error}"
        limit_s = float(self._slots["limit_s"][self._me])
        return f"{lost}: no answer for {self._silent_s:.0f} s" if self._silent_s > limit_s else ""


def end_process(text: str, *, status: int, say: bool = True) -> NoReturn:
    """End this process, which is one of several that a launcher has started.

    Args:
        text: why, one line; goes to where PyTorch's launcher looks for it, where there is none to stderr.
        status: exit status.
        say: whether this is the rank that says it on stderr.
    """
    place = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if place:
        said = {"message": text, "status": status, "timestamp": int(time.time())}
        Path(place).write_text(json.dumps(said), encoding="utf-8")
    elif say:
        sys.stderr.write(f"error: {text}\n")
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(status)


def _machine() -> bytes:
    """What processes have in common that can hand each other descriptors."""
    return _BOOT_ID.read_bytes() + str(_NETWORK.stat().st_ino).encode()


def _waits() -> bool:
    """Whether the main thread stands in a call that waits for other ranks."""
    frame, depth = sys._current_frames().get(threading.main_thread().ident or 0), 0
    while frame and depth < _WAIT_DEPTH:
        if any(place in frame.f_code.co_filename for place in _WAITING) and "elastic" not in frame.f_code.co_filename:
            return True
        frame, depth = frame.f_back, depth + 1
    return False
