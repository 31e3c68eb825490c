# SPDX-License-Identifier: Apache-2.0
"""Experts shared by the ranks of several nodes, where stores end at the node and puts do the rest, against one rank."""

import re
import signal
import time
from dataclasses import replace

import pytest
import torch
from layers import Case, Figures, Problem, error_of, on_one_rank, on_ranks, once
from ranks import Ranks, over_shm, run_ranks
from test_faults import SIZE, await_steps, told_once, train_forever
from test_layer import LIMIT, cases, recomputed, two_forwards

from nmoe.ops.ship import reference as ship_op
from nmoe.rdep.exchange import Exchange
from nmoe.rdep.nodes import NodeExchange

NODES = [(2, 1), (4, 2), (8, 2)]  # ranks, ranks of a node


def wrong_of(size: int, node_size: int, chosen: dict[str, Case]) -> dict[str, str]:
    """What differs from one rank's by more than rounding."""
    chosen = {name: replace(case, node_size=node_size) for name, case in chosen.items()}
    ranks, wrong = run_ranks(size, on_ranks, list(chosen.values())), {}
    for number, (name, case) in enumerate(chosen.items()):
        try:
            errors = error_of([rank[number][0] for rank in ranks], on_one_rank(Problem.of(case)))
            assert max(errors.values()) <= LIMIT[case.dtype], errors
        except AssertionError as error:
            wrong[name] = str(error)
    return wrong


@pytest.mark.parametrize(("size", "node_size"), NODES)
def test_experts_of_several_nodes_equal_those_of_one_rank(size, node_size):
    chosen = cases(size)
    if size == 8:
        chosen = {name: chosen[name] for name in ("K=8", "no token", "one rank in rounds", "half the room")}
    assert wrong_of(size, node_size, chosen) == {}


@pytest.mark.parametrize(("size", "node_size"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("work", [two_forwards, recomputed])
def test_calls_may_overlap_with_others(work, size, node_size):
    case = Case(tokens=(5, 41, 20, 0)[:size], top_k=3, capacity=0.5, node_size=node_size)
    ranks = run_ranks(size, on_ranks, [case], work)
    for number in range(len(ranks[0][0])):
        errors = error_of([rank[0][number] for rank in ranks], on_one_rank(Problem.of(case, number + 1)))
        assert max(errors.values()) <= LIMIT[case.dtype], errors


def test_two_runs_are_equal_to_the_bit():
    names = ("K=3", "K=8", "empty experts", "all the rounds", "nothing kept in rounds")
    chosen = [replace(cases(4)[name], dtype=torch.float32, node_size=2) for name in names]
    one, two = (run_ranks(4, on_ranks, chosen) for _ in range(2))
    for a, b in zip(one, two, strict=True):
        for x, y in zip(a, b, strict=True):
            assert all(torch.equal(x[0][name], y[0][name]) for name in x[0])


@pytest.mark.parametrize(("size", "node_size"), [(2, 1), (4, 2)])
def test_one_row_crosses_for_a_token_and_a_node(size, node_size, monkeypatch):
    """Of the rows of x that a layer puts, forward and backward: each token once to each other node that has an expert of it."""
    case = Case(tokens=(37, 5, 13, 20)[:size], top_k=6, node_size=node_size)

    def work(exchange: Exchange | NodeExchange, case: Case) -> list[Figures]:
        rows = exchange.rail.rows if isinstance(exchange, NodeExchange) else exchange.rows
        sent, real = list[int](), ship_op.ship

        def ship(areas, lines_P2, board):
            sent.extend(int(lines_P2[far.peer, 1]) for area in areas if area is rows for far in area.far)
            real(areas, lines_P2, board)

        monkeypatch.setattr(ship_op, "ship", ship)
        once(exchange, case)
        return [{"sent": torch.tensor(sum(sent))}]

    share = case.experts * node_size // size
    expert = Problem.of(case).expert_TK
    source_T = torch.repeat_interleave(torch.arange(size), torch.tensor(case.tokens)) // node_size
    crossing = sum(len(set((row // share).tolist()) - {int(node)}) for row, node in zip(expert, source_T, strict=True))
    found = sum(int(rank[0][0]["sent"]) for rank in run_ranks(size, on_ranks, [case], work))
    assert found == 2 * crossing  # and once more for backward


def test_a_rank_behind_a_node_that_dies_ends_all_with_one_message(tmp_path):
    with Ranks(SIZE, lambda *rest: over_shm(*rest, node_size=2), train_forever, tmp_path, 60.0) as ranks:
        await_steps(tmp_path, 3)
        ranks.signal(3, signal.SIGKILL)
        killed = time.monotonic()
        others = ranks.wait(only={0, 1, 2})
        assert time.monotonic() - killed < 5.0
    # Rank 0 shares neither rail nor node with rank 3: it is told.
    pattern = (
        r"rank [12]: lost rank 3 in layer 3, [a-z ]+: expected epoch \d+, seen epoch \d+ of a process that has ended"
    )
    assert re.fullmatch(pattern, told_once(others))
