# SPDX-License-Identifier: Apache-2.0
"""Rows on their way, on both chips: bulk copies into shared memory and out of it into the owners' memory.

Warps take tokens in turn. Each holds a ring of rows in shared memory: rows ahead are being loaded while those
behind are being stored, by one bulk store for each owner, so a row is read once however many owners it has. No thread
touches a row's bytes.

How many multiprocessors (H200, measured): one stores 51 GB/s where a row goes to two owners, 44 where it goes to one and has to
be loaded for that alone; whether rows have 4 or 14 KiB, ring of 16 KiB or 192, memory its own or a peer's. A link takes
about 350 GB/s, and it takes them best when it is asked for little more: at P=2, where half of what is stored crosses it,
16 blocks that ask for 368 get 348, 16 that ask for 412 get 308, 24 get 300, and only 64 and more get 350 to 364 again.
So just as many blocks are launched as the link can feed on.

Roofline, T=32768 D=2048 K=6 P=2 in bf16: 132 MB over the link (0.38 ms at 350 GB/s), 0.4 GB of memory traffic at each rank.
"""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64
from torch import Tensor

from nmoe import arch
from nmoe.comm.remote import Board, Remote
from nmoe.errors import EnvironmentFault
from nmoe.ops._cute.build import compile_kernel, fake, kernel_cache
from nmoe.ops._cute.remote import bulk_load, bulk_store, first_row
from nmoe.ops.plan import Sends
from nmoe.ops.push import HEADER_WORDS, record_words

__all__ = ["launch_push", "push", "push_records"]

_LOAD_GB_S, _STORE_GB_S = 160, 61  # of one multiprocessor, idle but for it: 44 stored at one owner a row, 51 at two
_LINK_GB_S = {"sm90a": 350, "sm100a": 700}  # each way; sm100a: not measured, from what others report of B200
_RING_BYTES = 192 << 10
_WARPS = 4
_RECORD_THREADS = 128


