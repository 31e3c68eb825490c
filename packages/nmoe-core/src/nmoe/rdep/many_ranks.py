# SPDX-License-Identifier: Apache-2.0
"""The routed experts where several ranks share them: plan, dispatch, group, experts, return.

Kept for backward are the rows that this rank sent (not those that it received: they travel again), the records, and,
unless `keep` is off, the pre-activations of the first round of assignments. Later rounds, which only an overloaded owner
has, are computed again.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from nmoe.ops import group
from nmoe.ops.group import Groups
from nmoe.ops.plan import Sends
from nmoe.ops.receive import Arrivals
from nmoe.rdep.combine import collect, collect_gradient, send_back, send_back_gradient
from nmoe.rdep.dispatch import dispatch, dispatch_gradient
from nmoe.rdep.exchange import Exchange, Rounds
from nmoe.rdep.experts import experts_backward, experts_forward, up_again
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
        x_RD, arrivals = dispatch(x_TD, gate_TK, expert_TK, plan, exchange=exchange, layer=layer)
        rounds = exchange.rounds_for(plan.count_PP2)
        first_S2F = None
        for groups in _groups(arrivals, rounds, exchange):
            y_SD, preact_S2F = experts_forward(x_RD, w13_X2FD, w2_XDF, groups)
            send_back(y_SD, groups, arrivals, exchange=exchange)
            first_S2F = preact_S2F if first_S2F is None else first_S2F
        out_TD = collect(plan, exchange=exchange, layer=layer)

        records = (arrivals.expert_RK, arrivals.gate_RK, arrivals.home_R3)
        ctx.save_for_backward(
            x_TD, first_S2F if keep else None, w13_X2FD, w2_XDF, plan.sends.row_TP, plan.count_PP2, *records
        )
        ctx.exchange, ctx.layer, ctx.rounds = exchange, layer, rounds
        return out_TD

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None, None, None, None]:
        x_TD, preact_S2F, w13_X2FD, w2_XDF, row_TP, count_PP2, expert_RK, gate_RK, home_R3 = ctx.saved_tensors
        exchange, layer = ctx.exchange, ctx.layer
        plan = Plan(sends=Sends(row_TP=row_TP), count_PP2=count_PP2)
        arrivals = Arrivals(expert_RK=expert_RK, gate_RK=gate_RK, home_R3=home_R3)

        dout_TD = grad_outputs[0].contiguous()
        x_RD, dout_RD = dispatch_gradient(x_TD, dout_TD, plan, exchange=exchange, layer=layer)
        dw13_X2FD, dw2_XDF = torch.empty_like(w13_X2FD), torch.empty_like(w2_XDF)
        for number, groups in enumerate(_groups(arrivals, ctx.rounds, exchange)):
            if number > 0 or preact_S2F is None:
                preact_S2F = up_again(x_RD, w13_X2FD, groups)
            dx_SD, dgate_S = experts_backward(
                dout_RD,
                x_RD,
                preact_S2F,
                w13_X2FD,
                w2_XDF,
                groups,
                dw13_X2FD=dw13_X2FD,
                dw2_XDF=dw2_XDF,
                add_w13=number > 0,
                add_w2=number > 0,
            )
            send_back_gradient(dx_SD, dgate_S, groups, home_R3, exchange=exchange)
        dx_TD, dgate_TK = collect_gradient(plan, exchange=exchange, layer=layer)
        return dx_TD, dgate_TK, dw13_X2FD, dw2_XDF, None, None, None, None


def _groups(arrivals: Arrivals, rounds: Rounds, exchange: Exchange) -> Iterator[Groups]:
    """The assignments of each round, in expert order."""
    for expert_RK in _by_round(arrivals.expert_RK, rounds):
        yield group.kernels().group(
            expert_RK, arrivals.gate_RK, num_experts=exchange.experts_per_rank, num_slots=rounds.num_slots
        )


def _by_round(expert_RK: Tensor, rounds: Rounds) -> Iterator[Tensor]:
    """The table of assignments, all but those of each round taken out."""
    if rounds.num_rounds == 1:
        yield expert_RK
        return
    count_R = (expert_RK >= 0).sum(dim=1)
    round_R1 = ((count_R.cumsum(dim=0) - count_R) // rounds.budget).unsqueeze(1)
    for number in range(rounds.num_rounds):
        yield torch.where(round_R1 == number, expert_RK, -1)
