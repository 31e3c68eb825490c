# SPDX-License-Identifier: Apache-2.0
"""Who owns which expert, and so where each row goes; made once a forward and kept for backward.

Experts lie on ranks in blocks: rank p owns [p * E / P, (p + 1) * E / P). A row travels once to each rank that owns one
of its K experts, however many of them that rank owns.
"""

from dataclasses import dataclass

from torch import Tensor

from nmoe.comm.remote import Phase
from nmoe.ops import plan as plan_op
from nmoe.ops.plan import Sends
from nmoe.rdep.exchange import Exchange

__all__ = ["Plan", "make_plan"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The way of every row of one forward."""

    sends: Sends
    """Rows of this rank."""
    count_PP2: Tensor
    """int32: rows and assignments from each rank to each; a copy, because the next forward overwrites the table."""


def make_plan(expert_TK: Tensor, *, exchange: Exchange, layer: int) -> Plan:
    """Plan the way of T rows to the owners of their K experts, and learn the plans of all ranks.

    Args:
        expert_TK: int32 ids among the experts of the exchange; -1 where a choice is none of them.
        exchange: Between the owners.
        layer: For messages.
    """
    sends = plan_op.kernels().plan(expert_TK, experts_per_rank=exchange.experts_per_rank, count=exchange.count)
    exchange.announce()
    exchange.meet(layer, Phase.COUNTS)
    return Plan(sends=sends, count_PP2=exchange.count.local.clone())
