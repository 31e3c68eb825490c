# SPDX-License-Identifier: Apache-2.0
"""Bounded waits of CPU ranks, and the one place where the message of a lost peer is made."""

import time

from nmoe.comm.remote import Board, Phase
from nmoe.errors import PeerFault

__all__ = ["await_all", "peer_fault"]

_SPINS = 64  # polls before the first sleep: a meeting of ranks that run at once takes microseconds
_SLEEP_S = 50e-6


def peer_fault(board: Board, *, peer: int, layer: int, phase: Phase, expected: object, seen: object) -> PeerFault:
    """The error for a peer that did not do its part."""
    return PeerFault(
        f"rank {board.rank}: lost rank {peer} in layer {layer}, {phase.name.lower().replace('_', ' ')}: "
        f"expected {expected}, seen {seen}"
    )


def await_all(board: Board, *, layer: int, phase: Phase) -> None:
    """Wait until every rank has come to the meeting that this rank has come to.

    Raises:
        PeerFault: A rank did not come within the board's timeout.
    """
    epoch = int(board.epoch_1)
    deadline = time.monotonic() + board.timeout_s
    polls = 0
    while int(board.flag.local.min()) < epoch:
        polls += 1
        if polls > _SPINS:
            time.sleep(_SLEEP_S)
        if time.monotonic() > deadline:
            peer = int(board.flag.local.argmin())
            seen = f"epoch {int(board.flag.local[peer])} after {board.timeout_s:g} s"
            raise peer_fault(board, peer=peer, layer=layer, phase=phase, expected=f"epoch {epoch}", seen=seen)
