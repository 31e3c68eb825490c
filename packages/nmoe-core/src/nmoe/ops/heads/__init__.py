# SPDX-License-Identifier: Apache-2.0
"""Queries, keys and values of latent attention, from the products that make them: rotated, and the shared key joined on.

Each key is a head's own columns and then the rotated key that all heads share; each query is rotated in as many last
columns. Pairs are interleaved, as in `nmoe.ops.rope`. As operations of their own (rotations, `cat`, and their gradients, with
the sum over heads) that moves three times as many bytes. Memory bound: per token and head, with H the width of keys and V of
values, forward 4H elements, backward 4H + 2V.

Source: DeepSeek-V2 (arXiv 2405.04434, 2.1.3).
"""

from typing import Protocol, cast

import torch
from torch import Tensor

from nmoe.ops.registry import implementation

__all__ = ["Kernels", "join_heads", "kernels"]


class Kernels(Protocol):
    """What an implementation file defines. cos and sin are [T, h], fp32 (fp64); the arithmetic is in their dtype."""

    def join(
        self, q_TNH: Tensor, kv_TNH: Tensor, shared_TH: Tensor, cos_TH: Tensor, sin_TH: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Queries with their last 2h columns rotated, and keys; contiguous.

        The rows of kv are a head's own columns of the key and then its value; shared is [T, 2h], maybe a view.
        """
        ...

    def split(
        self, dq_TNH: Tensor, dk_TNH: Tensor, dv_TNH: Tensor, cos_TH: Tensor, sin_TH: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dkv and dshared: rotated back, the last summed over heads before it is rounded."""
        ...


def kernels() -> Kernels:
    """The implementation on this process's arch."""
    return cast(Kernels, implementation("heads"))


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q_TNH: Tensor, kv_TNH: Tensor, shared_TH: Tensor, cos_TH: Tensor, sin_TH: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos_TH, sin_TH)
        q, k = kernels().join(q_TNH, kv_TNH, shared_TH, cos_TH, sin_TH)
        return q, k, kv_TNH[..., k.shape[2] - shared_TH.shape[1] :]

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        dq, dk, dv = (gradient.contiguous() for gradient in grad_outputs)
        return *kernels().split(dq, dk, dv, *ctx.saved_tensors), None, None


def join_heads(
    q_TNH: Tensor, kv_TNH: Tensor, shared_TH: Tensor, cos_TH: Tensor, sin_TH: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of all heads; differentiable in the first three, saves the tables only.

    Args:
        q_TNH: [T, N, H].
        kv_TNH: [T, N, H - 2h + V]: a head's own columns of the key, then its value.
        shared_TH: [T, 2h]: the part of the key that all heads share.
        cos_TH: [T, h], cosine of each token's angles, times any attention factor.
        sin_TH: [T, h].

    Returns:
        [T, N, H], [T, N, H] and [T, N, V] in q's dtype; the values are a view of kv.
    """
    return cast(tuple[Tensor, Tensor, Tensor], _Heads.apply(q_TNH, kv_TNH, shared_TH, cos_TH, sin_TH))
