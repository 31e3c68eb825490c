# SPDX-License-Identifier: Apache-2.0
"""One area of symmetric memory as this rank sees it at all ranks, and the board on which the ranks meet.

Ops take areas, not communicators: torch writes into the views, kernels through the addresses. Where a peer's memory is
not mapped, both write into an outbox of this rank instead, and `nmoe.ops.ship` puts what lies there into the peer's.
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from nmoe.comm.alarm import Alarm
from nmoe.comm.communicator import Symmetric

__all__ = ["Board", "Far", "Phase", "Remote", "area_of"]


class Phase(enum.IntEnum):
    """Which meeting of a layer: the word for it in a fault's message, the number in a kernel."""

    COUNTS = 0
    DISPATCH = 1
    RETURN = 2
    DISPATCH_GRADIENT = 3
    RETURN_GRADIENT = 4


def area_of(whole: Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The area that starts ``offset`` bytes into a buffer (uint8)."""
    nbytes = dtype.itemsize * math.prod(shape)
    return whole[offset : offset + nbytes].view(dtype).view(shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Far:
    """A peer whose part of an area is filled by puts. Both tensors have the area's lines as their first axis."""

    peer: int
    """In the group."""
    outbox: Tensor
    """Here: what is to travel."""
    target: Tensor | None
    """The peer's area, for puts in plain torch; None where only NVSHMEM reaches it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remote:
    """The same area in the memory of every rank of the group."""

    rank: int
    """Of this process."""
    local: Tensor
    """This rank's own area."""
    views: tuple[Tensor, ...]
    """One a rank, of equal shape and dtype: where this rank stores what is for that rank. Its part of the peer's area,
    or, for a peer without a mapping, an outbox."""
    address_P: Tensor
    """int64, on the device: where each view starts, for kernels."""
    far: tuple[Far, ...] = ()
    """The peers without a mapping, in rank order."""
    route_F3: Tensor | None = None
    """int64, on the device, one line for each of `far`: address of its outbox, its number in NVSHMEM, its rank."""

    @property
    def size(self) -> int:
        """Ranks P of the group."""
        return len(self.views)

    @classmethod
    def of(
        cls,
        memory: Symmetric,
        *,
        ranks: range,
        rank: int,
        offset: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        outboxes: Sequence[Tensor] | None = None,
        slabs: bool = False,
    ) -> "Remote":
        """The area that starts ``offset`` bytes into a symmetric buffer.

        Args:
            memory: The buffer.
            ranks: Numbers of the group's ranks in the whole communicator.
            rank: Of this process in the group.
            offset: In bytes.
            shape: Of the area; its first axis is that of lines.
            dtype: Of the area.
            outboxes: One for each peer without a mapping, lines first. None: what such peers get is what this rank writes
                into line ``rank`` of its own area, as with counts and flags.
            slabs: The first axis is that of ranks and the second that of lines: at every rank, entry q is written by rank q.
        """
        area = partial(area_of, offset=offset, shape=shape, dtype=dtype)
        own, views, far = area(memory.local), list[Tensor](), list[Far]()
        for peer, whole in enumerate(memory.peers):
            if whole is not None:
                views.append(area(whole)[rank : rank + 1] if slabs else area(whole))
                continue
            outbox = own[rank : rank + 1] if outboxes is None else outboxes[len(far)]
            views.append(own if outboxes is None else outbox.unsqueeze(0) if slabs else outbox)
            beyond = memory.beyond[peer] if memory.beyond else None
            target = None if beyond is None else area(beyond).flatten(0, 1) if slabs else area(beyond)
            far.append(Far(peer=peer, outbox=outbox, target=target))

        def on_device(numbers: list) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int64, device=own.device)

        return cls(
            rank=rank,
            local=own,
            views=tuple(views),
            address_P=on_device([view.data_ptr() for view in views]),
            far=tuple(far),
            route_F3=on_device([[f.outbox.data_ptr(), ranks[f.peer], f.peer] for f in far]) if far else None,
        )


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
    ranks: range
    """Numbers of the group's ranks in the whole communicator, by which the alarm and NVSHMEM know them."""
    alarm: Alarm | None = None
    """Where faults are told and heard."""
    pending: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Puts in plain torch that have been started and not yet completed: target and outbox of each."""

    @property
    def rank(self) -> int:
        """Of this process in the group."""
        return self.flag.rank

    def complete(self) -> None:
        """Make the copies that were started; the meeting does, before it raises a flag."""
        for target, outbox in self.pending:
            target.copy_(outbox)
        self.pending.clear()
