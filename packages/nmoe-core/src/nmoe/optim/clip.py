# SPDX-License-Identifier: Apache-2.0
"""The global gradient norm, and scaling gradients down to a limit."""

from collections.abc import Sequence

import torch
from torch.nn.utils import get_total_norm

__all__ = ["clip_scale", "gradient_norm"]


def gradient_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """L2 norm over all gradients together, a scalar in their precision on their device: those of one rank.

    The order of the sum is that of `gradients`, so the same gradients give the same bits.
    """
    return get_total_norm(list(gradients))


def clip_scale(norm: float, *, limit: float) -> float:
    """Factor on all gradients that brings their global norm to at most `limit`; 0 is no limit.

    Source: Pascanu, Mikolov, Bengio 2013, arXiv:1211.5063 algorithm 1.
    """
    return limit / norm if limit and norm > limit else 1.0
