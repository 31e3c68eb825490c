# SPDX-License-Identifier: Apache-2.0
"""What a launcher says of a rank in its environment: PyTorch's variables, and Slurm's as those. No process group, no device."""

import re
from collections.abc import Mapping

from nmoe.errors import EnvironmentFault

__all__ = ["check_meeting", "first_host", "nodes_of", "slurm_environment", "threads_of", "world_of"]

_FIRST_PORT, _PORTS = 20000, 12768
"""Below the ports that Linux gives to outgoing connections (32768 and up)."""
_HELP = "start with torchrun or srun, which set it, or unset it"


def world_of(environment: Mapping[str, str]) -> tuple[int, int, int, int]:
    """(rank, ranks, rank in the node, ranks of the node) as a launcher states them; (0, 1, 0, 1) without one.

    Raises:
        EnvironmentFault: one of them is no number, or the rank is not below the ranks.
    """
    rank, size = _number(environment, "RANK", 0), _number(environment, "WORLD_SIZE", 1)
    if rank >= size:
        raise EnvironmentFault(f"RANK={rank} in the environment with WORLD_SIZE={size}: expected a lower one; {_HELP}")
    return rank, size, _number(environment, "LOCAL_RANK", rank), _number(environment, "LOCAL_WORLD_SIZE", size)


def check_meeting(environment: Mapping[str, str]) -> None:
    """Looks for what PyTorch needs beside WORLD_SIZE for the ranks to find each other.

    Raises:
        EnvironmentFault: something of it is missing, or cannot be.
    """
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        if not environment.get(name):
            size = environment.get("WORLD_SIZE")
            raise EnvironmentFault(f"{name} is missing in the environment beside WORLD_SIZE={size}; {_HELP}")
    if not 0 < (port := _number(environment, "MASTER_PORT", 0)) < 1 << 16:
        raise EnvironmentFault(f"MASTER_PORT={port} in the environment: expected 1 to 65535; {_HELP}")


def nodes_of(environment: Mapping[str, str]) -> int:
    """Nodes that torchrun has joined; 1 without it."""
    return _number(environment, "GROUP_WORLD_SIZE", 1)


def threads_of(environment: Mapping[str, str]) -> int | None:
    """The first of OMP_NUM_THREADS, which OpenMP reads as a list by depth; None where nothing is said.

    Raises:
        EnvironmentFault: it is no number, or 0: OpenMP would do as if it were not there.
    """
    text = environment.get("OMP_NUM_THREADS", "").strip()
    if text and not re.fullmatch(r"[1-9][0-9]{0,8}(\s*,.*)?", text):
        raise EnvironmentFault(f"OMP_NUM_THREADS={text} in the environment: expected a whole number > 0; or unset it")
    return int(text.partition(",")[0]) if text else None


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    if not re.fullmatch("[0-9]{1,9}", text):
        raise EnvironmentFault(f"{name}={text} in the environment: expected a whole number; {_HELP}")
    return int(text)


def slurm_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT of this task of a job step.

    Args:
        environment: of the process. What it holds of these variables already is left as it is.

    Returns:
        Empty where torchrun, or nobody, started the process, and for a step of one task, whose process starts the ranks of
        its node itself.

    Raises:
        EnvironmentFault: a variable that srun sets is missing, or is not as Slurm writes it.
    """
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS", 1)
    if tasks == 1 or "RANK" in environment:
        return {}
    port = (
        _FIRST_PORT + (_number(environment, "SLURM_JOB_ID", 0) * 31 + _number(environment, "SLURM_STEP_ID", 0)) % _PORTS
    )
    names = ("PROCID", "LOCALID", "NODEID", "STEP_TASKS_PER_NODE", "STEP_NODELIST")
    if missing := [name for name in names if not environment.get(f"SLURM_{name}")]:
        raise EnvironmentFault(
            f"SLURM_{missing[0]} is not in the environment of a task of {tasks}: srun sets it; pass it on to the trainer, "
            "or start with torchrun"
        )
    found = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(_tasks_of_node(environment["SLURM_STEP_TASKS_PER_NODE"], environment["SLURM_NODEID"])),
        "MASTER_ADDR": first_host(environment["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": str(port),
    }
    return {name: environment.get(name, value) for name, value in found.items()}


def _tasks_of_node(counts: str, node: str) -> int:
    """Of a list as Slurm writes it: `8(x2),4` is 8, 8 and 4 tasks on three nodes."""
    every = [int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts) for _ in range(int(times or 1))]
    if not node.isdecimal() or int(node) >= len(every):
        raise EnvironmentFault(
            f"SLURM_NODEID={node} with SLURM_STEP_TASKS_PER_NODE={counts}: expected one of its nodes"
        )
    return every[int(node)]


def first_host(nodes: str) -> str:
    """The first of a list as Slurm writes it: `gpu[03-07,12],login` is `gpu03`."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodes)
    assert match, nodes
    return match[1] + (match[2] or "")
