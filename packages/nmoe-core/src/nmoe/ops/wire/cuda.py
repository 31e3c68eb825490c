# SPDX-License-Identifier: Apache-2.0
"""Packets of rows on both chips: quantised in registers, put together in shared memory, sent by bulk copies.

A warp takes a row: a lane holds 8 values (16 bytes) of every 256, so that 4 lanes share a block of mxfp8 and 2 one of nvfp4,
whose row is read twice: first for the scale of the row. The warp leaves the packet in its ring in shared memory, and
lane p stores it at owner p while the next row is loaded. A row is thus quantised once, however many owners it has.

Roofline, T=32768 D=2048 P=2: reads 134 MB, sends 35 MB (mxfp8) to each owner: 0.21 ms at 330 GB/s over the link, against 0.40
in bf16.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint8, const_expr
from torch import Tensor

from nmoe.comm.remote import Remote
from nmoe.errors import EnvironmentFault
from nmoe.ops._cute.build import compile_kernel, fake, kernel_cache
from nmoe.ops._cute.remote import bulk_store, first_row
from nmoe.ops.plan import Sends
from nmoe.ops.wire import NVFP4_RANGE, WIRES, Wire

__all__ = ["push_packed", "unpack"]

_BLOCKS = 48  # multiprocessors that a push may take from what runs beside it
_STAGES = 2  # packets in the ring of a warp
_RING_BYTES = 192 << 10
_WIDTH = 8  # values of a lane that lie side by side
_THREADS = 256


@cute.jit
def _bits(value: Float32) -> Int32:
    r = cute.make_rmem_tensor((1,), Float32)
    r[0] = value
    return cute.recast_tensor(r, Int32)[0]


@cute.jit
def _float(bits: Int32) -> Float32:
    r = cute.make_rmem_tensor((1,), Int32)
    r[0] = bits
    return cute.recast_tensor(r, Float32)[0]


@cute.jit
def _larger(a: Int32, b: Int32) -> Int32:
    return a if a > b else b


@cute.jit
def _to_e4m3(value: Float32) -> Uint8:
    r = cute.make_rmem_tensor((4,), Float32)
    r.fill(0.0)
    r[0] = value
    r8 = cute.make_rmem_tensor((4,), Float8E4M3FN)
    r8.store(r.load().to(Float8E4M3FN))
    return cute.recast_tensor(r8, Uint8)[0]


@cute.jit
def _from_e4m3(byte: Uint8) -> Float32:
    r8 = cute.make_rmem_tensor((4,), Uint8)
    r8.fill(0)
    r8[0] = byte
    r = cute.make_rmem_tensor((4,), Float32)
    r.store(cute.recast_tensor(r8, Float8E4M3FN).load().to(Float32))
    return r[0]


@cute.jit
def _load(mX: cute.Tensor, token: Int32, item: Int32, items: cutlass.Constexpr[int]) -> cute.Tensor:
    """8 values of a row; zeros past its end."""
    rX = cute.make_rmem_tensor((_WIDTH,), BFloat16)
    rX.fill(0)
    if item < items:
        cute.autovec_copy(cute.local_tile(mX[token, None], (_WIDTH,), (item,)), rX)
    return rX


@cute.jit
def _block_max(rX: cute.Tensor, lanes: cutlass.Constexpr[int]) -> Int32:
    """Largest magnitude of this lane's values and its neighbours', as bits: their order is that of the values, NaN last."""
    largest = Int32(0)
    for v in cutlass.range_constexpr(_WIDTH):
        largest = _larger(largest, _bits(Float32(rX[v])) & 0x7FFFFFFF)
    for step in cutlass.range_constexpr(lanes.bit_length() - 1):
        largest = _larger(largest, cute.arch.shuffle_sync_bfly(largest, offset=1 << step))
    return largest


@cute.jit
def _pack_mxfp8(rX: cute.Tensor, sPayload: cute.Pointer, sScale: cute.Pointer, largest: Int32, first: cutlass.Boolean):
    exponent = largest >> 23
    scale = _larger(exponent - 8 + (Int32(1) if (largest & 0x7FFFFF) > 0x600000 else Int32(0)), Int32(0))
    if exponent == 255:
        scale = Int32(255)
    inverse = _float((254 - (scale if scale < 253 else Int32(253))) << 23)
    r = cute.make_rmem_tensor((_WIDTH,), Float32)
    r.store(rX.load().to(Float32) * inverse)
    r8 = cute.make_rmem_tensor((_WIDTH,), Float8E4M3FN)
    r8.store(r.load().to(Float8E4M3FN))
    target = cute.make_tensor(sPayload.align(_WIDTH), cute.make_layout(_WIDTH))
    cute.autovec_copy(cute.recast_tensor(r8, Uint8), target)
    if first:
        cute.make_tensor(sScale, cute.make_layout(1))[0] = Uint8(scale)


@cute.jit
def _pack_nvfp4(
    rX: cute.Tensor, sPayload: cute.Pointer, sScale: cute.Pointer, largest: Int32, row: Float32, first: cutlass.Boolean
):
    scale = Float32(0.0)
    if row != 0.0:
        scale = _float(largest) / (Float32(6.0) * row)
    byte = _to_e4m3(scale)
    divisor = _from_e4m3(byte) * row
    inverse = Float32(0.0)
    if divisor != 0.0:
        inverse = Float32(1.0) / divisor
    packed = Int32(0)
    for v in cutlass.range_constexpr(_WIDTH):
        bits = _bits(Float32(rX[v]))
        size = _float(bits & 0x7FFFFFFF) * inverse
        code = Int32(1) if size > 0.25 else Int32(0)
        code += Int32(1) if size >= 0.75 else Int32(0)
        code += Int32(1) if size > 1.25 else Int32(0)
        code += Int32(1) if size >= 1.75 else Int32(0)
        code += Int32(1) if size > 2.5 else Int32(0)
        code += Int32(1) if size >= 3.5 else Int32(0)
        code += Int32(1) if size > 5.0 else Int32(0)
        packed |= (code | ((bits >> 28) & 8)) << (4 * v)
    cute.make_tensor(cute.recast_ptr(sPayload, dtype=Int32), cute.make_layout(1))[0] = packed
    if first:
        cute.make_tensor(sScale, cute.make_layout(1))[0] = byte


@cute.kernel
def _push_kernel(
    mX: cute.Tensor,
    mRow: cute.Tensor,
    mCount: cute.Tensor,
    mAddress: cute.Tensor,
    rank: Int32,
    ranks: cutlass.Constexpr[int],
    width: cutlass.Constexpr[int],
    wire: cutlass.Constexpr[Wire],
    warps: cutlass.Constexpr[int],
):
    nbytes: cutlass.Constexpr[int] = wire.packet_bytes(width)
    payload: cutlass.Constexpr[int] = wire.payload_bytes(width)
    lanes: cutlass.Constexpr[int] = wire.block // _WIDTH
    items: cutlass.Constexpr[int] = width // _WIDTH
    steps: cutlass.Constexpr[int] = -(-items // 32)
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    bid, _, _ = cute.arch.block_idx()
    grid, _, _ = cute.arch.grid_dim()
    smem = cutlass.utils.SmemAllocator()
    sRing = smem.allocate_tensor(Uint8, cute.make_layout(warps * _STAGES * nbytes), byte_alignment=128)
    used: cutlass.Constexpr[int] = payload + width // wire.block + 4 * wire.row_scale
    if lane < nbytes - used:  # what fills a packet up is zeros, not whatever lay here
        for s in cutlass.range_constexpr(_STAGES):
            sRing[(warp * _STAGES + s) * nbytes + used + lane] = Uint8(0)

    # A lane serves the peers lane, lane + 32, ...
    per_lane: cutlass.Constexpr[int] = (ranks + 31) // 32
    rTarget = cute.make_rmem_tensor((per_lane,), Int64)
    rTarget.fill(0)
    for i in cutlass.range_constexpr(per_lane):
        peer = lane + 32 * i
        if peer < ranks:
            rTarget[i] = mAddress[peer] + Int64(first_row(mCount, rank, peer)) * nbytes

    stage = Int32(0)
    for token in cutlass.range(bid * warps + warp, mRow.shape[0], grid * warps):
        row = Float32(0.0)
        if const_expr(wire.row_scale):
            row_max = Int32(0)
            for s in cutlass.range(steps, unroll=4):
                row_max = _larger(row_max, _block_max(_load(mX, token, 32 * s + lane, items), 1))
            for step in cutlass.range_constexpr(5):
                row_max = _larger(row_max, cute.arch.shuffle_sync_bfly(row_max, offset=1 << step))
            row = _float(row_max) * Float32(1 / NVFP4_RANGE)
        # The packet that was here must have left shared memory.
        cute.arch.cp_async_bulk_wait_group(_STAGES - 1, read=True)
        cute.arch.sync_warp()
        packet = sRing.iterator + (warp * _STAGES + stage) * nbytes
        if const_expr(wire.row_scale):
            if lane == 0:
                place = cute.recast_ptr(packet + (payload + width // wire.block), dtype=Float32)
                cute.make_tensor(place, cute.make_layout(1))[0] = row
        for s in cutlass.range(steps, unroll=4):
            item = 32 * s + lane
            rX = _load(mX, token, item, items)
            largest = _block_max(rX, lanes)
            if item < items:
                sPayload = packet + item * (_WIDTH * wire.bits // 8)
                sScale = packet + (payload + item // lanes)
                if const_expr(wire.row_scale):
                    _pack_nvfp4(rX, sPayload, sScale, largest, row, item % lanes == 0)
                else:
                    _pack_mxfp8(rX, sPayload, sScale, largest, item % lanes == 0)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        for i in cutlass.range_constexpr(per_lane):
            if lane + 32 * i < ranks:
                number = mRow[token, lane + 32 * i]
                if number >= 0:
                    bulk_store(rTarget[i] + Int64(number) * nbytes, packet, Int32(nbytes))
        cute.arch.cp_async_bulk_commit_group()
        stage = (stage + 1) % _STAGES
    cute.arch.cp_async_bulk_wait_group(0)  # not `read`: the bytes have arrived
    cute.arch.fence_proxy("async")


@cute.jit
def _push_entry(
    mX: cute.Tensor,
    mRow: cute.Tensor,
    mCount: cute.Tensor,
    mAddress: cute.Tensor,
    rank: Int32,
    blocks: Int32,
    ranks: cutlass.Constexpr[int],
    width: cutlass.Constexpr[int],
    wire: cutlass.Constexpr[Wire],
    warps: cutlass.Constexpr[int],
    stream: Any,
):
    _push_kernel(mX, mRow, mCount, mAddress, rank, ranks, width, wire, warps).launch(
        grid=[blocks, 1, 1], block=[32 * warps, 1, 1], stream=stream
    )


def _warps(wire: Wire, width: int) -> int:
    """Warps of a block: as many as have room for their packets."""
    if wire.row_scale and width % 64:
        raise EnvironmentFault(f"{wire.name}: found rows of {width} values, expected a multiple of 64 on a GPU")
    for warps in (8, 4, 2):
        if warps * _STAGES * wire.packet_bytes(width) <= _RING_BYTES:
            return warps
    raise EnvironmentFault(f"{wire.name}: found rows of {width} values, whose packets do not fit into shared memory")


@kernel_cache
def push_packed_kernel(name: str, width: int, ranks: int) -> Any:
    wire = WIRES[name]
    return compile_kernel(
        _push_entry,
        fake("bfloat16", None, width),
        fake("int32", None, ranks, align=4),
        fake("int32", ranks, ranks, 2, align=4),
        fake("int64", ranks, align=8),
        Int32(0),
        Int32(0),
        ranks,
        width,
        wire,
        _warps(wire, width),
    )


@cute.kernel
def _unpack_kernel(
    mPacket: cute.Tensor,
    mCount: cute.Tensor,
    mX: cute.Tensor,
    rank: Int32,
    ranks: cutlass.Constexpr[int],
    width: cutlass.Constexpr[int],
    wire: cutlass.Constexpr[Wire],
):
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    items: cutlass.Constexpr[int] = width // _WIDTH
    payload: cutlass.Constexpr[int] = wire.payload_bytes(width)
    item = bid * _THREADS + tid
    row = item // items
    col = item - row * items
    rows = Int32(0)
    for source in cutlass.range_constexpr(ranks):
        rows += mCount[source, rank, 0]
    if row < rows:
        r = cute.make_rmem_tensor((_WIDTH,), Float32)
        scale = Float32(0.0)
        byte = mPacket[row, payload + col // (wire.block // _WIDTH)]
        rPayload = cute.make_rmem_tensor((_WIDTH * wire.bits // 32,), Int32)
        gPayload = cute.local_tile(mPacket[row, None], (_WIDTH * wire.bits // 8,), (col,))
        cute.autovec_copy(cute.recast_tensor(gPayload, Int32), rPayload)
        if const_expr(wire.row_scale):
            place = cute.recast_ptr(mPacket[row, None].iterator + (payload + width // wire.block), dtype=Float32)
            scale = _from_e4m3(byte) * cute.make_tensor(place, cute.make_layout(1))[0]
            for v in cutlass.range_constexpr(_WIDTH):
                code = (rPayload[0] >> (4 * v)) & 15
                size = code & 7
                # 0, 0.5, 1, 1.5, 2, 3, 4, 6: two bits of exponent, one of significand.
                value = Float32(size) * 0.5 if size < 4 else Float32(2 + (size & 1)) * Float32(1 << ((size >> 1) - 2))
                r[v] = -value if code >= 8 else value
        else:
            exponent = Int32(byte)
            bits = exponent << 23
            if exponent == 0:
                bits = Int32(0x00400000)
            if exponent == 255:
                bits = Int32(0x7FC00000)
            scale = _float(bits)
            r.store(cute.recast_tensor(rPayload, Float8E4M3FN).load().to(Float32))
        rOut = cute.make_rmem_tensor((_WIDTH,), BFloat16)
        rOut.store((r.load() * scale).to(BFloat16))
        cute.autovec_copy(rOut, cute.local_tile(mX[row, None], (_WIDTH,), (col,)))


@cute.jit
def _unpack_entry(
    mPacket: cute.Tensor,
    mCount: cute.Tensor,
    mX: cute.Tensor,
    rank: Int32,
    ranks: cutlass.Constexpr[int],
    width: cutlass.Constexpr[int],
    wire: cutlass.Constexpr[Wire],
    stream: Any,
):
    _unpack_kernel(mPacket, mCount, mX, rank, ranks, width, wire).launch(
        grid=[cute.ceil_div(mX.shape[0] * (width // _WIDTH), _THREADS), 1, 1], block=[_THREADS, 1, 1], stream=stream
    )


@kernel_cache
def unpack_kernel(name: str, width: int, ranks: int) -> Any:
    wire = WIRES[name]
    return compile_kernel(
        _unpack_entry,
        fake("uint8", None, wire.packet_bytes(width)),
        fake("int32", ranks, ranks, 2, align=4),
        fake("bfloat16", None, width),
        Int32(0),
        ranks,
        width,
        wire,
    )


def push_packed(x_TD: Tensor, sends: Sends, count_PP2: Tensor, *, packets: Remote, wire: Wire) -> None:
    if x_TD.shape[0] == 0:
        return
    kernel = push_packed_kernel(wire.name, x_TD.shape[1], packets.size)
    kernel(x_TD, sends.row_TP, count_PP2, packets.address_P, packets.rank, _BLOCKS)


def unpack(packets: Tensor, count_PP2: Tensor, *, rank: int, wire: Wire, like_RD: Tensor) -> Tensor:
    x_RD = torch.empty(packets.shape[0], like_RD.shape[1], dtype=like_RD.dtype, device=packets.device)
    if x_RD.numel() > 0:
        unpack_kernel(wire.name, x_RD.shape[1], count_PP2.shape[0])(packets, count_PP2, x_RD, rank)
    return x_RD
