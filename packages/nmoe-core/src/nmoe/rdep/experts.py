# SPDX-License-Identifier: Apache-2.0
"""The experts of this rank: two weights each, and the products of forward and backward.

The weights are the master values, usually wider than the rows. They are rounded to the rows' dtype for a product and
not kept so; their gradients are summed in the masters' dtype, never rounded to bf16 on the way.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from nmoe.ops import grouped_gemm
from nmoe.ops.group import Groups

__all__ = ["Experts", "experts_backward", "experts_forward", "up_again"]


class Experts(nn.Module):
    """Weights of the X experts that this rank owns.

    Args:
        hidden_size: D.
        expert_size: F.
        owned: Global ids of the experts; their initial values depend on these, not on the rank.
        dtype: Of the master values.
    """

    def __init__(self, *, hidden_size: int, expert_size: int, owned: range, dtype: torch.dtype) -> None:
        super().__init__()
        self.owned = owned
        self.recompute = False
        """Compute the pre-activations again in backward instead of keeping them: a third of what the layer keeps."""
        self.w13 = nn.Parameter(torch.empty(len(owned), 2 * expert_size, hidden_size, dtype=dtype))
        """[X, 2F, D]: row 2f is gate f, row 2f + 1 is up f."""
        self.w2 = nn.Parameter(torch.empty(len(owned), hidden_size, expert_size, dtype=dtype))
        """[X, D, F]."""

    def forward(self, routed: Callable[..., Tensor], x_TD: Tensor, gate_TK: Tensor, expert_TK: Tensor) -> Tensor:
        """`routed` with the weights; a call of this module, so that what shards them over ranks can gather them for it."""
        return routed(x_TD, gate_TK, self.w13, self.w2, expert_TK, not self.recompute)


def experts_forward(x_RD: Tensor, w13_X2FD: Tensor, w2_XDF: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """Results of all assignments, without gates.

    Returns:
        y_SD in the rows' dtype, and the pre-activations preact_S2F, all that backward needs beside the rows.
    """
    kernels, dtype = grouped_gemm.kernels(), x_RD.dtype
    preact_S2F, act_SF = kernels.up(x_RD, w13_X2FD.to(dtype), groups.index_S, groups.offset_X)
    return kernels.down(act_SF, w2_XDF.to(dtype), groups.offset_X), preact_S2F


def up_again(x_RD: Tensor, w13_X2FD: Tensor, groups: Groups) -> Tensor:
    """preact_S2F once more, the same bits."""
    preact_S2F, _ = grouped_gemm.kernels().up(x_RD, w13_X2FD.to(x_RD.dtype), groups.index_S, groups.offset_X)
    return preact_S2F


def experts_backward(
    dout_RD: Tensor,
    x_RD: Tensor,
    preact_S2F: Tensor,
    w13_X2FD: Tensor,
    w2_XDF: Tensor,
    groups: Groups,
    *,
    dw13_X2FD: Tensor,
    dw2_XDF: Tensor,
    accumulate: bool = False,
) -> tuple[Tensor, Tensor]:
    """Gradients of all assignments and of the weights.

    Args:
        dout_RD: Gradient of each row's output, in the rows' dtype.
        x_RD: Rows of the forward.
        preact_S2F: Pre-activations of the forward.
        w13_X2FD: Master values.
        w2_XDF: Master values.
        groups: Of the forward.
        dw13_X2FD: Takes the gradient of w13; usually in the masters' dtype.
        dw2_XDF: Takes the gradient of w2.
        accumulate: Add to what is there.

    Returns:
        dx_SD and dgate_S, per assignment.
    """
    kernels, dtype = grouped_gemm.kernels(), x_RD.dtype
    index_S, offset_X = groups.index_S, groups.offset_X
    dpreact_S2F, gated_act_SF, dgate_S = kernels.gated_backward(
        dout_RD, w2_XDF.to(dtype), preact_S2F, groups.gate_S, index_S, offset_X
    )
    kernels.dw2(dout_RD, gated_act_SF, index_S, offset_X, out_XDF=dw2_XDF, accumulate=accumulate)
    del gated_act_SF
    kernels.dw13(x_RD, dpreact_S2F, index_S, offset_X, out_X2FD=dw13_X2FD, accumulate=accumulate)
    return kernels.dx(dpreact_S2F, w13_X2FD.to(dtype), offset_X), dgate_S
