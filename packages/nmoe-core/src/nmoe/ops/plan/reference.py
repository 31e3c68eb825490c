# SPDX-License-Identifier: Apache-2.0
"""Plain torch meaning of the plan: a running count down each column of the table of who needs which token."""

import torch
from torch import Tensor

from nmoe.comm.remote import Remote
from nmoe.ops.plan import Sends

__all__ = ["plan"]


def plan(expert_TK: Tensor, *, experts_per_rank: int, count: Remote) -> Sends:
    owner_TK = expert_TK.to(torch.int64).div(experts_per_rank, rounding_mode="floor")  # of -1: -1
    assignments_TP = torch.zeros(expert_TK.shape[0], count.size, dtype=torch.int64, device=expert_TK.device)
    assignments_TP.scatter_add_(1, owner_TK.clamp(min=0), (owner_TK >= 0).to(torch.int64))
    goes_TP = assignments_TP > 0
    row_TP = torch.where(goes_TP, goes_TP.cumsum(dim=0) - 1, -1).to(torch.int32)
    count_P2 = torch.stack([goes_TP.sum(dim=0), assignments_TP.sum(dim=0)], dim=1).to(torch.int32)
    for table in count.views:
        table[count.rank] = count_P2
    return Sends(row_TP=row_TP, top_k=expert_TK.shape[1])
