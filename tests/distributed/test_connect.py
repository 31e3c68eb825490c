# SPDX-License-Identifier: Apache-2.0
"""Which rendering connects which ranks, and what is said where none does."""

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from nmoe.comm import connect as subject
from nmoe.comm.connect import connect
from nmoe.errors import ConfigError

CPU = torch.device("cpu")


def test_one_rank_is_its_own_peer():
    assert type(connect(None, CPU)).__name__ == "Local"
    with pytest.raises(ConfigError, match=r'parallel.comm = "ipc" needs several expert-parallel ranks, found 1'):
        connect(None, CPU, kind="ipc")


@pytest.mark.parametrize("kind", ["auto", "shm"])
def test_processes_of_a_machine_share_memory(kind):
    def work() -> str:
        dist.init_process_group("gloo")
        comm = connect(dist.group.WORLD, CPU, kind=kind)
        comm.barrier()
        comm.close()
        return type(comm).__name__

    assert run_ranks(2, work) == ["Shm"] * 2


def test_ranks_that_cannot_be_connected_are_told():
    def message(device: torch.device, kind: Any) -> str:
        with pytest.raises(ConfigError) as error:
            connect(dist.group.WORLD, device, kind=kind)
        return str(error.value)

    def work() -> list[str]:
        dist.init_process_group("gloo")
        first = message(CPU, "nvshmem")
        boot_id = mock.Mock(read_bytes=lambda: os.environ["RANK"].encode())  # as on two machines
        with mock.patch.object(subject, "_BOOT_ID", boot_id):
            return [first, message(CPU, "auto")]

    for told in run_ranks(2, work):
        assert told == [
            'parallel.comm = "nvshmem" does not connect 2 ranks on CPUs; expected "auto" or "shm"',
            "2 ranks on CPUs of 2 machines cannot share experts; set parallel.ep to at most the ranks of one machine",
        ]
