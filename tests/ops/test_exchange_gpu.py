# SPDX-License-Identifier: Apache-2.0
"""The exchange between GPUs: its kernels against their meaning in plain torch, and whole layers of two processes."""

import importlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from nmoe.comm.communicator import Symmetric
from nmoe.comm.watcher import LOST
from nmoe.ops.give_back import reference as give_back_reference
from nmoe.ops.meet import reference as meet_reference
from nmoe.ops.plan import reference as plan_reference
from nmoe.ops.push import reference as push_reference
from nmoe.ops.receive import reference as receive_reference
from nmoe.rdep.exchange import Exchange

pytestmark = pytest.mark.gpu


class Together:
    """The communicator of rank `rank` of several that live in this process: kernels cannot tell, and no process waits."""

    alarm = None

    def __init__(self, rank: int, size: int, memory: dict[int, Tensor]) -> None:
        self.rank, self.size, self._memory = rank, size, memory
        self.ranks, self.node_size = range(size), size
        self.device = torch.device("cuda", 0)

    def symmetric(self, name: str, *, nbytes: int) -> Symmetric:
        for rank in range(self.size):
            if rank not in self._memory:
                self._memory[rank] = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        peers = tuple(self._memory[rank] for rank in range(self.size))
        return Symmetric(local=peers[self.rank], peers=peers)

    def barrier(self) -> None: ...

    def close(self) -> None: ...


def exchanges(size: int, *, tokens: int, width: int, experts: int, top_k: int) -> list[Exchange]:
    memory: dict[int, Tensor] = {}
    settings = {"tokens": tokens, "hidden_size": width, "num_experts": experts, "top_k": top_k, "timeout_s": 20.0}
    made = [Exchange(Together(rank, size, memory), dtype=torch.bfloat16, **settings) for rank in range(size)]
    for exchange in made:  # what nobody writes must not matter
        for area in (exchange.rows, exchange.gradients, exchange.results, exchange.values):
            area.local.fill_(float("nan"))
        exchange.records.local.fill_(-77)
    return made


def kernel(op: str) -> ModuleType:
    return importlib.import_module(f"nmoe.ops.{op}.cuda")


def meet_together(group: list[Exchange], meet: Callable) -> None:
    """Each rank on a stream of its own, since a wait of one stream would hold up the rest."""
    if meet is meet_reference.meet:
        for exchange in group:  # sequentially: raise all flags, then nobody waits
            exchange.board.epoch_1.add_(1)
            for flag_P in exchange.board.flag.views:
                flag_P[exchange.comm.rank] = exchange.board.epoch_1[0]
        return
    torch.cuda.synchronize()
    for exchange in group:
        with torch.cuda.stream(torch.cuda.Stream()):
            meet(exchange.board, layer=0, phase=0)
    torch.cuda.synchronize()


CASES = [
    # tokens of each rank, width, experts, top_k
    ([37, 0], 64, 4, 1),
    ([1000, 517], 256, 8, 3),
    ([5000, 4097], 512, 64, 6),
    ([200, 100, 0, 333, 128, 1, 77, 250], 256, 16, 8),
    ([300, 200, 100], 7168, 12, 4),
]


