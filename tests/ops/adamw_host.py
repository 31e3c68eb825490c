# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the AdamW kernel, compiled for this machine's processor, against plain torch; prints what differs.

CuTe compiles a function without threads and shared memory for the host as well: so what the kernel does to an element can be
run, bits of rounding and all, on a machine that has no GPU.
"""

import os

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")

import cutlass  # type: ignore[import-not-found]
import torch
from cutlass import Float32, Int32, Int64, cute  # type: ignore[import-not-found]
from cutlass.cute.runtime import from_dlpack  # type: ignore[import-not-found]

from nmoe.ops.adamw import Rule, reference
from nmoe.ops.adamw.cuda import moved
from nmoe.ops.adamw.rounding import words

KEY, OFFSET, COUNT = 0xFEDCBA98_76543210, (5 << 32) - 1000, 20_000
RULE = Rule(learning_rate=1e-2, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8, number=3, scale=0.3)


@cute.jit
def on_host(
    mValue: cute.Tensor,
    mGrad: cute.Tensor,
    mFirst: cute.Tensor,
    mSecond: cute.Tensor,
    offset: Int64,
    low: Int32,
    high: Int32,
    *numbers: Float32,
):
    for i in cutlass.range(mValue.shape[0]):
        value, first, second = moved(mValue[i], mGrad[i], mFirst[i], mSecond[i], offset + i, (low, high), numbers)
        mValue[i] = value
        mFirst[i] = first
        mSecond[i] = second


def main() -> None:
    generator = torch.Generator().manual_seed(1)
    value, grad, first, second = (torch.randn(COUNT, generator=generator) for _ in range(4))
    arrays = [value, grad, first.bfloat16(), second.square().bfloat16()]
    expected = [array.clone() for array in arrays]
    reference.step(*expected, rule=RULE, key=KEY, offset=OFFSET)
    low, high = words(KEY)
    scalars = (Int64(OFFSET), Int32(low), Int32(high), *map(Float32, RULE.numbers))
    tensors = [from_dlpack(array) for array in arrays]
    cute.compile(on_host, *tensors, *scalars)(*tensors, *scalars)
    values = float((arrays[0] - expected[0]).abs().max())
    moments = [int((found != wanted).sum()) for found, wanted in zip(arrays[2:], expected[2:], strict=True)]
    unmoved = int((expected[2] == first.bfloat16()).sum())
    print(f"{values:.3e} {moments[0]} {moments[1]} {unmoved}")


if __name__ == "__main__":
    main()
