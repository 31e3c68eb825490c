# SPDX-License-Identifier: Apache-2.0
"""Memory between processes: stores of each rank into each peer, what a disagreement says, and what is left behind."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import over_shm, run_ranks

from nmoe.comm.communicator import Communicator
from nmoe.errors import EnvironmentFault


def store_everywhere(comm: Communicator, rounds: int) -> list[list[int]]:
    """Each rank writes its number into its place at every peer, again and again, and reads what the others wrote."""
    buffer = comm.symmetric("numbers", nbytes=8 * comm.size)
    assert buffer.local.count_nonzero() == 0
    comm.barrier()
    seen = []
    for number in range(rounds):
        for view in buffer.peers:
            assert view is not None
            view.view(torch.int64)[comm.rank] = 1000 * number + comm.rank
        comm.barrier()
        seen.append(buffer.local.view(torch.int64).tolist())
        comm.barrier()
    return seen


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_stores_arrive_at_every_peer(size):
    expected = [[1000 * number + rank for rank in range(size)] for number in range(50)]
    assert run_ranks(size, over_shm, store_everywhere, 50) == [expected] * size


def test_ranks_that_ask_for_different_buffers_are_told():
    def work(comm: Communicator) -> str:
        comm.symmetric("rows", nbytes=64)
        with pytest.raises(ValueError, match="64 bytes, not 65"):
            comm.symmetric("rows", nbytes=65)
        with pytest.raises(EnvironmentFault) as error:
            comm.symmetric("more", nbytes=100 + comm.rank)
        return str(error.value)

    assert run_ranks(2, over_shm, work) == [
        "shared buffer 'more' of 100 bytes: rank 1 asks for more 101 (name, bytes)",
        "shared buffer 'more' of 101 bytes: rank 0 asks for more 100 (name, bytes)",
    ]


def test_memory_has_no_name_and_goes_with_its_last_tensor():
    def work(comm: Communicator) -> tuple[int, int]:
        before = open_files()
        kept = comm.symmetric("rows", nbytes=1 << 20).local[:8]
        kept.fill_(7)
        comm.close()
        return open_files() - before, int(kept.sum())

    names = set(Path("/dev/shm").iterdir())
    assert all(files <= 0 and total == 56 for files, total in run_ranks(2, over_shm, work))
    assert set(Path("/dev/shm").iterdir()) == names


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_groups_of_one_world_are_apart():
    def work() -> tuple[int, list[int]]:
        from nmoe.comm.shm import Shm

        dist.init_process_group("gloo")
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        group = groups[dist.get_rank() // 2]
        assert isinstance(group, dist.ProcessGroup)
        comm = Shm(group)
        buffer = comm.symmetric("numbers", nbytes=16)
        for view in buffer.peers:
            assert view is not None
            view.view(torch.int64)[comm.rank] = dist.get_rank()
        comm.barrier()
        numbers = buffer.local.view(torch.int64).tolist()
        comm.close()
        return comm.rank, numbers

    assert run_ranks(4, work) == [(0, [0, 1]), (1, [0, 1]), (0, [2, 3]), (1, [2, 3])]
