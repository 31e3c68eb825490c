# SPDX-License-Identifier: Apache-2.0
"""Transfers from the source of a token to the owners of its experts: rows forward, gradients of the output backward.

In backward the rows of x travel once more, to the places that they had in forward: keeping them would cost an owner up
to P x T_max rows a layer.
"""

from torch import Tensor

from nmoe.comm.remote import Phase
from nmoe.ops import push, receive
from nmoe.ops.receive import Arrivals
from nmoe.rdep.exchange import Exchange
from nmoe.rdep.plan import Plan

__all__ = ["dispatch", "dispatch_gradient"]


def dispatch(
    x_TD: Tensor, gate_TK: Tensor, expert_TK: Tensor, plan: Plan, *, exchange: Exchange, layer: int
) -> tuple[Tensor, Arrivals]:
    """Send each row, with its choices and gates, to the owners of its experts.

    Returns:
        x_RD: the rows that arrived, in (source rank, token) order, in shared memory: valid until the next meeting.
        What to do with them.
    """
    kernels = push.kernels()
    kernels.push(x_TD, plan.sends, plan.count_PP2, rows=exchange.rows)
    kernels.push_records(
        expert_TK,
        gate_TK,
        plan.sends,
        plan.count_PP2,
        exchange.board,
        experts_per_rank=exchange.experts_per_rank,
        records=exchange.records,
    )
    exchange.meet(layer, Phase.DISPATCH)
    arrivals = receive.kernels().receive(
        exchange.records.local,
        plan.count_PP2,
        exchange.board,
        gate_like=gate_TK,
        top_k=gate_TK.shape[1],
        layer=layer,
    )
    return exchange.rows.local, arrivals


def dispatch_gradient(
    x_TD: Tensor, dout_TD: Tensor, plan: Plan, *, exchange: Exchange, layer: int
) -> tuple[Tensor, Tensor]:
    """Send each row, and the gradient of its output, the way that the row went.

    Returns:
        x_RD and dout_RD, in shared memory: valid until the next meeting.
    """
    kernels = push.kernels()
    kernels.push(x_TD, plan.sends, plan.count_PP2, rows=exchange.rows)
    kernels.push(dout_TD, plan.sends, plan.count_PP2, rows=exchange.gradients)
    exchange.meet(layer, Phase.DISPATCH_GRADIENT)
    return exchange.rows.local, exchange.gradients.local
