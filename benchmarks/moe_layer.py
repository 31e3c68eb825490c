# SPDX-License-Identifier: Apache-2.0
"""The MoE layer on one GPU against its peers: same rows, same routing, one process a peer.

    python benchmarks/moe_layer.py [--shape 0] [--peer nmoe] [--zipf 1.0] [--csv results.csv] [--profile]
    uv run --with matplotlib python benchmarks/moe_layer.py --csv results.csv --plot results.svg    draws a file of results

Prints, for router to combine, medians over steps that follow each other without a wait, as in training (the host runs
ahead): forward; forward + backward into fresh gradients; the same adding to gradients that exist; the same replayed as a
CUDA graph; the host's own time a step; and what is kept for backward. FLOP: 6*T*K*F*D forward, 18*T*K*F*D with backward.
Weights and gradients are bf16 for everyone. The share is of a dense 8192^3 bf16 product, timed just before, for as long as
the layer, so that the chip is as hot. With --zipf the experts' popularity falls as rank^-exponent. A peer that is not
installed or fails is printed as such. Graphs come last: a capture that fails costs that peer the graphs, with the reason,
and nothing else. --profile lists the kernels of a step in their order, and what lies between them.
"""

import argparse
import csv
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from moe_peers import DEVICE, HALF, PEERS
from torch import Tensor, nn

from nmoe.commands import enter

SHAPES = [  # T, D, F, E, K
    (32768, 2048, 1408, 64, 6),
    (32768, 4096, 256, 256, 16),
    (32768, 4096, 1024, 64, 4),
    (32768, 7168, 2048, 8, 1),
    (4096, 2048, 1408, 64, 6),
    (512, 2048, 1408, 64, 6),
]
FIELDS = ["peer", "T", "D", "F", "E", "K", "zipf", "dense_tflops", "forward_ms", "both_ms", "adding_ms", "graph_ms"]
FIELDS += ["host_ms", "kept_gib", "failure", "graph_failure"]


def milliseconds(work: Callable[[], object], *, runs: int, before: Callable[[], None] = lambda: None) -> float:
    """Median time on the GPU of runs that follow each other; the first quarter warms up."""
    marks = []
    for _ in range(runs):
        before()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        marks.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks[runs // 4 :])


def data(shape: tuple[int, ...], zipf: float) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, gradient of the output, router weight. The first column of the rows is 1 and carries the popularity."""
    tokens, width, _, experts, _ = shape
    torch.manual_seed(0)
    x = torch.randn(tokens, width, device=DEVICE, dtype=HALF)
    router = torch.randn(experts, width, device=DEVICE) * 1.28 * width**-0.5  # near the spread of Gumbel noise
    x[:, 0] = 1.0
    router[:, 0] = -zipf * torch.arange(1, experts + 1, device=DEVICE).log()
    return x.requires_grad_(), torch.randn_like(x), router.to(HALF)


@dataclass(kw_only=True)
class Step:
    """One peer's layer at one shape."""

    x: Tensor
    dout: Tensor
    layer: Callable[[Tensor], Tensor]
    parameters: list[nn.Parameter]

    def __call__(self) -> None:
        """Forward and backward."""
        self.layer(self.x).backward(self.dout)

    def clear_rows(self) -> None:
        self.x.grad = None

    def clear(self) -> None:
        for leaf in (self.x, *self.parameters):
            leaf.grad = None


def prepared(peer: str, shape: tuple[int, ...], zipf: float) -> Step:
    """The layer with every kernel compiled, those that add to gradients too."""
    x, dout, router = data(shape, zipf)
    layer, parameters = PEERS[peer](router, shape[2], shape[4])
    step = Step(x=x, dout=dout, layer=layer, parameters=parameters)
    for _ in range(2):
        step()
    step.clear()
    torch.cuda.synchronize()
    return step


def dense(runs: int) -> float:
    """TFLOP/s of an 8192^3 product, once the chip is warm."""
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=HALF) for _ in range(2))
    return 2 * 8192**3 / milliseconds(lambda: a @ b, runs=runs) / 1e9


