# SPDX-License-Identifier: Apache-2.0
"""SwiGLU over interleaved columns: act = silu(gate) * up, with gate in the even and up in the odd columns.

For dense layers and shared experts; the experts have it in their products' epilogues (`nmoe.ops.grouped_gemm`).
Memory bound: forward moves 3F elements a row, backward 5F.

Source: GLU Variants Improve Transformer (arXiv 2002.05202).
"""

from typing import Protocol, cast

import torch
from torch import Tensor

from nmoe.ops.registry import implementation

__all__ = ["Kernels", "kernels", "swiglu"]


class Kernels(Protocol):
    """What an implementation file defines. Arithmetic in fp32 (fp64 where the input is), results in the input's dtype."""

    def forward(self, preact_T2F: Tensor) -> Tensor:
        """act_TF."""
        ...

    def backward(self, dact_TF: Tensor, preact_T2F: Tensor) -> Tensor:
        """dpreact_T2F, interleaved as the input."""
        ...


def kernels() -> Kernels:
    """The implementation on this process's arch."""
    return cast(Kernels, implementation("swiglu"))


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, preact_T2F: Tensor) -> Tensor:
        ctx.save_for_backward(preact_T2F)
        return kernels().forward(preact_T2F)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> Tensor:
        return kernels().backward(grad_outputs[0].contiguous(), *ctx.saved_tensors)


def swiglu(preact_T2F: Tensor) -> Tensor:
    """Gate the odd columns by the silu of the even ones; differentiable, saves its argument only.

    Args:
        preact_T2F: Contiguous, any float dtype.

    Returns:
        act_TF in the same dtype.
    """
    return cast(Tensor, _SwiGLU.apply(preact_T2F))
