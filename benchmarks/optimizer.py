# SPDX-License-Identifier: Apache-2.0
"""What an update costs on one GPU: AdamW with moments in bf16 and in fp32, and Muon's products, by kernel and by torch.

    python benchmarks/optimizer.py [--elements 1_000_000_000] [--shapes 64x1408x2048 1x2048x2048]

AdamW: bytes that have to move (20 an element with bf16 moments, 28 with fp32) over time, of a copy's rate. Muon: one
orthogonalisation of five Newton-Schulz steps, the model FLOP of three full products a step over time, whatever is
computed. `reference` is plain torch (for Muon cuBLAS), on the same device in the same run. Needs a CUDA GPU, or `--cpu`
to try the script out, where there are no kernels.
"""

import argparse
import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from timing import milliseconds
from torch.optim.adamw import adamw

from nmoe import arch
from nmoe.commands import enter
from nmoe.ops import gram, registry
from nmoe.ops.adamw import Rule
from nmoe.optim.muon import orthogonalize
from nmoe.train.throughput import measured_bandwidth

RULE = Rule(learning_rate=1e-3, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8, number=10, scale=0.5)
STEPS = 5


def implementations(op: str, *, wanted: bool) -> Iterator[tuple[str, Any]]:
    """The file that serves an op here, and plain torch."""
    stems = [path.stem for path in [registry.source_file(op, on=arch.current())] if path and wanted]
    for stem in dict.fromkeys([*stems, "reference"]):
        yield stem, importlib.import_module(f"nmoe.ops.{op}.{stem}")


def adamw_lines(elements: int, device: torch.device) -> None:
    rate = measured_bandwidth(device)
    print(f"AdamW, {elements:,} elements; a copy moves {rate / 1e9:.0f} GB/s")
    value, gradient = torch.randn(elements, device=device), torch.randn(elements, device=device)
    first, second = (torch.zeros(elements, dtype=torch.bfloat16, device=device) for _ in range(2))

    def line(name: str, spent: float, size: int) -> None:
        moved = size * elements / spent * 1e3
        print(f"  {name:28} {spent:9.2f} ms  {moved / 1e9:7.0f} GB/s  {100 * moved / rate:5.1f} % of the copy")

    for name, module in implementations("adamw", wanted=True):
        update = lambda m=module: m.step(value, gradient, first, second, rule=RULE, key=1, offset=0)  # noqa: E731
        line(f"bf16 moments, {name}", milliseconds(update, runs=5), 20)
    wide = [torch.zeros(elements, device=device) for _ in range(2)]
    settings = {"amsgrad": False, "beta1": 0.9, "beta2": 0.95, "lr": 1e-3, "weight_decay": 0.1, "eps": 1e-8}

    def torchs() -> None:
        step = [torch.tensor(9.0, device=device)]
        adamw([value], [gradient], wide[:1], wide[1:], [], step, fused=True, maximize=False, **settings)

    line("fp32 moments, torch's fused", milliseconds(torchs, runs=5), 28)


def muon_lines(shapes: list[str], device: torch.device) -> None:
    print(f"Muon, {STEPS} Newton-Schulz steps in bf16")
    for text in shapes:
        count, rows, columns = (int(part) for part in text.split("x"))
        x = torch.randn(count, rows, columns, device=device).bfloat16()
        short, long = min(rows, columns), max(rows, columns)
        flop = STEPS * count * (4 * short * short * long + 2 * short**3)
        for name, module in implementations("gram", wanted=True):
            with mock.patch.object(gram, "kernels", lambda m=module: m):
                spent = milliseconds(partial(orthogonalize, x, steps=STEPS), runs=5)
            print(f"  {text:18} {name:10} {spent:9.2f} ms  {flop / spent / 1e9:7.0f} TFLOP/s of full products")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1_000_000_000)
    shapes = ["64x1408x2048", "128x1408x2048", "1x2048x2048", "1x2048x11264", "1x4096x4096"]
    parser.add_argument("--shapes", nargs="+", default=shapes, metavar="NxROWSxCOLUMNS")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    device = torch.device("cpu" if options.cpu else "cuda")
    where = "CPU" if options.cpu else torch.cuda.get_device_name()
    print(f"{where}, PyTorch {torch.__version__}, arch {arch.current().name}")
    adamw_lines(options.elements, device)
    muon_lines(options.shapes, device)


if __name__ == "__main__":
    raise SystemExit(enter("__main__", "main"))
