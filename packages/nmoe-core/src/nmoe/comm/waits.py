# SPDX-License-Identifier: Apache-2.0
"""Bounded waits of CPU ranks, and the one place where the message of a lost peer is made."""

import os
import time
from collections.abc import Callable

import numpy as np
import torch.distributed as dist

from nmoe.comm.alarm import Alarm
from nmoe.comm.remote import Board, Phase
from nmoe.comm.watcher import OTHERS_S, PATIENCE_S
from nmoe.errors import PeerFault

__all__ = ["await_all", "await_barrier", "lost", "number_in_run", "peer_fault"]

_SPINS = 32  # polls before the first sleep: ranks that run at once meet in microseconds
_SLEEP_S, _LONGEST_SLEEP_S = 20e-6, 500e-6
_LONGEST_POLL_S = 1.0  # of longer ones this process was stopped, and so perhaps were all


def lost(rank: int, peer: int, *, layer: int, phase: Phase, expected: object, seen: object) -> str:
    """The message for a peer that did not do its part."""
    where = f"layer {layer}, {phase.name.lower().replace('_', ' ')}"
    return f"rank {rank}: lost rank {peer} in {where}: expected {expected}, seen {seen}"


def peer_fault(board: Board, *, peer: int, layer: int, phase: Phase, expected: object, seen: object) -> PeerFault:
    """The error to raise for a peer that did not do its part; the other ranks are told."""
    text = lost(
        number_in_run(board, board.rank),
        number_in_run(board, peer),
        layer=layer,
        phase=phase,
        expected=expected,
        seen=seen,
    )
    return board.alarm.ring(text) if board.alarm else PeerFault(text)


def number_in_run(board: Board, rank: int) -> int:
    """What messages call a rank of the board's group: its number in the run."""
    return board.alarm.ranks[board.ranks[rank]] if board.alarm else board.ranks[rank]


def await_all(board: Board, *, layer: int, phase: Phase) -> None:
    """Wait until every rank has come to the meeting that this rank has come to.

    Raises:
        PeerFault: A rank did not come within the board's timeout, its process has ended, or another rank found a fault.
    """
    epoch = int(board.epoch_1)

    def complain(peer: int, seen: int, how: str) -> PeerFault:
        return peer_fault(
            board, peer=peer, layer=layer, phase=phase, expected=f"epoch {epoch}", seen=f"epoch {seen} {how}"
        )

    flag_P = board.flag.local.numpy()
    _await(lambda: flag_P, epoch, ranks=board.ranks, timeout_s=board.timeout_s, alarm=board.alarm, complain=complain)


def await_barrier(alarm: Alarm) -> None:
    """Wait on the host until all ranks are here: half an hour, because some may still compile or read.

    Raises:
        PeerFault: See `await_all`.
    """

    def complain(peer: int, seen: int, how: str) -> PeerFault:
        return alarm.ring(
            f"rank {alarm.watcher.rank}: lost rank {alarm.ranks[peer]} at a barrier: expected number {number}, "
            f"seen {seen} {how}"
        )

    if not alarm.watcher.sees(alarm.ranks):
        dist.barrier(alarm.group)  # on several machines; who does not come is found by its place in the program
        return
    number, ranks = alarm.watcher.arrive(), range(len(alarm.ranks))
    _await(lambda: alarm.arrivals, number, ranks=ranks, timeout_s=PATIENCE_S, alarm=alarm, complain=complain)


def _await(
    flags: Callable[[], np.ndarray],
    epoch: int,
    *,
    ranks: range,
    timeout_s: float,
    alarm: Alarm | None,
    complain: Callable[[int, int, str], PeerFault],
) -> None:
    waited_s, before, polls, nap = 0.0, time.monotonic(), 0, _SLEEP_S
    if alarm:
        alarm.watcher.check()
    while flags().min() < epoch:
        polls += 1
        if polls <= _SPINS:
            os.sched_yield()  # there may be fewer cores than ranks
            continue
        time.sleep(nap)
        nap = min(2 * nap, _LONGEST_SLEEP_S)
        now = time.monotonic()
        waited_s, before = waited_s + min(now - before, _LONGEST_POLL_S), now
        gone: set[int] = set()
        if alarm:
            alarm.watcher.check()
            gone = alarm.gone()  # before the flags are read: a peer may come and then end
        flag_P = flags()
        for peer in np.flatnonzero(flag_P < epoch).tolist():
            if ranks[peer] in gone:
                raise complain(peer, int(flag_P[peer]), "of a process that has ended")
            limit_s = timeout_s + (OTHERS_S if alarm and alarm.waits(peer) else 0.0)
            if waited_s > limit_s:
                raise complain(peer, int(flag_P[peer]), f"after {limit_s:g} s")
