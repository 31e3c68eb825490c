# SPDX-License-Identifier: Apache-2.0
"""Many layers while random ranks are held up at random points: does any row arrive late, twice, or overwritten?

    python tests/distributed/stress.py --ranks 4 --layers 20000

A delay falls between any two operations of the exchange, on one rank at a time, and lasts from no time (the core is given
away) to 20 ms (other ranks run far ahead, as far as the protocol lets them). Shapes, routing and values change from
layer to layer; each output and gradient is compared with that of one rank. CI runs 500 layers of it.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parent))
from layers import Case, Figures, Problem, across, error_of, gradients, on_one_rank, on_ranks
from ranks import run_ranks

from nmoe.comm.remote import Board
from nmoe.ops.give_back import reference as give_back
from nmoe.ops.meet import reference as meet
from nmoe.ops.plan import reference as plan
from nmoe.ops.push import reference as push
from nmoe.ops.receive import reference as receive
from nmoe.ops.ship import reference as ship
from nmoe.rdep.exchange import Exchange

__all__ = ["main", "stress"]

_POINTS = (
    (plan, "plan"),
    (push, "push"),
    (push, "push_records"),
    (meet, "meet"),
    (receive, "receive"),
    (give_back, "reduce_push"),
    (give_back, "push_values"),
    (give_back, "partial_sum"),
    (ship, "ship"),
    (Board, "complete"),
)
_PROBLEMS = 50


@contextmanager
def _delays(seed: int) -> Iterator[None]:
    """Every operation of the exchange may be late, before or after its work."""
    draws = random.Random(seed)

    def late(real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*operands: Any, **options: Any) -> Any:
            _hold_up(draws)
            result = real(*operands, **options)
            _hold_up(draws)
            return result

        return operation

    patches = [mock.patch.object(module, name, late(getattr(module, name))) for module, name in _POINTS]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def _hold_up(draws: random.Random) -> None:
    chance = draws.random()
    if chance < 0.002:
        time.sleep(0.02 * draws.random())
    elif chance < 0.03:
        time.sleep(0.001 * draws.random())
    elif chance < 0.1:
        time.sleep(0)


def _problems(case: Case) -> list[tuple[Case, int]]:
    """Cases that share one exchange: other numbers of tokens, other routing, other values."""
    draws = random.Random(7)
    found = []
    for salt in range(_PROBLEMS):
        tokens = tuple(draws.choice([0, 1, draws.randrange(max(case.tokens) + 1), most]) for most in case.tokens)
        found.append(
            (replace(case, tokens=tokens, routing=draws.choice(["random", "few", "one expert", "one rank"])), salt)
        )
    return found


def stress(case: Case, layers: int, *, say: bool = False) -> None:
    """Run layers on as many ranks as the case has.

    Raises:
        AssertionError: A number differs from that of one rank, or the ranks hang.
    """
    problems = _problems(case)
    truths = [on_one_rank(Problem.of(one, salt)) for one, salt in problems]

    def work(exchange: Exchange, case: Case) -> list[Figures]:
        del case
        rank, found = exchange.comm.rank, []
        parts = [Problem.of(one, salt).of_rank(one, rank) for one, salt in problems]
        first = [one.tokens[:rank] for one, _ in problems]
        began = time.monotonic()
        with _delays(rank):
            for number in range(layers):
                which = number * 17 % _PROBLEMS
                figures = gradients(parts[which], across(exchange, layer=number % 32))
                _compare(figures, truths[which], number, rank=rank, tokens_before=sum(first[which]))
                if say and rank == 0 and number % 500 == 499:
                    rate = (number + 1) / (time.monotonic() - began)
                    print(
                        f"{number + 1} of {layers} layers, {rate:.0f}/s, {(layers - number) / rate:.0f} s left",
                        flush=True,
                    )
        found.append({"layers": torch.tensor([layers])})
        return found

    assert (
        run_ranks(case.ranks, on_ranks, [case], work, timeout_s=86400)
        == [[[{"layers": torch.tensor([layers])}]]] * case.ranks
    )


def _compare(figures: Figures, truth: Figures, number: int, *, rank: int, tokens_before: int) -> None:
    """This rank's part of the truth, and its part alone."""
    mine = {}
    for name, found in figures.items():
        start = tokens_before if name.endswith(("TD", "TK")) else rank * found.shape[0]
        mine[name] = truth[name][start : start + found.shape[0]]
    errors = error_of([figures], mine)
    assert max(errors.values()) <= 1e-11, f"layer {number} on rank {rank}: {errors}"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=20000)
    parser.add_argument("--capacity", type=float, default=1.0)
    parser.add_argument("--node-size", type=int, default=0)
    options = parser.parse_args()
    tokens = (9, 13, 5, 11, 7, 3, 12, 10)[: options.ranks]
    case = Case(
        tokens=tokens,
        experts=8,
        top_k=3,
        width=16,
        expert_width=4,
        capacity=options.capacity,
        node_size=options.node_size,
    )
    began = time.monotonic()
    stress(case, options.layers, say=True)
    print(f"{options.layers} layers on {options.ranks} ranks: no mismatch, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
