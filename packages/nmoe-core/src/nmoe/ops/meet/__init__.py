# SPDX-License-Identifier: Apache-2.0
"""The meeting of all ranks between two transfers.

Whoever leaves it sees every store that any rank made, to whomever, before it came; and knows that every rank has read
what it was going to read before it came. So one copy of each area is enough: see docs/rdep.md.
"""

from typing import Protocol, cast

from nmoe.comm.remote import Board
from nmoe.ops.registry import implementation

__all__ = ["Kernels", "kernels"]


class Kernels(Protocol):
    """What an implementation file defines."""

    def meet(self, board: Board, *, layer: int, phase: int) -> None:
        """Release all stores and puts of this rank to all ranks, and go on, in stream order, when all have done the same.

        Puts that were started before are complete, at the peer and here, before any peer sees the flag.

        Args:
            board: Its epoch rises by 1.
            layer: For the message.
            phase: A `nmoe.comm.remote.Phase`, for the message.

        Raises:
            PeerFault: A peer did not come within the board's timeout (kernels report it where the host looks).
        """
        ...


def kernels() -> Kernels:
    """The implementation on this process's arch."""
    return cast(Kernels, implementation("meet"))
