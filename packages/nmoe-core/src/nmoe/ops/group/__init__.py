# SPDX-License-Identifier: Apache-2.0

"""Counting sort of assignments by (expert, row): the order in which experts read rows.

Rows are not copied: the up-projection gathers them through ``index_S``. The sort is stable, so the order of a row's
results, and with it every sum, is fixed.
"""

from dataclasses import dataclass
from typing import Protocol, cast

from torch import Tensor

from nmoe.ops.registry import implementation

__all__ = ["Groups", "Kernels", "kernels"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """Assignments in expert order. S is a size that the host chose; slots past ``offset_X[X]`` are a tail without use."""

    index_S: Tensor
    """int32: row of each slot; rising within an expert. Tail: 0, so that a gather stays in bounds."""
    gate_S: Tensor
    """fp32 (fp64 in reference mode): gate of each slot. Tail: 0."""
    offset_X: Tensor
    """int32 [X + 1]: slots of expert e are [offset_X[e], offset_X[e + 1])."""
    slot_RK: Tensor
    """int32: where assignment (row, k) lies in S; -1 where the row has no k-th assignment here."""


class Kernels(Protocol):
    """What an implementation file defines."""

    def group(self, expert_RK: Tensor, gate_RK: Tensor, *, num_experts: int, num_slots: int) -> Groups:
        """Sort the assignments of R rows.

        Args:
            expert_RK: int32 in [0, num_experts), or -1 where there is no assignment. A row names an expert once.
            gate_RK: fp32 or fp64; ignored where the expert is -1.
            num_experts: X.
            num_slots: S, at least the number of assignments (the caller's duty: it cannot be checked without waiting
                for the device).
        """
        ...


def kernels() -> Kernels:
    """The implementation on this process's arch."""
    return cast(Kernels, implementation("group"))
