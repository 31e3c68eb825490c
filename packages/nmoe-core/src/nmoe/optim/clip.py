# SPDX-License-Identifier: Apache-2.0
"""The global gradient norm, and scaling gradients down to a limit."""

from collections.abc import Sequence

import torch
from torch.nn.utils import get_total_norm

__all__ = ["clip_gradients", "gradient_norm"]


def gradient_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """L2 norm over all gradients together, a scalar in their precision on their device: those of one rank.

    The order of the sum is that of `gradients`, so the same gradients give the same bits.
    """
    return get_total_norm(list(gradients))


def clip_gradients(gradients: Sequence[torch.Tensor], *, norm: float, limit: float) -> None:
    """Scales all gradients in place so that their global norm is at most `limit`; 0 is no limit.

    Source: Pascanu, Mikolov, Bengio 2013, arXiv:1211.5063 algorithm 1.
    """
    if limit and norm > limit:
        for gradient in gradients:
            gradient.mul_(limit / norm)
