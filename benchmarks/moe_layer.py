# SPDX-License-Identifier: Apache-2.0
"""The MoE layer on one GPU against its peers: same data, same weights' shapes, one process.

    python benchmarks/moe_layer.py [--shape 0] [--csv results.csv]

Prints milliseconds (median) and TFLOP/s of forward and of forward + backward, router and combine included, and the share
of a dense bf16 product measured in the same run. FLOP: 6*T*K*F*D forward, 18*T*K*F*D with backward. Weights and
gradients are bf16 for everyone. A peer that is not installed or fails is printed as such.
"""

import argparse
import csv
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmoe.comm.local import Local
from nmoe.config import Moe
from nmoe.rdep.layer import MoE

SHAPES = [
    (32768, 2048, 1408, 64, 6),
    (32768, 4096, 256, 256, 16),
    (32768, 4096, 1024, 64, 4),
    (32768, 7168, 2048, 8, 1),
    (4096, 2048, 1408, 64, 6),
]
DEVICE = "cuda"


def milliseconds(work: Callable[[], object], *, runs: int = 15) -> float:
    """Median time of `work` on the GPU after three warm-ups."""
    times = []
    for run in range(runs + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if run >= 3:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


class Plain(nn.Module):
    """The layer as one writes it in PyTorch: sort, `_grouped_mm`, index_add."""

    def __init__(self, width: int, hidden: int, experts: int, top_k: int):
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(width, experts, bias=False, device=DEVICE, dtype=torch.bfloat16)
        self.w13 = nn.Parameter(
            torch.randn(experts, width, 2 * hidden, device=DEVICE, dtype=torch.bfloat16) * width**-0.5
        )
        self.w2 = nn.Parameter(torch.randn(experts, hidden, width, device=DEVICE, dtype=torch.bfloat16) * hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.router(x).float().softmax(dim=-1).topk(self.top_k, dim=-1)
        order = chosen.view(-1).argsort(stable=True)
        counts = torch.zeros(self.w13.shape[0], dtype=torch.int32, device=x.device).scatter_add_(
            0, chosen.view(-1), torch.ones_like(chosen.view(-1), dtype=torch.int32)
        )
        offsets = counts.cumsum(0).int()
        rows = order // self.top_k
        gate, up = F.grouped_mm(x[rows], self.w13, offs=offsets).chunk(2, dim=-1)
        y = F.grouped_mm(F.silu(gate) * up, self.w2, offs=offsets)
        return torch.zeros_like(x).index_add_(0, rows, y * gates.view(-1)[order].unsqueeze(1).to(y.dtype))


def ours(width: int, hidden: int, experts: int, top_k: int) -> Callable[[Tensor], Tensor]:
    config = Moe(
        num_experts=experts,
        num_shared_experts=0,
        top_k=top_k,
        expert_size=hidden,
        scoring="softmax",
        selection_bias=False,
        normalize_gates=False,
    )
    with torch.device(DEVICE):
        layer = MoE(hidden_size=width, config=config, comm=Local(DEVICE), shared=None, dtype=torch.bfloat16)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.02)
    return lambda x: layer(x, 1)[0]


def sonic(width: int, hidden: int, experts: int, top_k: int) -> Callable[[Tensor], Tensor]:
    import sonicmoe  # type: ignore[import-not-found]
    from sonicmoe.enums import ActivationType  # type: ignore[import-not-found]

    layer = sonicmoe.MoE(experts, top_k, width, hidden, ActivationType.SWIGLU, False, 0.02).to(DEVICE, torch.bfloat16)
    return lambda x: layer(x)[0]


def compiled(*shape: int) -> Callable[[Tensor], Tensor]:
    return torch.compile(Plain(*shape))


PEERS = {"nmoe": ours, "sonic-moe": sonic, "torch.compile": compiled, "eager": Plain}


def measure(name: str, shape: tuple[int, ...], x: Tensor, dout: Tensor) -> tuple[float, float, float]:
    """(forward ms, forward + backward ms, GiB kept for backward)."""
    layer = PEERS[name](*shape[1:])

    def train() -> None:
        layer(x).backward(dout)
        x.grad = None

    train()
    before = torch.cuda.memory_allocated()
    kept = layer(x)
    saved = (torch.cuda.memory_allocated() - before - kept.numel() * 2) / 2**30
    del kept
    return milliseconds(lambda: layer(x)), milliseconds(train), saved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", type=int, choices=range(len(SHAPES)), action="append", help="index into the shapes; may be repeated"
    )
    parser.add_argument("--peer", choices=PEERS, action="append")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    ceiling = 2 * 8192**3 / milliseconds(lambda: a @ b) / 1e9
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, dense bf16 8192^3: {ceiling:.0f} TFLOP/s")
    rows = []
    for number in options.shape or range(len(SHAPES)):
        tokens, width, hidden, experts, top_k = shape = SHAPES[number]
        flop = 6 * tokens * top_k * hidden * width
        print(f"T={tokens} D={width} F={hidden} E={experts} K={top_k}")
        for name in options.peer or PEERS:
            torch.manual_seed(0)
            x = torch.randn(tokens, width, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
            dout = torch.randn_like(x)
            try:
                forward, both, saved = measure(name, shape, x, dout)
            except Exception as error:  # noqa: BLE001 - a peer that cannot run is a result too
                print(f"  {name:14s} failed: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
                continue
            rates = flop / forward / 1e9, 3 * flop / both / 1e9
            print(
                f"  {name:14s} forward {forward:7.3f} ms {rates[0]:6.0f} TFLOP/s   with backward {both:7.3f} ms {rates[1]:6.0f} TFLOP/s, {rates[1] / ceiling:.2f} of dense   kept {saved:5.2f} GiB"
            )
            rows.append([*shape, name, forward, rates[0], both, rates[1], ceiling, saved])
            torch.cuda.empty_cache()
        sys.stdout.flush()
    if options.csv:
        with options.csv.open("w", newline="") as stream:
            csv.writer(stream).writerows(
                [
                    [
                        "T",
                        "D",
                        "F",
                        "E",
                        "K",
                        "name",
                        "forward_ms",
                        "forward_tflops",
                        "both_ms",
                        "both_tflops",
                        "dense_tflops",
                        "kept_gib",
                    ],
                    *rows,
                ]
            )


if __name__ == "__main__":
    main()
