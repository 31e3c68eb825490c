# SPDX-License-Identifier: Apache-2.0
"""The plan on both chips: a running count per destination, in token order, without atomics whose order matters.

1. `count` (only where one block does not hold all tokens): each block counts what its range of tokens sends to each rank.
2. `place`: each block sums the counts of the blocks before it, each warp those of the warps before it, and walks its
   range 32 tokens at a time, numbering a token's row by the lanes below. The first block announces the totals to all.

At T=32768, K=6, P=2 it reads 1.6 MB and writes 0.3 MB: launch latency dominates.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Int32
from torch import Tensor

from nmoe.comm.remote import Remote
from nmoe.ops._cute.build import compile_kernel, fake, kernel_cache
from nmoe.ops._cute.remote import global_pointer
from nmoe.ops.plan import Sends

__all__ = ["plan"]

_THREADS = 1024
_WARPS = _THREADS // 32
_ONE_BLOCK = 1024  # tokens: so many are quicker in one block than with a second kernel


@cute.jit
def _owners(mExpert: cute.Tensor, token: Int32, end: Int32, experts: Int32, top_k: cutlass.Constexpr[int]):
    """Ranks of a token's experts; -1 where it has none, and past the end."""
    rOwner = cute.make_rmem_tensor((top_k,), Int32)
    rOwner.fill(-1)
    if token < end:
        for k in cutlass.range_constexpr(top_k):
            expert = mExpert[token, k]
            rOwner[k] = expert // experts if expert >= 0 else Int32(-1)
    return rOwner


@cute.jit
def _assignments(rOwner: cute.Tensor, peer: cutlass.Constexpr[int], top_k: cutlass.Constexpr[int]) -> Int32:
    found = Int32(0)
    for k in cutlass.range_constexpr(top_k):
        found += Int32(1) if rOwner[k] == peer else Int32(0)
    return found


@cute.jit
def _warp_tally(
    mExpert: cute.Tensor,
    sWarp: cute.Tensor,
    sAssigned: cute.Tensor,
    start: Int32,
    end: Int32,
    steps: Int32,
    experts: Int32,
    ranks: cutlass.Constexpr[int],
    top_k: cutlass.Constexpr[int],
):
    """sWarp[warp, p]: rows that this warp's range sends to p; their assignments are added to sAssigned[p]."""
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rRows = cute.make_rmem_tensor((ranks,), Int32)
    rAssigned = cute.make_rmem_tensor((ranks,), Int32)
    rRows.fill(0)
    rAssigned.fill(0)
    for step in cutlass.range(steps):
        rOwner = _owners(mExpert, start + step * 32 + lane, end, experts, top_k)
        for p in cutlass.range_constexpr(ranks):
            found = _assignments(rOwner, p, top_k)
            rAssigned[p] += found
            rRows[p] += Int32(cute.arch.popc(cute.arch.vote_ballot_sync(Boolean(found > 0))))
    for p in cutlass.range_constexpr(ranks):
        if rAssigned[p] > 0:
            cute.arch.atomic_add((sAssigned.iterator + p).llvm_ptr, rAssigned[p], scope="cta")
        if lane == 0:
            sWarp[warp, p] = rRows[p]


@cute.jit
def _shared(ranks: cutlass.Constexpr[int]):
    """Shared memory of both kernels, with the sums of assignments cleared."""
    tid, _, _ = cute.arch.thread_idx()
    smem = cutlass.utils.SmemAllocator()
    sWarp = smem.allocate_tensor(Int32, cute.make_layout((_WARPS, ranks), stride=(ranks, 1)), byte_alignment=16)
    sAssigned = smem.allocate_tensor(Int32, cute.make_layout(ranks), byte_alignment=16)
    sTotal = smem.allocate_tensor(Int32, cute.make_layout((ranks, 2), stride=(2, 1)), byte_alignment=16)
    for p in cutlass.range(tid, ranks, _THREADS):
        sAssigned[p] = 0
    cute.arch.sync_threads()
    return sWarp, sAssigned, sTotal


@cute.jit
def _range(block_tokens: Int32, tokens: Int32):
    """This warp's tokens [start, end), and how many steps of 32 they take."""
    bid, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    steps = (block_tokens + _THREADS - 1) // _THREADS
    start = bid * block_tokens + warp * steps * 32
    return start, min(min((bid + 1) * block_tokens, tokens), start + steps * 32), steps


@cute.kernel
def _count_kernel(
    mExpert: cute.Tensor,
    mCount: cute.Tensor,
    block_tokens: Int32,
    experts: Int32,
    ranks: cutlass.Constexpr[int],
    top_k: cutlass.Constexpr[int],
):
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    sWarp, sAssigned, _ = _shared(ranks)
    start, end, steps = _range(block_tokens, mExpert.shape[0])
    _warp_tally(mExpert, sWarp, sAssigned, start, end, steps, experts, ranks, top_k)
    cute.arch.sync_threads()
    for p in cutlass.range(tid, ranks, _THREADS):
        rows = Int32(0)
        for w in cutlass.range_constexpr(_WARPS):
            rows += sWarp[w, p]
        mCount[bid, p] = rows
        mCount[bid, ranks + p] = sAssigned[p]


