# SPDX-License-Identifier: Apache-2.0
"""A rank that `srun` started: Slurm's variables as those of PyTorch. No process group, no device."""

import re
from collections.abc import Mapping

__all__ = ["slurm_environment"]

_FIRST_PORT, _PORTS = 20000, 12768
"""Below the ports that Linux gives to outgoing connections (32768 and up)."""


def slurm_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT of this task of a job step.

    Args:
        environment: of the process. What it holds of these variables already is left as it is.

    Returns:
        Empty where torchrun, or nobody, started the process, and for a step of one task, whose process starts the ranks of
        its node itself.
    """
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", 1))
    if tasks == 1 or "RANK" in environment:
        return {}
    port = _FIRST_PORT + (int(environment["SLURM_JOB_ID"]) * 31 + int(environment.get("SLURM_STEP_ID", 0))) % _PORTS
    found = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(int(re.split(r"\D", environment["SLURM_STEP_TASKS_PER_NODE"])[0])),
        "MASTER_ADDR": first_host(environment["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": str(port),
    }
    return {name: environment.get(name, value) for name, value in found.items()}


def first_host(nodes: str) -> str:
    """The first of a list as Slurm writes it: `gpu[03-07,12],login` is `gpu03`."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodes)
    assert match, nodes
    return match[1] + (match[2] or "")
