# SPDX-License-Identifier: Apache-2.0
"""Memory and time of the linear cross entropy, and its gradient against fp64 on a slice.

    python benchmarks/loss_memory.py [--tokens 32768] [--vocabulary 201088] [--width 2048] [--master fp32]

Peak memory is what the loss needs above weight, weight gradient and rows: forward and backward, the gradient of the rows
included. The check takes 64 rows and 512 words: dx of those rows, and the head's gradient of those words, are computed
again in fp64 from the same bf16 values, over all words and over all rows. Needs a CUDA GPU.
"""

import argparse
import time

import torch
from torch import Tensor

from nmoe import arch
from nmoe.ops import registry
from nmoe.ops.cross_entropy import IGNORED, linear_cross_entropy

GIB = 1 << 30


def _exact_rows(x_TD: Tensor, head_VD: Tensor, target_T: Tensor) -> Tensor:
    """dx of some rows in fp64."""
    p = torch.softmax(x_TD.double() @ head_VD.double().t(), dim=1)
    p[torch.arange(len(x_TD)), target_T] -= 1
    return p @ head_VD.double()


def _exact_words(x_TD: Tensor, head_VD: Tensor, target_T: Tensor, words: int) -> Tensor:
    """Gradient of the head's first words in fp64, a few rows at a time."""
    out = torch.zeros(words, x_TD.shape[1], dtype=torch.float64, device=x_TD.device)
    for start in range(0, len(x_TD), 256):
        x, target = x_TD[start : start + 256].double(), target_T[start : start + 256]
        p = torch.softmax(x @ head_VD.double().t(), dim=1)[:, :words].clone()
        hit = (target < words) & (target >= 0)
        p[hit, target[hit]] -= 1
        out += p[target != IGNORED].t() @ x[target != IGNORED]
    return out


def _error(ours: Tensor, exact: Tensor) -> float:
    return ((ours.double() - exact).norm() / exact.norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory and time of the linear cross entropy.")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--vocabulary", type=int, default=201088)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--master", choices=["fp32", "bf16"], default="fp32", help="dtype of the head (default: fp32)")
    parser.add_argument("--check", choices=["yes", "no"], default="yes", help="compare with fp64 (default: yes)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: needs a CUDA GPU")
    device, T, V, D = torch.device("cuda"), options.tokens, options.vocabulary, options.width
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {registry.table()['cross_entropy']}")
    print(f"arch {arch.current().name}, T={T} V={V} D={D}, head in {options.master}, rows in bf16")

    generator = torch.Generator(device).manual_seed(0)
    master = torch.float32 if options.master == "fp32" else torch.bfloat16
    head = (torch.randn(V, D, device=device, generator=generator) * D**-0.5).to(master).requires_grad_()
    x = torch.randn(T, D, device=device, generator=generator).bfloat16().requires_grad_()
    target = torch.randint(0, V, (T,), device=device, generator=generator)
    target[::97] = IGNORED

    loss = torch.zeros(())
    for attempt in range(3):  # the first warms the allocator and the libraries up
        head.grad = x.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, began = torch.cuda.memory_allocated(), time.perf_counter()
        loss, _ = linear_cross_entropy(x, head, target)
        loss.backward()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        peak = torch.cuda.max_memory_allocated() - before - head.numel() * head.element_size()
        if attempt:
            tflops = 6 * T * V * D / seconds / 1e12
            print(
                f"peak above weight and its gradient {peak / GIB:.2f} GiB, {seconds * 1e3:.1f} ms, {tflops:.0f} TFLOP/s"
            )

    assert head.grad is not None
    assert x.grad is not None
    print(f"loss {loss.item() / (target != IGNORED).sum().item():.4f} nat/token")
    if options.check == "yes":
        rounded, rows = head.detach().bfloat16(), slice(1, 65)
        print(f"error of dx, 64 rows: {_error(x.grad[rows], _exact_rows(x.detach()[rows], rounded, target[rows])):.2e}")
        words = _exact_words(x.detach(), rounded, target, 512)
        print(f"error of the head's gradient, 512 words: {_error(head.grad[:512], words):.2e} (norm over norm)")


if __name__ == "__main__":
    main()
