# SPDX-License-Identifier: Apache-2.0
"""Transfers from the owners back to the source: gate-weighted results forward, gradients of rows and gates backward.

An owner sums what a row has on it before it sends: one row travels back, not one per assignment.
"""

from torch import Tensor

from nmoe.ops import combine as combine_op
from nmoe.ops.group import Groups
from nmoe.rdep.dispatch import Rows

__all__ = ["combine", "combine_gradient"]


def combine(y_SD: Tensor, groups: Groups, rows: Rows) -> Tensor:
    """out_TD: each row's results times their gates, summed in the order of its choices."""
    return combine_op.kernels().combine(y_SD, groups.slot_RK, rows.gate_RK)


def combine_gradient(dx_SD: Tensor, dgate_S: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """dx_TD and dgate_TK: each row's gradients, summed over its assignments, and one number per gate."""
    kernels = combine_op.kernels()
    return kernels.combine(dx_SD, groups.slot_RK, None), kernels.collect(dgate_S, groups.slot_RK)
