# SPDX-License-Identifier: Apache-2.0
"""The update in plain torch."""

from torch import Tensor

from nmoe.ops.adamw import Rule
from nmoe.ops.adamw.rounding import noise, round_up_at_random

__all__ = ["step"]

# Elements updated at a time, so that temporaries stay at 256 MiB whatever the tensor's size.
_CHUNK = 1 << 24


def step(value: Tensor, gradient: Tensor, first: Tensor, second: Tensor, *, rule: Rule, key: int, offset: int) -> None:
    flat = (tensor.view(-1).split(_CHUNK) for tensor in (value, gradient, first, second))
    for x, grad, first_bf16, second_bf16 in zip(*flat, strict=True):
        grad = grad if rule.scale == 1.0 else grad * rule.scale
        mean = first_bf16.float().lerp_(grad, 1.0 - rule.beta1)
        square = second_bf16.float().mul_(rule.beta2).addcmul_(grad, grad, value=1.0 - rule.beta2)
        x.mul_(rule.kept)
        x.addcdiv_(mean, (square * rule.correction2).sqrt_().add_(rule.eps), value=-rule.pace)
        bits = noise(key, offset=offset, count=len(x), device=x.device)
        first_bf16.copy_(round_up_at_random(mean, bits))
        second_bf16.copy_(round_up_at_random(square, bits >> 16))
        offset += len(x)
