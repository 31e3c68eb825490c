# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: pairs of a head's last columns turn by an angle that grows with the position.

Interleaved pairs are columns (2i, 2i + 1), as DeepSeek trains; split pairs are (i, i + half), as Qwen and Llama do.
The gradient is the same rotation by the opposite angle, so one kernel serves both ways.

Source: RoFormer (arXiv 2104.09864).
"""

from typing import Protocol, cast

import torch
from torch import Tensor

from nmoe.ops.registry import implementation

__all__ = ["Kernels", "kernels", "rope"]


class Kernels(Protocol):
    """What an implementation file defines."""

    def rotate(self, x_TNH: Tensor, cos_TH: Tensor, sin_TH: Tensor, *, interleaved: bool) -> Tensor:
        """x with the last 2h columns of every head rotated and the others copied, in x's dtype.

        cos and sin are [T, h], fp32 (fp64 where x is fp64); the arithmetic is in their dtype. x may be a view whose
        last axis is contiguous; the result is contiguous.
        """
        ...


def kernels() -> Kernels:
    """The implementation on this process's arch."""
    return cast(Kernels, implementation("rope"))


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TNH: Tensor, cos_TH: Tensor, sin_TH: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos_TH, sin_TH)
        ctx.interleaved = interleaved
        return kernels().rotate(x_TNH, cos_TH, sin_TH, interleaved=interleaved)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        cos_TH, sin_TH = ctx.saved_tensors
        dy_TNH = grad_outputs[0].contiguous()
        return kernels().rotate(dy_TNH, cos_TH, -sin_TH, interleaved=ctx.interleaved), None, None, None


def rope(x_TNH: Tensor, cos_TH: Tensor, sin_TH: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the last 2h columns of every head; differentiable in x, saves the tables only.

    Args:
        x_TNH: [T, heads, width], width >= 2h.
        cos_TH: [T, h], cosine of each token's angles, times any attention factor.
        sin_TH: [T, h].
        interleaved: Which columns are a pair.

    Returns:
        [T, heads, width] in x's dtype.
    """
    return cast(Tensor, _Rope.apply(x_TNH, cos_TH, sin_TH, interleaved))
