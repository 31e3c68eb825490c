# SPDX-License-Identifier: Apache-2.0
"""The layer across ranks with rows in 8 and 4 bits: just what one rank finds for rows that went through the format."""

import pytest
import torch
from ranks import over_shm, run_ranks
from torch import Tensor

from nmoe.comm.communicator import Communicator
from nmoe.comm.local import Local
from nmoe.ops.wire import WIRES
from nmoe.rdep.dispatch import dispatch, opened
from nmoe.rdep.exchange import Exchange
from nmoe.rdep.layer import experts_across
from nmoe.rdep.nodes import NodeExchange, exchange_over
from nmoe.rdep.one_rank import ExpertsHere
from nmoe.rdep.plan import make_plan

TOKENS_P, D, F, E, K = [9, 0, 14, 5], 64, 24, 8, 3


@pytest.fixture(autouse=True)
def reference_arch(monkeypatch):
    monkeypatch.setenv("NMOE_ARCH", "reference")


def exchange_of(comm: Communicator, wire: str) -> Exchange | NodeExchange:
    shape = {"hidden_size": D, "num_experts": E, "top_k": K, "dtype": torch.float32}
    return exchange_over(comm, tokens=sum(TOKENS_P), wire=WIRES[wire], **shape)


def on_arrival(x_TD: Tensor, gate_TK: Tensor, expert_TK: Tensor, wire: str) -> Tensor:
    """The rows as their owner sees them: sent by a rank to itself."""
    exchange = exchange_of(Local(), wire)
    assert isinstance(exchange, Exchange)
    plan = make_plan(expert_TK, exchange=exchange, layer=0)
    rows, _ = dispatch(x_TD, gate_TK, expert_TK, plan, exchange=exchange, layer=0)
    return opened(rows, plan, exchange=exchange, like=x_TD)


@pytest.mark.parametrize("node_size", [0, 1, 2])
@pytest.mark.parametrize("wire", list(WIRES))
def test_layer_equals_one_rank_on_quantised_rows(wire, node_size):
    """Over nodes too: what a rail carries is sent on in the same bits, so a row is rounded once."""
    generator = torch.Generator().manual_seed(5)
    tokens, size = sum(TOKENS_P), len(TOKENS_P)
    shapes = [(tokens, D), (tokens, K), (E, 2 * F, D), (E, D, F), (tokens, D)]
    x, gate, w13, w2, dout = (torch.randn(*shape, generator=generator) for shape in shapes)
    expert = torch.rand(tokens, E, generator=generator).topk(K).indices.int()

    def work(comm: Communicator) -> list[Tensor]:
        start, share = sum(TOKENS_P[: comm.rank]), E // size
        own, held = slice(start, start + TOKENS_P[comm.rank]), slice(comm.rank * share, (comm.rank + 1) * share)
        leaves = [part.detach().clone().requires_grad_() for part in (x[own], gate[own], w13[held], w2[held])]
        exchange = exchange_of(comm, wire)
        out = experts_across(exchange).apply(*leaves, expert[own], True, exchange, 0)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout[own])]

    found = [torch.cat(parts) for parts in zip(*run_ranks(size, over_shm, work, node_size=node_size), strict=True)]
    arrived = on_arrival(x, gate, expert, wire)
    assert 0.01 < (arrived - x).norm() / x.norm() < 0.2  # it did go through few bits
    leaves = [part.clone().requires_grad_() for part in (arrived, gate, w13, w2)]
    out = ExpertsHere.apply(*leaves, expert)
    for ours, truth in zip(found, (out, *torch.autograd.grad(out, leaves, dout)), strict=True):
        assert (ours - truth).norm() <= 1e-6 * truth.norm()
