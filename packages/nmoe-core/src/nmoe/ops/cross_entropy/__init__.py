# SPDX-License-Identifier: Apache-2.0
"""Cross entropy of a linear head, without ever holding the logits of all tokens.

At 32768 tokens and 201088 words the logits alone would be 12 GiB in bf16 and 25 in fp32. Here they exist for one chunk
of tokens at a time, and the gradients are made in the forward pass, while the chunk's logits are there: three products
instead of four, and nothing but the two gradients is kept for backward.
"""

from typing import Protocol, cast

import torch
from torch import Tensor

from nmoe.ops.registry import implementation

__all__ = ["IGNORED", "Kernels", "kernels", "linear_cross_entropy"]

IGNORED = -100
"""Target of a token that has no part in the loss."""


class Kernels(Protocol):
    """What an implementation file defines. A is fp32, or fp64 where x is fp64."""

    def forward(
        self, x_TD: Tensor, weight_VD: Tensor, target_T: Tensor, *, z_loss: float, gradients: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Loss and, if asked, gradients, over the tokens whose target is not IGNORED.

        logits = x weight^T with the weight rounded to x's dtype and sums in A; lse = log sum exp(logits).

        Returns:
            nll_sum, scalar in A: sum of lse - logits[target], in nats.
            z_sum, scalar in A: z_loss * sum of lse^2.
            dx_TD in x's dtype, gradient of nll_sum + z_sum; zero rows at ignored tokens. None without ``gradients``.
            dweight_VD in weight's dtype, summed over chunks in A. None without ``gradients``.
        """
        ...


def kernels() -> Kernels:
    """The implementation on this process's arch."""
    return cast(Kernels, implementation("cross_entropy"))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x_TD: Tensor, weight_VD: Tensor, target_T: Tensor, z_loss: float, gradients: bool
    ) -> tuple[Tensor, Tensor]:
        nll_sum, z_sum, dx_TD, dweight_VD = kernels().forward(
            x_TD, weight_VD, target_T, z_loss=z_loss, gradients=gradients
        )
        ctx.mark_non_differentiable(z_sum)
        ctx.gradients = (dx_TD, dweight_VD)
        return nll_sum, z_sum

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        if ctx.gradients is None:
            raise RuntimeError("linear_cross_entropy keeps no gradients after its backward: call it once")
        dx_TD, dweight_VD = ctx.gradients
        ctx.gradients = None  # they are scaled in place, and freed as early as can be
        dnll = grad_outputs[0]
        return dx_TD.mul_(dnll), dweight_VD.mul_(dnll), None, None, None


def linear_cross_entropy(
    x_TD: Tensor, weight_VD: Tensor, target_T: Tensor, *, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Sum of the cross entropy of logits x weight^T; differentiable in x and weight.

    Args:
        x_TD: Rows, any float dtype; decides the dtype of the products.
        weight_VD: Head, any float dtype.
        target_T: int64 in [0, V), or IGNORED.
        z_loss: Weight of the squared log-partition, >= 0.

    Returns:
        nll_sum: scalar, nats summed over targets. Its *gradient* is that of nll_sum + z_sum.
        z_sum: scalar, the z-loss summed over targets, for the record; not differentiable.
    """
    # Asked here: within the function gradients are always off, and what it is told of its inputs forgets `no_grad`.
    gradients = torch.is_grad_enabled() and (x_TD.requires_grad or weight_VD.requires_grad)
    return cast(tuple[Tensor, Tensor], _LinearCrossEntropy.apply(x_TD, weight_VD, target_T, z_loss, gradients))
