# SPDX-License-Identifier: Apache-2.0
"""Who owns which expert, and so where each row goes; made once a forward and kept for backward.

Experts lie on ranks in blocks: rank p owns [p * E / P, (p + 1) * E / P). A row travels once to each rank that owns one
of its K experts, however many of them that rank owns.
"""

from dataclasses import dataclass

from torch import Tensor

from nmoe.comm.communicator import Communicator
from nmoe.errors import ConfigError

__all__ = ["Plan", "make_plan", "owned_experts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Destination of each row of one forward."""

    expert_TK: Tensor
    """int32: global id of each chosen expert."""
    num_local_experts: int
    """X = E / P."""
    num_slots: int
    """S: assignments that this rank must be able to hold."""


def owned_experts(num_experts: int, comm: Communicator) -> range:
    """Global ids of the experts of this rank.

    Raises:
        ConfigError: The ranks do not divide the experts.
    """
    if num_experts % comm.size:
        raise ConfigError(f"moe.num_experts = {num_experts} is not divisible by the {comm.size} expert-parallel ranks")
    share = num_experts // comm.size
    return range(comm.rank * share, (comm.rank + 1) * share)


def make_plan(expert_TK: Tensor, *, owned: range) -> Plan:
    """Plan the way of T rows to the owners of their K experts.

    Args:
        expert_TK: int32 global expert ids.
        owned: Experts of this rank; here all of them.
    """
    return Plan(expert_TK=expert_TK, num_local_experts=len(owned), num_slots=expert_TK.numel())
