# SPDX-License-Identifier: Apache-2.0
"""The meeting of CPU processes: plain stores suffice on x86-64, where stores become visible in their order."""

from nmoe.comm.remote import Board, Phase
from nmoe.comm.waits import await_all

__all__ = ["meet"]


def meet(board: Board, *, layer: int, phase: int) -> None:
    board.epoch_1.add_(1)
    board.complete()
    for flag_P in board.flag.views:
        flag_P[board.rank] = board.epoch_1[0]
    for far in board.flag.far:
        assert far.target is not None
        far.target[board.rank] = board.epoch_1[0]
    await_all(board, layer=layer, phase=Phase(phase))
