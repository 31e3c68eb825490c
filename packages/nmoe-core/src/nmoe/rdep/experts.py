# SPDX-License-Identifier: Apache-2.0
"""The experts of this rank: two weights each, and the products of forward and backward.

The weights are the master values, usually wider than the rows. They are rounded to the rows' dtype for the products; their
gradients are summed in the masters' dtype, never rounded to bf16 on the way.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from nmoe.ops import grouped_gemm
from nmoe.ops.group import Groups
from nmoe.rdep.held import hold, rounded

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

    def hold(self, *, copies: bool) -> None:
        """Add up gradients in place and, with ``copies``, round the weights once a change; `nmoe.rdep.held` has the price."""
        hold(self.w13, copies=copies)
        hold(self.w2, copies=copies)

    def forward(self, routed: Callable[..., Tensor], x_TD: Tensor, gate_TK: Tensor, expert_TK: Tensor) -> Tensor:
        """`routed` with the weights; a call of this module, so that what shards them over ranks can gather them for it."""
        return routed(x_TD, gate_TK, self.w13, self.w2, expert_TK, not self.recompute)


def experts_forward(x_RD: Tensor, w13_X2FD: Tensor, w2_XDF: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """Results of all assignments, without gates.

    Returns:
        y_SD in the rows' dtype, and the pre-activations preact_S2F, all that backward needs beside the rows.
    """
    preact_S2F, act_SF = _up(x_RD, w13_X2FD, groups)
    return grouped_gemm.kernels().down(act_SF, rounded(w2_XDF, x_RD.dtype), groups.offset_X), preact_S2F


def up_again(x_RD: Tensor, w13_X2FD: Tensor, groups: Groups) -> Tensor:
    """preact_S2F once more, the same bits."""
    return _up(x_RD, w13_X2FD, groups)[0]


def _up(x_RD: Tensor, w13_X2FD: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    kernels = grouped_gemm.kernels()
    rows, index = kernels.arrange(x_RD, groups.index_S, groups.slot_RK, w13_X2FD, use="up")
    return kernels.up(rows, rounded(w13_X2FD, x_RD.dtype), index, groups.offset_X)


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
    add_w13: bool = False,
    add_w2: bool = False,
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
        add_w13: Add to what is in dw13_X2FD.
        add_w2: Add to what is in dw2_XDF.

    Returns:
        dx_SD and dgate_S, per assignment.
    """
    kernels, dtype = grouped_gemm.kernels(), x_RD.dtype
    offset_X = groups.offset_X
    dout, index = kernels.arrange(dout_RD, groups.index_S, groups.slot_RK, w13_X2FD, use="dout")
    dpreact_S2F, gated_act_SF, dgate_S = kernels.gated_backward(
        dout, rounded(w2_XDF, dtype), preact_S2F, groups.gate_S, index, offset_X
    )
    kernels.dw2(dout, gated_act_SF, index, offset_X, out_XDF=dw2_XDF, accumulate=add_w2)
    del dout, gated_act_SF
    x, index = kernels.arrange(x_RD, groups.index_S, groups.slot_RK, w13_X2FD, use="dw13")
    kernels.dw13(x, dpreact_S2F, index, offset_X, out_X2FD=dw13_X2FD, accumulate=add_w13)
    del x
    return kernels.dx(dpreact_S2F, rounded(w13_X2FD, dtype), offset_X), dgate_S
