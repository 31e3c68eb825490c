# SPDX-License-Identifier: Apache-2.0
"""A rank that dies, hangs or goes wrong ends all ranks in time, with one message that says who, where and what."""

import itertools
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Outcome, Ranks, over_shm, run_ranks

from nmoe.comm.shm import Shm
from nmoe.comm.watcher import LOST
from nmoe.config import Moe
from nmoe.errors import PeerFault
from nmoe.ops.plan import reference as plan_op
from nmoe.rdep.layer import MoE
from nmoe.rdep.nodes import exchange_over

SIZE, D, E, K = 4, 8, 8, 2
MARGIN_S = 5.0


def train_forever(comm: Shm, folder: Path, timeout_s: float, steps: int = 10**9) -> None:
    """Layer after layer, and a file a rank with its step so that the test sees it work."""
    for step in itertools.islice(steps_of(comm, timeout_s), steps):
        (folder / str(comm.rank)).write_text(str(step))


def steps_of(comm: Shm, timeout_s: float) -> Iterator[int]:
    """Number of each forward and backward, when it is done."""
    exchange = exchange_over(
        comm, tokens=16, hidden_size=D, num_experts=E, top_k=K, dtype=torch.float32, timeout_s=timeout_s
    )
    config = Moe(num_experts=E, num_shared_experts=0, top_k=K, expert_size=4)
    layer = MoE(hidden_size=D, config=config, comm=comm, shared=None, dtype=torch.float32, layer=3)
    layer.exchange = exchange
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    for step in itertools.count():
        layer(torch.randn(16, D, requires_grad=True), 1)[0].sum().backward()
        yield step


def await_steps(folder: Path, least: int) -> None:
    deadline = time.monotonic() + 60
    while any(not (p := folder / str(rank)).exists() or int(p.read_text() or 0) < least for rank in range(SIZE)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def told_once(outcomes: list[Outcome]) -> str:
    """The message: equal on all ranks that ended in order, and one of them says it."""
    errors = [outcome.error for outcome in outcomes]
    faults = [error for error in errors if isinstance(error, PeerFault)]
    assert len(faults) == len(errors), errors
    assert len({str(fault) for fault in faults}) == 1
    assert [fault.heard for fault in faults].count(False) == 1
    return str(faults[0])


def test_killed_rank_ends_the_others_at_once_and_a_new_start_works(tmp_path):
    before = set(Path("/dev/shm").iterdir())
    with Ranks(SIZE, over_shm, train_forever, tmp_path, 60.0) as ranks:
        await_steps(tmp_path, 3)
        ranks.signal(2, signal.SIGKILL)
        killed = time.monotonic()
        others = ranks.wait(only={0, 1, 3})
        assert time.monotonic() - killed < MARGIN_S, "a death is seen, not waited for"
    pattern = (
        r"rank [013]: lost rank 2 in layer 3, [a-z ]+: expected epoch \d+, seen epoch \d+ of a process that has ended"
    )
    assert re.fullmatch(pattern, told_once(others))
    assert set(Path("/dev/shm").iterdir()) == before
    assert run_ranks(SIZE, over_shm, train_forever, tmp_path, 60.0, 3) == [None] * SIZE


def test_stopped_rank_is_named_when_the_timeout_is_over_and_does_not_outlive_it(tmp_path):
    timeout_s = 1.0
    with Ranks(SIZE, over_shm, train_forever, tmp_path, timeout_s) as ranks:
        await_steps(tmp_path, 3)
        ranks.signal(1, signal.SIGSTOP)
        stopped = time.monotonic()
        outcomes = ranks.wait()
        assert time.monotonic() - stopped < timeout_s + MARGIN_S
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert re.fullmatch(
        r"rank [023]: lost rank 1 in layer 3, [a-z ]+: expected epoch \d+, seen epoch \d+ after 1 s",
        told_once([outcomes[rank] for rank in (0, 2, 3)]),
    )


def test_ranks_that_are_paused_together_go_on(tmp_path):
    """Ctrl-Z, and `fg` after more than the timeout: nobody was waited for in that time."""

    def work(comm: Shm) -> None:
        for step in steps_of(comm, 2.0):
            comm.alarm.watcher.beat("a layer", step=step + 1)
            comm.alarm.watcher.limit(2.0)
            (tmp_path / str(comm.rank)).write_text(str(step))

    with Ranks(SIZE, over_shm, work) as ranks:
        await_steps(tmp_path, 3)
        for rank in range(SIZE):  # the later ones wait for the first already
            ranks.signal(rank, signal.SIGSTOP)
            time.sleep(0.1)
        time.sleep(3.0)
        for rank in reversed(range(SIZE)):  # those that waited wake before those that they wait for
            ranks.signal(rank, signal.SIGCONT)
            time.sleep(0.2)
        step = int((tmp_path / "0").read_text() or 0)
        await_steps(tmp_path, step + 3)


def test_wrong_count_is_found_by_the_owner(tmp_path, monkeypatch):
    real, calls = plan_op.plan, itertools.count()

    def plan(expert_TK, *, experts_per_rank, count):
        sends = real(expert_TK, experts_per_rank=experts_per_rank, count=count)
        if os.environ["RANK"] == "2" and next(calls) == 5:
            for table in count.views:
                table[2, 0, 0] += 1  # announces a row more to rank 0 than it will send
        return sends

    monkeypatch.setattr(plan_op, "plan", plan)
    with Ranks(SIZE, over_shm, train_forever, tmp_path, 60.0) as ranks:
        message = told_once(ranks.wait(30))
    assert re.fullmatch(r"rank 0: lost rank 2 in layer 3, dispatch: expected one of its \d+ rows.*", message)


def test_error_of_one_rank_ends_the_others_with_its_words(tmp_path):
    def work(comm: Shm) -> None:
        with comm.alarm.told_of_errors():
            train_forever(comm, tmp_path, 60.0, steps=4 if comm.rank == 1 else 10**9)
            raise ZeroDivisionError("nothing left to divide")

    with Ranks(SIZE, over_shm, work) as ranks:
        outcomes = ranks.wait(30)
    assert isinstance(outcomes[1].error, ZeroDivisionError)
    for rank in (0, 2, 3):
        assert str(outcomes[rank].error) == "rank 1 failed: ZeroDivisionError: nothing left to divide"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_ranks_that_are_stuck_elsewhere_end_too(number, tmp_path):
    """In a collective, or asleep; where nobody waits for the lost rank, the alarm's own thread sees it end."""

    def work(comm: Shm) -> None:
        steps = steps_of(comm, 1.0)
        next(steps)
        (tmp_path / str(comm.rank)).write_text("9")
        while number == signal.SIGSTOP and not (tmp_path / "stopped").exists():
            time.sleep(0.01)
        if number == signal.SIGSTOP and comm.rank == 0:
            next(steps)
        elif number == signal.SIGSTOP:
            dist.recv(torch.empty(1), src=3)
        time.sleep(1000)

    with Ranks(SIZE, over_shm, work) as ranks:
        await_steps(tmp_path, 9)
        ranks.signal(3, number)
        (tmp_path / "stopped").touch()
        began = time.monotonic()
        outcomes = ranks.wait()
        assert time.monotonic() - began < 1.0 + MARGIN_S
    # A rank raises where it waits in a layer, or where the collective's peer is gone; elsewhere the alarm ends it.
    ends = {1, LOST} if number == signal.SIGSTOP else {LOST}
    assert {outcome.exit_code for outcome in outcomes[:3]} <= ends
    assert outcomes[3].exit_code == -signal.SIGKILL