@cute.kernel
def _place_kernel(
    mExpert: cute.Tensor,
    mCount: Any,
    mRow: cute.Tensor,
    mAddress: cute.Tensor,
    block_tokens: Int32,
    experts: Int32,
    rank: Int32,
    ranks: cutlass.Constexpr[int],
    top_k: cutlass.Constexpr[int],
):
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    sWarp, sAssigned, sTotal = _shared(ranks)
    start, end, steps = _range(block_tokens, mExpert.shape[0])
    _warp_tally(mExpert, sWarp, sAssigned, start, end, steps, experts, ranks, top_k)
    cute.arch.sync_threads()

    for p in cutlass.range(tid, ranks, _THREADS):
        running = Int32(0)
        if cutlass.const_expr(mCount is not None):
            rows = Int32(0)
            assigned = Int32(0)
            for b in cutlass.range(mCount.shape[0], unroll=8):
                here = mCount[b, p]
                running += here if b < bid else Int32(0)
                rows += here
                assigned += mCount[b, ranks + p]
            sTotal[p, 0] = rows
            sTotal[p, 1] = assigned
        for w in cutlass.range_constexpr(_WARPS):
            rows_of_warp = sWarp[w, p]
            sWarp[w, p] = running
            running += rows_of_warp
        if cutlass.const_expr(mCount is None):
            sTotal[p, 0] = running
            sTotal[p, 1] = sAssigned[p]
    cute.arch.sync_threads()

    if bid == 0:
        for item in cutlass.range(tid, ranks * ranks, _THREADS):
            peer = item // ranks
            p = item - peer * ranks
            table = cute.make_tensor(global_pointer(mAddress[peer], Int32, 8), cute.make_layout(2 * ranks * ranks))
            table[2 * (rank * ranks + p)] = sTotal[p, 0]
            table[2 * (rank * ranks + p) + 1] = sTotal[p, 1]

    rNext = cute.make_rmem_tensor((ranks,), Int32)
    for p in cutlass.range_constexpr(ranks):
        rNext[p] = sWarp[warp, p]
    for step in cutlass.range(steps):
        token = start + step * 32 + lane
        rOwner = _owners(mExpert, token, end, experts, top_k)
        for p in cutlass.range_constexpr(ranks):
            goes = Boolean(_assignments(rOwner, p, top_k) > 0)
            lanes = cute.arch.vote_ballot_sync(goes)
            if token < end:
                number = rNext[p] + Int32(cute.arch.popc(lanes & cute.arch.lanemask_lt()))
                mRow[token, p] = number if goes else Int32(-1)
            rNext[p] += Int32(cute.arch.popc(lanes))


@cute.jit
def _plan_entry(
    mExpert: cute.Tensor,
    mCount: Any,
    mRow: cute.Tensor,
    mAddress: cute.Tensor,
    block_tokens: Int32,
    experts: Int32,
    rank: Int32,
    ranks: cutlass.Constexpr[int],
    top_k: cutlass.Constexpr[int],
    stream: Any,
):
    blocks = Int32(1)
    if cutlass.const_expr(mCount is not None):
        blocks = mCount.shape[0]
        _count_kernel(mExpert, mCount, block_tokens, experts, ranks, top_k).launch(
            grid=[blocks, 1, 1], block=[_THREADS, 1, 1], stream=stream
        )
    _place_kernel(mExpert, mCount, mRow, mAddress, block_tokens, experts, rank, ranks, top_k).launch(
        grid=[blocks, 1, 1], block=[_THREADS, 1, 1], stream=stream
    )


@kernel_cache
def plan_kernel(ranks: int, top_k: int, one_block: bool) -> Any:
    return compile_kernel(
        _plan_entry,
        fake("int32", None, top_k, align=4),
        None if one_block else fake("int32", None, 2 * ranks, align=4),
        fake("int32", None, ranks, align=4),
        fake("int64", ranks, align=8),
        Int32(0),
        Int32(0),
        Int32(0),
        ranks,
        top_k,
    )


def plan(expert_TK: Tensor, *, experts_per_rank: int, count: Remote) -> Sends:
    tokens, top_k = expert_TK.shape
    row_TP = torch.empty(tokens, count.size, dtype=torch.int32, device=expert_TK.device)
    one_block = tokens <= _ONE_BLOCK
    blocks = -(-tokens // _THREADS)
    plan_kernel(count.size, top_k, one_block)(
        expert_TK,
        None if one_block else torch.empty(blocks, 2 * count.size, dtype=torch.int32, device=expert_TK.device),
        row_TP,
        count.address_P,
        max(tokens, 1) if one_block else _THREADS,
        experts_per_rank,
        count.rank,
    )
    return Sends(row_TP=row_TP, top_k=top_k)
