# SPDX-License-Identifier: Apache-2.0
"""Plain torch meaning of the way home."""

import torch
from torch import Tensor

from nmoe.comm.remote import Remote
from nmoe.ops.combine import reference as combine_op
from nmoe.ops.plan import Sends

__all__ = ["partial_sum", "push_values", "reduce_push"]


def reduce_push(y_SD: Tensor, slot_RK: Tensor, gate_RK: Tensor | None, home_R3: Tensor, *, results: Remote) -> None:
    sum_RD = combine_op.combine(y_SD, slot_RK, gate_RK)
    busy_R = (slot_RK >= 0).any(dim=1)
    for peer, view_OTD in enumerate(results.views):
        row_R = torch.nonzero(busy_R & (home_R3[:, 0] == peer)).squeeze(1)
        _, token_R, ordinal_R = home_R3[row_R].to(torch.int64).unbind(1)
        view_OTD[ordinal_R, token_R] = sum_RD[row_R]


def push_values(value_S: Tensor, slot_RK: Tensor, home_R3: Tensor, *, values: Remote) -> None:
    for peer, view_TK in enumerate(values.views):
        row_R, k_R = torch.nonzero((slot_RK >= 0) & (home_R3[:, :1] == peer)).unbind(1)
        view_TK.flatten(0, -2)[home_R3[row_R, 1].to(torch.int64), k_R] = value_S[slot_RK[row_R, k_R].to(torch.int64)]


def partial_sum(result_OTD: Tensor, sends: Sends) -> Tensor:
    tokens = sends.row_TP.shape[0]
    owners_T1 = (sends.row_TP >= 0).sum(dim=1, keepdim=True)
    wide = torch.promote_types(result_OTD.dtype, torch.float32)
    out_TD = torch.zeros(tokens, result_OTD.shape[2], dtype=wide, device=result_OTD.device)
    for ordinal in range(result_OTD.shape[0]):
        out_TD += result_OTD[ordinal, :tokens].to(wide).masked_fill(owners_T1 <= ordinal, 0)
    return out_TD.to(result_OTD.dtype)
