# SPDX-License-Identifier: Apache-2.0
"""Plain torch meaning of the records."""

import torch
from torch import Tensor

from nmoe.comm.remote import Board, Phase
from nmoe.comm.waits import number_in_run, peer_fault
from nmoe.ops.push import HEADER_WORDS
from nmoe.ops.receive import Arrivals

__all__ = ["receive"]


def receive(
    record_RM: Tensor, count_PP2: Tensor, board: Board, *, gate_like: Tensor, top_k: int, layer: int
) -> Arrivals:
    rows = record_RM.shape[0]
    count_P = count_PP2[:, board.rank, 0].to(torch.int64)
    row_R = torch.arange(rows, device=record_RM.device)
    source_R = torch.bucketize(row_R, count_P.cumsum(0), right=True)
    present_R = row_R < count_P.sum()

    epoch = (board.epoch_1 - 1) & 0x7FFFFFFF
    wrong_R = present_R & ((record_RM[:, 0] != source_R) | (record_RM[:, 3] != epoch))
    if wrong_R.any():
        row = int(wrong_R.nonzero()[0])
        peer = int(source_R[row])
        source = int(record_RM[row, 0])
        source = number_in_run(board, source) if 0 <= source < len(board.ranks) else source
        found = f"row of rank {source}, epoch {record_RM[row, 3]}"
        wanted = f"one of its {count_P[peer]} rows, epoch {int(epoch)}"
        raise peer_fault(board, peer=peer, layer=layer, phase=Phase.DISPATCH, expected=wanted, seen=found)

    present_R1 = present_R.unsqueeze(1)
    expert_RK = record_RM[:, HEADER_WORDS : HEADER_WORDS + top_k]
    words = top_k * gate_like.dtype.itemsize // 4
    gate_RK = record_RM[:, HEADER_WORDS + top_k : HEADER_WORDS + top_k + words].contiguous().view(gate_like.dtype)
    here_RK = present_R1 & (expert_RK >= 0)
    return Arrivals(
        expert_RK=torch.where(here_RK, expert_RK, -1),
        gate_RK=torch.where(here_RK, gate_RK, 0),
        home_R3=torch.where(present_R1, record_RM[:, :3], -1),
    )
