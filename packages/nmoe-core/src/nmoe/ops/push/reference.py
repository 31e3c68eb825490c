# SPDX-License-Identifier: Apache-2.0
"""Plain torch meaning of the push: an indexed store into each peer's view."""

import torch
from torch import Tensor

from nmoe.comm.remote import Board, Remote
from nmoe.ops.plan import Sends
from nmoe.ops.push import HEADER_WORDS

__all__ = ["push", "push_records"]


def _places(sends: Sends, count_PP2: Tensor, *, rank: int, peer: int) -> tuple[Tensor, Tensor]:
    """Tokens that go to a peer, and where in its memory their rows lie."""
    token_T = torch.nonzero(sends.row_TP[:, peer] >= 0).squeeze(1)
    base = count_PP2[:rank, peer, 0].sum()
    return token_T, base + sends.row_TP[token_T, peer]


def push(x_TD: Tensor, sends: Sends, count_PP2: Tensor, *, rows: Remote) -> None:
    for peer, view_RD in enumerate(rows.views):
        token_T, place_T = _places(sends, count_PP2, rank=rows.rank, peer=peer)
        view_RD[place_T] = x_TD[token_T]


def push_records(
    expert_TK: Tensor,
    gate_TK: Tensor,
    sends: Sends,
    count_PP2: Tensor,
    board: Board,
    *,
    experts_per_rank: int,
    records: Remote,
) -> None:
    top_k = expert_TK.shape[1]
    ordinal_TP = (sends.row_TP >= 0).cumsum(dim=1) - 1
    for peer, view_RM in enumerate(records.views):
        token_T, place_T = _places(sends, count_PP2, rank=records.rank, peer=peer)
        record_TM = torch.zeros(token_T.shape[0], view_RM.shape[1], dtype=torch.int32, device=view_RM.device)
        record_TM[:, 0] = records.rank
        record_TM[:, 1] = token_T
        record_TM[:, 2] = ordinal_TP[token_T, peer]
        record_TM[:, 3] = board.epoch_1 & 0x7FFFFFFF
        local_TK = expert_TK[token_T] - peer * experts_per_rank
        here_TK = (local_TK >= 0) & (local_TK < experts_per_rank)
        record_TM[:, HEADER_WORDS : HEADER_WORDS + top_k] = torch.where(here_TK, local_TK, -1)
        gate_TW = gate_TK[token_T].contiguous().view(torch.int32)
        record_TM[:, HEADER_WORDS + top_k : HEADER_WORDS + top_k + gate_TW.shape[1]] = gate_TW
        view_RM[place_T] = record_TM
