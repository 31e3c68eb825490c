# SPDX-License-Identifier: Apache-2.0
"""One area of symmetric memory as this rank sees it at all ranks, and the board on which the ranks meet.

Ops take areas, not communicators: torch writes into the views, kernels through the addresses.
"""

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from nmoe.comm.alarm import Alarm
from nmoe.comm.communicator import Symmetric
from nmoe.errors import EnvironmentFault

__all__ = ["Board", "Phase", "Remote"]


class Phase(enum.IntEnum):
    """Which meeting of a layer: the word for it in a fault's message, the number in a kernel."""

    COUNTS = 0
    DISPATCH = 1
    RETURN = 2
    DISPATCH_GRADIENT = 3
    RETURN_GRADIENT = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Remote:
    """The same area in the memory of every rank of the group."""

    rank: int
    """Of this process: ``views[rank]`` is its own memory."""
    views: tuple[Tensor, ...]
    """One a rank, of equal shape and dtype, as this rank can store into them."""
    address_P: Tensor
    """int64, on the device: where each view starts, for kernels."""

    @property
    def size(self) -> int:
        """Ranks P of the group."""
        return len(self.views)

    @property
    def local(self) -> Tensor:
        """This rank's own view."""
        return self.views[self.rank]

    @classmethod
    def of(cls, memory: Symmetric, *, rank: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> "Remote":
        """The area that starts ``offset`` bytes into a symmetric buffer.

        Raises:
            EnvironmentFault: A peer's memory is not mapped here: rows to it would have to travel as puts.
        """
        nbytes = dtype.itemsize * int(torch.Size(shape).numel())
        views = []
        for peer, whole in enumerate(memory.peers):
            if whole is None:
                raise EnvironmentFault(
                    f"rank {rank} cannot write into the memory of rank {peer}, which is on another node, and rows do not "
                    "travel between nodes yet; set parallel.ep to at most the GPUs of a node"
                )
            views.append(whole[offset : offset + nbytes].view(dtype).view(shape))
        address_P = torch.tensor([v.data_ptr() for v in views], dtype=torch.int64, device=memory.local.device)
        return cls(rank=rank, views=tuple(views), address_P=address_P)


@dataclass(frozen=True, kw_only=True, slots=True)
class Board:
    """Where the ranks meet: each writes its epoch into the flag that every rank keeps for it."""

    flag: Remote
    """int64 [P] at each rank: entry p is the number of meetings that rank p has come to."""
    epoch_1: Tensor
    """int64 [1], on the device, private: meetings that this rank has come to. In memory, so that a captured graph
    goes on counting when it is replayed."""
    timeout_s: float
    """How long to wait for a peer before it counts as lost."""
    alarm: Alarm | None = None
    """Where faults are told and heard."""

    @property
    def rank(self) -> int:
        """Of this process."""
        return self.flag.rank
