# SPDX-License-Identifier: Apache-2.0
"""Plain torch meaning of the counting sort: a stable sort of (expert, row, k), absent assignments last."""

import torch
from torch import Tensor

from nmoe.ops.group import Groups

__all__ = ["group"]


def group(expert_RK: Tensor, gate_RK: Tensor, *, num_experts: int, num_slots: int) -> Groups:
    rows, top_k = expert_RK.shape
    expert = expert_RK.reshape(-1).to(torch.int64)
    present = expert >= 0
    # Rows are in order already, so a stable sort by expert alone orders by (expert, row).
    order = torch.sort(expert.masked_fill(~present, num_experts), stable=True).indices
    count_X = torch.zeros(num_experts + 1, dtype=torch.int64, device=expert.device)
    count_X.index_add_(0, expert + 1, present.to(torch.int64))  # an absent one adds 0 to entry 0
    offset_X = count_X.cumsum(0)

    # Slot number of each (row, k): the inverse of the order.
    rank = torch.empty_like(order)
    rank[order] = torch.arange(rows * top_k, device=order.device)
    slot_RK = torch.where(present, rank, -1).view(rows, top_k)

    used = min(num_slots, rows * top_k)
    head = order[:used]
    valid = present[head]
    index_S = torch.zeros(num_slots, dtype=torch.int32, device=order.device)
    gate_S = torch.zeros(num_slots, dtype=gate_RK.dtype, device=order.device)
    index_S[:used] = torch.where(valid, head // max(top_k, 1), 0).to(torch.int32)
    gate_S[:used] = torch.where(valid, gate_RK.reshape(-1)[head], 0)
    return Groups(
        index_S=index_S, gate_S=gate_S, offset_X=offset_X.to(torch.int32), slot_RK=slot_RK.to(torch.int32).contiguous()
    )
