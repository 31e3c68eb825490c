# SPDX-License-Identifier: Apache-2.0
"""Transfers from the source of a token to the owners of its experts: rows forward, gradients of the output backward.

In backward the rows of x travel once more, to the places that they had in forward: keeping them would cost an owner up
to P x T_max rows a layer.
"""

from torch import Tensor

from nmoe.comm.remote import Phase
from nmoe.ops import push, receive, wire
from nmoe.ops.receive import Arrivals
from nmoe.rdep.exchange import Exchange
from nmoe.rdep.plan import Plan

__all__ = ["dispatch", "dispatch_gradient"]


def dispatch(
    x_TD: Tensor, gate_TK: Tensor, expert_TK: Tensor, plan: Plan, *, exchange: Exchange, layer: int
) -> tuple[Tensor, Arrivals]:
    """Send each row, with its choices and gates, to the owners of its experts.

    Returns:
        x_RD: the rows that arrived, in (source rank, token) order; in shared memory, so valid until the next meeting.
        What to do with them.
    """
    _send(x_TD, plan, exchange)
    push.kernels().push_records(
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
    return _arrived(x_TD, plan, exchange), arrivals


def dispatch_gradient(
    x_TD: Tensor, dout_TD: Tensor, plan: Plan, *, exchange: Exchange, layer: int
) -> tuple[Tensor, Tensor]:
    """Send each row, and the gradient of its output, the way that the row went.

    Returns:
        x_RD and dout_RD, in shared memory: valid until the next meeting.
    """
    _send(x_TD, plan, exchange)
    push.kernels().push(dout_TD, plan.sends, plan.count_PP2, rows=exchange.gradients)
    exchange.meet(layer, Phase.DISPATCH_GRADIENT)
    return _arrived(x_TD, plan, exchange), exchange.gradients.local


def _send(x_TD: Tensor, plan: Plan, exchange: Exchange) -> None:
    if exchange.wire is None:
        push.kernels().push(x_TD, plan.sends, plan.count_PP2, rows=exchange.rows)
    else:
        kernels = wire.kernels()
        kernels.push_packed(x_TD, plan.sends, plan.count_PP2, packets=exchange.rows, wire=exchange.wire)


def _arrived(like_TD: Tensor, plan: Plan, exchange: Exchange) -> Tensor:
    if exchange.wire is None:
        return exchange.rows.local
    return wire.kernels().unpack(
        exchange.rows.local, plan.count_PP2, rank=exchange.comm.rank, wire=exchange.wire, like_RD=like_TD
    )
