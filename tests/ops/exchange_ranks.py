# SPDX-License-Identifier: Apache-2.0
"""One rank of a test between GPUs: `python exchange_ranks.py CHECK RANK SIZE STORE`, started by `test_exchange_gpu.py`.

Ranks take the GPUs in turn, so that two of them on one GPU do the same as two on two, only slower. A check prints what it
found, or fails with a traceback.
"""

import os
import sys
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nmoe.comm.communicator import Communicator, Symmetric
from nmoe.comm.ipc import Ipc
from nmoe.comm.local import Local
from nmoe.comm.nvshmem import Nvshmem
from nmoe.ops.wire import WIRES
from nmoe.rdep.dispatch import dispatch, opened
from nmoe.rdep.exchange import Exchange
from nmoe.rdep.many_ranks import ExpertsAcross
from nmoe.rdep.one_rank import ExpertsHere
from nmoe.rdep.plan import make_plan

DELAYED = int(os.environ.get("NMOE_STRESS_LAYERS", "200")) // 2
"""Pairs of layers in the check of delays."""
NAMES = ("out", "dx", "dgate", "dw13", "dw2")


class Problem:
    """Rows, routing, weights and gradients of all ranks; equal wherever it is made, because it depends on the seed alone."""

    def __init__(
        self, tokens_P: list[int], *, width: int, hidden: int, experts: int, top_k: int, skew: str = ""
    ) -> None:
        generator = torch.Generator(device="cuda").manual_seed(sum(tokens_P) + width + top_k)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(*shape, device="cuda", generator=generator) * scale

        self.tokens_P, self.experts, self.top_k, self.width = tokens_P, experts, top_k, width
        total = sum(tokens_P)
        scores = draw(total, experts)
        if skew == "one expert":
            scores[:, experts - 1] += 100
        if skew == "one rank":
            scores[:, : experts // 2] -= 100
        self.expert = scores.topk(top_k, dim=1).indices.int()
        self.gate = torch.rand(total, top_k, device="cuda", generator=generator)
        self.x, self.dout = draw(total, width).bfloat16(), draw(total, width).bfloat16()
        self.w13, self.w2 = (
            draw(experts, 2 * hidden, width, scale=width**-0.5),
            draw(experts, width, hidden, scale=hidden**-0.5),
        )

    def rows(self, rank: int) -> slice:
        start = sum(self.tokens_P[:rank])
        return slice(start, start + self.tokens_P[rank])

    def one_rank(self) -> dict[str, Tensor]:
        """What one rank that holds all experts finds in bf16, for all tokens."""
        leaves = [part.clone().requires_grad_() for part in (self.x, self.gate, self.w13, self.w2)]
        out = ExpertsHere.apply(*leaves, self.expert)
        return dict(zip(NAMES, (out.detach(), *torch.autograd.grad(out, leaves, self.dout)), strict=True))

    def truth(self) -> dict[str, Tensor]:
        """The same in fp64, written down once more."""
        leaves = [part.double().requires_grad_() for part in (self.x, self.gate, self.w13, self.w2)]
        x, gate, w13, w2 = leaves
        out = torch.zeros_like(x)
        for e in range(self.experts):
            row, k = torch.nonzero(self.expert == e).unbind(1)
            preact = x[row] @ w13[e].t()
            y = (torch.nn.functional.silu(preact[:, 0::2]) * preact[:, 1::2]) @ w2[e].t()
            out = out.index_add(0, row, gate[row, k].unsqueeze(1) * y)
        return dict(zip(NAMES, (out.detach(), *torch.autograd.grad(out, leaves, self.dout.double())), strict=True))

    def quantise(self, wire: str) -> None:
        """From now on its rows are those that their owners see: sent once by a rank to itself."""
        exchange = self.exchange(Local(torch.device("cuda")), wire=wire, tokens=len(self.x))
        plan = make_plan(self.expert, exchange=exchange, layer=0)
        packets, _ = dispatch(self.x, self.gate, self.expert, plan, exchange=exchange, layer=0)
        self.x = opened(packets, plan, exchange=exchange, like=self.x)[: len(self.x)]

    def exchange(
        self,
        comm: Communicator,
        *,
        capacity: float = 2.0,
        timeout_s: float = 60.0,
        wire: str = "",
        tokens: int | None = None,
    ) -> Exchange:
        return Exchange(
            comm,
            tokens=max(self.tokens_P) if tokens is None else tokens,
            hidden_size=self.width,
            num_experts=self.experts,
            top_k=self.top_k,
            dtype=torch.bfloat16,
            capacity=capacity,
            timeout_s=timeout_s,
            wire=WIRES[wire] if wire else None,
        )

    def leaves(self, comm: Communicator) -> list[Tensor]:
        """Rows and gates of a rank, and the weights of its experts."""
        own, share = self.rows(comm.rank), self.experts // comm.size
        held = slice(comm.rank * share, (comm.rank + 1) * share)
        parts = (self.x[own], self.gate[own], self.w13[held], self.w2[held])
        return [part.detach().clone().requires_grad_() for part in parts]

    def across(
        self, exchange: Exchange, leaves: list[Tensor], expert: Tensor | None = None, *, keep: bool = True
    ) -> list[Tensor]:
        """Output and gradients of this rank; ``keep`` is whether pre-activations are kept or computed again."""
        own = self.rows(exchange.comm.rank)
        out = ExpertsAcross.apply(*leaves, self.expert[own] if expert is None else expert, keep, exchange, 0)
        return [out.detach(), *torch.autograd.grad(out, leaves, self.dout[own])]


def error(found: Tensor, truth: Tensor) -> float:
    """Norm of the difference over the norm of the truth."""
    assert torch.isfinite(found).all()
    return float((found.double() - truth).norm() / truth.norm().clamp_min(1e-30))


def poison() -> None:
    """Fills memory that the allocator will hand out again with NaN."""
    torch.full((1 << 26,), float("nan"), device="cuda")
    torch.cuda.synchronize()


Case = tuple[list[int], dict[str, Any], dict[str, Any]]
"""Tokens of each rank; the rest of its `Problem`; settings of its exchange."""
LAYERS: list[Case] = [
    ([300, 217], {"width": 256, "hidden": 128, "experts": 8, "top_k": 3}, {}),
    ([0, 129], {"width": 64, "hidden": 64, "experts": 4, "top_k": 1}, {}),
    ([333, 100], {"width": 512, "hidden": 96, "experts": 8, "top_k": 4, "skew": "one expert"}, {}),
    ([256, 77], {"width": 256, "hidden": 128, "experts": 16, "top_k": 2, "skew": "one rank"}, {}),
    ([400, 350], {"width": 2048, "hidden": 256, "experts": 16, "top_k": 6}, {"capacity": 0.5}),
    ([31, 64], {"width": 7168, "hidden": 128, "experts": 32, "top_k": 8}, {}),
    ([300, 217], {"width": 512, "hidden": 128, "experts": 8, "top_k": 3}, {"wire": "mxfp8"}),
    ([300, 217], {"width": 512, "hidden": 128, "experts": 8, "top_k": 3}, {"wire": "nvfp4"}),
]


def main(check: str, rank: str, size: str, store: str) -> int:
    torch.cuda.set_device(int(rank) % torch.cuda.device_count())
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(size))
    group = dist.group.WORLD
    assert group is not None
    globals()[f"check_{check}"](group)
    torch.cuda.synchronize()
    dist.destroy_process_group()
    return 0


