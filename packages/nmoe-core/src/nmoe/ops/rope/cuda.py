# SPDX-License-Identifier: Apache-2.0
"""The rotation on both chips: one thread owns one pair, or copies two columns; in fp32 (tables are fp32).

Memory bound, 2 x heads x width elements a token, and small beside attention; neighbouring threads touch neighbouring
columns, so accesses are whole sectors without vector types, whatever the width.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr
from torch import Tensor

from nmoe.errors import EnvironmentFault
from nmoe.ops._cute.build import compile_kernel, fake, kernel_cache

__all__ = ["rotate"]

_THREADS = 256


@cute.kernel
def _rotate_kernel(
    mX: cute.Tensor,
    mCos: cute.Tensor,
    mSin: cute.Tensor,
    mOut: cute.Tensor,
    items: Int32,
    interleaved: cutlass.Constexpr[bool],
):
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    width, half = mX.shape[2], mCos.shape[1]
    kept = width - 2 * half
    per_head = kept // 2 + half  # two kept columns, or one pair, an item
    item = bid * _THREADS + tid
    token = item // items
    rest = item - token * items
    head = rest // per_head
    i = rest - head * per_head
    if token < mX.shape[0]:
        if i < kept // 2:
            mOut[token, head, 2 * i] = mX[token, head, 2 * i]
            mOut[token, head, 2 * i + 1] = mX[token, head, 2 * i + 1]
        else:
            pair = i - kept // 2
            first = kept + 2 * pair if const_expr(interleaved) else kept + pair
            second = first + (1 if const_expr(interleaved) else half)
            a = Float32(mX[token, head, first])
            b = Float32(mX[token, head, second])
            cos = mCos[token, pair]
            sin = mSin[token, pair]
            mOut[token, head, first] = (a * cos - b * sin).to(mOut.element_type)
            mOut[token, head, second] = (a * sin + b * cos).to(mOut.element_type)


@cute.jit
def _rotate_entry(
    mX: cute.Tensor,
    mCos: cute.Tensor,
    mSin: cute.Tensor,
    mOut: cute.Tensor,
    interleaved: cutlass.Constexpr[bool],
    stream: Any,
):
    items = mX.shape[1] * (mX.shape[2] // 2)
    _rotate_kernel(mX, mCos, mSin, mOut, items, interleaved).launch(
        grid=[cute.ceil_div(mX.shape[0] * items, _THREADS), 1, 1], block=[_THREADS, 1, 1], stream=stream
    )


@kernel_cache
def rotate_kernel(dtype: str, interleaved: bool) -> Any:
    x, out = fake(dtype, None, None, None, align=4), fake(dtype, None, None, None, align=4)
    cos, sin = fake("float32", None, None, align=4), fake("float32", None, None, align=4)
    return compile_kernel(_rotate_entry, x, cos, sin, out, interleaved)


def rotate(x_TNH: Tensor, cos_TH: Tensor, sin_TH: Tensor, *, interleaved: bool) -> Tensor:
    if x_TNH.shape[2] % 2:
        raise EnvironmentFault(
            f"rope: found head width {x_TNH.shape[2]}, expected an even one; NMOE_ARCH=reference takes others"
        )
    out_TNH = torch.empty(x_TNH.shape, dtype=x_TNH.dtype, device=x_TNH.device)
    if out_TNH.numel():
        rotate_kernel(str(x_TNH.dtype).removeprefix("torch."), interleaved)(x_TNH, cos_TH, sin_TH, out_TNH)
    return out_TNH
