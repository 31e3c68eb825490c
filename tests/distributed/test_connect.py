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


@pytest.mark.parametrize(("kind", "node_size"), [("auto", 0), ("shm", 1)])
def test_processes_of_a_machine_share_memory(kind, node_size):
    def work() -> tuple[str, int]:
        dist.init_process_group("gloo")
        comm = connect(dist.group.WORLD, CPU, kind=kind, node_size=node_size)
        comm.barrier()
        comm.close()
        return type(comm).__name__, comm.node_size

    assert run_ranks(2, work) == [("Shm", node_size or 2)] * 2


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


def test_nodes_are_machines_or_parts_of_them():
    def told(machines: str, asked: int = 0) -> int | str:
        try:
            return subject._node_size([name.encode() for name in machines], asked=asked)
        except ConfigError as error:
            return str(error)

    assert [told("aabb"), told("aaaa"), told("aaaabbbb", 2), told("abcd", 1)] == [2, 4, 2, 1]
    for machines, parts in (("aab", "2, 1"), ("abab", "2, 2"), ("aabbb", "2, 3")):
        assert f"in unequal parts ({parts})" in str(told(machines)), machines
    assert "rdep.node_size = 4 does not divide the 2 expert-parallel ranks of a machine" in str(told("aabb", 4))


def test_gpus_of_one_node_are_mapped_and_of_several_reached_by_puts():
    def chosen(machines: int, *, is_one_node: bool, asked: Any = "auto") -> str:
        return subject._chosen(
            torch.device("cuda"), machines=machines, is_one_node=is_one_node, where="4 ranks on GPUs", asked=asked
        )

    assert chosen(1, is_one_node=True) == "ipc"
    assert chosen(2, is_one_node=False) == "nvshmem"
    assert chosen(1, is_one_node=False) == "nvshmem"  # rdep.node_size below the GPUs of the machine
    with pytest.raises(ConfigError, match=r'"ipc" maps the memory of all ranks.*rdep\.node_size to 0'):
        chosen(1, is_one_node=False, asked="ipc")
