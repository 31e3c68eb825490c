# SPDX-License-Identifier: Apache-2.0
"""What a launcher says of a rank in its environment: PyTorch's variables, and Slurm's as those. No process group, no device."""

import re
from collections.abc import Mapping

from nmoe.errors import EnvironmentFault

__all__ = ["first_host", "slurm_environment", "world_of"]

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