class Apart:
    """A communicator whose buffers have names of their own: NVSHMEM starts once in a process, and each problem needs its sizes."""

    def __init__(self, comm: Nvshmem, name: str) -> None:
        self._comm, self._name = comm, name
        self.rank, self.size, self.ranks = comm.rank, comm.size, comm.ranks
        self.node_size, self.device, self.alarm = comm.node_size, comm.device, comm.alarm

    def symmetric(self, name: str, *, nbytes: int) -> Symmetric:
        return self._comm.symmetric(f"{self._name} {name}", nbytes=nbytes)

    def barrier(self) -> None:
        self._comm.barrier()

    def close(self) -> None: ...


def check_layer(group: dist.ProcessGroup) -> None:
    for case in LAYERS:
        comm = Ipc(group, torch.device("cuda"))
        equals_one_rank(comm, case)
        comm.close()


def check_graph(group: dist.ProcessGroup) -> None:
    comm = Ipc(group, torch.device("cuda"))
    replays(comm)
    comm.close()


def check_delays(group: dist.ProcessGroup) -> None:
    comm = Ipc(group, torch.device("cuda"))
    survives_delays(comm)
    comm.close()


def check_gathers(group: dist.ProcessGroup) -> None:
    comm = Ipc(group, torch.device("cuda"))
    runs_beside_gathers(comm)
    comm.close()


