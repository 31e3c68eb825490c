# SPDX-License-Identifier: Apache-2.0
"""The routed experts where one rank holds them all: source and owner are the same, so the experts read rows in place."""

import torch
from torch import Tensor

from nmoe.ops import combine, group
from nmoe.ops.group import Groups
from nmoe.rdep.experts import experts_backward, experts_forward, up_again
from nmoe.rdep.held import gradient_target

__all__ = ["ExpertsHere"]


class ExpertsHere(torch.autograd.Function):
    """out_TD of T rows and their choices; keeps the rows, three numbers an assignment, and with `keep` pre-activations."""

    @staticmethod
    def forward(
        ctx, x_TD: Tensor, gate_TK: Tensor, w13_X2FD: Tensor, w2_XDF: Tensor, expert_TK: Tensor, keep: bool = True
    ) -> Tensor:
        groups = group.kernels().group(expert_TK, gate_TK, num_experts=w2_XDF.shape[0], num_slots=expert_TK.numel())
        y_SD, preact_S2F = experts_forward(x_TD, w13_X2FD, w2_XDF, groups)
        metadata = (groups.index_S, groups.gate_S, groups.offset_X, groups.slot_RK)
        ctx.save_for_backward(x_TD, preact_S2F if keep else None, w13_X2FD, w2_XDF, *metadata)
        return combine.kernels().combine(y_SD, groups.slot_RK, gate_TK)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, None, None]:
        x_TD, preact_S2F, w13_X2FD, w2_XDF, index_S, gate_S, offset_X, slot_TK = ctx.saved_tensors
        groups = Groups(index_S=index_S, gate_S=gate_S, offset_X=offset_X, slot_RK=slot_TK)
        if preact_S2F is None:
            preact_S2F = up_again(x_TD, w13_X2FD, groups)
        dout_TD = grad_outputs[0].contiguous()
        (dw13_X2FD, add_w13), (dw2_XDF, add_w2) = gradient_target(w13_X2FD), gradient_target(w2_XDF)
        dx_SD, dgate_S = experts_backward(
            dout_TD,
            x_TD,
            preact_S2F,
            w13_X2FD,
            w2_XDF,
            groups,
            dw13_X2FD=dw13_X2FD,
            dw2_XDF=dw2_XDF,
            add_w13=add_w13,
            add_w2=add_w2,
        )
        kernels = combine.kernels()
        dx_TD, dgate_TK = kernels.combine(dx_SD, slot_TK, None), kernels.collect(dgate_S, slot_TK)
        return dx_TD, dgate_TK, None if add_w13 else dw13_X2FD, None if add_w2 else dw2_XDF, None, None
