# SPDX-License-Identifier: Apache-2.0
"""Dispatch, return and their parts, against peers in the same run; bytes that cross the link are counted, and no others.

    python benchmarks/rdep.py [--ranks N] [--csv rdep.csv] [--shape 0]        one process a GPU; results of rank 0
    uv run --with torchtitan==0.3.0 python benchmarks/rdep.py ...      with torchtitan's kernels among the peers
    uv run --with matplotlib python benchmarks/rdep.py --plot rdep.csv        draws rdep.svg from a file of results

With one GPU there is no link: the parts are timed on one rank that sends to itself, which bounds the kernels from one
side (they move as many bytes through one memory as a rank would send), and says nothing about NVLink. Every figure is a
median over runs (p99 beside it) of a step between two events, all ranks together, after a barrier; a part's time is that
of its replays in a CUDA graph. Routing is uniformly random. Plans, flags and meetings are inside dispatch and return.
"""

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rdep_peers import Peer, nccl, torchtitan, vdev

from nmoe.comm.communicator import Communicator
from nmoe.comm.ipc import Ipc
from nmoe.comm.local import Local
from nmoe.comm.remote import Phase
from nmoe.commands import enter
from nmoe.ops import give_back, group, push, receive
from nmoe.ops import plan as plan_op
from nmoe.ops.push import cuda as push_cuda
from nmoe.rdep.combine import collect, send_back
from nmoe.rdep.dispatch import dispatch
from nmoe.rdep.exchange import Exchange
from nmoe.rdep.many_ranks import ExpertsAcross
from nmoe.rdep.one_rank import ExpertsHere
from nmoe.rdep.plan import make_plan

