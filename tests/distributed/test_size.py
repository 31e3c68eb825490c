# SPDX-License-Identifier: Apache-2.0
"""The memory that a config is said to share is the memory that its ranks take."""

from pathlib import Path

import pytest
import torch
from ranks import over_shm, run_ranks

from nmoe.config import load_config
from nmoe.rdep.exchange import Exchange
from nmoe.rdep.size import shared_bytes

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 2), ("bf16", 4)])
@pytest.mark.parametrize("wire", ["plain", "mxfp8", "nvfp4"])
def test_shared_bytes_are_those_of_the_exchange(dtype, size, wire):
    config = load_config(QUICKSTART, [f"train.dtype={dtype}", f"rdep.wire={wire}", "data.seq_len=50"])
    rows = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    taken = run_ranks(size, over_shm, lambda comm: Exchange.of(config, comm, dtype=rows).nbytes)
    assert taken == [shared_bytes(config, ranks=size)] * size
