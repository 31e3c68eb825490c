# SPDX-License-Identifier: Apache-2.0
"""The MoE layer: router, then plan, dispatch, group, experts, combine.

The five calls are one autograd function, so that what is kept for backward is stated in one place: the rows, the
pre-activations of the experts, and metadata (4 numbers an assignment). At D=2048 F=1408 K=6 in bf16 that is 37 KiB a
token; the activations and the results of the experts would be another 40.
"""

import torch
from torch import Tensor, nn

from nmoe.comm.communicator import Communicator
from nmoe.config import Moe
from nmoe.ops import group
from nmoe.ops.group import Groups
from nmoe.rdep.combine import combine, combine_gradient
from nmoe.rdep.dispatch import dispatch, dispatch_gradient
from nmoe.rdep.experts import Experts, experts_backward, experts_forward
from nmoe.rdep.plan import Plan, make_plan, owned_experts
from nmoe.rdep.router import Router

__all__ = ["MoE"]


class _RoutedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x_TD: Tensor, gate_TK: Tensor, w13_X2FD: Tensor, w2_XDF: Tensor, expert_TK: Tensor, owned: range
    ) -> Tensor:
        plan = make_plan(expert_TK, owned=owned)
        rows = dispatch(x_TD, gate_TK, plan)
        groups = group.kernels().group(
            rows.expert_RK, rows.gate_RK, num_experts=plan.num_local_experts, num_slots=plan.num_slots
        )
        y_SD, preact_S2F = experts_forward(rows, w13_X2FD, w2_XDF, groups)
        out_TD = combine(y_SD, groups, rows)

        _save(ctx, rows.x_RD, preact_S2F, w13_X2FD, w2_XDF, groups, plan)
        return out_TD

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None, None]:
        x_RD, preact_S2F, w13_X2FD, w2_XDF, groups, plan = _saved(ctx)
        dout_RD = dispatch_gradient(grad_outputs[0].contiguous(), plan)
        dx_SD, dgate_S, dw13_X2FD, dw2_XDF = experts_backward(dout_RD, x_RD, preact_S2F, w13_X2FD, w2_XDF, groups)
        dx_TD, dgate_TK = combine_gradient(dx_SD, dgate_S, groups)
        return dx_TD, dgate_TK, dw13_X2FD, dw2_XDF, None, None


def _save(ctx, x_RD: Tensor, preact_S2F: Tensor, w13_X2FD: Tensor, w2_XDF: Tensor, groups: Groups, plan: Plan) -> None:
    metadata = (groups.index_S, groups.gate_S, groups.offset_X, groups.slot_RK, plan.expert_TK)
    ctx.save_for_backward(x_RD, preact_S2F, w13_X2FD, w2_XDF, *metadata)
    ctx.sizes = (plan.num_local_experts, plan.num_slots)


def _saved(ctx) -> tuple[Tensor, Tensor, Tensor, Tensor, Groups, Plan]:
    x_RD, preact_S2F, w13_X2FD, w2_XDF, index_S, gate_S, offset_X, slot_RK, expert_TK = ctx.saved_tensors
    groups = Groups(index_S=index_S, gate_S=gate_S, offset_X=offset_X, slot_RK=slot_RK)
    plan = Plan(expert_TK=expert_TK, num_local_experts=ctx.sizes[0], num_slots=ctx.sizes[1])
    return x_RD, preact_S2F, w13_X2FD, w2_XDF, groups, plan


class MoE(nn.Module):
    """Routed experts of one layer, and the shared one beside them.

    Args:
        hidden_size: D.
        config: The section [moe].
        comm: The ranks that share the routed experts.
        shared: Network that every token passes through, or None.
        dtype: Of the master values.
    """

    def __init__(
        self, *, hidden_size: int, config: Moe, comm: Communicator, shared: nn.Module | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        owned = owned_experts(config.num_experts, comm)
        self.router = Router(hidden_size=hidden_size, config=config, dtype=dtype)
        self.experts = Experts(hidden_size=hidden_size, expert_size=config.expert_size, owned=owned, dtype=dtype)
        self.shared = shared

    def forward(self, x_TD: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Pass T tokens of ``num_rows`` sequences through their experts.

        Returns:
            out_TD in x's dtype; the router's balance and z-loss [2], summed over tokens; load_E, int32.
        """
        routes = self.router(x_TD, num_rows)
        out_TD = self.experts(_RoutedExperts.apply, x_TD, routes.gate_TK, routes.expert_TK)
        if self.shared is not None:
            out_TD = out_TD + self.shared(x_TD)
        return out_TD, routes.aux_loss, routes.load_E
