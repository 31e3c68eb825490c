# SPDX-License-Identifier: Apache-2.0
"""The memory of the exchange over the life of a communicator: made again, and armed late."""

import pytest
import torch
from ranks import over_shm, run_ranks
from test_size import QUICKSTART

from nmoe.comm.communicator import Communicator
from nmoe.comm.remote import Phase
from nmoe.config import load_config
from nmoe.errors import PeerFault
from nmoe.rdep.exchange import Exchange
from nmoe.rdep.nodes import exchange_of


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
        exchange = exchange_of(config, comm, dtype=torch.float32)
        assert isinstance(exchange, Exchange)
        before = exchange.board.timeout_s
        exchange.arm()
        return [before, exchange.board.timeout_s]

    assert run_ranks(2, over_shm, work) == [[1800.0, 7.0]] * 2
