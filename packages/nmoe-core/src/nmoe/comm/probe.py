# SPDX-License-Identifier: Apache-2.0
"""Tries the ways by which ranks reach each other, each in a process of its own, since one that is broken may not return.

`python -m nmoe.comm.probe open DEVICE HANDLE BYTES` maps a CUDA IPC handle, `... nvshmem DEVICE` starts NVSHMEM with one
rank; each prints one JSON object. `nmoe-doctor` calls them through the functions below.
"""

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from nmoe.errors import EnvironmentFault

__all__ = ["available_memory", "copy_bandwidth", "map_shared_memory", "open_in_child", "start_nvshmem_in_child"]

_BYTES = 1 << 20
_OURS, _THEIRS = 0x5A, 0xA5
_LIMIT_S = 120


def _child(*arguments: object) -> dict[str, Any]:
    """Run this module as a program; its answer."""
    command = [sys.executable, "-m", "nmoe.comm.probe", *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise EnvironmentFault(f"no answer within {_LIMIT_S} s") from None
    if done.returncode:
        last = (done.stderr.strip() or f"ended with status {done.returncode}").splitlines()[-1]
        raise EnvironmentFault(last[:300])
    return json.loads(done.stdout.splitlines()[-1])


def open_in_child(owner: int, opener: int) -> None:
    """Allocate on one GPU, let a child map it for another (or the same) GPU, read what is there and write into it.

    Args:
        owner: Index of the GPU whose memory it is.
        opener: Index of the GPU that the child uses.

    Raises:
        EnvironmentFault: It cannot be mapped, or what was read or written is not what was sent.
    """
    import torch
    from cuda.bindings import runtime  # type: ignore[attr-defined]

    from nmoe.comm.foreign import tensor_over
    from nmoe.comm.ipc import allocate, export_handle

    with torch.cuda.device(owner):
        address = allocate(_BYTES)
        try:
            memory = tensor_over(address, _BYTES, torch.device("cuda", owner))
            memory.fill_(_OURS)
            torch.cuda.synchronize()
            answer = _child("open", opener, export_handle(address).hex(), _BYTES)
            if answer["read"] != _OURS * _BYTES or int(memory.sum()) != _THEIRS * _BYTES:
                raise EnvironmentFault("mapped, but what arrives is not what was written")
            del memory
        finally:
            runtime.cudaFree(address)


def _open(device: int, handle: str, nbytes: int) -> dict[str, Any]:
    import torch

    from nmoe.comm.foreign import tensor_over
    from nmoe.comm.ipc import open_handle

    torch.cuda.set_device(device)
    torch.cuda.synchronize()
    memory = tensor_over(open_handle(bytes.fromhex(handle)), nbytes, torch.device("cuda", device))
    read = int(memory.sum())
    memory.fill_(_THEIRS)
    torch.cuda.synchronize()
    return {"read": read}


def start_nvshmem_in_child(device: int) -> str:
    """Start NVSHMEM with one rank, take memory from its heap, end it; its version.

    Raises:
        EnvironmentFault: It does not start, or its memory cannot be written.
    """
    return str(_child("nvshmem", device)["version"])


def _nvshmem(device: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from nmoe.comm.nvshmem import Nvshmem

    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    comm = Nvshmem(dist.group.WORLD, torch.device("cuda", device))  # type: ignore[arg-type]
    memory = comm.symmetric("probe", nbytes=_BYTES)
    memory.local.fill_(_OURS)
    if int(memory.local.sum()) != _OURS * _BYTES:
        raise EnvironmentFault("its memory does not keep what is written")
    version = comm.version
    comm.close()
    dist.destroy_process_group()
    return {"version": version}


def copy_bandwidth(source: int, target: int, *, nbytes: int = 256 << 20, repeats: int = 10) -> float:
    """Bytes a second from one GPU's memory to another's by the copy engine; not counting those of a warm-up."""
    import torch

    sent = torch.zeros(nbytes, dtype=torch.uint8, device=f"cuda:{source}")
    got = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{target}")
    with torch.cuda.device(source):
        got.copy_(sent)
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            got.copy_(sent)
        end.record()
        torch.cuda.synchronize()
        return nbytes * repeats / (begin.elapsed_time(end) * 1e-3)


def map_shared_memory() -> int:
    """Map a page as CPU ranks share it and write it; bytes of memory that are available.

    Raises:
        OSError: It cannot be made, mapped or written.
    """
    descriptor = os.memfd_create("nmoe-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        with mmap.mmap(descriptor, mmap.PAGESIZE) as memory:
            memory[0] = _OURS
    finally:
        os.close(descriptor)
    return available_memory()


def available_memory() -> int:
    """Of the machine, or what its control group leaves, whichever is less."""
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(facts["MemAvailable"].split()[0]) * 1024
    limit, used = (Path("/sys/fs/cgroup") / f"memory.{name}" for name in ("max", "current"))
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        available = min(available, int(limit.read_text()) - int(used.read_text()))
    return available


def _main(arguments: list[str]) -> int:
    try:
        answer = (
            _open(int(arguments[1]), arguments[2], int(arguments[3]))
            if arguments[0] == "open"
            else _nvshmem(int(arguments[1]))
        )
    except Exception as error:  # noqa: BLE001  one line for the parent, whatever it was
        sys.stderr.write(" ".join(f"{type(error).__name__}: {error}".split()) + "\n")
        return 1
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)  # the driver's and NVSHMEM's own ends are not what is tried here


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
