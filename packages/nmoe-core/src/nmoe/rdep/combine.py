# SPDX-License-Identifier: Apache-2.0
"""Transfers from the owners back to the source: gate-weighted results forward, gradients of rows and gates backward.

An owner sums what a row has on it before it sends: one row travels back, not one per assignment. A rank that only passed
a row on (`nmoe.rdep.many_nodes`) hands back what its node made of it.
"""

import torch
from torch import Tensor

from nmoe.comm.remote import Phase
from nmoe.ops import combine as combine_op
from nmoe.ops import give_back
from nmoe.ops.group import Groups
from nmoe.ops.receive import Arrivals
from nmoe.rdep.exchange import Exchange
from nmoe.rdep.plan import Plan

__all__ = ["collect", "collect_gradient", "hand_back", "hand_back_gradient", "send_back", "send_back_gradient"]


def send_back(y_SD: Tensor, groups: Groups, arrivals: Arrivals, *, exchange: Exchange) -> None:
    """Owner: store each row's results times their gates, summed in the order of its choices, at its source."""
    give_back.kernels().reduce_push(y_SD, groups.slot_RK, arrivals.gate_RK, arrivals.home_R3, results=exchange.results)


def hand_back(out_RD: Tensor, home_R3: Tensor, *, exchange: Exchange) -> None:
    """In between: store each row at its source."""
    here_R, row_R = home_R3[:, 0] >= 0, torch.arange(home_R3.shape[0], dtype=torch.int32, device=home_R3.device)
    slot_R1 = torch.where(here_R, row_R, -1).unsqueeze(1)
    give_back.kernels().reduce_push(out_RD, slot_R1, None, home_R3, results=exchange.results)


def collect(plan: Plan, *, exchange: Exchange, layer: int) -> Tensor:
    """Source: out_TD, when all owners have sent."""
    exchange.ship_home(plan.count_PP2, exchange.results)
    exchange.meet(layer, Phase.RETURN)
    return _sum(plan, exchange)


def send_back_gradient(dx_SD: Tensor, dgate_S: Tensor, groups: Groups, home_R3: Tensor, *, exchange: Exchange) -> None:
    """Owner: store each row's gradient, summed over its assignments, and one number per gate at its source."""
    kernels = give_back.kernels()
    kernels.reduce_push(dx_SD, groups.slot_RK, None, home_R3, results=exchange.results)
    kernels.push_values(dgate_S, groups.slot_RK, home_R3, values=exchange.values)


def hand_back_gradient(
    dx_RD: Tensor, dgate_RK: Tensor, expert_RK: Tensor, home_R3: Tensor, *, exchange: Exchange
) -> None:
    """In between: store each row's gradient, and one number for each of its choices that is of this node, at its source."""
    hand_back(dx_RD, home_R3, exchange=exchange)
    number_RK = torch.arange(expert_RK.numel(), dtype=torch.int32, device=expert_RK.device).view(expert_RK.shape)
    slot_RK = torch.where(expert_RK >= 0, number_RK, -1)
    give_back.kernels().push_values(dgate_RK.view(-1), slot_RK, home_R3, values=exchange.values)


def collect_gradient(expert_TK: Tensor, plan: Plan, *, exchange: Exchange, layer: int) -> tuple[Tensor, Tensor]:
    """Source: dx_TD and dgate_TK, when all owners have sent; a gate whose choice is none of the exchange's experts has no
    defined gradient."""
    exchange.ship_home(plan.count_PP2, exchange.results, exchange.values)
    exchange.meet(layer, Phase.RETURN_GRADIENT)
    dx_TD = _sum(plan, exchange)
    if not exchange.has_far:
        return dx_TD, exchange.values.local[: expert_TK.shape[0]].clone()
    owner_TK = expert_TK.div(exchange.experts_per_rank, rounding_mode="floor").clamp(min=0)
    line_TK = _lines(plan, exchange).gather(1, owner_TK.to(torch.int64))
    choice_K = torch.arange(expert_TK.shape[1], dtype=torch.int32, device=expert_TK.device)
    slot_TK = torch.where(expert_TK >= 0, line_TK * expert_TK.shape[1] + choice_K, -1)
    return dx_TD, combine_op.kernels().collect(exchange.values.local.view(-1), slot_TK)


def _sum(plan: Plan, exchange: Exchange) -> Tensor:
    """Each token's rows, summed in the order of its owners."""
    if not exchange.has_far:
        return give_back.kernels().partial_sum(exchange.results.local, plan.sends)
    return combine_op.kernels().combine(exchange.results.local.flatten(0, 1), _lines(plan, exchange), None)


def _lines(plan: Plan, exchange: Exchange) -> Tensor:
    """int32 [T, P]: where a token's row of each owner lies among the lines of `results`; -1 where there is none."""
    row_TP = plan.sends.row_TP
    first_P = torch.arange(row_TP.shape[1], dtype=torch.int32, device=row_TP.device) * exchange.tokens
    return torch.where(row_TP >= 0, row_TP + first_P, -1)
