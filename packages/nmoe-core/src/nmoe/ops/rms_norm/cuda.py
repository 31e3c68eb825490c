# SPDX-License-Identifier: Apache-2.0
"""RMSNorm on both chips, by quack's kernels: one pass over the rows each way, arithmetic in fp32.

Backward keeps a sum for the weight per block and adds the blocks in a fixed order, so it is deterministic for a given
number of multiprocessors. Memory bound: 2D elements a row forward, 3D backward.
"""

import torch
from quack.rmsnorm import rmsnorm_bwd, rmsnorm_fwd
from torch import Tensor

from nmoe.ops._cute.build import enter_context

__all__ = ["backward", "forward"]


def forward(x_TD: Tensor, weight_D: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    if x_TD.numel() == 0:
        return torch.empty_like(x_TD), x_TD.new_empty(x_TD.shape[0], dtype=torch.float32)
    enter_context()
    y_TD, _, rstd_T = rmsnorm_fwd(x_TD, weight_D, eps=eps, store_rstd=True)
    assert rstd_T is not None  # store_rstd was asked for
    return y_TD, rstd_T


def backward(dy_TD: Tensor, x_TD: Tensor, weight_D: Tensor, rstd_T: Tensor) -> tuple[Tensor, Tensor]:
    if x_TD.numel() == 0:
        return torch.empty_like(x_TD), torch.zeros_like(weight_D)
    enter_context()
    dx_TD, dweight_D, _, _ = rmsnorm_bwd(x_TD, weight_D, dy_TD, rstd_T)
    assert dweight_D is not None  # a weight was given
    return dx_TD, dweight_D
