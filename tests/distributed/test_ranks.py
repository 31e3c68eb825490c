# SPDX-License-Identifier: Apache-2.0
"""The harness itself: results in order, a failure is told at once, nothing is left behind."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, run_ranks


def sum_of_ranks(factor: int) -> tuple[int, int]:
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() * factor])
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


@pytest.mark.parametrize("size", [2, 8])
def test_ranks_find_each_other(size):
    assert run_ranks(size, sum_of_ranks, 10) == [(rank, 5 * size * (size - 1)) for rank in range(size)]


def test_failure_of_one_rank_is_told_while_the_others_wait():
    def work() -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("no such luck")
        time.sleep(60)

    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)rank 1 of 3.*no such luck"):
        run_ranks(3, work)
    assert time.monotonic() - began < 30


def test_ranks_end_with_the_block_and_say_how():
    with Ranks(3, time.sleep, 60) as ranks:
        ranks.signal(2, signal.SIGKILL)
        assert ranks.wait(only={2})[0].exit_code == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(ranks.pids[0], 0)
