# SPDX-License-Identifier: Apache-2.0
"""Which rendering a group of ranks gets: by their number, their devices and their machines, or as the config says.

======== ============================================ =============
ranks    on                                           rendering
======== ============================================ =============
1        any device                                   `local`
several  CPUs of a machine                            `shm`
several  GPUs of a machine                            `ipc`
several  GPUs of more machines, or of smaller nodes   `nvshmem`
======== ============================================ =============

A node is the ranks of a machine, or fewer of them where `rdep.node_size` says so.
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
    group: dist.ProcessGroup | None,
    device: torch.device,
    *,
    kind: Kind = "auto",
    watcher: Watcher | None = None,
    node_size: int = 0,
) -> Communicator:
    """The ranks of an expert-parallel group, connected. Collective.

    Args:
        group: The ranks, over a backend that moves CPU tensors (gloo); None for a rank alone.
        device: Of this rank.
        kind: `parallel.comm`.
        watcher: That of the run, which ends all ranks when one is lost; None: one for these ranks alone.
        node_size: `rdep.node_size`.

    Raises:
        ConfigError: What the config asks for does not fit the ranks, their devices or their machines.
        EnvironmentFault: A package is missing, or the machine refuses; nmoe-doctor tries it in advance.
    """
    size = dist.get_world_size(group) if group is not None else 1
    where = f"{size} ranks on {'GPUs' if device.type == 'cuda' else 'CPUs'}"
    if group is None or size == 1:
        if kind in ("auto", "local"):
            return Local(device)
        raise ConfigError(
            f'parallel.comm = "{kind}" needs several expert-parallel ranks, found 1; set it to "auto", or start more ranks'
        )
    machines = agree(("", _BOOT_ID.read_bytes()), group, what="the machines of the ranks")
    nodes = _node_size(machines, asked=node_size)
    found = _chosen(device, machines=len(set(machines)), is_one_node=nodes == size, where=where, asked=kind)
    try:
        module = importlib.import_module(f"nmoe.comm.{found}")
    except ImportError as error:
        raise EnvironmentFault(
            f'parallel.comm = "{found}": {error}; install nmoe-core[train] on a machine with NVIDIA GPUs'
        ) from None
    rendering = getattr(module, _CLASSES[found])
    if found == "ipc":
        return rendering(group, device, watcher)
    return rendering(group, *([device] if found == "nvshmem" else []), watcher, node_size=nodes)


def _node_size(machines: list[bytes], *, asked: int) -> int:
    """Ranks of a node, where each rank names its machine.

    Raises:
        ConfigError: The group is not made of machines with equally many ranks each, or what is asked does not divide those.
    """
    size, here = len(machines), machines.count(machines[0])
    if any(machine != machines[rank - rank % here] for rank, machine in enumerate(machines)) or size % here:
        parts = ", ".join(str(machines.count(machine)) for machine in dict.fromkeys(machines))
        raise ConfigError(
            f"{size} expert-parallel ranks that lie on machines in unequal parts ({parts}) cannot share experts; set "
            "parallel.ep to a multiple or a divisor of a machine's ranks, and start as many on each"
        )
    if asked and here % asked:
        raise ConfigError(
            f"rdep.node_size = {asked} does not divide the {here} expert-parallel ranks of a machine; set it to 0, or to a "
            f"divisor of {here}"
        )
    return asked or here


def _chosen(device: torch.device, *, machines: int, is_one_node: bool, where: str, asked: Kind) -> Kind:
    if device.type != "cuda" and machines > 1:
        raise ConfigError(
            f"{where} of {machines} machines cannot share experts; set parallel.ep to at most the ranks of one machine"
        )
    fitting = ("ipc" if is_one_node else "nvshmem") if device.type == "cuda" else "shm"
    possible = ("ipc", "nvshmem") if device.type == "cuda" else ("shm",)
    if asked == "auto":
        return fitting
    if asked not in possible:
        raise ConfigError(
            f'parallel.comm = "{asked}" does not connect {where}; expected "auto" or '
            + " or ".join(f'"{name}"' for name in possible)
        )
    if asked == "ipc" and machines == 1 and not is_one_node:
        raise ConfigError(
            'parallel.comm = "ipc" maps the memory of all ranks of a machine and knows no smaller nodes; set rdep.node_size to 0, '
            'or parallel.comm to "nvshmem"'
        )
    return asked