def measure(step: Step, runs: int) -> dict[str, float]:
    """All figures but the graph's."""
    before = torch.cuda.memory_allocated()
    out = step.layer(step.x)
    found = {"kept_gib": (torch.cuda.memory_allocated() - before - out.nbytes) / 2**30}
    del out
    found["dense_tflops"] = dense(256)
    found["forward_ms"] = milliseconds(lambda: step.layer(step.x), runs=runs)
    found["both_ms"] = milliseconds(step, runs=runs, before=step.clear)
    begin = time.perf_counter()
    for _ in range(8):
        step.clear()
        step()
    found["host_ms"] = (time.perf_counter() - begin) / 8 * 1e3
    found["adding_ms"] = milliseconds(step, runs=runs, before=step.clear_rows)
    step.clear()
    return found


def captured(step: Step) -> torch.cuda.CUDAGraph:
    """A graph of forward and backward into fresh gradients."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        step.clear()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    step.clear()
    return graph


def run_peer(peer: str, shapes: list[int], zipf: float, path: Path) -> None:
    """Measures one peer in this process, and adds a row a shape to a CSV file; then completes the rows by the graphs."""
    rows: list[dict[str, Any]] = []
    for number in shapes:
        shape = SHAPES[number]
        row: dict[str, Any] = dict(zip(("T", "D", "F", "E", "K"), shape, strict=True)) | {"peer": peer, "zipf": zipf}
        try:
            row |= measure(prepared(peer, shape, zipf), _runs(shape))
        except Exception as error:  # noqa: BLE001 - a peer that cannot run is a result too
            row["failure"] = _reason(error)
        torch.cuda.empty_cache()
        print(describe(row), flush=True)
        rows.append(row)
    others = _read(path) if path.exists() else []
    _write(path, others + rows)
    failed = ""
    for number, row in zip(shapes, rows, strict=True):
        if row.get("failure"):
            continue
        try:  # after a failed capture the process may be unable to capture anything
            row["graph_failure"] = f"not tried after: {failed}" if failed else None
            if not failed:
                replay = captured(prepared(peer, SHAPES[number], zipf)).replay
                dense(256)  # as hot as for the other figures
                row["graph_ms"] = milliseconds(replay, runs=_runs(SHAPES[number]))
                del replay
                torch.cuda.empty_cache()
        except Exception as error:  # noqa: BLE001 - as above
            row["graph_failure"] = failed = _reason(error)
        result = f"failed: {row['graph_failure']}" if row["graph_failure"] else f"{row['graph_ms']:.3f} ms"
        print(f"{head(row)} graph {result}", flush=True)
        _write(path, others + rows)


def _runs(shape: tuple[int, ...]) -> int:
    return 24 if shape[0] > 4096 else 64


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"


def _read(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="") as stream:
        return [*csv.DictReader(stream)]


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, FIELDS)
        writer.writeheader()
        writer.writerows(rows)


def print_profile(peer: str, shape: tuple[int, ...], zipf: float, steps: int = 24) -> None:
    """The kernels of a step in their order: mean milliseconds, share, and the idle time of the GPU before each."""
    step = prepared(peer, shape, zipf)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step.clear()
            step()
        torch.cuda.synchronize()
    events = [event for event in profile.events() or [] if event.device_type == torch.profiler.DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    size = len(events) // steps
    if len(events) % steps:
        print(f"{len(events)} kernels in {steps} steps: steps differ, so the order below is wrong")
    events = events[size * (steps // 4) :]  # the first quarter warms up
    steps -= steps // 4
    busy, idle = [0.0] * size, [0.0] * size
    end = events[0].time_range.start
    for number, event in enumerate(events):
        span = event.time_range
        idle[number % size] += max(0.0, span.start - end) / steps / 1e3
        busy[number % size] += (span.end - min(max(span.start, end), span.end)) / steps / 1e3
        end = max(end, span.end)
    total = (end - events[0].time_range.start) / steps / 1e3
    print(f"{peer} T={shape[0]} D={shape[1]} F={shape[2]} E={shape[3]} K={shape[4]} zipf={zipf}: {size} kernels a step")
    print(f"  {total:.3f} ms a step = {sum(busy):.3f} in kernels + {sum(idle):.3f} between them")
    for number in range(size):
        print(
            f"  {busy[number]:7.3f} ms {busy[number] / total:6.1%}  after {idle[number] * 1e3:6.1f} us  {events[number].name[:110]}"
        )


def head(row: dict) -> str:
    return f"{row['peer']:14s} T={row['T']} D={row['D']} F={row['F']} E={row['E']} K={row['K']} zipf={row['zipf']}"


def describe(row: dict) -> str:
    if row.get("failure"):
        return f"{head(row)} failed: {row['failure']}"
    flop = 6 * int(row["T"]) * int(row["K"]) * int(row["F"]) * int(row["D"]) / 1e9
    forward, both, adding = (float(row[f"{name}_ms"]) for name in ("forward", "both", "adding"))
    rate = 3 * flop / both
    return (
        f"{head(row)} forward {forward:.3f} ms {flop / forward:.0f} TFLOP/s, both {both:.3f} ms {rate:.0f} TFLOP/s "
        f"({rate / float(row['dense_tflops']):.2f} of dense {float(row['dense_tflops']):.0f}), adding {adding:.3f} ms "
        f"{3 * flop / adding:.0f}, host {float(row['host_ms']):.2f} ms, kept {float(row['kept_gib']):.2f} GiB"
    )


def plot(rows: list[dict], path: Path) -> None:
    """Bars of TFLOP/s with backward, by shape and peer."""
    import matplotlib.pyplot as plt  # type: ignore[import-not-found]

    rows = [row for row in rows if row["both_ms"]]
    peers = [*dict.fromkeys(row["peer"] for row in rows)]
    shapes = [*dict.fromkeys(_shape(row) for row in rows)]
    figure, axes = plt.subplots(figsize=(12, 4.5))
    for number, peer in enumerate(peers):
        done = [row for row in rows if row["peer"] == peer]
        places = [shapes.index(_shape(row)) + (number - (len(peers) - 1) / 2) * 0.8 / len(peers) for row in done]
        flop = [18 * int(row["T"]) * int(row["K"]) * int(row["F"]) * int(row["D"]) / 1e9 for row in done]
        rate = [f / float(row["both_ms"]) for f, row in zip(flop, done, strict=True)]
        axes.bar(places, rate, width=0.8 / len(peers), label=peer)
    axes.set_xticks(range(len(shapes)), shapes, fontsize=7)
    axes.set_ylabel("TFLOP/s, forward + backward, fresh gradients")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def _shape(row: dict) -> str:
    popular = f"\nZipf({float(row['zipf']):g})" if float(row["zipf"]) else ""
    return "T={T}\nD={D} F={F}\nE={E} K={K}".format(**row) + popular


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, choices=range(len(SHAPES)), action="append", help="index; may be repeated")
    parser.add_argument("--peer", choices=PEERS, action="append", help="may be repeated; one runs in this process")
    parser.add_argument("--zipf", type=float, default=0.0, help="exponent of the experts' popularity; 0 is uniform")
    parser.add_argument("--csv", type=Path, help="rows are added to it")
    parser.add_argument("--plot", type=Path, metavar="SVG", help="draw --csv, measure nothing")
    parser.add_argument("--profile", action="store_true", help="the kernels of a step instead of its figures")
    options = parser.parse_args()
    path = options.csv or Path(tempfile.mkdtemp()) / "moe_layer.csv"
    shapes, peers = options.shape or [*range(len(SHAPES))], options.peer or [*PEERS]
    if options.plot:
        plot(_read(path), options.plot)
        return
    if options.profile:
        for peer, number in itertools.product(peers, shapes):
            print_profile(peer, SHAPES[number], options.zipf)
        return
    if len(peers) == 1:
        print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}", flush=True)
        run_peer(peers[0], shapes, options.zipf, path)
    else:
        chosen = [argument for number in shapes for argument in ("--shape", str(number))]
        died = []
        for peer in peers:
            command = [sys.executable, __file__, "--peer", peer, "--zipf", str(options.zipf), "--csv", str(path)]
            status = subprocess.run([*command, *chosen], check=False).returncode
            if status:  # what a peer raises is a row; this is a crash of its process
                print(f"{peer}: its process ended with status {status}", flush=True)
                died.append(peer)
        if died:
            raise SystemExit(f"error: no figures of {', '.join(died)}")


if __name__ == "__main__":
    raise SystemExit(enter("__main__", "main"))
