# SPDX-License-Identifier: Apache-2.0
"""From records to what the owner computes with: the experts, gates and way home of each row that arrived.

This is also where a wrong count is found: a row that its source did not send in this call carries another source or an
older epoch.
"""

from dataclasses import dataclass
from typing import Protocol, cast

from torch import Tensor

from nmoe.comm.remote import Board
from nmoe.ops.registry import implementation

__all__ = ["Arrivals", "Kernels", "kernels"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrivals:
    """Copies of the records' fields, private to this rank; R is the size of the area, P * T_max."""

    expert_RK: Tensor
    """int32: local ids of the row's experts here; -1 where the choice is another rank's, and past the last row."""
    gate_RK: Tensor
    """fp32 (fp64 in reference mode): gates of those choices; 0 where there is none."""
    home_R3: Tensor
    """int32: source rank, token there, ordinal of this rank among the token's owners; -1 past the last row."""


class Kernels(Protocol):
    """What an implementation file defines."""

    def receive(
        self, record_RM: Tensor, count_PP2: Tensor, board: Board, *, gate_like: Tensor, top_k: int, layer: int
    ) -> Arrivals:
        """Read the records of the rows that ``count_PP2`` announces for this rank.

        Args:
            record_RM: This rank's area of records, after the meeting that follows the push.
            count_PP2: The table of `nmoe.ops.plan`.
            board: Its epoch is one more than that of the records.
            gate_like: Any tensor of the gates' dtype.
            top_k: K.
            layer: For the message.

        Raises:
            PeerFault: A row is not the one that was announced (kernels report it where the host looks: see
                `nmoe.comm`).
        """
        ...


def kernels() -> Kernels:
    """The implementation on this process's arch."""
    return cast(Kernels, implementation("receive"))
