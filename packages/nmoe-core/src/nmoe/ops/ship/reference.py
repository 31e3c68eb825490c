# SPDX-License-Identifier: Apache-2.0
"""Plain torch meaning of a put: a copy, made at the last moment that the contract allows (`Board.complete`).

Whoever changes an outbox too early, or trusts that a put is done before the meeting, sees it here and not first on a network.
"""

from collections.abc import Sequence

from torch import Tensor

from nmoe.comm.remote import Board, Remote

__all__ = ["ship"]


def ship(areas: Sequence[Remote], lines_P2: Tensor, board: Board) -> None:
    for area in areas:
        for far in area.far:
            first, number = lines_P2[far.peer].tolist()
            assert far.target is not None, "puts in plain torch need communicator memory that is mapped for them"
            number = min(number, far.outbox.shape[0])  # of a wrong count the owner says what is missing
            board.pending.append((far.target[first : first + number], far.outbox[:number]))
