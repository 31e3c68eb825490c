# SPDX-License-Identifier: Apache-2.0
"""Experts shared by 2, 4 and 8 processes against one rank that holds them all: outputs and every gradient."""

import threading
from dataclasses import replace

import pytest
import torch
import torch._dynamo  # what a checkpoint imports: seconds, once here and not once a rank
import torch.distributed as dist
from layers import Case, Figures, Problem, across, error_of, gradients, on_one_rank, on_ranks
from ranks import run_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nmoe.rdep.exchange import Exchange

TOKENS = (37, 0, 13, 1, 64, 7, 29, 3)
SIZES = [2, 4, 8]
LIMIT = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def cases(size: int) -> dict[str, Case]:
    base = Case(tokens=TOKENS[:size])
    some = replace(base, tokens=(5, 41, 20, 33, 2, 9, 17, 50)[:size], top_k=3)
    found = {f"K={k}": replace(base, top_k=k) for k in range(1, 9)}
    found |= {f"D={width}": replace(some, width=width, expert_width=4) for width in (65, 1000, 7168)}
    found |= {
        "no token": replace(base, tokens=(0,) * size),
        "one token": replace(base, tokens=(0,) * (size - 1) + (1,)),
        "empty experts": replace(some, routing="few"),
        "one expert": replace(some, routing="one expert", top_k=1),
        "one expert of three": replace(some, routing="one expert"),
        "one rank": replace(some, routing="one rank", top_k=2),
        "one rank in rounds": replace(some, routing="one rank", top_k=2, capacity=0.5),
        "all the rounds": replace(base, tokens=(20,) * size, routing="one rank", capacity=0.5),
        "half the room": replace(some, capacity=0.5),
        "little room": replace(some, capacity=0.1),
        "nothing kept": replace(some, keep=False),
        "nothing kept in rounds": replace(some, keep=False, capacity=0.5),
        "exact sizes": replace(some, exact=True),
        "exact sizes of nothing": replace(base, tokens=(0,) * size, exact=True),
    }
    found |= {
        f"{dtype} {name}": replace(found[name], dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
        for name in ("K=8", "empty experts", "half the room", "one rank in rounds", "D=7168")
    }
    return found


def judge(case: Case, parts: list[Figures], *, salt: int = 0) -> None:
    errors = error_of(parts, on_one_rank(Problem.of(case, salt)))
    assert max(errors.values()) <= LIMIT[case.dtype], errors


@pytest.mark.parametrize("size", SIZES)
def test_shared_experts_equal_those_of_one_rank(size):
    chosen = cases(size)
    ranks = run_ranks(size, on_ranks, list(chosen.values()))
    wrong = {}
    for number, (name, case) in enumerate(chosen.items()):
        try:
            judge(case, [rank[number][0] for rank in ranks])
        except AssertionError as error:
            wrong[name] = str(error)
    assert wrong == {}


@pytest.mark.parametrize("size", SIZES)
def test_experts_without_a_token_have_zero_gradients(size):
    case = cases(size)["empty experts"]
    ranks = run_ranks(size, on_ranks, [case])
    for name in ("dw13_X2FD", "dw2_XDF"):
        gradient = torch.cat([rank[0][0][name] for rank in ranks])
        assert (gradient[::3] == 0).all()
        assert (gradient[1::3] != 0).any(dim=(1, 2)).all()


@pytest.mark.parametrize("size", SIZES)
def test_two_runs_are_equal_to_the_bit(size):
    chosen = [replace(case, dtype=torch.float32) for case in cases(size).values() if case.dtype == torch.float64]
    one, two = (run_ranks(size, on_ranks, chosen) for _ in range(2))
    for a, b in zip(one, two, strict=True):
        for x, y in zip(a, b, strict=True):
            assert all(torch.equal(x[0][name], y[0][name]) for name in x[0])


def two_forwards(exchange: Exchange, case: Case) -> list[Figures]:
    """Both forwards before either backward, the first one's backward first."""
    rank, outs, found = exchange.comm.rank, [], []
    for salt in (1, 2):
        problem = Problem.of(case, salt).of_rank(case, rank)
        names = ("x_TD", "gate_TK", "w13_X2FD", "w2_XDF")
        leaves = {name: getattr(problem, name).clone().requires_grad_() for name in names}
        outs.append((problem, leaves, across(exchange, layer=salt)(*leaves.values(), problem.expert_TK)))
    for problem, leaves, out_TD in outs:
        grads = torch.autograd.grad(out_TD, list(leaves.values()), problem.dout_TD)
        found.append({"out_TD": out_TD.detach()} | {f"d{n}": g for n, g in zip(leaves, grads, strict=True)})
    return found


def recomputed(exchange: Exchange, case: Case) -> list[Figures]:
    """The layer is run again in backward, as activation checkpointing does, with the choices of the first time."""

    def layer(*operands: Tensor) -> Tensor:
        out_TD = checkpoint(across(exchange), *operands, use_reentrant=False)
        assert isinstance(out_TD, Tensor)
        return out_TD

    return [gradients(Problem.of(case, 1).of_rank(case, exchange.comm.rank), layer)]


def beside_collectives(exchange: Exchange, case: Case) -> list[Figures]:
    """All-gathers of another thread are in flight all the time."""
    other = dist.new_group(backend="gloo")
    assert isinstance(other, dist.ProcessGroup)
    over = threading.Event()

    def gather() -> None:
        own, gathered = torch.ones(5000), torch.empty(5000 * exchange.comm.size)
        done = torch.zeros(1)
        while not done.any():
            dist.all_gather_into_tensor(gathered, own, group=other)
            done.fill_(over.is_set())
            dist.all_reduce(done, group=other)

    thread = threading.Thread(target=gather)
    thread.start()
    mine = [Problem.of(case, salt).of_rank(case, exchange.comm.rank) for salt in range(1, 9)]
    found = [gradients(problem, across(exchange)) for problem in mine]
    over.set()
    thread.join()
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("work", [two_forwards, recomputed, beside_collectives])
@pytest.mark.parametrize("capacity", [2.0, 0.5])
def test_calls_may_overlap_with_others(work, capacity, size):
    case = Case(tokens=(5, 41, 20, 0, 2, 9, 17, 50)[:size], top_k=3, capacity=capacity)
    ranks = run_ranks(size, on_ranks, [case], work)
    for number in range(len(ranks[0][0])):
        judge(case, [rank[0][number] for rank in ranks], salt=number + 1)