SHAPES = [  # T, D, K, E
    (32768, 2048, 6, 64),
    (8192, 7168, 8, 256),
    (4096, 7168, 8, 256),
    (4096, 4096, 1, 8),
    (128, 7168, 8, 256),
]
LAYER = (32768, 2048, 1408, 64, 6)  # T, D, F, E, K
BLOCKS = (4, 8, 12, 13, 14, 15, 16, 20, 24, 32, 64, 132)
FIELDS = ("what", "T", "D", "K", "E", "ranks", "gpus", "blocks", "us", "p99_us", "remote_bytes", "remote_gb_s", "note")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One shape on one rank."""

    tokens: int
    width: int
    top_k: int
    experts: int
    comm: Communicator
    exchange: Exchange
    x: torch.Tensor
    expert: torch.Tensor
    gate: torch.Tensor

    @classmethod
    def of(cls, shape: tuple[int, int, int, int], comm: Communicator) -> "Setting":
        tokens, width, top_k, experts = shape
        torch.manual_seed(comm.rank)
        return cls(
            tokens=tokens,
            width=width,
            top_k=top_k,
            experts=experts,
            comm=comm,
            exchange=Exchange(
                comm, tokens=tokens, hidden_size=width, num_experts=experts, top_k=top_k, dtype=torch.bfloat16
            ),
            x=torch.randn(tokens, width, device="cuda").bfloat16(),
            expert=torch.rand(tokens, experts, device="cuda").topk(top_k, dim=1).indices.int(),
            gate=torch.rand(tokens, top_k, device="cuda"),
        )

    def align(self) -> None:
        """Let all ranks come to the same point on the device."""
        self.exchange.meet(0, Phase.COUNTS)

    def remote_rows(self, row_TP: torch.Tensor) -> int:
        """Rows that this rank sends over the link."""
        sent = (row_TP >= 0).sum(dim=0)
        return int(sent.sum() - sent[self.comm.rank])


def event_times(work: Callable[[], object], align: Callable[[], None], *, runs: int = 30, warm: int = 5) -> list[float]:
    """Microseconds of each run, sorted; `align` lets all ranks begin together, on the device."""
    times = []
    for run in range(runs + warm):
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2_000_000)  # so that the launches are queued before the first kernel runs
        align()
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if run >= warm:
            times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times)


def graph_times(work: Callable[[], object], *, calls: int = 10, runs: int = 15) -> list[float]:
    """Microseconds of one call among `calls` in a CUDA graph, sorted; for parts that await nobody."""
    work()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for _ in range(calls):
            work()
    return [t / calls for t in event_times(captured.replay, lambda: None, runs=runs)]


def row(what: str, at: Setting, times: list[float], *, remote: int = 0, blocks: int | str = "", note: str = "") -> dict:
    """A line of results; `remote` in bytes."""
    median = statistics.median(times)
    return {
        "what": what,
        "T": at.tokens,
        "D": at.width,
        "K": at.top_k,
        "E": at.experts,
        "ranks": at.comm.size,
        "gpus": min(at.comm.size, torch.cuda.device_count()),
        "blocks": blocks,
        "us": f"{median:.1f}",
        "p99_us": f"{times[min(len(times) - 1, int(len(times) * 0.99))]:.1f}",
        "remote_bytes": remote or "",
        "remote_gb_s": f"{remote / median / 1e3:.0f}" if remote else "",
        "note": note,
    }


def parts(at: Setting) -> Iterator[dict]:
    """Each kernel alone. Nobody is awaited, so ranks need not keep step; rows go where they would go."""
    exchange, share = at.exchange, at.exchange.experts_per_rank
    plan = make_plan(at.expert, exchange=exchange, layer=0)
    count = plan.count_PP2
    remote = at.remote_rows(plan.sends.row_TP) * at.width * 2
    yield row(
        "plan", at, graph_times(lambda: plan_op.kernels().plan(at.expert, experts_per_rank=share, count=exchange.count))
    )
    row_bytes = int((plan.sends.row_TP >= 0).sum()) * at.width * 2
    for blocks in BLOCKS:
        times = graph_times(lambda: push_cuda.launch_push(at.x, plan.sends, count, rows=exchange.rows, blocks=blocks))  # noqa: B023
        speed = f"{row_bytes / statistics.median(times) / 1e3:.0f} GB/s stored, local and remote"
        yield row("push", at, times, remote=remote, blocks=blocks, note=speed)

    def records() -> None:
        push.kernels().push_records(
            at.expert, at.gate, plan.sends, count, exchange.board, experts_per_rank=share, records=exchange.records
        )

    yield row("push_records", at, graph_times(records))
    records()
    exchange.meet(0, Phase.DISPATCH)
    arrivals = receive.kernels().receive(
        exchange.records.local, count, exchange.board, gate_like=at.gate, top_k=at.top_k, layer=0
    )

    def receiving() -> None:
        receive.kernels().receive(
            exchange.records.local, count, exchange.board, gate_like=at.gate, top_k=at.top_k, layer=0
        )

    yield row("receive", at, graph_times(receiving))
    slots = exchange.rounds.num_slots

    def grouping() -> object:
        return group.kernels().group(arrivals.expert_RK, arrivals.gate_RK, num_experts=share, num_slots=slots)

    yield row("group", at, graph_times(grouping))
    groups = group.kernels().group(arrivals.expert_RK, arrivals.gate_RK, num_experts=share, num_slots=slots)
    y = torch.randn(slots, at.width, device="cuda", dtype=torch.bfloat16)
    yield row("reduce_push", at, graph_times(lambda: send_back(y, groups, arrivals, exchange=exchange)), remote=remote)
    summing = lambda: give_back.kernels().partial_sum(exchange.results.local, plan.sends)  # noqa: E731
    yield row("partial_sum", at, graph_times(summing))
    note = "with itself" if at.comm.size == 1 else ""
    yield row("meet", at, graph_times(lambda: exchange.meet(0, Phase.DISPATCH)), note=note)


def transfers(at: Setting) -> Iterator[dict]:
    """Whole dispatch and whole return, as a layer runs them."""
    exchange = at.exchange
    plan = make_plan(at.expert, exchange=exchange, layer=0)
    remote = at.remote_rows(plan.sends.row_TP) * at.width * 2

    def dispatching() -> tuple:
        found = make_plan(at.expert, exchange=exchange, layer=0)
        return found, dispatch(at.x, at.gate, at.expert, found, exchange=exchange, layer=0)

    plan, (_, arrivals) = dispatching()
    share, slots = exchange.experts_per_rank, exchange.rounds.num_slots
    groups = group.kernels().group(arrivals.expert_RK, arrivals.gate_RK, num_experts=share, num_slots=slots)
    y = torch.randn(slots, at.width, device="cuda", dtype=torch.bfloat16)

    def returning() -> None:
        exchange.meet(0, Phase.DISPATCH)  # stands for the meeting that precedes a return
        send_back(y, groups, arrivals, exchange=exchange)
        collect(plan, exchange=exchange, layer=0)

    yield row("dispatch", at, event_times(dispatching, at.align), remote=remote)
    yield row("return", at, event_times(returning, at.align), remote=remote)


def peers(at: Setting, chosen: tuple[Peer, ...]) -> Iterator[dict]:
    """What others do for the same rows, one row for each (token, expert)."""
    size, share = at.comm.size, at.exchange.experts_per_rank
    sent_P = torch.bincount(at.expert.view(-1) // share, minlength=size)
    remote = int(sent_P.sum() - sent_P[at.comm.rank]) * at.width * 2
    for peer in chosen:
        try:
            for what, work in peer(at.x, at.expert, at.gate, at.experts):
                yield row(what, at, event_times(work, at.align), remote=remote)
        except Exception as error:  # noqa: BLE001  a peer that cannot run is a result too
            name = getattr(peer, "__name__", str(peer))
            why = (str(error).splitlines() or [""])[0][:120]
            print(f"{name}: left out, {type(error).__name__}: {why}", file=sys.stderr, flush=True)


def layer(comm: Communicator) -> Iterator[dict]:
    """Experts forward and backward across the ranks, against one rank with as many of its own assignments."""
    tokens, width, hidden, experts, top_k = LAYER
    at = Setting.of((tokens, width, top_k, experts), comm)
    share = experts // comm.size

    def weights(count: int) -> list[torch.Tensor]:
        shapes = (count, 2 * hidden, width), (count, width, hidden)
        return [(torch.randn(s, device="cuda") * s[2] ** -0.5).bfloat16().requires_grad_() for s in shapes]

    x, gate = at.x.clone().requires_grad_(), at.gate.clone().requires_grad_()
    across, here, dout = weights(share), weights(share), torch.randn_like(at.x)
    own = torch.rand(tokens, share, device="cuda").topk(top_k, dim=1).indices.int() if share >= top_k else None

    def one(function: Callable, leaves: list, *rest: object) -> None:
        torch.autograd.grad(function(*leaves, *rest), leaves, dout)

    flop = 18 * tokens * top_k * hidden * width
    cases: dict[str, tuple] = {
        "layer across": (ExpertsAcross.apply, [x, gate, *across], at.expert, True, at.exchange, 0)
    }
    if own is not None:
        cases["layer alone"] = (ExpertsHere.apply, [x, gate, *here], own)
    for name, (function, leaves, *rest) in cases.items():
        times = event_times(lambda: one(function, leaves, *rest), at.align, runs=15)  # noqa: B023
        yield row(name, at, times, note=f"F={hidden}, {flop / statistics.median(times) / 1e6:.0f} TFLOP/s a GPU")


def measure(comm: Communicator, shape: tuple[int, int, int, int], *, with_vdev: bool) -> Iterator[dict]:
    """All lines of one shape but the layer's."""
    at = Setting.of(shape, comm)
    if with_vdev:
        yield from peers(at, (vdev,))
        return
    yield from parts(at)
    if comm.size > 1:
        yield from transfers(at)
    if comm.size > 1 and torch.cuda.device_count() >= comm.size:
        yield from peers(at, (nccl, torchtitan))


