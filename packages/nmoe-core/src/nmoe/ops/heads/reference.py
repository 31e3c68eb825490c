# SPDX-License-Identifier: Apache-2.0
"""Plain torch meaning of the joined heads."""

import torch
from torch import Tensor

from nmoe.ops.rope.reference import rotate

__all__ = ["join", "split"]


def join(q_TNH: Tensor, kv_TNH: Tensor, shared_TH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> tuple[Tensor, Tensor]:
    own_TNH = kv_TNH[..., : q_TNH.shape[2] - shared_TH.shape[1]]
    shared_TNH = rotate(shared_TH.unsqueeze(1), cos_TH, sin_TH, interleaved=True).expand(-1, q_TNH.shape[1], -1)
    return rotate(q_TNH, cos_TH, sin_TH, interleaved=True), torch.cat((own_TNH, shared_TNH), dim=-1)


def split(
    dq_TNH: Tensor, dk_TNH: Tensor, dv_TNH: Tensor, cos_TH: Tensor, sin_TH: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    own, shared = dk_TNH.split((dk_TNH.shape[2] - 2 * cos_TH.shape[1], 2 * cos_TH.shape[1]), dim=-1)
    dshared_T1H = shared.sum(dim=1, keepdim=True, dtype=cos_TH.dtype)
    dshared_TH = rotate(dshared_T1H, cos_TH, -sin_TH, interleaved=True).squeeze(1).to(dq_TNH.dtype)
    return rotate(dq_TNH, cos_TH, -sin_TH, interleaved=True), torch.cat((own, dv_TNH), dim=-1), dshared_TH