@pytest.mark.parametrize(("tokens_P", "width", "experts", "top_k"), CASES)
def test_exchange_kernels_equal_their_meaning(tokens_P, width, experts, top_k):
    size = len(tokens_P)
    shape = {"tokens": max(tokens_P), "width": width, "experts": experts, "top_k": top_k}
    expert = [torch.rand(t, experts, device="cuda").topk(top_k, dim=1).indices.int() for t in tokens_P]
    gate = [torch.rand(t, top_k, device="cuda") for t in tokens_P]
    x = [torch.randn(t, width, device="cuda").bfloat16() for t in tokens_P]
    ours, theirs = exchanges(size, **shape), exchanges(size, **shape)
    sides = [
        (ours, kernel("plan"), kernel("push"), kernel("receive"), kernel("meet").meet),
        (theirs, plan_reference, push_reference, receive_reference, meet_reference.meet),
    ]
    sent, arrived = [], []
    for group, plan, push, receive, meet in sides:
        sends = [
            plan.plan(e, experts_per_rank=experts // size, count=exchange.count)
            for e, exchange in zip(expert, group, strict=True)
        ]
        meet_together(group, meet)
        for rank, exchange in enumerate(group):
            count = exchange.count.local
            push.push(x[rank], sends[rank], count, rows=exchange.rows)
            push.push_records(
                expert[rank],
                gate[rank],
                sends[rank],
                count,
                exchange.board,
                experts_per_rank=experts // size,
                records=exchange.records,
            )
        meet_together(group, meet)
        sent.append(sends)
        arrived.append(
            [
                receive.receive(
                    exchange.records.local,
                    exchange.count.local,
                    exchange.board,
                    gate_like=gate[0],
                    top_k=top_k,
                    layer=0,
                )
                for exchange in group
            ]
        )
    for rank in range(size):
        assert torch.equal(sent[0][rank].row_TP, sent[1][rank].row_TP)
        assert torch.equal(ours[rank].count.local, theirs[rank].count.local)
        for area in ("rows", "records"):
            found, wanted = getattr(ours[rank], area).local, getattr(theirs[rank], area).local
            assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)), area
        for field in ("expert_RK", "gate_RK", "home_R3"):
            assert torch.equal(getattr(arrived[0][rank], field), getattr(arrived[1][rank], field)), field
    _way_home(ours, theirs, sent[0], arrived[0], width, top_k)


def _way_home(ours, theirs, sends, arrived, width, top_k) -> None:
    """From slots, here simply all (row, choice) pairs in order, back to the sources."""
    for gated in (True, False):
        for rank in range(len(ours)):
            expert_RK = arrived[rank].expert_RK
            here = expert_RK >= 0
            slot = torch.where(here, here.view(-1).cumsum(0).view(here.shape) - 1, -1).int()
            y = torch.randn(int(here.sum()) + 5, width, device="cuda").bfloat16()
            y[-5:] = float("nan")
            value = torch.randn(y.shape[0], device="cuda")
            gates = arrived[rank].gate_RK if gated else None
            for group, home in ((ours, kernel("give_back")), (theirs, give_back_reference)):
                home.reduce_push(y, slot, gates, arrived[rank].home_R3, results=group[rank].results)
                home.push_values(value, slot, arrived[rank].home_R3, values=group[rank].values)
        for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            tokens = sends[rank].row_TP.shape[0]
            assert torch.equal(mine.values.local[:tokens], other.values.local[:tokens])
            found = kernel("give_back").partial_sum(mine.results.local, sends[rank])
            wanted = give_back_reference.partial_sum(other.results.local, sends[rank])
            assert torch.isfinite(found).all()
            # Both sum in fp32 in the same order; a fused multiply-add may round a bf16 the other way, rarely.
            far = float((found.float() - wanted.float()).norm())
            assert far <= 1e-3 * float(wanted.float().norm())
            assert tokens == 0 or float((found != wanted).float().mean()) < 0.02


def ranks(check: str, folder: Path, *, size: int = 2, limit_s: float = 400.0) -> list[tuple[int, str]]:
    """Exit status and output of each rank of a check."""
    script = Path(__file__).with_name("exchange_ranks.py")
    command = [sys.executable, "-W", "ignore", str(script), check]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(folder / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        texts = [process.communicate(timeout=limit_s)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [(process.returncode, text) for process, text in zip(started, texts, strict=True)]


@pytest.mark.parametrize("check", ["layer", "graph", "delays", "nvshmem"])
def test_two_ranks(check, tmp_path):
    """On one GPU its two processes take turns; with two GPUs each has its own."""
    for status, text in ranks(check, tmp_path):
        print(text)
        assert status == 0, text[-4000:]


@pytest.mark.multi_gpu
@pytest.mark.parametrize("check", ["gathers", "puts"])
def test_two_ranks_on_two_gpus(check, tmp_path):
    for status, text in ranks(check, tmp_path):
        assert status == 0, text[-4000:]


def test_a_rank_that_does_not_come_is_named_and_all_end(tmp_path):
    began = time.monotonic()
    (first, said), (second, _) = ranks("lost", tmp_path)
    assert first in (1, LOST)  # by its error, or by its watcher, who sees the device's fault as well
    assert second == LOST
    assert "PeerFault: rank 0: lost rank 1 in layer 0, counts: expected epoch 11, seen epoch 10" in said
    assert time.monotonic() - began < 60
