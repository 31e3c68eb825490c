# SPDX-License-Identifier: Apache-2.0
"""Transfers from the owners back to the source: gate-weighted results forward, gradients of rows and gates backward.

An owner sums what a row has on it before it sends: one row travels back, not one per assignment.
"""

from torch import Tensor

from nmoe.comm.remote import Phase
from nmoe.ops import give_back
from nmoe.ops.group import Groups
from nmoe.ops.receive import Arrivals
from nmoe.rdep.exchange import Exchange
from nmoe.rdep.plan import Plan

__all__ = ["collect", "collect_gradient", "send_back", "send_back_gradient"]


def send_back(y_SD: Tensor, groups: Groups, arrivals: Arrivals, *, exchange: Exchange) -> None:
    """Owner: store each row's results times their gates, summed in the order of its choices, at its source."""
    give_back.kernels().reduce_push(y_SD, groups.slot_RK, arrivals.gate_RK, arrivals.home_R3, results=exchange.results)


def collect(plan: Plan, *, exchange: Exchange, layer: int) -> Tensor:
    """Source: out_TD, when all owners have sent."""
    exchange.meet(layer, Phase.RETURN)
    return give_back.kernels().partial_sum(exchange.results.local, plan.sends)


def send_back_gradient(dx_SD: Tensor, dgate_S: Tensor, groups: Groups, home_R3: Tensor, *, exchange: Exchange) -> None:
    """Owner: store each row's gradient, summed over its assignments, and one number per gate at its source."""
    kernels = give_back.kernels()
    kernels.reduce_push(dx_SD, groups.slot_RK, None, home_R3, results=exchange.results)
    kernels.push_values(dgate_S, groups.slot_RK, home_R3, values=exchange.values)


def collect_gradient(plan: Plan, *, exchange: Exchange, layer: int) -> tuple[Tensor, Tensor]:
    """Source: dx_TD and dgate_TK, when all owners have sent."""
    exchange.meet(layer, Phase.RETURN_GRADIENT)
    tokens = plan.sends.row_TP.shape[0]
    dx_TD = give_back.kernels().partial_sum(exchange.results.local, plan.sends)
    return dx_TD, exchange.values.local[:tokens].clone()
