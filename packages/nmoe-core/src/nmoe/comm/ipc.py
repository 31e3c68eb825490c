# SPDX-License-Identifier: Apache-2.0
"""GPUs of one node, each rank a process: peers' memory is mapped by CUDA IPC and written with plain stores over NVLink.

The memory comes from a `cudaMalloc` of its own, never from PyTorch's allocator: that one hands out pieces of larger
blocks, may move them (`expandable_segments`), and its handles then open nothing. Handles are exchanged once, at
allocation; two ranks on one GPU work too, which is how the kernels are tested where there is no second one.
"""

import ctypes
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cuda.bindings import runtime  # type: ignore[attr-defined]

from nmoe.comm.alarm import Alarm
from nmoe.comm.buffers import Buffers
from nmoe.comm.communicator import Symmetric
from nmoe.comm.faults import tell_faults
from nmoe.comm.foreign import agree, tensor_over
from nmoe.comm.waits import await_barrier
from nmoe.comm.watcher import Watcher
from nmoe.errors import EnvironmentFault

__all__ = ["Ipc", "allocate", "export_handle", "open_handle"]

_PAGE = 2 << 20
"""Whole pages, in bytes: the driver maps nothing smaller, and what shared a page would be mapped with it."""
_HANDLE_BYTES = 64
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _CudaFault(EnvironmentFault):
    """A call of the CUDA runtime failed."""


def _checked(call: str, result: tuple[Any, ...]) -> Any:
    """The value of a call of the CUDA runtime."""
    error, *values = result
    if error != runtime.cudaError_t.cudaSuccess:
        raise _CudaFault(f"{call} failed: {error.name}")
    return values[0] if values else None


def allocate(nbytes: int) -> int:
    """Address of that many zeroed bytes on the current device; freed by `cudaFree`."""
    rounded = -(-max(nbytes, 1) // _PAGE) * _PAGE
    address = int(_checked(f"cudaMalloc of {rounded / 2**20:.0f} MiB", runtime.cudaMalloc(rounded)))
    _checked("cudaMemset", runtime.cudaMemset(address, 0, rounded))
    _checked("cudaDeviceSynchronize", runtime.cudaDeviceSynchronize())
    return address


def export_handle(address: int) -> bytes:
    """What another process needs to map an allocation."""
    handle = _checked("cudaIpcGetMemHandle", runtime.cudaIpcGetMemHandle(address))
    return ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)


def open_handle(payload: bytes) -> int:
    """Map another process's allocation for the current device; its address here. Undone by `cudaIpcCloseMemHandle`."""
    handle = runtime.cudaIpcMemHandle_t()
    ctypes.memmove(handle.getPtr(), payload, _HANDLE_BYTES)
    return int(
        _checked(
            "cudaIpcOpenMemHandle",
            runtime.cudaIpcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess),
        )
    )


class Ipc:
    """A `Communicator` of processes on one node, one GPU each (or, for tests, several on one).

    Args:
        group: The ranks, over a backend that moves CPU tensors (gloo). It carries handles and barriers, never rows.
        device: This rank's GPU.
        watcher: That of the run; None: one for these ranks alone.

    Raises:
        EnvironmentFault: The ranks are not all on one machine.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, watcher: Watcher | None = None) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.ranks, self.node_size = range(self.size), self.size
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._own: dict[str, int] = {}
        self._mapped: list[int] = []
        self._buffers = Buffers(self._make)
        machines = agree(("", _BOOT_ID.read_bytes()), group, what="CUDA IPC")
        strangers = [rank for rank, machine in enumerate(machines) if machine != machines[0]]
        if strangers:
            raise EnvironmentFault(
                f"CUDA IPC: rank {strangers[0]} runs on another machine than rank 0; it maps memory inside one machine only: "
                'set parallel.ep to the GPUs of a node, or parallel.comm = "nvshmem"'
            )
        self.alarm = Alarm(group, watcher)
        tell_faults(self.alarm)

    def symmetric(self, name: str, *, nbytes: int) -> Symmetric:
        """See `Communicator`.

        Raises:
            ValueError: The name exists with another size.
            EnvironmentFault: On all ranks, where one of them could not allocate or map, or asked for another buffer.
        """
        return self._buffers.get(name, nbytes=nbytes)

    def _make(self, name: str, nbytes: int) -> Symmetric:
        what = f"CUDA IPC buffer {name!r} of {nbytes:,} bytes"
        with torch.cuda.device(self.device):  # a mapping is made for the device that is current
            error, handle = "", b""
            try:
                self._own[name] = allocate(nbytes)
                handle = export_handle(self._own[name])
            except _CudaFault as fault:
                error = str(fault)
            request = f"{name} {nbytes}\n".encode()
            told = agree((error, request + handle), self._group, what=what)
            error, addresses = "", list[int]()
            for peer, payload in enumerate(told):
                if not payload.startswith(request):
                    asked = payload[:-_HANDLE_BYTES].decode().strip()
                    error = error or f"asks for {name} {nbytes} where rank {peer} asks for {asked} (name, bytes)"
                    continue
                try:
                    addresses.append(self._own[name] if peer == self.rank else open_handle(payload[len(request) :]))
                except _CudaFault as fault:
                    error = error or f"memory of rank {peer}: {fault}; nmoe-doctor says which GPUs reach each other"
            self._mapped += [address for address in addresses if address != self._own[name]]
            agree((error, b""), self._group, what=what)
        peers = tuple(tensor_over(address, nbytes, self.device) for address in addresses)
        return Symmetric(local=peers[self.rank], peers=peers)

    def barrier(self) -> None:
        """See `Communicator`.

        Raises:
            PeerFault: A peer ended, failed, or did not come.
        """
        await_barrier(self.alarm)

    def close(self) -> None:
        """See `Communicator`. No tensor over the memory may be used afterwards; after a fault the process's end frees it."""
        if self.alarm.rung or not self.alarm.awake:
            self.alarm.close()
            return
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            self.barrier()  # nobody writes any more
            for address in self._mapped:
                _checked("cudaIpcCloseMemHandle", runtime.cudaIpcCloseMemHandle(address))
            self.barrier()  # nobody has it mapped any more
            for address in self._own.values():
                _checked("cudaFree", runtime.cudaFree(address))
        self.alarm.close()
        self._mapped.clear()
        self._own.clear()
        self._buffers.clear()
