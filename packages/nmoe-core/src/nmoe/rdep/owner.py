# SPDX-License-Identifier: Apache-2.0
"""What the owner does with the rows that arrived, however they came: group, experts, results on their way back, by rounds."""

from collections.abc import Iterator

import torch
from torch import Tensor

from nmoe.ops import group
from nmoe.ops.group import Groups
from nmoe.ops.receive import Arrivals
from nmoe.rdep.combine import send_back, send_back_gradient
from nmoe.rdep.exchange import Exchange, Rounds
from nmoe.rdep.experts import experts_backward, experts_forward, up_again

__all__ = ["serve", "serve_gradient"]


def serve(
    x_RD: Tensor, arrivals: Arrivals, w13_X2FD: Tensor, w2_XDF: Tensor, rounds: Rounds, *, exchange: Exchange
) -> Tensor:
    """Run this rank's experts over the rows and send the results back; the pre-activations of the first round."""
    first_S2F = None
    for groups in _groups(arrivals, rounds, exchange):
        y_SD, preact_S2F = experts_forward(x_RD, w13_X2FD, w2_XDF, groups)
        send_back(y_SD, groups, arrivals, exchange=exchange)
        first_S2F = preact_S2F if first_S2F is None else first_S2F
    assert first_S2F is not None
    return first_S2F


def serve_gradient(
    dout_RD: Tensor,
    x_RD: Tensor,
    preact_S2F: Tensor | None,
    arrivals: Arrivals,
    w13_X2FD: Tensor,
    w2_XDF: Tensor,
    rounds: Rounds,
    *,
    exchange: Exchange,
) -> tuple[Tensor, Tensor]:
    """Send the gradients of rows and gates back.

    Returns:
        The gradients of the weights.
    """
    dw13_X2FD, dw2_XDF = torch.empty_like(w13_X2FD), torch.empty_like(w2_XDF)
    for number, groups in enumerate(_groups(arrivals, rounds, exchange)):
        if number > 0 or preact_S2F is None:
            preact_S2F = up_again(x_RD, w13_X2FD, groups)
        dx_SD, dgate_S = experts_backward(
            dout_RD,
            x_RD,
            preact_S2F,
            w13_X2FD,
            w2_XDF,
            groups,
            dw13_X2FD=dw13_X2FD,
            dw2_XDF=dw2_XDF,
            add_w13=number > 0,
            add_w2=number > 0,
        )
        send_back_gradient(dx_SD, dgate_S, groups, arrivals.home_R3, exchange=exchange)
    return dw13_X2FD, dw2_XDF


def _groups(arrivals: Arrivals, rounds: Rounds, exchange: Exchange) -> Iterator[Groups]:
    """The assignments of each round, in expert order."""
    for expert_RK in _by_round(arrivals.expert_RK, rounds):
        yield group.kernels().group(
            expert_RK, arrivals.gate_RK, num_experts=exchange.experts_per_rank, num_slots=rounds.num_slots
        )


def _by_round(expert_RK: Tensor, rounds: Rounds) -> Iterator[Tensor]:
    """The table of assignments, all but those of each round taken out."""
    if rounds.num_rounds == 1:
        yield expert_RK
        return
    count_R = (expert_RK >= 0).sum(dim=1)
    round_R1 = ((count_R.cumsum(dim=0) - count_R) // rounds.budget).unsqueeze(1)
    for number in range(rounds.num_rounds):
        yield torch.where(round_R1 == number, expert_RK, -1)
