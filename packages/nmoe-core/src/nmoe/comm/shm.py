# SPDX-License-Identifier: Apache-2.0
"""CPU processes of one machine: peers' memory is mapped, and rows, counts and flags are written into it with stores.

Everything of RDEP but the wire is real here: plan, slots, flags, epochs, waits, rounds. With `node_size` the ranks stand for
those of several nodes: stores reach the memory of the own node only, the rest is reached by puts, which are copies that
take place as late as the protocol allows (`nmoe.ops.ship`). Flags need no fence: x86-64 makes
the stores of a thread visible in their order (Intel SDM 3A, 8.2.2), and copies with non-temporal stores end in one. A
meeting of 4 ranks on 2 cores takes about 0.1 ms.
"""

import platform

import torch
import torch.distributed as dist

from nmoe.comm.alarm import Alarm
from nmoe.comm.buffers import Buffers, agree_on_buffer
from nmoe.comm.communicator import Symmetric
from nmoe.comm.descriptors import share
from nmoe.comm.waits import await_barrier
from nmoe.comm.watcher import Watcher
from nmoe.errors import EnvironmentFault

__all__ = ["Shm"]

_ORDERED = ("x86_64", "AMD64")


class Shm:
    """A `Communicator` of processes on one machine.

    Args:
        group: The ranks, over gloo. It carries names, sizes and descriptors at allocation, and nothing else.
        watcher: That of the run; None: one for these ranks alone.
        node_size: Ranks of a node, a divisor of theirs; 0: all.

    Raises:
        EnvironmentFault: The processor may reorder stores, or the ranks are not all on one machine.
    """

    device = torch.device("cpu")

    def __init__(self, group: dist.ProcessGroup, watcher: Watcher | None = None, *, node_size: int = 0) -> None:
        if platform.machine() not in _ORDERED:
            raise EnvironmentFault(
                f'parallel.comm = "shm" needs a processor that keeps the order of stores (x86-64), found {platform.machine()}; '
                'use GPUs (parallel.comm = "ipc"), or one rank'
            )
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.ranks, self.node_size = range(self.size), node_size or self.size
        self._buffers = Buffers(self._make)
        self.alarm = Alarm(group, watcher)

    def symmetric(self, name: str, *, nbytes: int) -> Symmetric:
        """See `Communicator`. Pages are taken when they are first written.

        Raises:
            ValueError: The name exists with another size.
            EnvironmentFault: On all ranks, where one of them could not allocate or map, or asked for another buffer.
        """
        return self._buffers.get(name, nbytes=nbytes)

    def _make(self, name: str, nbytes: int) -> Symmetric:
        what = f"shared buffer {name!r} of {nbytes:,} bytes"
        agree_on_buffer(name, nbytes, self._group, what=what)
        memory = share(nbytes, self._group, what=what)
        near = [peer // self.node_size == self.rank // self.node_size for peer in self.ranks]
        return Symmetric(
            local=memory[self.rank],
            peers=tuple(own if here else None for own, here in zip(memory, near, strict=True)),
            beyond=tuple(None if here else own for own, here in zip(memory, near, strict=True)),
        )

    def barrier(self) -> None:
        """See `Communicator`.

        Raises:
            PeerFault: A peer ended, failed, or did not come.
        """
        await_barrier(self.alarm)

    def close(self) -> None:
        """See `Communicator`. The memory goes when the last tensor over it does; after a fault nobody is awaited."""
        if self.alarm.awake and not self.alarm.rung:
            self.barrier()
        self.alarm.close()
        self._buffers.clear()
