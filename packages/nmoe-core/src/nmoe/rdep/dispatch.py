# SPDX-License-Identifier: Apache-2.0
"""Transfers from the source of a token to the owners of its experts: rows forward, gradients of the output backward.

With one rank, source and owner are the same and nothing is copied: the experts read the rows where they are.
"""

from dataclasses import dataclass

from torch import Tensor

from nmoe.rdep.plan import Plan

__all__ = ["Rows", "dispatch", "dispatch_gradient"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """What an owner received."""

    x_RD: Tensor
    """Rows, in (source rank, token) order."""
    expert_RK: Tensor
    """int32: local ids of the row's experts here; -1 where the choice is another rank's."""
    gate_RK: Tensor
    """fp32 (fp64 in reference mode): gates of those choices."""


def dispatch(x_TD: Tensor, gate_TK: Tensor, plan: Plan) -> Rows:
    """Send each row, with its choices and gates, to the owners of its experts."""
    return Rows(x_RD=x_TD, expert_RK=plan.expert_TK, gate_RK=gate_TK)


def dispatch_gradient(dout_TD: Tensor, plan: Plan) -> Tensor:
    """Send the gradient of each row's output the way that the row went; dout_RD."""
    del plan  # one rank: the rows are where they are needed
    return dout_TD
