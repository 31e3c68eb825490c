# SPDX-License-Identifier: Apache-2.0
"""Plain torch meaning of the way from slots to rows."""

import torch
from torch import Tensor

__all__ = ["collect", "combine", "spread"]


def combine(y_SD: Tensor, slot_RK: Tensor, gate_RK: Tensor | None) -> Tensor:
    rows, top_k = slot_RK.shape
    wide = gate_RK.dtype if gate_RK is not None else torch.promote_types(y_SD.dtype, torch.float32)
    out_RD = torch.zeros(rows, y_SD.shape[1], dtype=wide, device=y_SD.device)
    if y_SD.shape[0] == 0:
        return out_RD.to(y_SD.dtype)
    for k in range(top_k):
        slot_R = slot_RK[:, k]
        part_RD = y_SD.index_select(0, slot_R.clamp(min=0)).to(wide)
        if gate_RK is not None:
            part_RD = part_RD * gate_RK[:, k : k + 1]
        out_RD += part_RD.masked_fill_((slot_R < 0).unsqueeze(1), 0)
    return out_RD.to(y_SD.dtype)


def spread(x_RD: Tensor, slot_RK: Tensor, *, num_slots: int) -> Tensor:
    x_SD = x_RD.new_empty(num_slots, x_RD.shape[1])
    row_A, choice_A = (slot_RK >= 0).nonzero(as_tuple=True)
    x_SD[slot_RK[row_A, choice_A].to(torch.int64)] = x_RD[row_A]
    return x_SD


def collect(value_S: Tensor, slot_RK: Tensor) -> Tensor:
    if value_S.shape[0] == 0:
        return value_S.new_zeros(slot_RK.shape)
    value_RK = value_S.index_select(0, slot_RK.reshape(-1).clamp(min=0)).view(slot_RK.shape)
    return value_RK.masked_fill(slot_RK < 0, 0)
