# SPDX-License-Identifier: Apache-2.0
"""The meeting on GPUs: one warp that releases, then waits in its own memory.

What earlier kernels of this stream stored, in whatever way, is complete when this one starts; the fence of each thread
that then sets a flag orders all of it before the flag (fences are cumulative). A waiter reads its own memory only, so
waiting takes nothing from the link; it sleeps between reads and gives up after the board's timeout.

The epoch lies in memory and rises here, so a captured graph counts on when it is replayed.

Where peers are reached by puts, one lane first waits until all puts of this rank have arrived, and such peers get their flag
as a signal of NVSHMEM. Their flags are seen by the same loads; a test by NVSHMEM's own call then makes visible what came
before them, which on some networks takes more than an acquire.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from nmoe.comm.faults import LATE, fault_record
from nmoe.comm.remote import Board
from nmoe.ops._cute.build import compile_kernel, fake, kernel_cache
from nmoe.ops._cute.puts import compile_with_puts, quiet, ready, see, signal
from nmoe.ops._cute.remote import fail, global_pointer, nanosleep

__all__ = ["meet"]

_SLEEP_NS = 64


@cute.kernel
def _meet_kernel(
    mAddress: cute.Tensor,
    mEpoch: cute.Tensor,
    record: Int64,
    timeout_ns: Int64,
    layer: Int32,
    phase: Int32,
    rank: Int32,
    first: Int32,
    step: Int32,
    ranks: cutlass.Constexpr[int],
    route: Any,
    far: cutlass.Constexpr[int],
):
    """`first + step * p` is the number of rank p in the whole communicator; `route` is the address of [far, 3] of `Remote`, or None."""
    lane = cute.arch.lane_idx()
    epoch = mEpoch[0] + 1
    cute.arch.sync_warp()
    if lane == 0:
        mEpoch[0] = epoch

    if const_expr(far > 0):
        if lane == 0:
            quiet()
        cute.arch.sync_warp()
    cute.arch.fence_acq_rel_sys()
    for peer in cutlass.range(lane, ranks, 32):
        flag = global_pointer(mAddress[peer], Int64, 8) + rank
        cute.arch.store(flag, epoch, sem="release", scope="sys")

    own = global_pointer(mAddress[rank], Int64, 8)
    if const_expr(far > 0):
        mRoute = cute.make_tensor(global_pointer(route, Int64, 8), cute.make_layout((far, 3), stride=(3, 1)))
        for f in cutlass.range(lane, far, 32):
            signal((own + rank).toint(), epoch, Int32(mRoute[f, 1]))
    deadline = cute.arch.globaltimer() + timeout_ns
    lost = Int32(-1)
    last = Int64(0)
    for peer in cutlass.range(lane, ranks, 32):
        seen = cute.arch.load(own + peer, Int64, sem="acquire", scope="sys")
        while seen < epoch and cute.arch.globaltimer() < deadline:
            nanosleep(_SLEEP_NS)
            seen = cute.arch.load(own + peer, Int64, sem="acquire", scope="sys")
        if seen < epoch:
            lost = peer
            last = seen
    late = cute.arch.vote_ballot_sync(lost >= 0)
    if lost >= 0 and (late & cute.arch.lanemask_lt()) == 0:  # one of them reports
        fail(record, Int32(LATE), first + step * rank, first + step * lost, layer, phase, epoch, last)
    if const_expr(far > 0):
        for f in cutlass.range(lane, far, 32):
            see((own + Int32(mRoute[f, 2])).toint(), epoch)
        cute.arch.sync_warp()
    cute.arch.fence_proxy("async")  # later bulk loads, too, read what was acquired here


@cute.jit
def _meet_entry(
    mAddress: cute.Tensor,
    mEpoch: cute.Tensor,
    record: Int64,
    timeout_ns: Int64,
    layer: Int32,
    phase: Int32,
    rank: Int32,
    first: Int32,
    step: Int32,
    ranks: cutlass.Constexpr[int],
    stream: Any,
):
    _meet_kernel(mAddress, mEpoch, record, timeout_ns, layer, phase, rank, first, step, ranks, None, 0).launch(
        grid=[1, 1, 1], block=[32, 1, 1], stream=stream
    )


@kernel_cache
def meet_kernel(ranks: int) -> Any:
    numbers = fake("int64", ranks, align=8), fake("int64", 1, align=8)
    return compile_kernel(_meet_entry, *numbers, Int64(0), Int64(0), *[Int32(0)] * 5, ranks)


@cute.jit
def _meet_far_entry(
    address: Int64,
    epoch: Int64,
    record: Int64,
    timeout_ns: Int64,
    layer: Int32,
    phase: Int32,
    rank: Int32,
    first: Int32,
    step: Int32,
    route: Int64,
    ranks: cutlass.Constexpr[int],
    far: cutlass.Constexpr[int],
    stream: Any,
):
    mAddress = cute.make_tensor(global_pointer(address, Int64, 8), cute.make_layout(ranks))
    mEpoch = cute.make_tensor(global_pointer(epoch, Int64, 8), cute.make_layout(1))
    _meet_kernel(mAddress, mEpoch, record, timeout_ns, layer, phase, rank, first, step, ranks, route, far).launch(
        grid=[1, 1, 1], block=[32, 1, 1], stream=stream
    )


@ready
def meet_far_kernel(ranks: int, far: int, options: str = "") -> Any:
    return compile_with_puts(_meet_far_entry, *[Int64(0)] * 4, *[Int32(0)] * 5, Int64(0), ranks, far, options=options)


def meet(board: Board, *, layer: int, phase: int) -> None:
    flag, ranks = board.flag, board.ranks
    numbers = (
        fault_record().data_ptr(),
        int(board.timeout_s * 1e9),
        layer,
        int(phase),
        board.rank,
        ranks.start,
        ranks.step,
    )
    if flag.route_F3 is None:
        meet_kernel(flag.size)(flag.address_P, board.epoch_1, *numbers)
    else:
        kernel = meet_far_kernel(flag.size, len(flag.far))
        kernel(flag.address_P.data_ptr(), board.epoch_1.data_ptr(), *numbers, flag.route_F3.data_ptr())
