# SPDX-License-Identifier: Apache-2.0
"""The routed experts where several ranks share them: plan, dispatch, group, experts, return.

Kept for backward are the rows that this rank sent (not those that it received: they travel again), the records, and,
unless `keep` is off, the pre-activations of the first round of assignments. Later rounds, which only an overloaded owner
has, are computed again.
"""

import torch
from torch import Tensor

from nmoe.ops.plan import Sends
from nmoe.ops.receive import Arrivals
from nmoe.rdep.combine import collect, collect_gradient
from nmoe.rdep.dispatch import dispatch, dispatch_gradient, opened
from nmoe.rdep.exchange import Exchange
from nmoe.rdep.owner import serve, serve_gradient
from nmoe.rdep.plan import Plan, make_plan

__all__ = ["ExpertsAcross"]


class ExpertsAcross(torch.autograd.Function):
    """out_TD of this rank's T rows and their choices among the experts of all ranks. All ranks call it, in one order."""

    @staticmethod
    def forward(
        ctx,
        x_TD: Tensor,
        gate_TK: Tensor,
        w13_X2FD: Tensor,
        w2_XDF: Tensor,
        expert_TK: Tensor,
        keep: bool,
        exchange: Exchange,
        layer: int,
    ) -> Tensor:
        plan = make_plan(expert_TK, exchange=exchange, layer=layer)
        rows, arrivals = dispatch(x_TD, gate_TK, expert_TK, plan, exchange=exchange, layer=layer)
        x_RD = opened(rows, plan, exchange=exchange, like=x_TD)
        rounds = exchange.rounds_for(plan.count_PP2)
        preact_S2F = serve(x_RD, arrivals, w13_X2FD, w2_XDF, rounds, exchange=exchange)
        out_TD = collect(plan, exchange=exchange, layer=layer)

        kept = x_TD, preact_S2F if keep else None, w13_X2FD, w2_XDF, expert_TK
        way = plan.sends.row_TP, plan.count_PP2, arrivals.expert_RK, arrivals.gate_RK, arrivals.home_R3
        ctx.save_for_backward(*kept, *way)
        ctx.exchange, ctx.layer, ctx.rounds = exchange, layer, rounds
        return out_TD

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None, None, None, None]:
        x_TD, preact_S2F, w13_X2FD, w2_XDF, expert_TK, *way = ctx.saved_tensors
        row_TP, count_PP2, expert_RK, gate_RK, home_R3 = way
        exchange, layer = ctx.exchange, ctx.layer
        plan = Plan(sends=Sends(row_TP=row_TP, top_k=expert_TK.shape[1]), count_PP2=count_PP2)
        arrivals = Arrivals(expert_RK=expert_RK, gate_RK=gate_RK, home_R3=home_R3)

        dout_TD = grad_outputs[0].contiguous()
        rows, dout_RD = dispatch_gradient(x_TD, dout_TD, plan, exchange=exchange, layer=layer)
        x_RD = opened(rows, plan, exchange=exchange, like=x_TD)
        dw13_X2FD, dw2_XDF = serve_gradient(
            dout_RD, x_RD, preact_S2F, arrivals, w13_X2FD, w2_XDF, ctx.rounds, exchange=exchange
        )
        dx_TD, dgate_TK = collect_gradient(expert_TK, plan, exchange=exchange, layer=layer)
        return dx_TD, dgate_TK, dw13_X2FD, dw2_XDF, None, None, None, None
