# SPDX-License-Identifier: Apache-2.0
"""Transfers from the source of a token to the owners of its experts: rows forward, gradients of the output backward.

In backward the rows of x travel once more, to the places that they had in forward: keeping them would cost an owner up
to P x T_max rows a layer.

Rows arrive as they travel, maybe in few bits: they are sent on as they are (`nmoe.rdep.many_nodes`), and `opened` where they
are computed with.
"""

from dataclasses import replace

import torch
from torch import Tensor

from nmoe.comm.remote import Phase
from nmoe.ops import push, receive, wire
from nmoe.ops.receive import Arrivals
from nmoe.rdep.exchange import Exchange
from nmoe.rdep.plan import Plan

__all__ = ["dispatch", "dispatch_gradient", "opened"]


def dispatch(
    x_TD: Tensor, gate_TK: Tensor, expert_TK: Tensor, plan: Plan, *, exchange: Exchange, layer: int
) -> tuple[Tensor, Arrivals]:
    """Send each row, with its choices and gates, to the owners of its experts.

    Args:
        x_TD: Rows, or what a dispatch with the same format returned.
        gate_TK: Gates.
        expert_TK: Choices.
        plan: The way.
        exchange: Between the owners.
        layer: For messages.

    Returns:
        The rows that arrived, as they travelled, in (source rank, token) order; in shared memory, so valid until the next
        meeting of this exchange. What to do with them.
    """
    _send(x_TD, plan, exchange)
    push.kernels().push_records(
        expert_TK,
        gate_TK,
        plan.sends,
        exchange.places(plan.count_PP2),
        exchange.board,
        experts_per_rank=exchange.experts_per_rank,
        records=exchange.records,
    )
    exchange.ship_out(plan.count_PP2, exchange.rows, exchange.records)
    exchange.meet(layer, Phase.DISPATCH)
    arrivals = receive.kernels().receive(
        exchange.records.local,
        plan.count_PP2,
        exchange.board,
        gate_like=gate_TK,
        top_k=gate_TK.shape[1],
        layer=layer,
    )
    if exchange.has_far:
        arrivals = replace(arrivals, home_R3=_by_arrival(arrivals.home_R3, plan.count_PP2, exchange.comm.rank))
    return exchange.rows.local, arrivals


def dispatch_gradient(
    x_TD: Tensor, dout_TD: Tensor, plan: Plan, *, exchange: Exchange, layer: int
) -> tuple[Tensor, Tensor]:
    """Send each row, and the gradient of its output, the way that the row went.

    Returns:
        The rows as they travelled, and dout_RD; in shared memory, so valid until the next meeting of this exchange.
    """
    _send(x_TD, plan, exchange)
    push.kernels().push(dout_TD, plan.sends, exchange.places(plan.count_PP2), rows=exchange.gradients)
    exchange.ship_out(plan.count_PP2, exchange.rows, exchange.gradients)
    exchange.meet(layer, Phase.DISPATCH_GRADIENT)
    return exchange.rows.local, exchange.gradients.local


def opened(rows: Tensor, plan: Plan, *, exchange: Exchange, like: Tensor) -> Tensor:
    """x_RD in the dtype and width of ``like``, of rows as they travelled."""
    if exchange.wire is None:
        return rows
    return wire.kernels().unpack(rows, plan.count_PP2, rank=exchange.comm.rank, wire=exchange.wire, like_RD=like)


def _send(x_TD: Tensor, plan: Plan, exchange: Exchange) -> None:
    places_PP2 = exchange.places(plan.count_PP2)
    if x_TD.dtype == exchange.rows.local.dtype:
        push.kernels().push(x_TD, plan.sends, places_PP2, rows=exchange.rows)
    else:
        assert exchange.wire is not None
        kernels = wire.kernels()
        kernels.push_packed(x_TD, plan.sends, places_PP2, packets=exchange.rows, wire=exchange.wire)


def _by_arrival(home_R3: Tensor, count_PP2: Tensor, rank: int) -> Tensor:
    """The way home of rows whose results leave as one block a source: its rank, the row's number among its rows, block 0."""
    source_R = home_R3[:, 0]
    count_P = count_PP2[:, rank, 0]
    first_P = count_P.cumsum(dim=0) - count_P
    number_R = torch.arange(source_R.shape[0], device=source_R.device) - first_P[source_R.clamp(min=0).to(torch.int64)]
    home_R3 = torch.stack([source_R, number_R.to(torch.int32), torch.zeros_like(source_R)], dim=1)
    return torch.where((source_R >= 0).unsqueeze(1), home_R3, -1)
