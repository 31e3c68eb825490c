# SPDX-License-Identifier: Apache-2.0
"""Plain torch meaning of the rotation."""

import torch
from torch import Tensor

__all__ = ["rotate"]


def rotate(x_TNH: Tensor, cos_TH: Tensor, sin_TH: Tensor, *, interleaved: bool) -> Tensor:
    half = cos_TH.shape[1]
    kept, turned = x_TNH.split((x_TNH.shape[-1] - 2 * half, 2 * half), dim=-1)
    cos, sin = cos_TH.unsqueeze(1), sin_TH.unsqueeze(1)
    pairs = turned.to(cos.dtype)
    a, b = pairs.unflatten(-1, (half, 2)).unbind(-1) if interleaved else pairs.split(half, dim=-1)
    rotated = (a * cos - b * sin, a * sin + b * cos)
    joined = torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)
    return torch.cat((kept, joined.to(x_TNH.dtype)), dim=-1)
