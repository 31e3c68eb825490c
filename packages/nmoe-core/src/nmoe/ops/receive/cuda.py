# SPDX-License-Identifier: Apache-2.0
"""Records to arrivals on both chips: one thread for each (row, choice), reading and writing side by side.

At R=65536, K=6 it reads and writes 5 MB each: launch latency dominates.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64
from torch import Tensor

from nmoe.comm.faults import WRONG_ROW, fault_record
from nmoe.comm.remote import Board, Phase
from nmoe.ops._cute.build import compile_kernel, fake, kernel_cache
from nmoe.ops._cute.remote import fail
from nmoe.ops.push import HEADER_WORDS
from nmoe.ops.receive import Arrivals

__all__ = ["receive"]

_THREADS = 256


@cute.kernel
def _receive_kernel(
    mRecord: cute.Tensor,
    mCount: cute.Tensor,
    mEpoch: cute.Tensor,
    mExpert: cute.Tensor,
    mGate: cute.Tensor,
    mHome: cute.Tensor,
    fault: Int64,
    layer: Int32,
    rank: Int32,
    first: Int32,
    step: Int32,
    ranks: cutlass.Constexpr[int],
    top_k: cutlass.Constexpr[int],
):
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    lanes: cutlass.Constexpr[int] = max(top_k, 3)  # the way home has three words
    sEnd = cutlass.utils.SmemAllocator().allocate_tensor(Int32, cute.make_layout(ranks), byte_alignment=16)
    for p in cutlass.range(tid, ranks, _THREADS):
        end = Int32(0)
        for q in cutlass.range(p + 1):
            end += mCount[q, rank, 0]
        sEnd[p] = end
    cute.arch.sync_threads()

    item = bid * _THREADS + tid
    row = item // lanes
    lane = item - row * lanes
    if row < mRecord.shape[0]:
        present = row < sEnd[ranks - 1]
        if present and lane == 0:
            source = Int32(0)
            for p in cutlass.range_constexpr(ranks - 1):
                source += Int32(1) if row >= sEnd[p] else Int32(0)
            found = mRecord[row, 0]
            epoch = Int32((mEpoch[0] - 1) & 0x7FFFFFFF)
            if found != source or mRecord[row, 3] != epoch:
                seen = (Int64(first + step * found) << 32) | Int64(mRecord[row, 3])
                own, peer = first + step * rank, first + step * source  # numbers in the whole
                fail(fault, Int32(WRONG_ROW), own, peer, layer, Int32(int(Phase.DISPATCH)), Int64(epoch), seen)
        if lane < 3:
            mHome[row, lane] = mRecord[row, lane] if present else Int32(-1)
        if lane < top_k:
            expert = mRecord[row, HEADER_WORDS + lane] if present else Int32(-1)
            mExpert[row, lane] = expert
            mGate[row, lane] = mRecord[row, HEADER_WORDS + top_k + lane] if expert >= 0 else Int32(0)


@cute.jit
def _receive_entry(
    mRecord: cute.Tensor,
    mCount: cute.Tensor,
    mEpoch: cute.Tensor,
    mExpert: cute.Tensor,
    mGate: cute.Tensor,
    mHome: cute.Tensor,
    fault: Int64,
    layer: Int32,
    rank: Int32,
    first: Int32,
    step: Int32,
    ranks: cutlass.Constexpr[int],
    top_k: cutlass.Constexpr[int],
    stream: Any,
):
    items = mRecord.shape[0] * max(top_k, 3)
    _receive_kernel(
        mRecord, mCount, mEpoch, mExpert, mGate, mHome, fault, layer, rank, first, step, ranks, top_k
    ).launch(grid=[cute.ceil_div(items, _THREADS), 1, 1], block=[_THREADS, 1, 1], stream=stream)


@kernel_cache
def receive_kernel(top_k: int, ranks: int) -> Any:
    return compile_kernel(
        _receive_entry,
        fake("int32", None, None),
        fake("int32", ranks, ranks, 2, align=4),
        fake("int64", 1, align=8),
        fake("int32", None, top_k, align=4),
        fake("int32", None, top_k, align=4),
        fake("int32", None, 3, align=4),
        Int64(0),
        *[Int32(0)] * 4,
        ranks,
        top_k,
    )


def receive(
    record_RM: Tensor, count_PP2: Tensor, board: Board, *, gate_like: Tensor, top_k: int, layer: int
) -> Arrivals:
    rows, device = record_RM.shape[0], record_RM.device
    arrivals = Arrivals(
        expert_RK=torch.empty(rows, top_k, dtype=torch.int32, device=device),
        gate_RK=torch.empty(rows, top_k, dtype=gate_like.dtype, device=device),
        home_R3=torch.empty(rows, 3, dtype=torch.int32, device=device),
    )
    receive_kernel(top_k, board.flag.size)(
        record_RM,
        count_PP2,
        board.epoch_1,
        arrivals.expert_RK,
        arrivals.gate_RK.view(torch.int32),
        arrivals.home_R3,
        fault_record().data_ptr(),
        layer,
        board.rank,
        board.ranks.start,
        board.ranks.step,
    )
    return arrivals
