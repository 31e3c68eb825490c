# SPDX-License-Identifier: Apache-2.0
"""Between rows and slots: copies of a row in all its slots, and back the sum of a row's results, in the fixed order
k = 0, 1, ..., K-1, without atomics."""

from typing import Protocol, cast

from torch import Tensor

from nmoe.ops.registry import implementation

__all__ = ["Kernels", "kernels"]


class Kernels(Protocol):
    """What an implementation file defines. slot_RK is int32, -1 where the row has no k-th assignment."""

    def combine(self, y_SD: Tensor, slot_RK: Tensor, gate_RK: Tensor | None) -> Tensor:
        """out_RD in y's dtype: sum over k of gate * y[slot], accumulated in the gates' dtype (fp32 or fp64).

        Without gates (the way back of dX) every weight is 1 and the sum is in fp32 (fp64 where y is). A row without
        assignments gets zeros; slots that no row names are never read, NaN in them changes nothing.
        """
        ...

    def spread(self, x_RD: Tensor, slot_RK: Tensor, *, num_slots: int) -> Tensor:
        """x_SD: every row in each of its slots, bit for bit. Slots that no row names are left unwritten."""
        ...

    def collect(self, value_S: Tensor, slot_RK: Tensor) -> Tensor:
        """value_RK: the value of each assignment's slot; exactly 0 where there is none."""
        ...


def kernels() -> Kernels:
    """The implementation on this process's arch."""
    return cast(Kernels, implementation("combine"))
