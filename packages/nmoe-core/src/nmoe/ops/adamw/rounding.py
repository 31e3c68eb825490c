# SPDX-License-Identifier: Apache-2.0
"""Random bits that are a function of a key and of an element's place, and rounding to bf16 by them.

A generator's stream belongs to the tensor that it is drawn for: cut into rows of several ranks, the same values would
meet other bits. Here each element's bits are a hash of its place in the whole, so that one rank, many ranks and any
expert parallelism round alike, and nothing has to be saved for a resumed run to round as it would have.

Source: Wellons 2018, https://nullprogram.com/blog/2018/07/31/ (the constants of `lowbias32`, a 32-bit permutation whose
output bits each change with probability 1/2, to 0.2 %, with every input bit).
"""

import torch
from torch import Tensor

__all__ = ["MULTIPLIERS", "noise", "round_up_at_random", "words"]

MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
"""Of the hash's two products, mod 2^32."""


def words(key: int) -> tuple[int, int]:
    """The two halves of a 64-bit key, low one first, as signed 32-bit numbers."""
    return _signed(key & 0xFFFFFFFF), _signed(key >> 32 & 0xFFFFFFFF)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def noise(key: int, *, offset: int, count: int, device: torch.device) -> Tensor:
    """32 random bits for each of some consecutive elements.

    Args:
        key: 64 bits.
        offset: place of the first element, in [0, 2^63).
        count: elements.
        device: of the result.

    Returns:
        int32 [count]: mix(mix(low word of the place ^ low word of the key) ^ high word of the place ^ high word of the key).
    """
    low, high = words(key)
    place = torch.arange(offset, offset + count, dtype=torch.int64, device=device)
    bits = _mix(place.to(torch.int32).bitwise_xor_(low))  # the conversion keeps the low word
    place >>= 32
    return _mix(bits.bitwise_xor_(place.to(torch.int32)).bitwise_xor_(high))


def _mix(bits: Tensor) -> Tensor:
    """The hash, in place; int32 products wrap, and the shifts' copies of the sign are cut off."""
    bits ^= (bits >> 16) & 0xFFFF
    bits *= _signed(MULTIPLIERS[0])
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= _signed(MULTIPLIERS[1])
    bits ^= (bits >> 16) & 0xFFFF
    return bits


def round_up_at_random(values: Tensor, bits: Tensor) -> Tensor:
    """Rounds to bf16, up with the probability of the part that is cut off; the mean is the value itself.

    Args:
        values: fp32, any shape.
        bits: int32 of the same shape, of which the low 16 bits are random.

    Returns:
        bf16 of the same shape. Infinities and NaN stay what they are.
    """
    rounded = ((values.view(torch.int32) + (bits & 0xFFFF)) & -65536).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)
