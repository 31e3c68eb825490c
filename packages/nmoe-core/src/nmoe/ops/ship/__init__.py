# SPDX-License-Identifier: Apache-2.0
"""From an outbox of this rank into the memory of a peer that no store reaches: one put for each area and peer.

A put moves lines that lie side by side on both ends. How many they are, and where they go, only the device knows. It may take
place at any time up to the end of this rank's next meeting: what is in the outbox must not change before, and is there
after.
"""

from collections.abc import Sequence
from typing import Protocol, cast

from torch import Tensor

from nmoe.comm.remote import Board, Remote
from nmoe.ops.registry import implementation

__all__ = ["Kernels", "kernels"]


class Kernels(Protocol):
    """What an implementation file defines."""

    def ship(self, areas: Sequence[Remote], lines_P2: Tensor, board: Board) -> None:
        """Start the puts of the first lines of every far peer's outbox.

        Args:
            areas: All with the same far peers.
            lines_P2: int32: for each rank, the line of its area at which the first one goes, and how many go. Only the
                entries of far peers are read.
            board: Of the meeting that completes them.
        """
        ...


def kernels() -> Kernels:
    """The implementation on this process's arch."""
    return cast(Kernels, implementation("ship"))
