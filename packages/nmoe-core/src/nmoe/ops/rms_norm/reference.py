# SPDX-License-Identifier: Apache-2.0
"""Plain torch meaning of RMSNorm."""

import torch
from torch import Tensor

__all__ = ["backward", "forward"]


def forward(x_TD: Tensor, weight_D: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    x = x_TD.to(wide)
    rstd_T = torch.rsqrt(x.square().mean(dim=-1) + eps)
    return (x * rstd_T.unsqueeze(1) * weight_D.to(wide)).to(x_TD.dtype), rstd_T


def backward(dy_TD: Tensor, x_TD: Tensor, weight_D: Tensor, rstd_T: Tensor) -> tuple[Tensor, Tensor]:
    wide = rstd_T.dtype
    dy, unit = dy_TD.to(wide), x_TD.to(wide) * rstd_T.unsqueeze(1)
    dunit = dy * weight_D.to(wide)
    dx = rstd_T.unsqueeze(1) * (dunit - unit * (dunit * unit).mean(dim=-1, keepdim=True))
    return dx.to(x_TD.dtype), (dy * unit).sum(dim=0).to(weight_D.dtype)
