# SPDX-License-Identifier: Apache-2.0
"""One AdamW update of fp32 values whose moments are kept in bf16, rounded stochastically, in place.

Rounding to nearest would freeze a second moment that changes by less than 1/256 a step (beta2 = 0.999 and up). Rounded up
with the probability of the part that is cut off, a moment is right in the mean. The random bits are a function of a key
and of an element's place in the whole parameter (`nmoe.ops.adamw.rounding`): whoever holds the element draws the same.

Memory bound: 20 bytes an element (7.34 B of them: 147 GB, 37 ms at 4 TB/s); as separate torch operations some 180.

Source: Loshchilov, Hutter 2019, arXiv:1711.05101 algorithm 2; decay times the learning rate.
"""

from dataclasses import dataclass
from typing import Protocol, cast

from torch import Tensor

from nmoe.ops.registry import implementation

__all__ = ["Kernels", "Rule", "kernels"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """The numbers of one update.

    Attributes:
        learning_rate: of this step and group.
        weight_decay: decoupled, times the learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root of the second moment.
        number: of the update, from 1: moments that began at zero are corrected by it.
        scale: factor on the gradient, that of clipping: as an operation of its own it would read and write 8 bytes more.
    """

    learning_rate: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    number: int
    scale: float = 1.0

    @property
    def kept(self) -> float:
        """Factor that decay leaves of a value."""
        return 1.0 - self.learning_rate * self.weight_decay

    @property
    def pace(self) -> float:
        """Learning rate over the correction of the first moment."""
        return self.learning_rate / (1.0 - self.beta1**self.number)

    @property
    def correction2(self) -> float:
        """Factor that corrects the second moment."""
        return 1.0 / (1.0 - self.beta2**self.number)

    @property
    def numbers(self) -> tuple[float, ...]:
        """What an element is moved by: scale, kept, pace, 1 - beta1, beta2, 1 - beta2, correction2, eps."""
        shares = (1.0 - self.beta1, self.beta2, 1.0 - self.beta2)
        return (self.scale, self.kept, self.pace, *shares, self.correction2, self.eps)


class Kernels(Protocol):
    """What an implementation file defines."""

    def step(
        self, value: Tensor, gradient: Tensor, first: Tensor, second: Tensor, *, rule: Rule, key: int, offset: int
    ) -> None:
        """Update value, first and second in place, from their old values and the gradient, with fp32 arithmetic.

        The value moves by the moments as they are before they are rounded.

        Args:
            value: fp32, contiguous, any shape.
            gradient: fp32, the same shape, contiguous.
            first: bf16, the same shape, contiguous.
            second: bf16, the same shape, contiguous.
            rule: rates and decays.
            key: of the random bits, 64 bits: another for each update and parameter.
            offset: elements of the whole parameter before the first of these, below 2^63.
        """
        ...


def kernels() -> Kernels:
    """The implementation on this process's arch."""
    return cast(Kernels, implementation("adamw"))
