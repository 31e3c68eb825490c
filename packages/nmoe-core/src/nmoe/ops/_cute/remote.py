# SPDX-License-Identifier: Apache-2.0
"""Device functions for memory of other ranks: pointers from addresses, bulk copies, and the report of a lost peer.

Bulk copies (`cp.async.bulk`, the TMA without a tensor map) move 16 bytes and more between shared and global memory,
whoever's it is, while the thread that issued them goes on. What a thread stored so is complete after
`bulk_wait(0)`; whether its source in shared memory may be overwritten, `bulk_wait_read` says earlier.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

__all__ = ["bulk_load", "bulk_store", "fail", "first_row", "global_pointer", "nanosleep"]


@cute.jit
def global_pointer(address: Int64, element: cutlass.Constexpr[Any], align: cutlass.Constexpr[int]) -> cute.Pointer:
    """A pointer into global memory, own or a peer's."""
    return cute.make_ptr(element, address, cute.AddressSpace.gmem, assumed_align=align)


@cute.jit
def bulk_load(target: cute.Pointer, source: Int64, nbytes: Int32, barrier: cute.Pointer):
    """Start a copy from global to shared memory; the barrier, told of it beforehand, counts its bytes."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target.toint(), source, nbytes, barrier.toint()],
    )


@cute.jit
def bulk_store(target: Int64, source: cute.Pointer, nbytes: Int32):
    """Start a copy from shared to global memory, in this thread's open group."""
    cute.arch.inline_ptx(
        "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
        read_only_args=[target, source.toint(), nbytes],
    )


@cute.jit
def first_row(mCount: cute.Tensor, rank: Int32, peer: Int32) -> Int32:
    """Where this rank's rows begin at a peer: behind those of the ranks below."""
    rows = Int32(0)
    for source in cutlass.range(rank):
        rows += mCount[source, peer, 0]
    return rows


@cute.jit
def nanosleep(nanoseconds: cutlass.Constexpr[int]):
    """Let others use the multiprocessor for about that long."""
    cute.arch.inline_ptx(f"nanosleep.u32 {nanoseconds};")


@cute.jit
def fail(
    record: Int64, kind: Int32, rank: Int32, peer: Int32, layer: Int32, phase: Int32, expected: Int64, seen: Int64
):
    """Write a fault where the host finds it (`nmoe.comm.faults`), and end all work of this process on the device."""
    fields = cute.make_tensor(global_pointer(record, Int64, 8), cute.make_layout(8))
    fields[1] = Int64(rank)
    fields[2] = Int64(peer)
    fields[3] = Int64(layer)
    fields[4] = Int64(phase)
    fields[5] = expected
    fields[6] = seen
    cute.arch.fence_acq_rel_sys()
    fields[0] = Int64(kind)
    cute.arch.fence_acq_rel_sys()
    cute.arch.inline_ptx("trap;")
