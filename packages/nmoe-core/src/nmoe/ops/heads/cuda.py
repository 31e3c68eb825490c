# SPDX-License-Identifier: Apache-2.0
"""The joined heads on both chips: one thread turns or copies 16 bytes of a query and of a key, in fp32 (tables are fp32).

Memory bound: at N=16, H=192, V=128 in bf16 24 KiB a token forward, 32 KiB backward (T=32768: 0.20 and 0.26 ms at 4 TB/s).
Widths that are no multiples of eight, and rows that do not begin at 16 bytes, take a pair a thread.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr
from torch import Tensor

from nmoe.errors import EnvironmentFault
from nmoe.ops._cute.build import compile_kernel, fake, kernel_cache

__all__ = ["join", "split"]

_THREADS = 256
_WIDE = 8


@cute.jit
def _turn(rX: Any, mCos: cute.Tensor, mSin: cute.Tensor, token: Int32, chunk: Int32, back: cutlass.Constexpr[bool]):
    """Rotates the neighbouring pairs of a vector of fp32, of which there are `chunk` before it; `back` undoes it."""
    pairs = const_expr(cute.size(rX) // 2)
    rCos = cute.make_rmem_tensor((pairs,), Float32)
    rSin = cute.make_rmem_tensor((pairs,), Float32)
    cute.autovec_copy(cute.local_tile(mCos[token, None], (pairs,), (chunk,)), rCos)
    cute.autovec_copy(cute.local_tile(mSin[token, None], (pairs,), (chunk,)), rSin)
    for i in cutlass.range_constexpr(pairs):
        sin = -rSin[i] if const_expr(back) else rSin[i]
        a = rX[2 * i]
        b = rX[2 * i + 1]
        rX[2 * i] = a * rCos[i] - b * sin
        rX[2 * i + 1] = a * sin + b * rCos[i]


@cute.jit
def _load(mX: cute.Tensor, chunk: Int32, width: cutlass.Constexpr[int]):
    """A vector of a row."""
    rX = cute.make_rmem_tensor((width,), mX.element_type)
    cute.autovec_copy(cute.local_tile(mX, (width,), (chunk,)), rX)
    return rX


@cute.jit
def _store(rX: Any, mX: cute.Tensor, chunk: Int32, width: cutlass.Constexpr[int]):
    cute.autovec_copy(rX, cute.local_tile(mX, (width,), (chunk,)))


@cute.jit
def _turned(rX: Any, mCos: cute.Tensor, mSin: cute.Tensor, token: Int32, chunk: Int32, back: cutlass.Constexpr[bool]):
    """The vector, rotated in fp32 and rounded."""
    width = const_expr(cute.size(rX))
    rWide = cute.make_rmem_tensor((width,), Float32)
    for i in cutlass.range_constexpr(width):
        rWide[i] = Float32(rX[i])
    _turn(rWide, mCos, mSin, token, chunk, back)
    rOut = cute.make_rmem_tensor((width,), rX.element_type)
    for i in cutlass.range_constexpr(width):
        rOut[i] = rWide[i].to(rX.element_type)
    return rOut


@cute.kernel
def _join_kernel(
    mQ: cute.Tensor,
    mKV: cute.Tensor,
    mShared: cute.Tensor,
    mCos: cute.Tensor,
    mSin: cute.Tensor,
    mQOut: cute.Tensor,
    mK: cute.Tensor,
    vectors: Int32,
    width: cutlass.Constexpr[int],
):
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    item = bid * _THREADS + tid
    per_head = mQ.shape[2] // width
    own = (mQ.shape[2] - mShared.shape[1]) // width
    token = item // vectors
    head = (item - token * vectors) // per_head
    chunk = item - token * vectors - head * per_head
    if token < mQ.shape[0]:
        rQ = _load(mQ[token, head, None], chunk, width)
        if chunk < own:
            rK = _load(mKV[token, head, None], chunk, width)
            _store(rQ, mQOut[token, head, None], chunk, width)
            _store(rK, mK[token, head, None], chunk, width)
        else:
            rK = _load(mShared[token, None], chunk - own, width)
            _store(_turned(rQ, mCos, mSin, token, chunk - own, False), mQOut[token, head, None], chunk, width)
            _store(_turned(rK, mCos, mSin, token, chunk - own, False), mK[token, head, None], chunk, width)


@cute.kernel
def _split_kernel(
    mDQ: cute.Tensor,
    mDK: cute.Tensor,
    mDV: cute.Tensor,
    mCos: cute.Tensor,
    mSin: cute.Tensor,
    mDQOut: cute.Tensor,
    mDKV: cute.Tensor,
    mDShared: cute.Tensor,
    vectors: Int32,
    width: cutlass.Constexpr[int],
):
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    item = bid * _THREADS + tid
    heads = mDQ.shape[1]
    of_q = mDQ.shape[2] // width
    of_kv = mDKV.shape[2] // width
    own = (mDK.shape[2] - mDShared.shape[1]) // width
    token = item // vectors
    rest = item - token * vectors
    if token < mDQ.shape[0]:
        if rest < heads * of_q:
            head = rest // of_q
            chunk = rest - head * of_q
            rDQ = _load(mDQ[token, head, None], chunk, width)
            if chunk < own:
                _store(rDQ, mDQOut[token, head, None], chunk, width)
            else:
                _store(_turned(rDQ, mCos, mSin, token, chunk - own, True), mDQOut[token, head, None], chunk, width)
        elif rest < heads * (of_q + of_kv):
            head = (rest - heads * of_q) // of_kv
            chunk = rest - heads * of_q - head * of_kv
            if chunk < own:
                _store(_load(mDK[token, head, None], chunk, width), mDKV[token, head, None], chunk, width)
            else:
                _store(_load(mDV[token, head, None], chunk - own, width), mDKV[token, head, None], chunk, width)
        else:
            chunk = rest - heads * (of_q + of_kv)
            rSum = cute.make_rmem_tensor((width,), Float32)
            for i in cutlass.range_constexpr(width):
                rSum[i] = Float32(0.0)
            for head in cutlass.range(heads):
                rDK = _load(mDK[token, head, None], own + chunk, width)
                for i in cutlass.range_constexpr(width):
                    rSum[i] = rSum[i] + Float32(rDK[i])
            _turn(rSum, mCos, mSin, token, chunk, True)
            rOut = cute.make_rmem_tensor((width,), mDShared.element_type)
            for i in cutlass.range_constexpr(width):
                rOut[i] = rSum[i].to(mDShared.element_type)
            _store(rOut, mDShared[token, None], chunk, width)


@cute.jit
def _join_entry(
    mQ: cute.Tensor,
    mKV: cute.Tensor,
    mShared: cute.Tensor,
    mCos: cute.Tensor,
    mSin: cute.Tensor,
    mQOut: cute.Tensor,
    mK: cute.Tensor,
    width: cutlass.Constexpr[int],
    stream: Any,
):
    vectors = mQ.shape[1] * (mQ.shape[2] // width)
    _join_kernel(mQ, mKV, mShared, mCos, mSin, mQOut, mK, vectors, width).launch(
        grid=[cute.ceil_div(mQ.shape[0] * vectors, _THREADS), 1, 1], block=[_THREADS, 1, 1], stream=stream
    )


@cute.jit
def _split_entry(
    mDQ: cute.Tensor,
    mDK: cute.Tensor,
    mDV: cute.Tensor,
    mCos: cute.Tensor,
    mSin: cute.Tensor,
    mDQOut: cute.Tensor,
    mDKV: cute.Tensor,
    mDShared: cute.Tensor,
    width: cutlass.Constexpr[int],
    stream: Any,
):
    vectors = mDQ.shape[1] * ((mDQ.shape[2] + mDKV.shape[2]) // width) + mDShared.shape[1] // width
    _split_kernel(mDQ, mDK, mDV, mCos, mSin, mDQOut, mDKV, mDShared, vectors, width).launch(
        grid=[cute.ceil_div(mDQ.shape[0] * vectors, _THREADS), 1, 1], block=[_THREADS, 1, 1], stream=stream
    )


@kernel_cache
def join_kernel(dtype: str, width: int) -> Any:
    heads, row = _heads(dtype, width), fake(dtype, None, None, align=2 * width)
    return compile_kernel(_join_entry, heads(), heads(), row, *_tables(width), heads(), heads(), width)


@kernel_cache
def split_kernel(dtype: str, width: int) -> Any:
    heads, row = _heads(dtype, width), fake(dtype, None, None, align=2 * width)
    return compile_kernel(_split_entry, heads(), heads(), heads(), *_tables(width), heads(), heads(), row, width)


def _heads(dtype: str, width: int) -> Any:
    return lambda: fake(dtype, None, None, None, align=2 * width)


def _tables(width: int) -> list[Any]:
    return [fake("float32", None, None, align=2 * width) for _ in "cs"]


def _width(*tensors: Tensor, columns: tuple[int, ...]) -> int:
    """Elements that a thread takes: eight where every row begins at 16 bytes, else two."""
    if tensors[0].dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(
            f"heads: found {tensors[0].dtype}, expected bfloat16; NMOE_ARCH=reference computes in other dtypes"
        )
    if any(width % 2 for width in columns):
        raise EnvironmentFault(
            f"heads: found head widths {columns}, expected even ones; NMOE_ARCH=reference takes others"
        )
    aligned = all(t.data_ptr() % 16 == 0 and all(s * t.itemsize % 16 == 0 for s in t.stride()[:-1]) for t in tensors)
    return _WIDE if aligned and all(width % _WIDE == 0 for width in columns) else 2


def join(q_TNH: Tensor, kv_TNH: Tensor, shared_TH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> tuple[Tensor, Tensor]:
    columns = (q_TNH.shape[2], shared_TH.shape[1], kv_TNH.shape[2])
    width = _width(q_TNH, kv_TNH, shared_TH, columns=columns)
    q, k = torch.empty_like(q_TNH), torch.empty_like(q_TNH)
    if q.numel():
        join_kernel(str(q.dtype).removeprefix("torch."), width)(q_TNH, kv_TNH, shared_TH, cos_TH, sin_TH, q, k)
    return q, k


def split(
    dq_TNH: Tensor, dk_TNH: Tensor, dv_TNH: Tensor, cos_TH: Tensor, sin_TH: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    (tokens, heads, wide), rotated = dq_TNH.shape, 2 * cos_TH.shape[1]
    dq = torch.empty_like(dq_TNH)
    dkv = dq_TNH.new_empty(tokens, heads, wide - rotated + dv_TNH.shape[2])
    dshared = dq_TNH.new_empty(tokens, rotated)
    width = _width(dq_TNH, dk_TNH, dv_TNH, columns=(wide, rotated, dkv.shape[2]))
    if dq.numel():
        kernel = split_kernel(str(dq.dtype).removeprefix("torch."), width)
        kernel(dq_TNH, dk_TNH, dv_TNH, cos_TH, sin_TH, dq, dkv, dshared)
    return dq, dkv, dshared
