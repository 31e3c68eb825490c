# SPDX-License-Identifier: Apache-2.0
"""The MoE layer on one GPU against its peers: same rows, same routing, one process a peer.

    python benchmarks/moe_layer.py [--shape 0] [--peer nmoe] [--zipf 1.0] [--csv results.csv] [--plot results.html]

Prints, for router to combine, medians over steps that follow each other without a wait, as in training (the host runs
ahead): forward; forward + backward into fresh gradients; the same adding to gradients that exist; the same replayed as a
CUDA graph; the host's own time a step; and what is kept for backward. FLOP: 6*T*K*F*D forward, 18*T*K*F*D with backward.
Weights and gradients are bf16 for everyone. The share is of a dense 8192^3 bf16 product, timed just before. With --zipf
the experts' popularity falls as rank^-exponent. A peer that is not installed or fails is printed as such.
"""

import argparse
import csv
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from moe_peers import DEVICE, HALF, PEERS
from torch import Tensor

SHAPES = [  # T, D, F, E, K
    (32768, 2048, 1408, 64, 6),
    (32768, 4096, 256, 256, 16),
    (32768, 4096, 1024, 64, 4),
    (32768, 7168, 2048, 8, 1),
    (4096, 2048, 1408, 64, 6),
    (512, 2048, 1408, 64, 6),
]
FIELDS = ["peer", "T", "D", "F", "E", "K", "zipf", "dense_tflops", "forward_ms", "both_ms", "adding_ms", "graph_ms"]
FIELDS += ["host_ms", "kept_gib", "failure"]


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


def measure(peer: str, shape: tuple[int, ...], zipf: float) -> dict[str, float]:
    """The figures of one peer at one shape."""
    x, dout, router = data(shape, zipf)
    layer, parameters = PEERS[peer](router, shape[2], shape[4])

    def clear() -> None:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None

    def step() -> None:
        layer(x).backward(dout)

    def clear_rows() -> None:
        x.grad = None

    step()
    clear()
    before = torch.cuda.memory_allocated()
    out = layer(x)
    kept = (torch.cuda.memory_allocated() - before - out.nbytes) / 2**30
    del out
    runs = 24 if shape[0] > 4096 else 64
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=HALF) for _ in range(2))
    found = {"dense_tflops": 2 * 8192**3 / milliseconds(lambda: a @ b, runs=24) / 1e9, "kept_gib": kept}
    found["forward_ms"] = milliseconds(lambda: layer(x), runs=runs)
    found["both_ms"] = milliseconds(step, runs=runs, before=clear)
    begin = time.perf_counter()
    for _ in range(8):
        step()
        clear()
    found["host_ms"] = (time.perf_counter() - begin) / 8 * 1e3
    step()
    found["adding_ms"] = milliseconds(step, runs=runs, before=clear_rows)
    clear()
    found["graph_ms"] = milliseconds(_captured(step, clear).replay, runs=runs)
    return found


def _captured(step: Callable[[], None], clear: Callable[[], None]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        clear()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    clear()
    return graph


def run_peer(peer: str, shapes: list[int], zipf: float, path: Path) -> None:
    """Measures one peer in this process, and adds a row a shape to a CSV file."""
    for number in shapes:
        shape = SHAPES[number]
        row: dict[str, Any] = dict(zip(("T", "D", "F", "E", "K"), shape, strict=True)) | {"peer": peer, "zipf": zipf}
        try:
            row |= measure(peer, shape, zipf)
        except Exception as error:  # noqa: BLE001 - a peer that cannot run is a result too
            row["failure"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
        torch.cuda.empty_cache()
        print(describe(row), flush=True)
        new = not path.exists()
        with path.open("a", newline="") as stream:
            writer = csv.DictWriter(stream, FIELDS)
            if new:
                writer.writeheader()
            writer.writerow(row)


def describe(row: dict) -> str:
    head = f"{row['peer']:14s} T={row['T']} D={row['D']} F={row['F']} E={row['E']} K={row['K']} zipf={row['zipf']}"
    if row.get("failure"):
        return f"{head} failed: {row['failure']}"
    flop = 6 * int(row["T"]) * int(row["K"]) * int(row["F"]) * int(row["D"]) / 1e9
    forward, both, adding, graph = (float(row[f"{name}_ms"]) for name in ("forward", "both", "adding", "graph"))
    rate = 3 * flop / both
    return (
        f"{head} forward {forward:.3f} ms {flop / forward:.0f} TFLOP/s, both {both:.3f} ms {rate:.0f} TFLOP/s "
        f"({rate / float(row['dense_tflops']):.2f} of dense {float(row['dense_tflops']):.0f}), adding {adding:.3f} ms "
        f"{3 * flop / adding:.0f}, graph {graph:.3f} ms, host {float(row['host_ms']):.2f} ms, "
        f"kept {float(row['kept_gib']):.2f} GiB"
    )


def plot(rows: list[dict], path: Path) -> None:
    """Bars of TFLOP/s with backward, by shape and peer, as a page of HTML."""
    import plotly.graph_objects as go

    figure = go.Figure(layout={"yaxis_title": "TFLOP/s, forward + backward, fresh gradients"})
    for peer in dict.fromkeys(row["peer"] for row in rows):
        done = [row for row in rows if row["peer"] == peer and not row["failure"]]
        labels = ["T={T} D={D} F={F} E={E} K={K} zipf={zipf}".format(**row) for row in done]
        flop = [18 * int(row["T"]) * int(row["K"]) * int(row["F"]) * int(row["D"]) / 1e9 for row in done]
        figure.add_bar(name=peer, x=labels, y=[f / float(row["both_ms"]) for f, row in zip(flop, done, strict=True)])
    figure.write_html(path, include_plotlyjs="cdn")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, choices=range(len(SHAPES)), action="append", help="index; may be repeated")
    parser.add_argument("--peer", choices=PEERS, action="append", help="may be repeated; one runs in this process")
    parser.add_argument("--zipf", type=float, default=0.0, help="exponent of the experts' popularity; 0 is uniform")
    parser.add_argument("--csv", type=Path, help="rows are added to it")
    parser.add_argument("--plot", type=Path, help="HTML; without a GPU nothing is measured and --csv is drawn")
    options = parser.parse_args()
    path = options.csv or Path(tempfile.mkdtemp()) / "moe_layer.csv"
    shapes, peers = options.shape or [*range(len(SHAPES))], options.peer or [*PEERS]
    if options.plot and not torch.cuda.is_available():
        peers = []
    if len(peers) == 1:
        print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}", flush=True)
        run_peer(peers[0], shapes, options.zipf, path)
    else:
        chosen = [argument for number in shapes for argument in ("--shape", str(number))]
        for peer in peers:
            command = [sys.executable, __file__, "--peer", peer, "--zipf", str(options.zipf), "--csv", str(path)]
            subprocess.run([*command, *chosen], check=False)
    if options.plot:
        with path.open(newline="") as stream:
            plot([*csv.DictReader(stream)], options.plot)


if __name__ == "__main__":
    main()