def check_puts(group: dist.ProcessGroup) -> None:
    """All of it with no peer's memory mapped: every row, count and flag travels as a put of NVSHMEM."""
    comm = Nvshmem(group, torch.device("cuda"), node_size=1)
    for number, case in enumerate(LAYERS):
        equals_one_rank(Apart(comm, f"layer {number}"), case)
    for check in (replays, survives_delays, runs_beside_gathers):
        check(Apart(comm, check.__name__))
    comm.close()


def equals_one_rank(comm: Communicator, case: Case) -> None:
    """Output and every gradient are as near to fp64 as those of one rank with all experts; two runs are bit-equal.

    Rows that travel in few bits are compared with a rank that computes with what arrives.
    """
    tokens_P, shape, settings = case
    problem = Problem(tokens_P, **shape)
    exchange = problem.exchange(comm, **settings)
    assert exchange.has_far == (comm.node_size < comm.size)
    own, share = problem.rows(comm.rank), problem.experts // comm.size
    held = slice(comm.rank * share, (comm.rank + 1) * share)
    leaves = problem.leaves(comm)
    if "wire" in settings:
        problem.quantise(settings["wire"])
        assert not torch.equal(problem.x[own], leaves[0])
    truth, plain = problem.truth(), problem.one_rank()
    comm.barrier()
    runs = []
    for keep in (True, True, False):
        poison()
        runs.append(problem.across(exchange, leaves, keep=keep))
    for name, first, second, again in zip(NAMES, *runs, strict=True):
        part = held if name.startswith("dw") else own
        assert torch.equal(first, second), f"{name} of {tokens_P}: two runs differ"
        assert torch.equal(first, again), f"{name} of {tokens_P}: recomputation differs"
        if first.numel():
            far, near = error(first, truth[name][part]), error(plain[name][part], truth[name][part])
            print(f"{tokens_P} {name}: {far:.2e}, one rank {near:.2e}")
            assert far <= 1.5 * near + 1e-7, f"{name} of {tokens_P}, {shape}"
    torch.cuda.synchronize()


def replays(comm: Communicator) -> None:
    """Forward and backward are captured once and replayed with other routings; beforehand, no call waits for the device."""
    problem = Problem([200, 190], width=512, hidden=128, experts=8, top_k=3)
    exchange, leaves = problem.exchange(comm), problem.leaves(comm)
    expert = problem.expert[problem.rows(comm.rank)].clone()
    problem.across(exchange, leaves, expert)  # compiles
    torch.cuda.synchronize()
    comm.barrier()
    torch.cuda.set_sync_debug_mode("error")
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as trace:
        problem.across(exchange, leaves, expert)
    torch.cuda.set_sync_debug_mode("default")
    names = {event.key for event in trace.key_averages()}
    assert any("meet" in name for name in names), names
    waits = {name for name in names if "ynchronize" in name}
    assert waits <= {"cudaDeviceSynchronize"}, waits  # the profiler's own, at its end
    torch.cuda.synchronize()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # the caller's stream is the contract
        problem.across(exchange, leaves, expert)
    torch.cuda.synchronize()
    comm.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = problem.across(exchange, leaves, expert)
    for shift in range(1, 4):
        expert.copy_((problem.expert[problem.rows(comm.rank)] + shift) % problem.experts)
        graph.replay()
        replayed = [part.clone() for part in captured]
        eager = problem.across(exchange, leaves, expert)
        for name, one, other in zip(NAMES, replayed, eager, strict=True):
            assert torch.equal(one, other), f"{name}: the replay differs from the call"
    print(f"epoch {int(exchange.board.epoch_1)}")


