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
    wide = replace(some, tokens=(5, 11, 3, 7, 2, 0, 4, 10)[:size], expert_width=4)
    found |= {f"D={width}": replace(wide, width=width) for width in (65, 1000, 7168)}
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


@pytest.fixture(scope="module", params=SIZES)
def figures(request) -> tuple[int, dict[str, list[Figures]]]:
    """How many ranks, and what each of them found for each case."""
    chosen = cases(request.param)
    ranks = run_ranks(request.param, on_ranks, list(chosen.values()))
    return request.param, {name: [rank[number][0] for rank in ranks] for number, name in enumerate(chosen)}


def test_shared_experts_equal_those_of_one_rank(figures):
    size, found = figures
    wrong = {}
    for name, case in cases(size).items():
        try:
            judge(case, found[name])
        except AssertionError as error:
            wrong[name] = str(error)
    assert wrong == {}


def test_experts_without_a_token_have_zero_gradients(figures):
    for name in ("dw13_X2FD", "dw2_XDF"):
        gradient = torch.cat([part[name] for part in figures[1]["empty experts"]])
        assert (gradient[::3] == 0).all()
        assert (gradient[1::3] != 0).any(dim=(1, 2)).all()


def test_two_runs_are_equal_to_the_bit(figures):
    """Whatever sums in an order of its own: several experts of a token, rounds, what is computed again, exact sizes."""
    size, found = figures
    names = ["K=3", "K=8", "empty experts", "one expert of three", "one rank in rounds", "little room"]
    names += ["nothing kept in rounds", "exact sizes", "torch.float32 K=8", "torch.bfloat16 half the room"]
    again = run_ranks(size, on_ranks, [cases(size)[name] for name in names])
    for rank, parts in enumerate(again):
        for name, (part,) in zip(names, parts, strict=True):
            assert all(torch.equal(part[figure], value) for figure, value in found[name][rank].items()), name


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
def test_calls_may_overlap_with_others(work, size):
    """With room for all rows, and in rounds."""
    roomy = Case(tokens=(5, 41, 20, 0, 2, 9, 17, 50)[:size], top_k=3)
    chosen = [roomy, replace(roomy, capacity=0.5)]
    ranks = run_ranks(size, on_ranks, chosen, work)
    for case, parts in zip(chosen, zip(*ranks, strict=True), strict=True):
        for salt, figures in enumerate(zip(*parts, strict=True), start=1):
            judge(case, list(figures), salt=salt)
