# SPDX-License-Identifier: Apache-2.0
"""The symmetric products in plain torch, which computes both halves."""

import torch
from torch import Tensor

__all__ = ["gram", "quadratic"]


def gram(matrices: Tensor) -> Tensor:
    return torch.bmm(matrices, matrices.mT)


def quadratic(symmetric: Tensor, *, linear: float, square: float) -> Tensor:
    return torch.baddbmm(symmetric, symmetric, symmetric, beta=linear, alpha=square)
