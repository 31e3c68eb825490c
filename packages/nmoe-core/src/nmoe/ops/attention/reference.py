# SPDX-License-Identifier: Apache-2.0
"""Plain torch meaning of attention: all scores of a row at once, [B, N, T, T]."""

import torch
from torch import Tensor

__all__ = ["attention", "prepare"]


def prepare(document_BT: Tensor, *, window: int, device: torch.device) -> Tensor:
    """Bool [B, 1, T, T], true where the query may not see the key."""
    document_BT = document_BT.to(device)
    position = torch.arange(document_BT.shape[1], device=device)
    distance = position.unsqueeze(1) - position.unsqueeze(0)
    hidden = distance < 0
    if window:
        hidden = hidden | (distance >= window)
    return (hidden | (document_BT.unsqueeze(2) != document_BT.unsqueeze(1))).unsqueeze(1)


def attention(q_BTNH: Tensor, k_BTGH: Tensor, v_BTGH: Tensor, mask: Tensor, *, scale: float) -> Tensor:
    shared = q_BTNH.shape[2] // k_BTGH.shape[2]
    q = q_BTNH.transpose(1, 2)
    k = k_BTGH.transpose(1, 2).repeat_interleave(shared, dim=1)
    v = v_BTGH.transpose(1, 2).repeat_interleave(shared, dim=1)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.transpose(2, 3)).to(wide) * scale
    weights = torch.softmax(scores.masked_fill(mask, float("-inf")), dim=-1).to(q.dtype)
    return (weights @ v).transpose(1, 2)
