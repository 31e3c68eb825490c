# SPDX-License-Identifier: Apache-2.0
"""The routed experts where several nodes share them: the exchange of rows twice, over the network and inside the node.

A row first goes to one rank of each node that has an expert of it, the one of its own place there (the ranks of equal place are
a **rail**); what arrives there is just what a rank of a single node brings to its layer: rows, choices, gates. So each
step below is that of `many_ranks`, with the rail's exchange or the node's, and one row crosses for a (token, node).

Kept for backward is what `many_ranks` keeps, and the plans and choices of both exchanges.
"""

import torch
from torch import Tensor

from nmoe.ops.plan import Sends
from nmoe.ops.receive import Arrivals
from nmoe.rdep.combine import collect, collect_gradient, hand_back, hand_back_gradient
from nmoe.rdep.dispatch import dispatch, dispatch_gradient, opened
from nmoe.rdep.nodes import NodeExchange
from nmoe.rdep.owner import serve, serve_gradient
from nmoe.rdep.plan import Plan, make_plan

__all__ = ["ExpertsAcrossNodes"]


class ExpertsAcrossNodes(torch.autograd.Function):
    """out_TD of this rank's T rows and their choices among the experts of all nodes. All ranks call it, in one order."""

    @staticmethod
    def forward(
        ctx,
        x_TD: Tensor,
        gate_TK: Tensor,
        w13_X2FD: Tensor,
        w2_XDF: Tensor,
        expert_TK: Tensor,
        keep: bool,
        exchange: NodeExchange,
        layer: int,
    ) -> Tensor:
        rail, node = exchange.rail, exchange.node
        out = make_plan(expert_TK, exchange=rail, layer=layer)
        x_R, came = dispatch(x_TD, gate_TK, expert_TK, out, exchange=rail, layer=layer)
        on = make_plan(came.expert_RK, exchange=node, layer=layer)
        x_Q, held = dispatch(x_R, came.gate_RK, came.expert_RK, on, exchange=node, layer=layer)

        x_QD = opened(x_Q, on, exchange=node, like=x_TD)
        rounds = node.rounds_for(on.count_PP2)
        preact_S2F = serve(x_QD, held, w13_X2FD, w2_XDF, rounds, exchange=node)

        out_RD = collect(on, exchange=node, layer=layer)
        hand_back(out_RD, came.home_R3, exchange=rail)
        out_TD = collect(out, exchange=rail, layer=layer)

        kept = x_TD, preact_S2F if keep else None, w13_X2FD, w2_XDF, expert_TK
        over_rail = out.sends.row_TP, out.count_PP2, came.expert_RK, came.home_R3
        in_node = on.sends.row_TP, on.count_PP2, held.expert_RK, held.gate_RK, held.home_R3
        ctx.save_for_backward(*kept, *over_rail, *in_node)
        ctx.exchange, ctx.layer, ctx.rounds = exchange, layer, rounds
        return out_TD

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None, None, None, None]:
        x_TD, preact_S2F, w13_X2FD, w2_XDF, expert_TK, *ways = ctx.saved_tensors
        row_TP, count_PP2, expert_RK, home_R3, *in_node = ways
        rail, node, layer = ctx.exchange.rail, ctx.exchange.node, ctx.layer
        top_k = expert_TK.shape[1]
        out = Plan(sends=Sends(row_TP=row_TP, top_k=top_k), count_PP2=count_PP2)
        on = Plan(sends=Sends(row_TP=in_node[0], top_k=top_k), count_PP2=in_node[1])
        held = Arrivals(expert_RK=in_node[2], gate_RK=in_node[3], home_R3=in_node[4])

        dout_TD = grad_outputs[0].contiguous()
        x_R, dout_RD = dispatch_gradient(x_TD, dout_TD, out, exchange=rail, layer=layer)
        x_Q, dout_QD = dispatch_gradient(x_R, dout_RD, on, exchange=node, layer=layer)

        x_QD = opened(x_Q, on, exchange=node, like=x_TD)
        dw13_X2FD, dw2_XDF = serve_gradient(
            dout_QD, x_QD, preact_S2F, held, w13_X2FD, w2_XDF, ctx.rounds, exchange=node
        )

        dx_RD, dgate_RK = collect_gradient(expert_RK, on, exchange=node, layer=layer)
        hand_back_gradient(dx_RD, dgate_RK, expert_RK, home_R3, exchange=rail)
        dx_TD, dgate_TK = collect_gradient(expert_TK, out, exchange=rail, layer=layer)
        return dx_TD, dgate_TK, dw13_X2FD, dw2_XDF, None, None, None, None
