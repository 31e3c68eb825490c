# SPDX-License-Identifier: Apache-2.0
"""The memory that a config is said to share is the memory that its ranks take."""

from pathlib import Path

import pytest
import torch
from ranks import over_shm, run_ranks

from nmoe.comm.communicator import Communicator
from nmoe.config import load_config
from nmoe.rdep.nodes import exchange_of
from nmoe.rdep.size import shared_bytes

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"


@pytest.mark.parametrize(
    ("dtype", "size", "node_size"), [("fp32", 2, 0), ("bf16", 4, 0), ("bf16", 2, 1), ("fp32", 4, 2)]
)
@pytest.mark.parametrize("wire", ["plain", "mxfp8", "nvfp4"])
def test_shared_bytes_are_those_of_the_exchange(dtype, size, node_size, wire):
    config = load_config(QUICKSTART, [f"train.dtype={dtype}", f"rdep.wire={wire}", "data.seq_len=50"])
    rows = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]

    def work(comm: Communicator) -> tuple[int, int]:
        exchange = exchange_of(config, comm, dtype=rows)
        names = ("rdep rail", "rdep node") if 1 < comm.node_size < size else ("rdep",)
        return exchange.nbytes, sum(comm._buffers._found[name].local.numel() for name in names)  # type: ignore[attr-defined]

    taken = run_ranks(size, over_shm, work, node_size=node_size)
    planned = shared_bytes(config, ranks=size, node_size=node_size)
    assert taken == [(planned, planned)] * size