def survives_delays(comm: Communicator) -> None:
    """Many layers with random delays of random ranks, two forwards before one backward among them: always the same bits."""
    problem = Problem([96, 64], width=256, hidden=64, experts=8, top_k=4)
    exchange, leaves = problem.exchange(comm), problem.leaves(comm)
    own = problem.rows(comm.rank)
    wanted = problem.across(exchange, leaves)
    mismatches = torch.zeros((), dtype=torch.int64, device="cuda")
    random = torch.Generator().manual_seed(comm.rank)
    for number in range(DELAYED):
        if int(torch.randint(3, (), generator=random)) == 0:
            torch.cuda._sleep(int(torch.randint(2_000_000, (), generator=random)))
        first = ExpertsAcross.apply(*leaves, problem.expert[own], True, exchange, 0)
        second = ExpertsAcross.apply(*leaves, problem.expert[own], True, exchange, 1)
        grads = torch.autograd.grad(first, leaves, problem.dout[own])
        for one, other in zip(wanted, (first, *grads), strict=True):
            mismatches += (one != other).sum()
        mismatches += (first != second).sum()
        torch.autograd.grad(second, leaves, problem.dout[own])
        if number % 500 == 499 or number == DELAYED - 1:
            assert int(mismatches) == 0
            print(f"{2 * number + 2} layers, epoch {int(exchange.board.epoch_1)}", flush=True)


def check_nvshmem(group: dist.ProcessGroup) -> None:
    """The same layer over NVSHMEM's heap as over CUDA IPC, to the bit."""
    problem = Problem([120, 133], width=512, hidden=128, experts=8, top_k=3)
    found = []
    for make in (Ipc, Nvshmem):
        comm = make(group, torch.device("cuda"))
        leaves = problem.leaves(comm)
        found.append(problem.across(problem.exchange(comm), leaves))
        torch.cuda.synchronize()
        comm.close()
    for name, one, other in zip(NAMES, *found, strict=True):
        assert torch.equal(one, other), name
    print("equal")


def runs_beside_gathers(comm: Communicator) -> None:
    """Layers while NCCL gathers on another stream, as sharded dense weights do: the same bits, and no deadlock."""
    nccl = dist.new_group(backend="nccl")
    assert isinstance(nccl, dist.ProcessGroup)
    problem = Problem([700, 600], width=1024, hidden=128, experts=8, top_k=3)
    exchange, leaves = problem.exchange(comm), problem.leaves(comm)
    wanted = problem.across(exchange, leaves)
    shard = torch.full((1 << 24,), float(comm.rank), device="cuda")
    whole = shard.new_empty(comm.size << 24)
    side = torch.cuda.Stream()
    for _ in range(50):
        with torch.cuda.stream(side):
            dist.all_gather_into_tensor(whole, shard, group=nccl)
        found = problem.across(exchange, leaves)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    torch.cuda.synchronize()
    assert whole[:: 1 << 24].tolist() == list(range(comm.size))
    print("50 layers beside 50 gathers")


def check_lost(group: dist.ProcessGroup) -> None:
    """Rank 1 does not come to the third layer: rank 0 says so when its wait is over, and both end."""
    comm = Ipc(group, torch.device("cuda"))
    problem = Problem([64, 64], width=256, hidden=64, experts=8, top_k=2)
    exchange, leaves = problem.exchange(comm), problem.leaves(comm)
    for _ in range(2):
        problem.across(exchange, leaves)
    exchange.board = replace(exchange.board, timeout_s=5.0)  # now that everything is compiled
    torch.cuda.synchronize()
    comm.barrier()
    if comm.rank == 1:
        time.sleep(60)
    with comm.alarm.told_of_errors():
        problem.across(exchange, leaves)
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
