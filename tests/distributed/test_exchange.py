# SPDX-License-Identifier: Apache-2.0
"""The memory of the exchange over the life of a communicator: made again, armed late, and where a peer cannot be reached."""

import pytest
import torch
from ranks import over_shm, run_ranks
from test_size import QUICKSTART

from nmoe.comm.communicator import Communicator, Symmetric
from nmoe.comm.remote import Phase, Remote
from nmoe.config import load_config
from nmoe.errors import EnvironmentFault, PeerFault
from nmoe.rdep.exchange import Exchange


def small(comm: Communicator, **settings: float) -> Exchange:
    shape = {"tokens": 4, "hidden_size": 8, "num_experts": 2, "top_k": 1, "dtype": torch.float32}
    return Exchange(comm, **shape, **settings)  # type: ignore[arg-type]


def test_a_second_exchange_over_the_same_memory_waits_for_its_peers():
    """Were its epochs to start anew, its meetings would find the flags of the first and wait for nobody."""

    def work(comm: Communicator) -> list[int]:
        for _ in range(3):
            small(comm).meet(0, Phase.COUNTS)
        comm.barrier()
        second = small(comm, timeout_s=0.3)
        if comm.rank == 1:
            return []
        with pytest.raises(PeerFault, match="lost rank 1 in layer 5, return: expected epoch 4, seen epoch 3"):
            second.meet(5, Phase.RETURN)
        return [int(second.board.epoch_1)]

    def alone(comm: Communicator) -> list[int]:
        found = work(comm)
        if comm.rank == 1:
            with pytest.raises(PeerFault):
                comm.barrier()
        return found

    assert run_ranks(2, over_shm, alone) == [[4], []]


def test_an_exchange_of_a_run_is_patient_until_it_is_armed():
    def work(comm: Communicator) -> list[float]:
        config = load_config(QUICKSTART, ["rdep.timeout_s=7", "data.seq_len=16"])
        exchange = Exchange.of(config, comm, dtype=torch.float32)
        before = exchange.board.timeout_s
        exchange.arm()
        return [before, exchange.board.timeout_s]

    assert run_ranks(2, over_shm, work) == [[1800.0, 7.0]] * 2


def test_a_peer_whose_memory_is_not_mapped_is_named():
    own = torch.zeros(64, dtype=torch.uint8)
    memory = Symmetric(local=own, peers=(own, None))
    with pytest.raises(EnvironmentFault, match=r"rank 0 cannot write into the memory of rank 1.*parallel\.ep"):
        Remote.of(memory, rank=0, offset=0, shape=(8,), dtype=torch.int64)
