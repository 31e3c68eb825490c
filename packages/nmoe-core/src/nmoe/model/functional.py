# SPDX-License-Identifier: Apache-2.0
"""The small things that every part of the model does: a product with a master weight, a norm, and recomputing."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nmoe.ops.rms_norm import rms_norm

__all__ = ["Norm", "linear", "recomputed"]


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T in x's dtype; the weight may be a wider master value and is rounded for the product."""
    return F.linear(x, weight.to(x.dtype))


def recomputed(function: Callable[..., Tensor], *arguments: object) -> Tensor:
    """function(*arguments), of which nothing but the arguments is kept; backward computes it again, to the same bits."""
    result = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(result, Tensor)
    return result


class Norm(nn.Module):
    """RMSNorm over the last axis with a learned weight; its arithmetic is fp32 (fp64 where x is).

    Args:
        width: Of the last axis.
        eps: Added to the mean square.
        dtype: Of the weight.
    """

    def __init__(self, width: int, *, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, eps=self.eps)
