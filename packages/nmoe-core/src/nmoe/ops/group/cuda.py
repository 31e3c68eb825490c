# SPDX-License-Identifier: Apache-2.0
"""Counting sort of assignments on both chips: two kernels, no host synchronisation, no atomics whose order matters.

1. `count`: each block counts, per expert, the assignments of its contiguous range of rows.
2. `place`: each block sums the counts of all blocks (its own expert bases are the experts' offsets plus the counts of
   the blocks before it), splits them over its warps, and each warp walks its range in order, 32 assignments at a time,
   ranking equal experts by lane. The place of an assignment thus depends on (expert, row) alone.

At T=32768, K=6 both read 0.8 MB twice and write 2.4 MB: launch latency dominates.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from torch import Tensor

from nmoe.ops._cute.build import compile_kernel, fake, kernel_cache, sm_count
from nmoe.ops.group import Groups

__all__ = ["group"]

_THREADS = 256
_WARPS = _THREADS // 32
_MIN_ROWS = 16  # of a block: fewer blocks make the sum over blocks shorter where there is little to sort


@cute.kernel
def _count_kernel(mExpert: cute.Tensor, mCount: cute.Tensor, block_items: Int32, experts: cutlass.Constexpr[int]):
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    sCount = cutlass.utils.SmemAllocator().allocate_tensor(Int32, cute.make_layout(experts), byte_alignment=16)
    for e in cutlass.range(tid, experts, _THREADS):
        sCount[e] = 0
    cute.arch.sync_threads()
    end = min((bid + 1) * block_items, mExpert.shape[0])
    for item in cutlass.range(bid * block_items + tid, end, _THREADS):
        expert = mExpert[item]
        if expert >= 0:
            cute.arch.atomic_add((sCount.iterator + expert).llvm_ptr, Int32(1), scope="cta")
    cute.arch.sync_threads()
    for e in cutlass.range(tid, experts, _THREADS):
        mCount[bid, e] = sCount[e]


@cute.jit
def _exclusive_scan(sValue: cute.Tensor, sSum: cute.Tensor, experts: cutlass.Constexpr[int]):
    """One warp: sSum[e] = sum of sValue below e, for e in 0..experts."""
    lane = cute.arch.lane_idx()
    per_lane = (experts + 31) // 32
    mine = Int32(0)
    for i in cutlass.range_constexpr(per_lane):
        e = lane * per_lane + i
        if e < experts:
            mine += sValue[e]
    running = mine
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(running, offset=1 << step, mask_and_clamp=0)
        if lane >= (1 << step):
            running += below
    running -= mine
    for i in cutlass.range_constexpr(per_lane):
        e = lane * per_lane + i
        if e < experts:
            sSum[e] = running
            running += sValue[e]
            if e == experts - 1:
                sSum[experts] = running


@cute.kernel
def _place_kernel(
    mExpert: cute.Tensor,
    mGate: cute.Tensor,
    mCount: cute.Tensor,
    mIndex: cute.Tensor,
    mGateOut: cute.Tensor,
    mOffset: cute.Tensor,
    mSlot: cute.Tensor,
    block_items: Int32,
    top_k: Int32,
    experts: cutlass.Constexpr[int],
):
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    blocks = mCount.shape[0]
    smem = cutlass.utils.SmemAllocator()
    sTotal = smem.allocate_tensor(Int32, cute.make_layout(experts), byte_alignment=16)
    sBefore = smem.allocate_tensor(Int32, cute.make_layout(experts), byte_alignment=16)
    sOffset = smem.allocate_tensor(Int32, cute.make_layout(experts + 1), byte_alignment=16)
    sWarp = smem.allocate_tensor(Int32, cute.make_layout((_WARPS, experts), stride=(experts, 1)), byte_alignment=16)

    for e in cutlass.range(tid, experts, _THREADS):
        total = Int32(0)
        before = Int32(0)
        for b in cutlass.range(blocks, unroll=8):
            count = mCount[b, e]
            total += count
            before += count if b < bid else Int32(0)
        sTotal[e] = total
        sBefore[e] = before
        for w in cutlass.range_constexpr(_WARPS):
            sWarp[w, e] = 0
    cute.arch.sync_threads()
    if warp == 0:
        _exclusive_scan(sTotal, sOffset, experts)

    # This warp's range of assignments, in steps of 32.
    steps = (block_items + _THREADS - 1) // _THREADS
    start = bid * block_items + warp * steps * 32
    end = min(min((bid + 1) * block_items, mExpert.shape[0]), start + steps * 32)
    for item in cutlass.range(start + lane, end, 32):
        expert = mExpert[item]
        if expert >= 0:
            cute.arch.atomic_add((sWarp.iterator + warp * experts + expert).llvm_ptr, Int32(1), scope="cta")
    cute.arch.sync_threads()
    for e in cutlass.range(tid, experts, _THREADS):
        running = sOffset[e] + sBefore[e]
        for w in cutlass.range_constexpr(_WARPS):
            count = sWarp[w, e]
            sWarp[w, e] = running
            running += count
    cute.arch.sync_threads()

    for step in cutlass.range(steps):
        item = start + step * 32 + lane
        expert = Int32(-1)
        if item < end:
            expert = mExpert[item]
        peers = cute.arch.match_sync(0xFFFFFFFF, expert)
        rank = Int32(cute.arch.popc(peers & cute.arch.lanemask_lt()))
        slot = Int32(-1)
        if expert >= 0:
            slot = sWarp[warp, expert] + rank
        cute.arch.sync_warp()
        if expert >= 0 and rank == 0:
            sWarp[warp, expert] = slot + Int32(cute.arch.popc(peers))
        cute.arch.sync_warp()
        if item < end:
            mSlot[item] = slot
            if expert >= 0:
                mIndex[slot] = item // top_k
                mGateOut[slot] = mGate[item]

    if bid == 0:
        for e in cutlass.range(tid, experts + 1, _THREADS):
            mOffset[e] = sOffset[e]
    for slot in cutlass.range(sOffset[experts] + bid * _THREADS + tid, mIndex.shape[0], blocks * _THREADS):
        mIndex[slot] = 0
        mGateOut[slot] = Float32(0.0)


@cute.jit
def _group_entry(
    mExpert: cute.Tensor,
    mGate: cute.Tensor,
    mCount: cute.Tensor,
    mIndex: cute.Tensor,
    mGateOut: cute.Tensor,
    mOffset: cute.Tensor,
    mSlot: cute.Tensor,
    block_items: Int32,
    top_k: Int32,
    experts: cutlass.Constexpr[int],
    stream: Any,
):
    blocks = mCount.shape[0]
    _count_kernel(mExpert, mCount, block_items, experts).launch(
        grid=[blocks, 1, 1], block=[_THREADS, 1, 1], stream=stream
    )
    _place_kernel(mExpert, mGate, mCount, mIndex, mGateOut, mOffset, mSlot, block_items, top_k, experts).launch(
        grid=[blocks, 1, 1], block=[_THREADS, 1, 1], stream=stream
    )


@kernel_cache
def group_kernel(experts: int) -> Any:
    integers, floats = fake("int32", None, align=4), fake("float32", None, align=4)
    return compile_kernel(
        _group_entry,
        integers,
        floats,
        fake("int32", None, experts, align=4),
        fake("int32", None, align=4),
        fake("float32", None, align=4),
        fake("int32", experts + 1, align=4),
        fake("int32", None, align=4),
        Int32(0),
        Int32(0),
        experts,
    )


def group(expert_RK: Tensor, gate_RK: Tensor, *, num_experts: int, num_slots: int) -> Groups:
    rows, top_k = expert_RK.shape
    device = expert_RK.device
    blocks = max(1, min(sm_count(device.index), -(-rows // _MIN_ROWS)))
    block_items = max(-(-rows // blocks), 1) * top_k
    count = torch.empty(blocks, num_experts, dtype=torch.int32, device=device)
    groups = Groups(
        index_S=torch.empty(num_slots, dtype=torch.int32, device=device),
        gate_S=torch.empty(num_slots, dtype=gate_RK.dtype, device=device),
        offset_X=torch.empty(num_experts + 1, dtype=torch.int32, device=device),
        slot_RK=torch.empty(rows, top_k, dtype=torch.int32, device=device),
    )
    group_kernel(num_experts)(
        expert_RK.view(-1),
        gate_RK.view(-1),
        count,
        groups.index_S,
        groups.gate_S,
        groups.offset_X,
        groups.slot_RK.view(-1),
        block_items,
        max(top_k, 1),
    )
    return groups
