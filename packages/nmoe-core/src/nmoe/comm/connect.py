# SPDX-License-Identifier: Apache-2.0
"""Which rendering a group of ranks gets: by their number, their devices and their machines, or as the config says.

======== ===================== =============
ranks    on                    rendering
======== ===================== =============
1        any device            `local`
several  CPUs of a machine     `shm`
several  GPUs of a machine     `ipc`
several  GPUs of more machines `nvshmem`
======== ===================== =============
"""

import importlib
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from nmoe.comm.communicator import Communicator
from nmoe.comm.foreign import agree
from nmoe.comm.local import Local
from nmoe.comm.watcher import Watcher
from nmoe.errors import ConfigError, EnvironmentFault

__all__ = ["Kind", "connect"]

Kind = Literal["auto", "local", "shm", "ipc", "nvshmem"]
_CLASSES = {"shm": "Shm", "ipc": "Ipc", "nvshmem": "Nvshmem"}
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def connect(
    group: dist.ProcessGroup | None, device: torch.device, *, kind: Kind = "auto", watcher: Watcher | None = None
) -> Communicator:
    """The ranks of an expert-parallel group, connected. Collective.

    Args:
        group: The ranks, over a backend that moves CPU tensors (gloo); None for a rank alone.
        device: Of this rank.
        kind: `parallel.comm`.
        watcher: That of the run, which ends all ranks when one is lost; None: one for these ranks alone.

    Raises:
        ConfigError: What the config asks for does not fit the ranks, their devices or their machines.
        EnvironmentFault: A package is missing, or the machine refuses; nmoe-doctor tries it in advance.
    """
    size = dist.get_world_size(group) if group is not None else 1
    found = _chosen(group, device, size, asked=kind)
    if found == "local":
        return Local(device)
    try:
        module = importlib.import_module(f"nmoe.comm.{found}")
    except ImportError as error:
        raise EnvironmentFault(
            f'parallel.comm = "{found}": {error}; install nmoe-core[train] on a machine with NVIDIA GPUs'
        ) from None
    rendering = getattr(module, _CLASSES[found])
    return rendering(group, watcher) if found == "shm" else rendering(group, device, watcher)


def _chosen(group: dist.ProcessGroup | None, device: torch.device, size: int, *, asked: Kind) -> Kind:
    where = f"{size} ranks on {'GPUs' if device.type == 'cuda' else 'CPUs'}"
    if group is None or size == 1:
        if asked in ("auto", "local"):
            return "local"
        raise ConfigError(
            f'parallel.comm = "{asked}" needs several expert-parallel ranks, found 1; set it to "auto", or start more ranks'
        )
    machines = len(set(agree(("", _BOOT_ID.read_bytes()), group, what="the machines of the ranks")))
    fitting = ("ipc" if machines == 1 else "nvshmem") if device.type == "cuda" else "shm"
    if fitting == "shm" and machines > 1:
        raise ConfigError(
            f"{where} of {machines} machines cannot share experts; set parallel.ep to at most the ranks of one machine"
        )
    possible = ("ipc", "nvshmem") if device.type == "cuda" else ("shm",)
    if asked == "auto":
        return fitting
    if asked not in possible:
        raise ConfigError(
            f'parallel.comm = "{asked}" does not connect {where}; expected "auto" or '
            + " or ".join(f'"{name}"' for name in possible)
        )
    return asked
