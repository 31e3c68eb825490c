# SPDX-License-Identifier: Apache-2.0
"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight over the last axis. Memory bound: forward 2D elements a row.

Source: Root Mean Square Layer Normalization (arXiv 1910.07467).
"""

from typing import Protocol, cast

import torch
from torch import Tensor

from nmoe.ops.registry import implementation

__all__ = ["Kernels", "kernels", "rms_norm"]


class Kernels(Protocol):
    """What an implementation file defines. A is fp32, or fp64 where x is fp64; arithmetic is in A throughout."""

    def forward(self, x_TD: Tensor, weight_D: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
        """y_TD in x's dtype (rounded once, after the weight) and the reciprocal root mean square, rstd_T in A."""
        ...

    def backward(self, dy_TD: Tensor, x_TD: Tensor, weight_D: Tensor, rstd_T: Tensor) -> tuple[Tensor, Tensor]:
        """dx_TD in x's dtype, dweight_D in weight's dtype; the sum over rows is in A and in a fixed order."""
        ...


def kernels() -> Kernels:
    """The implementation on this process's arch."""
    return cast(Kernels, implementation("rms_norm"))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        y_TD, rstd_T = kernels().forward(x_TD, weight_D, eps=eps)
        ctx.save_for_backward(x_TD, weight_D, rstd_T)
        return y_TD

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        dx_TD, dweight_D = kernels().backward(grad_outputs[0].contiguous(), *ctx.saved_tensors)
        return dx_TD, dweight_D, None


def rms_norm(x: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
    """Normalise the last axis; differentiable, saves x and one number a row.

    Args:
        x: [..., D], any float dtype.
        weight_D: Any float dtype; may be wider than x.
        eps: Added to the mean square, > 0.

    Returns:
        [..., D] in x's dtype.
    """
    y_TD = cast(Tensor, _RMSNorm.apply(x.reshape(-1, x.shape[-1]), weight_D, eps))
    # FSDP hangs a hook on what a module returns, and a view may lose it.
    return y_TD if x.ndim == 2 else y_TD.view(x.shape)
