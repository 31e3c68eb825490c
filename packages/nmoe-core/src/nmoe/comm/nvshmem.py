# SPDX-License-Identifier: Apache-2.0
"""GPUs of several nodes: memory from NVSHMEM's symmetric heap, through nvshmem4py.

Peers of the node are written with the same stores as under `ipc`. All others get what they get by puts, which kernels start
(`nmoe.ops.ship`, `nmoe.ops.meet`). Those have run between two GPUs of one node; **no run between nodes has been made**.
"""

import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nmoe.comm.alarm import Alarm
from nmoe.comm.buffers import Buffers, agree_on_buffer
from nmoe.comm.communicator import Symmetric
from nmoe.comm.faults import tell_faults
from nmoe.comm.foreign import agree, tensor_over
from nmoe.comm.watcher import Watcher

__all__ = ["Nvshmem"]


class Nvshmem:
    """A `Communicator` over NVSHMEM's symmetric heap.

    NVSHMEM is started here, not at the first allocation: its start is a collective, and one that hides in an allocation
    deadlocks as soon as ranks allocate in another order than something else waits.

    Args:
        group: The ranks, over a backend that moves CPU tensors (gloo). It carries NVSHMEM's unique id, sizes and barriers.
        device: This rank's GPU.
        watcher: That of the run; without it the ranks have no alarm.
        node_size: Ranks of a node, a divisor of theirs: only its ranks' memory is used as mapped, all other is reached by
            puts, even where the hardware could map it; 0: all.

    Raises:
        EnvironmentFault: NVSHMEM does not start on some rank.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, watcher: Watcher | None = None, *, node_size: int = 0
    ) -> None:
        # NVLink multicast (NVLS) is not used, and setting it up can leave a node's GPUs out of service.
        os.environ["NVSHMEM_DISABLE_NVLS"] = "1"
        self._group = group
        self.alarm = Alarm(group, watcher) if watcher else None
        if self.alarm:
            tell_faults(self.alarm)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.ranks, self.node_size = range(self.size), node_size or self.size
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._own: dict[str, Any] = {}
        self._buffers = Buffers(self._make)
        with torch.cuda.device(self.device):
            self._start()

    def _start(self) -> None:
        import nvshmem.core as nvshmem
        from cuda.core import Device  # type: ignore[attr-defined]

        unique_id, error = nvshmem.get_unique_id(empty=True), ""
        if self.rank == 0:
            try:
                unique_id = nvshmem.get_unique_id()
            except Exception as fault:  # noqa: BLE001  whatever it was, the others wait to hear of it
                error = f"no unique id: {fault}"
        ids = agree((error, unique_id._data.tobytes()), self._group, what="NVSHMEM start")
        unique_id._data.view(np.uint8)[:] = np.frombuffer(ids[0], dtype=np.uint8)
        Device(self.device.index).set_current()
        error = ""
        try:
            nvshmem.init(
                device=Device(self.device.index),
                uid=unique_id,
                rank=self.rank,
                nranks=self.size,
                initializer_method="uid",
            )
        except Exception as fault:  # noqa: BLE001
            error = f"{fault}; NVSHMEM_DEBUG=INFO shows why, nmoe-doctor tries it alone"
        agree((error, b""), self._group, what="NVSHMEM start")
        self.version = nvshmem.get_version().libnvshmem_version
        """Of the library that is loaded."""

    def symmetric(self, name: str, *, nbytes: int) -> Symmetric:
        """See `Communicator`. The heap grows as it is used, so its size need not be announced.

        Raises:
            ValueError: The name exists with another size.
            EnvironmentFault: On all ranks, where the ranks asked for different buffers or memory ran out.
        """
        return self._buffers.get(name, nbytes=nbytes)

    def _make(self, name: str, nbytes: int) -> Symmetric:
        import nvshmem.core as nvshmem
        from nvshmem.bindings import nvshmem as bindings  # type: ignore[attr-defined]

        what = f"NVSHMEM buffer {name!r} of {nbytes:,} bytes"
        agree_on_buffer(name, nbytes, self._group, what=what)
        with torch.cuda.device(self.device):
            error = ""
            try:
                self._own[name] = nvshmem.buffer(max(nbytes, 1))
            except Exception as fault:  # noqa: BLE001
                error = str(fault)
            agree((error, b""), self._group, what=what)
            base = int(self._own[name].handle)
            node = [peer for peer in self.ranks if peer // self.node_size == self.rank // self.node_size]
            addresses = {peer: int(bindings.ptr(base, peer)) for peer in node}
            local = tensor_over(base, nbytes, self.device).zero_()
            torch.cuda.synchronize()
        unmapped = [peer for peer, address in addresses.items() if not address]
        error = (
            f"cannot map the memory of rank {unmapped[0]}, which is of its node ({self.node_size} ranks); set rdep.node_size to "
            "the ranks whose GPUs reach each other (nmoe-doctor), 1 for none"
            if unmapped
            else ""
        )
        agree((error, b""), self._group, what=what)  # and nobody writes before everybody's memory is zero
        peers = (tensor_over(addresses[p], nbytes, self.device) if p in addresses else None for p in self.ranks)
        return Symmetric(local=local, peers=tuple(peers))

    def barrier(self) -> None:
        """See `Communicator`."""
        dist.barrier(self._group)

    def close(self) -> None:
        """See `Communicator`. No tensor over the memory may be used afterwards, and NVSHMEM does not start again here."""
        import nvshmem.core as nvshmem

        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            self.barrier()
            for own in self._own.values():
                nvshmem.free(own)
            nvshmem.finalize()
        self._own.clear()
        self._buffers.clear()