def _ring(row_bytes: int) -> tuple[int, int]:
    """Warps of a block, and rows in the ring of each; at least a row being loaded and one being stored."""
    for warps in (_WARPS, 2, 1):
        stages = min(_RING_BYTES // (warps * row_bytes), 16)
        if stages >= 2:
            return warps, stages
    raise EnvironmentFault(
        f"rows of {row_bytes:,} bytes: two do not fit into a GPU's shared memory, where at most {_RING_BYTES // 2:,} bytes "
        "each do; choose a smaller model.hidden_size"
    )


@cute.kernel
def _push_kernel(
    mX: cute.Tensor,
    mRow: cute.Tensor,
    mCount: cute.Tensor,
    mAddress: cute.Tensor,
    rank: Int32,
    ranks: cutlass.Constexpr[int],
    row_bytes: cutlass.Constexpr[int],
    warps: cutlass.Constexpr[int],
    stages: cutlass.Constexpr[int],
):
    lag: cutlass.Constexpr[int] = stages // 2  # rows whose stores may still read the ring
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    bid, _, _ = cute.arch.block_idx()
    grid, _, _ = cute.arch.grid_dim()
    smem = cutlass.utils.SmemAllocator()
    sBarrier = smem.allocate_array(Int64, warps * stages)
    sRow = smem.allocate_tensor(cutlass.Uint8, cute.make_layout(warps * stages * row_bytes), byte_alignment=128)
    barrier = sBarrier + warp * stages
    ring = sRow.iterator + warp * stages * row_bytes
    if lane == 0:
        for s in cutlass.range_constexpr(stages):
            cute.arch.mbarrier_init(barrier + s, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_warp()

    # A lane serves the peers lane, lane + 32, ...: it issues their stores, and waits for them.
    per_lane: cutlass.Constexpr[int] = (ranks + 31) // 32
    rTarget = cute.make_rmem_tensor((per_lane,), Int64)
    rTarget.fill(0)
    for i in cutlass.range_constexpr(per_lane):
        peer = lane + 32 * i
        if peer < ranks:
            rTarget[i] = mAddress[peer] + Int64(first_row(mCount, rank, peer)) * row_bytes

    first = bid * warps + warp
    stride = grid * warps
    tokens = mRow.shape[0]
    items = Int32(0)
    if first < tokens:
        items = (tokens - first + stride - 1) // stride
    x = mX.iterator.toint()
    for item in cutlass.range(min(items, stages - lag)):
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier + item, row_bytes)
            source = x + Int64(first + item * stride) * row_bytes
            bulk_load(ring + item * row_bytes, source, Int32(row_bytes), barrier + item)

    rNumber = cute.make_rmem_tensor((per_lane,), Int32)
    _numbers(mRow, rNumber, first, lane, ranks)
    for item in cutlass.range(items):
        stage = item % stages
        rHere = cute.make_rmem_tensor((per_lane,), Int32)
        for i in cutlass.range_constexpr(per_lane):
            rHere[i] = rNumber[i]
        _numbers(mRow, rNumber, first + (item + 1) * stride, lane, ranks)  # of the next row, before this one is awaited
        cute.arch.mbarrier_wait(barrier + stage, (item // stages) & 1)
        for i in cutlass.range_constexpr(per_lane):
            if rHere[i] >= 0:
                bulk_store(rTarget[i] + Int64(rHere[i]) * row_bytes, ring + stage * row_bytes, Int32(row_bytes))
        cute.arch.cp_async_bulk_commit_group()
        ahead = item + stages - lag
        if ahead < items:
            cute.arch.cp_async_bulk_wait_group(lag, read=True)
            cute.arch.sync_warp()
            if lane == 0:
                free = ahead % stages
                cute.arch.mbarrier_arrive_and_expect_tx(barrier + free, row_bytes)
                source = x + Int64(first + ahead * stride) * row_bytes
                bulk_load(ring + free * row_bytes, source, Int32(row_bytes), barrier + free)
    cute.arch.cp_async_bulk_wait_group(0)  # not `read`: the bytes have arrived
    cute.arch.fence_proxy("async")


@cute.jit
def _numbers(mRow: cute.Tensor, rNumber: cute.Tensor, token: Int32, lane: Int32, ranks: cutlass.Constexpr[int]):
    """Numbers of a token's rows at this lane's peers; -1 where it does not go."""
    for i in cutlass.range_constexpr((ranks + 31) // 32):
        rNumber[i] = Int32(-1)
        if token < mRow.shape[0] and lane + 32 * i < ranks:
            rNumber[i] = mRow[token, lane + 32 * i]


@cute.jit
def _push_entry(
    mX: cute.Tensor,
    mRow: cute.Tensor,
    mCount: cute.Tensor,
    mAddress: cute.Tensor,
    rank: Int32,
    blocks: Int32,
    ranks: cutlass.Constexpr[int],
    row_bytes: cutlass.Constexpr[int],
    warps: cutlass.Constexpr[int],
    stages: cutlass.Constexpr[int],
    stream: Any,
):
    _push_kernel(mX, mRow, mCount, mAddress, rank, ranks, row_bytes, warps, stages).launch(
        grid=[blocks, 1, 1], block=[32 * warps, 1, 1], stream=stream
    )


@kernel_cache
def push_kernel(row_bytes: int, ranks: int) -> Any:
    warps, stages = _ring(row_bytes)
    return compile_kernel(
        _push_entry,
        fake("int32", None, row_bytes // 4),
        fake("int32", None, ranks, align=4),
        fake("int32", ranks, ranks, 2, align=4),
        fake("int64", ranks, align=8),
        Int32(0),
        Int32(0),
        ranks,
        row_bytes,
        warps,
        stages,
    )


@cute.kernel
def _records_kernel(
    mExpert: cute.Tensor,
    mGate: cute.Tensor,
    mRow: cute.Tensor,
    mCount: cute.Tensor,
    mEpoch: cute.Tensor,
    mAddress: cute.Tensor,
    experts: Int32,
    rank: Int32,
    ranks: cutlass.Constexpr[int],
    top_k: cutlass.Constexpr[int],
    words: cutlass.Constexpr[int],
):
    """A block takes 128 tokens and one peer: their records lie side by side there, so one bulk store carries them all."""
    tid, _, _ = cute.arch.thread_idx()
    bid, peer, _ = cute.arch.block_idx()
    smem = cutlass.utils.SmemAllocator()
    sRecord = smem.allocate_tensor(Int32, cute.make_layout(_RECORD_THREADS * words), byte_alignment=128)
    sRange = smem.allocate_tensor(Int32, cute.make_layout(2), byte_alignment=16)
    if tid == 0:
        sRange[0] = 0x7FFFFFFF
        sRange[1] = 0
    cute.arch.sync_threads()
    token = bid * _RECORD_THREADS + tid
    number = Int32(-1)
    if token < mRow.shape[0]:
        number = mRow[token, peer]
    if number >= 0:
        cute.arch.atomic_min(sRange.iterator.llvm_ptr, number, scope="cta")
        cute.arch.atomic_add((sRange.iterator + 1).llvm_ptr, Int32(1), scope="cta")
    cute.arch.sync_threads()
    first = sRange[0]
    if number >= 0:
        ordinal = Int32(0)
        for p in cutlass.range(peer):
            ordinal += Int32(1) if mRow[token, p] >= 0 else Int32(0)
        at = (number - first) * words
        sRecord[at] = rank
        sRecord[at + 1] = token
        sRecord[at + 2] = ordinal
        sRecord[at + 3] = Int32(mEpoch[0] & 0x7FFFFFFF)
        for k in cutlass.range_constexpr(top_k):
            local = mExpert[token, k] - peer * experts
            sRecord[at + HEADER_WORDS + k] = local if local >= 0 and local < experts else Int32(-1)
            sRecord[at + HEADER_WORDS + top_k + k] = mGate[token, k]
        for w in cutlass.range_constexpr(HEADER_WORDS + 2 * top_k, words):
            sRecord[at + w] = 0
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()
    if tid == 0 and sRange[1] > 0:
        place = Int64(first_row(mCount, rank, peer) + first)
        bulk_store(mAddress[peer] + place * (4 * words), sRecord.iterator, sRange[1] * (4 * words))
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0)
        cute.arch.fence_proxy("async")


@cute.jit
def _records_entry(
    mExpert: cute.Tensor,
    mGate: cute.Tensor,
    mRow: cute.Tensor,
    mCount: cute.Tensor,
    mEpoch: cute.Tensor,
    mAddress: cute.Tensor,
    experts: Int32,
    rank: Int32,
    ranks: cutlass.Constexpr[int],
    top_k: cutlass.Constexpr[int],
    words: cutlass.Constexpr[int],
    stream: Any,
):
    _records_kernel(mExpert, mGate, mRow, mCount, mEpoch, mAddress, experts, rank, ranks, top_k, words).launch(
        grid=[cute.ceil_div(mRow.shape[0], _RECORD_THREADS), ranks, 1], block=[_RECORD_THREADS, 1, 1], stream=stream
    )


@kernel_cache
def records_kernel(top_k: int, ranks: int) -> Any:
    words = record_words(top_k=top_k, gate_bytes=4)
    return compile_kernel(
        _records_entry,
        fake("int32", None, top_k, align=4),
        fake("int32", None, top_k, align=4),
        fake("int32", None, ranks, align=4),
        fake("int32", ranks, ranks, 2, align=4),
        fake("int64", 1, align=8),
        fake("int64", ranks, align=8),
        Int32(0),
        Int32(0),
        ranks,
        top_k,
        words,
    )


def _blocks(ranks: int, top_k: int) -> int:
    """Multiprocessors that fill the link when choices go to all ranks alike, so that (P - 1) / P of the rows cross it."""
    owners = ranks * (1 - (1 - 1 / ranks) ** top_k)  # of a row, in the mean: it is loaded once and stored so many times
    stored = 1 / (1 / _STORE_GB_S + 1 / (owners * _LOAD_GB_S))
    return math.ceil(_LINK_GB_S[arch.current().name] / (stored * max(ranks - 1, 1) / ranks))


def push(x_TD: Tensor, sends: Sends, count_PP2: Tensor, *, rows: Remote) -> None:
    launch_push(x_TD, sends, count_PP2, rows=rows, blocks=_blocks(rows.size, sends.top_k))


def launch_push(x_TD: Tensor, sends: Sends, count_PP2: Tensor, *, rows: Remote, blocks: int) -> None:
    """`push` on so many multiprocessors."""
    if x_TD.shape[0] == 0:
        return
    row_bytes = x_TD.shape[1] * x_TD.element_size()
    push_kernel(row_bytes, rows.size)(
        x_TD.contiguous().view(torch.int32), sends.row_TP, count_PP2, rows.address_P, rows.rank, blocks
    )


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
    if expert_TK.shape[0] == 0:
        return
    records_kernel(expert_TK.shape[1], records.size)(
        expert_TK,
        gate_TK.view(torch.int32),
        sends.row_TP,
        count_PP2,
        board.epoch_1,
        records.address_P,
        experts_per_rank,
        records.rank,
    )