def work(rank: int, size: int, store: str, options: argparse.Namespace) -> None:
    """One rank."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    if size > 1:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.device_count() >= size else "gloo"
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    table = None
    if rank == 0 and options.csv:
        table = csv.DictWriter(options.csv.open("w", newline="", buffering=1), FIELDS, lineterminator="\n")
        table.writeheader()
    cases = [SHAPES[options.shape]] if options.shape is not None else [*SHAPES, *([] if options.vdev else [None])]
    for shape in cases:
        comm: Communicator = Local("cuda")
        if size > 1:
            assert dist.group.WORLD is not None
            comm = Ipc(dist.group.WORLD, torch.device("cuda"))
        for line in layer(comm) if shape is None else measure(comm, shape, with_vdev=options.vdev):
            if table:
                table.writerow(line)
            if rank == 0:
                print("  ".join(f"{value}" for value in line.values() if value != ""), flush=True)
        comm.close()
        torch.cuda.empty_cache()


def plot(path: Path) -> None:
    """Speed of the push over blocks, and of dispatch and return beside the peers'."""
    import matplotlib.pyplot as plt  # type: ignore[import-not-found]

    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5))
    for shape in dict.fromkeys((line["T"], line["D"], line["K"]) for line in lines):
        here = [line for line in lines if (line["T"], line["D"], line["K"]) == shape]
        linked = all(line["remote_gb_s"] for line in here if line["what"] == "push")
        pushes = [
            (int(line["blocks"]), float(line["remote_gb_s"] if linked else line["note"].split()[0]))
            for line in here
            if line["what"] == "push"
        ]
        left.plot(*zip(*pushes, strict=True), marker=".", label="T={} D={} K={}".format(*shape))
        bars = [(line["what"], float(line["us"])) for line in here if line["what"].endswith(("dispatch", "return"))]
        right.barh(
            [f"{what}, T={shape[0]} D={shape[1]}" for what, _ in reversed(bars)], [us for _, us in reversed(bars)]
        )
    left.set(xlabel="blocks", ylabel="GB/s over the link", title="push", ylim=0, xscale="log")
    left.legend()
    right.set(xlabel="µs", title="dispatch and return", xscale="log")
    right.tick_params(labelsize=7)
    figure.tight_layout()
    figure.savefig(path.with_suffix(".svg"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="processes; default: one a GPU")
    parser.add_argument("--csv", type=Path, help="file for the results")
    parser.add_argument("--shape", type=int, choices=range(len(SHAPES)), help="only this shape, and no layer")
    parser.add_argument(
        "--vdev", action="store_true", help="only torch's all_to_all_vdev_2d, which needs NVSHMEM and NCCL"
    )
    parser.add_argument("--plot", type=Path, metavar="CSV", help="draw a file of results, measure nothing")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plot:
        plot(options.plot)
        return 0
    size = options.ranks or torch.cuda.device_count()
    if options.rank is not None or size == 1:
        work(options.rank or 0, size, options.store, options)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        command = [sys.executable, *sys.argv, "--ranks", str(size), "--store", f"{folder}/store"]
        started = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(size)]
        try:
            # Not the largest status: that of a rank which a signal ended is negative.
            return int(any(process.wait() for process in started))
        finally:
            for process in started:
                process.kill()


if __name__ == "__main__":
    raise SystemExit(enter("__main__", "main"))
