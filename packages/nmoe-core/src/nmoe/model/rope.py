# SPDX-License-Identifier: Apache-2.0
"""Angles of rotary positions, plain or stretched by YaRN.

YaRN divides slow rotations by the stretch factor, keeps fast ones, and blends linearly between; DeepSeek sharpens the
attention of the longer context on top, by a factor on the rotated columns and one on the softmax scale. As in the
published models the frequencies and angles are fp32.

Source: YaRN (arXiv 2309.00071, 3.2 and 3.4); the two mscale factors: DeepSeek-V2 (arXiv 2405.04434, 3.1.4) and its
published configuration.
"""

import functools
import math

import torch
from torch import Tensor

from nmoe.config import Rope

__all__ = ["frequencies", "rotation_factor", "softmax_factor", "tables"]


def _turning_dimension(turns: float, width: int, rope: Rope) -> float:
    """Index of the pair that turns ``turns`` times within the original context."""
    return width * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


@functools.lru_cache(maxsize=64)
def frequencies(rope: Rope, width: int, device: torch.device) -> Tensor:
    """Angle per position of each of the width / 2 pairs, fp32, in radians."""
    exponent = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    fast = 1.0 / rope.theta**exponent
    if rope.scaling == "none":
        return fast
    low = max(math.floor(_turning_dimension(rope.beta_fast, width, rope)), 0)
    high = min(math.ceil(_turning_dimension(rope.beta_slow, width, rope)), width - 1)
    pair = torch.arange(width // 2, dtype=torch.float32, device=device)
    slow_share = ((pair - low) / max(high - low, 0.001)).clamp(0, 1)
    return fast / rope.factor * slow_share + fast * (1 - slow_share)


def _sharpening(rope: Rope, strength: float) -> float:
    return 0.1 * strength * math.log(rope.factor) + 1.0


def rotation_factor(rope: Rope) -> float:
    """Factor on cosine and sine."""
    if rope.scaling == "none":
        return 1.0
    return _sharpening(rope, rope.mscale) / _sharpening(rope, rope.mscale_all_dim)


def softmax_factor(rope: Rope) -> float:
    """Factor on the softmax scale, beside 1/sqrt(head width)."""
    return 1.0 if rope.scaling == "none" else _sharpening(rope, rope.mscale_all_dim) ** 2


def tables(rope: Rope, positions_T: Tensor, *, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines for tokens.

    Args:
        rope: The section [rope].
        positions_T: Integers: place of each token in its document.
        width: Rotated columns of a head, even.
        dtype: fp32 or fp64; the angles are fp32 in either case.

    Returns:
        cos_TH and sin_TH, [T, width / 2].
    """
    angle_TH = positions_T.to(torch.float32).unsqueeze(1) * frequencies(rope, width, positions_T.device)
    factor = rotation_factor(rope)
    return (angle_TH.cos() * factor).to(dtype), (angle_TH.sin() * factor).to(dtype)
