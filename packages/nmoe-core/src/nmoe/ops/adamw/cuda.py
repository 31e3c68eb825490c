# SPDX-License-Identifier: Apache-2.0
"""The update on both chips: a thread takes eight neighbouring elements, reads each array once and writes it once.

Memory bound: 20 bytes an element, 28 integer operations for its random bits (of two moments: 16 of the 32 bits each), which
hide behind the loads. Tensors that do not begin at 16 bytes, or are no multiple of eight long, take an element a thread.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32, Int32, Int64
from torch import Tensor

from nmoe.errors import EnvironmentFault
from nmoe.ops._cute.build import compile_kernel, fake, kernel_cache
from nmoe.ops.adamw import Rule
from nmoe.ops.adamw.rounding import MULTIPLIERS, words

__all__ = ["moved", "step"]

_THREADS = 256
_WIDTH = 8
_LONGEST = 1 << 30
"""Elements of a launch: places in it are 32-bit numbers."""
_FIRST, _SECOND = words(MULTIPLIERS[0] | MULTIPLIERS[1] << 32)


@cute.jit
def _mix(bits: Int32) -> Int32:
    """The hash of `nmoe.ops.adamw.rounding`; the masks cut off what a shift copies of the sign."""
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    bits = bits * Int32(_FIRST)
    bits = bits ^ ((bits >> 15) & 0x1FFFF)
    bits = bits * Int32(_SECOND)
    return bits ^ ((bits >> 16) & 0xFFFF)


@cute.jit
def _rounded(value: Float32, bits: Int32) -> BFloat16:
    """Up with the probability of the part that is cut off; what is not finite stays as it is."""
    r = cute.make_rmem_tensor((1,), Float32)
    r[0] = value
    as_bits = cute.recast_tensor(r, Int32)
    if (as_bits[0] & 0x7F800000) != 0x7F800000:
        as_bits[0] = (as_bits[0] + (bits & 0xFFFF)) & -65536
    return r[0].to(BFloat16)


@cute.jit
def moved(value: Float32, grad: Float32, first: BFloat16, second: BFloat16, place: Int64, key: Any, numbers: Any):
    """Value and moments of one element after the update; a test compiles it for the host, too.

    Each sum of a product is one fused operation that stands here: which others the compiler would fuse depends on how many
    elements a thread has, and an element must come out the same wherever it lies.
    """
    scale, kept, pace, share1, beta2, share2, correction2, eps = numbers
    mean = Float32(first)
    mean = cute.math.fma(cute.math.fma(grad, scale, -mean), share1, mean)
    grad = grad * scale
    square = cute.math.fma(grad * share2, grad, Float32(second) * beta2)
    size = cute.math.sqrt(square * correction2) + eps
    bits = _mix(_mix(Int32(place) ^ key[0]) ^ Int32(place >> 32) ^ key[1])
    return cute.math.fma(-pace, mean / size, value * kept), _rounded(mean, bits), _rounded(square, bits >> 16)


@cute.kernel
def _step_kernel(
    mValue: cute.Tensor,
    mGrad: cute.Tensor,
    mFirst: cute.Tensor,
    mSecond: cute.Tensor,
    offset: Int64,
    key: Any,
    numbers: Any,
    width: cutlass.Constexpr[int],
):
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    item = bid * _THREADS + tid
    if item < mValue.shape[0] // width:
        rValue = cute.make_rmem_tensor((width,), Float32)
        rGrad = cute.make_rmem_tensor((width,), Float32)
        rFirst = cute.make_rmem_tensor((width,), BFloat16)
        rSecond = cute.make_rmem_tensor((width,), BFloat16)
        cute.autovec_copy(cute.local_tile(mValue, (width,), (item,)), rValue)
        cute.autovec_copy(cute.local_tile(mGrad, (width,), (item,)), rGrad)
        cute.autovec_copy(cute.local_tile(mFirst, (width,), (item,)), rFirst)
        cute.autovec_copy(cute.local_tile(mSecond, (width,), (item,)), rSecond)
        for i in cutlass.range_constexpr(width):
            place = offset + Int64(item) * width + i
            value, first, second = moved(rValue[i], rGrad[i], rFirst[i], rSecond[i], place, key, numbers)
            rValue[i] = value
            rFirst[i] = first
            rSecond[i] = second
        cute.autovec_copy(rValue, cute.local_tile(mValue, (width,), (item,)))
        cute.autovec_copy(rFirst, cute.local_tile(mFirst, (width,), (item,)))
        cute.autovec_copy(rSecond, cute.local_tile(mSecond, (width,), (item,)))


@cute.jit
def _step_entry(
    mValue: cute.Tensor,
    mGrad: cute.Tensor,
    mFirst: cute.Tensor,
    mSecond: cute.Tensor,
    offset: Int64,
    low: Int32,
    high: Int32,
    scale: Float32,
    kept: Float32,
    pace: Float32,
    share1: Float32,
    beta2: Float32,
    share2: Float32,
    correction2: Float32,
    eps: Float32,
    width: cutlass.Constexpr[int],
    stream: Any,
):
    numbers = (scale, kept, pace, share1, beta2, share2, correction2, eps)
    _step_kernel(mValue, mGrad, mFirst, mSecond, offset, (low, high), numbers, width).launch(
        grid=[cute.ceil_div(mValue.shape[0] // width, _THREADS), 1, 1], block=[_THREADS, 1, 1], stream=stream
    )


@kernel_cache
def step_kernel(width: int) -> Any:
    wide, narrow = (16, 16) if width > 1 else (4, 2)
    tensors = [
        fake(dtype, None, align=align) for dtype, align in (("float32", wide), ("bfloat16", narrow)) for _ in "12"
    ]
    return compile_kernel(_step_entry, *tensors, Int64(0), Int32(0), Int32(0), *[Float32(0.0)] * 8, width)


def step(value: Tensor, gradient: Tensor, first: Tensor, second: Tensor, *, rule: Rule, key: int, offset: int) -> None:
    if (value.dtype, gradient.dtype, first.dtype) != (torch.float32, torch.float32, torch.bfloat16):
        raise EnvironmentFault(
            f"adamw: found {value.dtype} values with {first.dtype} moments, the kernel takes float32 with bfloat16; "
            "set NMOE_ARCH=reference"
        )
    numbers = (*words(key), *rule.numbers)
    flat = (tensor.view(-1).split(_LONGEST) for tensor in (value, gradient, first, second))
    for parts in zip(*flat, strict=True):
        length = len(parts[0])
        if length:
            whole = length % _WIDTH == 0 and all(part.data_ptr() % 16 == 0 for part in parts)
            step_kernel(_WIDTH if whole else 1)(*parts, offset, *numbers)
        offset += length
