# SPDX-License-Identifier: Apache-2.0
"""A rank that hangs while the others stand in a collective is found, named and ended, on one machine and on two."""

import itertools
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from nmoe.comm import faults, waits
from nmoe.comm.page import Word
from nmoe.comm.standing import Standing, verdict
from nmoe.comm.watcher import LOST, Watcher
from nmoe.errors import PeerFault

SIZE, TIMEOUT_S, MARGIN_S = 4, 2.0, 5.0


def work(folder: Path, machines: int, stuck: set[int]) -> None:
    """Step after step of one collective, as if the ranks were on so many machines; some get stuck in step 3."""
    store, rank, size = next(rendezvous("env://"))
    dist.init_process_group("gloo", store=PrefixStore("group", store), rank=rank, world_size=size)
    group = dist.group.WORLD
    assert group is not None
    os.dup2(os.open(folder / f"stderr-{rank}", os.O_CREAT | os.O_WRONLY), 2)
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    watcher = Watcher(group, store=store, place=str(rank * machines // size))
    for step in itertools.count(1):
        watcher.beat("the sums", step=step)
        if step == 3:
            watcher.limit(TIMEOUT_S if len(stuck) < size else 60.0)
            (folder / str(rank)).touch()
        if step == 3 and rank in stuck:
            user_code()
        try:
            dist.all_reduce(torch.ones(8))
        except RuntimeError:  # gloo sees the end of a process first
            watcher.await_ring()
            watcher.fail("gloo failed, and nobody else knows why", status=1)
        time.sleep(0.01)


def user_code() -> None:
    time.sleep(1000)


def await_ranks(folder: Path) -> None:
    deadline = time.monotonic() + 60
    while not all((folder / str(rank)).exists() for rank in range(SIZE)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def said(folder: Path) -> list[str]:
    """All that the ranks wrote to stderr, a text a rank."""
    return [(folder / f"stderr-{rank}").read_text() for rank in range(SIZE)]


@pytest.mark.parametrize(
    ("machines", "how"), [(1, "stopped"), (1, "stuck"), (2, "killed"), (2, "stopped"), (2, "stuck")]
)
def test_lost_rank_ends_all_with_one_message(machines, how, tmp_path):
    # Where one is killed the others stand in no collective, which would see it: only the alarm can tell the other machine.
    stuck = {"killed": {0, 1, 2, 3}, "stopped": set(), "stuck": {2}}[how]
    with Ranks(SIZE, work, tmp_path, machines, stuck) as ranks:
        await_ranks(tmp_path)
        if how != "stuck":
            ranks.signal(2, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        began = time.monotonic()
        outcomes = ranks.wait()
        took = time.monotonic() - began
    assert took < MARGIN_S + (0 if how == "killed" else TIMEOUT_S)
    lines = [line for text in said(tmp_path) for line in text.splitlines() if line.startswith("error: ")]
    why = {
        "killed": "rank [0-3]: lost rank 2: its process has ended; see its own last output",
        "stopped": r"lost rank 2: no progress for [234] s in step \d+, the sums; its process does not run",
        "stuck": "lost rank 2: no progress for [234] s in step 3, the sums; its process runs, see its stacks",
    }[how]
    assert len(lines) == 1, lines
    assert re.fullmatch(f"error: {why}", lines[0])
    ends = {rank: outcome.exit_code for rank, outcome in enumerate(outcomes)}
    assert ends.pop(2) == (LOST if how == "stuck" else -signal.SIGKILL)
    assert set(ends.values()) == {LOST}
    assert ("in user_code" in said(tmp_path)[2]) == (how == "stuck")
    assert ("in all_reduce" in "".join(said(tmp_path))) == (how != "killed"), "stacks"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_host_of_the_store_ends_the_other_machine_too(number, tmp_path):
    """Rank 0 has the store in its process: nobody can tell the other machine, which sees that it does not answer."""
    with Ranks(SIZE, work, tmp_path, 2, set()) as ranks:
        await_ranks(tmp_path)
        ranks.signal(0, number)
        began = time.monotonic()
        outcomes = ranks.wait()
        assert time.monotonic() - began < TIMEOUT_S + MARGIN_S
    assert [outcome.exit_code for outcome in outcomes] == [-signal.SIGKILL, LOST, LOST, LOST]
    for machine in (said(tmp_path)[:2], said(tmp_path)[2:]):
        lines = [line for text in machine for line in text.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, lines
        assert re.search(r"lost (rank 0: |the store of the run, )", lines[0])


def test_lost_machine_ends_the_other(tmp_path):
    """Both of its ranks are stopped, as by a power cut; it is for their launcher to end them."""
    with Ranks(SIZE, work, tmp_path, 2, set()) as ranks:
        await_ranks(tmp_path)
        for rank in (2, 3):
            ranks.signal(rank, signal.SIGSTOP)
        began = time.monotonic()
        outcomes = ranks.wait(only={0, 1})
        assert time.monotonic() - began < TIMEOUT_S + MARGIN_S
    assert [outcome.exit_code for outcome in outcomes] == [LOST, LOST]
    place = r"(the start|step \d+, the sums)"  # where it was when it was last heard of
    pattern = rf"error: lost rank 2 and 1 more: no progress for \d s in {place}; its process does not run"
    assert len(re.findall(pattern, "".join(said(tmp_path)))) == 1


def leave_at_once(reporter: int) -> None:
    """Rank 1 is stopped. The thread of rank 0 passes that on, whose main thread ends the process as soon as it hears."""
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    watcher = Watcher(dist.group.WORLD)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.5)
    word = Word(reporter, LOST, stacks=False, text="lost rank 1")
    threading.Thread(target=watcher._ring, args=(word,), daemon=True).start()
    while True:
        try:
            watcher.check()
        except PeerFault:
            os._exit(LOST)


@pytest.mark.parametrize("reporter", [0, 7])
def test_who_tells_of_a_stopped_rank_does_not_leave_before_that_is_ended(reporter):
    """PyTorch's launcher would give it half a minute. Another machine may have found out (7)."""
    with Ranks(2, leave_at_once, reporter) as ranks:
        outcomes = ranks.wait(20.0)
    assert [outcome.exit_code for outcome in outcomes] == [LOST, -signal.SIGKILL]


def test_last_of_the_ranks_is_the_one_that_hangs():
    one = Standing(
        rank=0, position=9, still_s=0, silent_s=0, limit_s=2, patience_s=2, waits=False, doing="step 3, the sums"
    )
    ahead = one._replace(rank=1, position=10, still_s=99, waits=True)
    text = "lost rank 0: no progress for 5 s in step 3, the sums; its process runs, see its stacks"
    assert verdict([ahead, one._replace(still_s=5)]) == text
    assert verdict([ahead, one]) == "", "one that is slow, for which another waits long"
    assert verdict([one._replace(still_s=5, waits=True, rank=1), one._replace(still_s=6)]) == text
    assert verdict([ahead, one._replace(still_s=99, patience_s=1800)]) == "", "it waits for a disk"
    assert "rank 0: no progress for 9 s in step 3, the sums; its process does not run" in verdict(
        [ahead, one._replace(still_s=9, silent_s=9, patience_s=1800)]
    )
    assert verdict([one._replace(still_s=9)], whole=False) == "", "who is last is not known"
    assert verdict([]) == "", "all have taken their leave"


@pytest.mark.parametrize(("late", "least_s", "most_s"), [(1, 2.5, 4.0), (2, 0.1, 1.5)])
def test_who_waits_for_others_is_blamed_only_when_the_watcher_had_its_time(late, least_s, most_s):
    """Rank 1 stands in a collective, rank 2 does not; a layer's wait of 0.1 s for either."""
    flag_P = np.array([7, 7, 7])
    flag_P[late] = 6
    watcher = SimpleNamespace(check=lambda: None)
    alarm: Any = SimpleNamespace(watcher=watcher, gone=set, waits=lambda peer: peer == 1)
    began = time.monotonic()
    with pytest.raises(PeerFault, match=f"rank {late} is at 6"):
        waits._await(
            lambda: flag_P,
            7,
            ranks=range(3),
            timeout_s=0.1,
            alarm=alarm,
            complain=lambda peer, seen, how: PeerFault(f"rank {peer} is at {seen} {how}"),
        )
    assert least_s < time.monotonic() - began < most_s


def test_device_that_waited_in_vain_leaves_it_to_the_watcher_who_is_lost(tmp_path):
    """Ranks 1 and 2 stand in a collective with rank 3, which is stopped; rank 0's kernel waited for rank 1 and says so."""
    with Ranks(SIZE, work_beside_a_device, tmp_path) as ranks:
        await_ranks(tmp_path)
        ranks.signal(3, signal.SIGSTOP)
        ranks.wait()
    lines = [line for text in said(tmp_path) for line in text.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, lines
    assert "lost rank 3" in lines[0]


@pytest.mark.parametrize(("kind", "awaited"), [(faults.LATE, 7), (faults.WRONG_ROW, None)])
def test_report_of_a_device_says_for_whom_a_wait_was(kind, awaited, monkeypatch):
    """Group ranks 0 and 1 are 4 and 7 of the run; only of a wait may the cause be another."""
    monkeypatch.setattr(faults, "fault_record", lambda: torch.tensor([kind, 0, 1, 3, 0, 9, 8, 0]))
    fault = faults.device_fault([4, 7])
    assert fault is not None
    assert str(fault).startswith("rank 4: lost rank 7 in layer 3, ")
    assert fault.awaited == awaited
    watcher = Watcher.__new__(Watcher)
    watcher._reported_at, watcher.device_fault, watcher.waits = 0.0, lambda: fault, lambda rank: rank == 7
    assert (watcher._report() is None) == (kind == faults.LATE)
    watcher.waits = lambda rank: False
    assert watcher._report() is fault


def work_beside_a_device(folder: Path) -> None:
    """Collectives of ranks 1 to 3; rank 0 has a device whose wait for rank 1 ends some time after that stands still."""
    store, rank, size = next(rendezvous("env://"))
    dist.init_process_group("gloo", store=PrefixStore("group", store), rank=rank, world_size=size)
    world = dist.group.WORLD
    assert world is not None
    os.dup2(os.open(folder / f"stderr-{rank}", os.O_CREAT | os.O_WRONLY), 2)
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    group: Any = dist.new_group([1, 2, 3])
    watcher = Watcher(world, store=store)
    for step in itertools.count(1):
        watcher.beat("the sums", step=step)
        watcher.limit(TIMEOUT_S)
        if step == 3:
            (folder / str(rank)).touch()
        try:
            if rank:
                dist.all_reduce(torch.ones(8), group=group)
            elif watcher.waits(1):
                time.sleep(TIMEOUT_S)
                watcher.device_fault = lambda: PeerFault("rank 0: lost rank 1 in layer 3, ready", awaited=1)
                raise watcher.ring(str(watcher.await_report()))
        except (PeerFault, RuntimeError):
            watcher.await_ring()
            watcher.end()
        time.sleep(0.01)
