# SPDX-License-Identifier: Apache-2.0
"""SwiGLU network: the dense layers, and the shared experts of a MoE layer as one network of their joint width."""

import torch
from torch import Tensor, nn

from nmoe.model.functional import linear, recomputed
from nmoe.ops.swiglu import swiglu

__all__ = ["MLP"]


class MLP(nn.Module):
    """y = (silu(x w1^T) * (x w3^T)) w2^T.

    Args:
        hidden_size: D.
        ffn_size: F.
        dtype: Of the master values.
        recompute: Keep the input alone for backward.
    """

    def __init__(self, *, hidden_size: int, ffn_size: int, dtype: torch.dtype, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.w13 = nn.Parameter(torch.empty(2 * ffn_size, hidden_size, dtype=dtype))
        """[2F, D]: row 2f is gate f, row 2f + 1 is up f."""
        self.w2 = nn.Parameter(torch.empty(hidden_size, ffn_size, dtype=dtype))
        """[D, F]."""

    def forward(self, x_TD: Tensor) -> Tensor:
        return recomputed(self._compute, x_TD) if self.recompute else self._compute(x_TD)

    def _compute(self, x_TD: Tensor) -> Tensor:
        return linear(swiglu(linear(x_TD, self.w13)), self.w2)
