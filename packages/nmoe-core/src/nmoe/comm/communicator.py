# SPDX-License-Identifier: Apache-2.0
"""What expert parallelism needs of its ranks: symmetric memory, and one meeting at start.

Rows, counts, flags and epochs all live in symmetric buffers, and the ops of `nmoe.rdep` write them with plain stores; so
a communicator has no verb for sending. A rendering differs from another in how a peer's memory is reached: its own, a
mapping of POSIX shared memory, a CUDA IPC mapping, or, where it cannot be mapped, by puts.

Ranks whose memory is mapped into each other's address space are a **node**: blocks of `node_size` consecutive ranks.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nmoe.comm.alarm import Alarm

__all__ = ["Communicator", "Symmetric"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Symmetric:
    """A buffer that every rank has, of equal size and layout."""

    local: Tensor
    """uint8: this rank's own, zeroed at allocation."""
    peers: tuple[Tensor | None, ...]
    """uint8, one a rank: the peers' buffers as this rank can store into them (its own among them); None where a peer's
    memory is not mapped."""
    beyond: tuple[Tensor | None, ...] = ()
    """Where puts are copies (`shm`): the buffers of the peers without a mapping, for `nmoe.ops.ship` and `nmoe.ops.meet` alone."""


class Communicator(Protocol):
    """The ranks that share the experts of a layer."""

    @property
    def rank(self) -> int:
        """Of this process, in [0, size)."""
        ...

    @property
    def size(self) -> int:
        """Ranks P of the group."""
        ...

    @property
    def ranks(self) -> range:
        """Numbers of these ranks in the whole communicator, by which the alarm and NVSHMEM know them: [0, size), or a part."""
        ...

    @property
    def node_size(self) -> int:
        """Ranks of a node: consecutive, and a divisor of size."""
        ...

    @property
    def device(self) -> torch.device:
        """Where symmetric memory lies."""
        ...

    @property
    def alarm(self) -> Alarm | None:
        """What ends all ranks when one fails; None where a rank is alone, or NVSHMEM is used without a run's watcher."""
        ...

    def symmetric(self, name: str, *, nbytes: int) -> Symmetric:
        """Allocate a buffer, or give the one of that name. Collective, at start only: all ranks, in the same order.

        Raises:
            ValueError: The name exists with another size.
        """
        ...

    def barrier(self) -> None:
        """Wait on the host until all ranks are here. For start and end, never in a step."""
        ...

    def close(self) -> None:
        """Give all symmetric memory back. Collective."""
        ...
