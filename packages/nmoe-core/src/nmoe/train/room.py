# SPDX-License-Identifier: Apache-2.0
"""Whether memory can do: asked before anything is made, and answered in the same words where it ran out nevertheless."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nmoe import arch
from nmoe.config import Config
from nmoe.data.loader import AHEAD
from nmoe.errors import EnvironmentFault, is_out_of_memory
from nmoe.train.environment import world_of
from nmoe.train.memory import Memory, plan_memory
from nmoe.train.ranks import Ranks
from nmoe.train.throughput import host_memory_bytes
from nmoe.words import size

__all__ = ["batch_bytes", "planned_memory", "refuse_too_large", "telling_of_memory"]

_HOPELESS = {"cuda": 1.25, "cpu": 1.05}
"""Times the memory there is, which no plan is so wrong that it would do. A GPU says so itself where it is less; on a CPU
the kernel ends the process without a word."""
_ROW_BYTES, _POSITION_BYTES = 400, 32
"""Of a row of a step on every rank, its place and its name; of a position of this rank's rows, four integers."""


def batch_bytes(config: Config, *, ranks: int = 1) -> int:
    """Host memory of the steps that a rank has read: one that it is at, one that is read, and those ahead."""
    rows = config.train.batch_size
    here = -(-rows // ranks) * config.data.seq_len * _POSITION_BYTES
    return (AHEAD + 2) * (rows * _ROW_BYTES + here)


def refuse_too_large(config: Config, ranks: Ranks) -> None:
    """Raises where the plan says that memory cannot do.

    Raises:
        EnvironmentFault: what is needed, what there is, and what to change.
    """
    sharing, host = world_of(os.environ)[3], host_memory_bytes()
    read = batch_bytes(config, ranks=ranks.size)
    if read * sharing > host:
        raise EnvironmentFault(
            f"train.batch_size = {config.train.batch_size} of data.seq_len = {config.data.seq_len}: {_times(sharing, read)} are "
            f"needed for {AHEAD + 2} steps that are read ahead, but the machine has {size(host)}; lower one of the two"
        )
    there, shared, what = _memory_of(ranks)
    plan = plan_memory(config, kernels=arch.current().target is not None, ranks=ranks.size)  # without what can go
    if plan.peak * shared > _HOPELESS[ranks.device.type] * there:
        raise EnvironmentFault(
            f"{_needed(plan, shared)}, but {what} has {size(there)}; {_advice(plan, there / shared)}"
        )


@contextmanager
def telling_of_memory(config: Config, ranks: Ranks) -> Iterator[None]:
    """Says of memory that runs out, in spite of the plan, what was planned and what there is.

    Raises:
        EnvironmentFault: it did.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        there, shared, what = _memory_of(ranks)
        plan, taken = planned_memory(config, ranks), ""
        if ranks.device.type == "cuda":
            free, ours = torch.cuda.mem_get_info(ranks.device)[0], torch.cuda.memory_reserved(ranks.device)
            taken = f", {size(ours)} of it taken by this process, {size(max(0, there - free - ours))} by others"
        raise EnvironmentFault(
            f"out of memory: by plan {_needed(plan, shared)}; {what} has {size(there)}{taken}; {_advice(plan, there / shared)}"
        ) from None


def planned_memory(config: Config, ranks: Ranks) -> Memory:
    """The plan of this run on this device, with what is kept because there is room."""
    memory = _memory_of(ranks)[0] if ranks.device.type == "cuda" else 0
    return plan_memory(config, kernels=arch.current().target is not None, ranks=ranks.size, memory=memory)


def _memory_of(ranks: Ranks) -> tuple[int, int, str]:
    """Bytes of what this rank computes in, how many ranks share them, and its name."""
    if ranks.device.type == "cuda":
        return torch.cuda.mem_get_info(ranks.device)[1], 1, "the GPU"
    return host_memory_bytes(), world_of(os.environ)[3], "the machine"


def _times(sharing: int, needed: int) -> str:
    return f"{sharing} x {size(needed)}" if sharing > 1 else size(needed)


def _needed(plan: Memory, sharing: int) -> str:
    return (
        f"{_times(sharing, plan.peak)} are needed in the {plan.moment} ({size(plan.state)} of them for parameters, gradients and "
        "moments)"
    )


def _advice(plan: Memory, there: float) -> str:
    if plan.state > there:
        return "make the model smaller, or use more GPUs"
    return "lower train.micro_batch_size or data.seq_len, set train.recompute, or use more GPUs"
