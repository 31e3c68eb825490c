# SPDX-License-Identifier: Apache-2.0
"""The linear cross entropy on one GPU: memory, time and error beside other ways to compute it.

    python benchmarks/loss.py [--tokens 32768] [--vocabulary 201088] [--width 2048] [--peer nmoe]

Every peer makes the loss and both gradients from rows in bf16 and a head in fp32 (liger's takes it in bf16). Memory is the
peak above rows, head and the head's gradient. "Products" are the three matrix products alone, in the same chunks: what no
way of this kind can undercut. The error takes 64 rows and 512 words: dx of those rows, and the head's gradient of those
words, are computed again in fp64 from the same bf16 values. Needs a CUDA GPU.
"""

import argparse
from collections.abc import Callable

import torch
from timing import dense_ceiling, milliseconds
from torch import Tensor

from nmoe.commands import enter
from nmoe.ops import registry
from nmoe.ops.cross_entropy import IGNORED, kernels, reference

GIB = 1 << 30
Gradients = tuple[Tensor, Tensor]


def nmoe(x_TD: Tensor, head_VD: Tensor, target_T: Tensor) -> Gradients:
    _, _, dx, dhead = kernels().forward(x_TD, head_VD, target_T, z_loss=0.0, gradients=True)
    assert dx is not None
    assert dhead is not None
    return dx, dhead


def plain(x_TD: Tensor, head_VD: Tensor, target_T: Tensor) -> Gradients:
    _, _, dx, dhead = reference.forward(x_TD, head_VD, target_T, z_loss=0.0, gradients=True)
    assert dx is not None
    assert dhead is not None
    return dx, dhead


def liger(x_TD: Tensor, head_VD: Tensor, target_T: Tensor) -> Gradients:
    from liger_kernel.ops.fused_linear_cross_entropy import (  # type: ignore[import-not-found]
        fused_linear_cross_entropy_forward,
    )

    head = head_VD.detach().bfloat16().requires_grad_()
    x = x_TD.detach().requires_grad_()
    with torch.no_grad():  # as its own autograd function calls it; else every chunk's logits are kept
        results = fused_linear_cross_entropy_forward(
            x, head, target_T, ignore_index=IGNORED, reduction="sum", accum_dtype=torch.float32
        )
    dx, dhead = [t for t in results if isinstance(t, Tensor) and t.dim() == 2][:2]
    return dx, dhead


def products(x_TD: Tensor, head_VD: Tensor, target_T: Tensor) -> Gradients:
    del target_T
    head, size = head_VD.bfloat16(), 2048
    memory = torch.empty(size, len(head), dtype=torch.float32, device=x_TD.device)
    dlogits = memory.view(torch.bfloat16)[:, : len(head)]
    dx, dhead = torch.empty_like(x_TD), torch.zeros_like(head_VD)
    for start in range(0, len(x_TD), size):
        x = x_TD[start : start + size]
        torch.mm(x, head.t(), out_dtype=torch.float32, out=memory[: len(x)])
        torch.mm(dlogits[: len(x)], head, out=dx[start : start + size])
        torch.addmm(dhead, dlogits[: len(x)].t(), x, out_dtype=torch.float32, out=dhead)
    return dx, dhead


PEERS: dict[str, Callable[[Tensor, Tensor, Tensor], Gradients]] = {
    "nmoe": nmoe,
    "plain torch, chunks": plain,
    "liger": liger,
    "products": products,
}


def _exact_rows(x_TD: Tensor, head_VD: Tensor, target_T: Tensor) -> Tensor:
    """dx of some rows in fp64."""
    p = torch.softmax(x_TD.double() @ head_VD.double().t(), dim=1)
    p[torch.arange(len(x_TD)), target_T] -= 1
    return p @ head_VD.double()


def _exact_words(x_TD: Tensor, head_VD: Tensor, target_T: Tensor, words: int) -> Tensor:
    """Gradient of the head's first words in fp64, a few rows at a time."""
    out = torch.zeros(words, x_TD.shape[1], dtype=torch.float64, device=x_TD.device)
    head = head_VD.double()
    for start in range(0, len(x_TD), 512):
        x, target = x_TD[start : start + 512].double(), target_T[start : start + 512]
        logits = x @ head.t()
        p = (logits[:, :words] - torch.logsumexp(logits, dim=1, keepdim=True)).exp_()
        hit = (target < words) & (target >= 0)
        p[hit, target[hit]] -= 1
        out += p[target != IGNORED].t() @ x[target != IGNORED]
    return out


def _error(ours: Tensor, exact: Tensor) -> float:
    return ((ours.double() - exact).norm() / exact.norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--vocabulary", type=int, default=201088)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--peer", choices=PEERS, action="append", help="may be repeated (default: all)")
    parser.add_argument(
        "--chunk-gb", type=float, help="most memory for a chunk's logits, in GB (default: the kernel's own)"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: needs a CUDA GPU")
    if options.chunk_gb:
        registry.implementation("cross_entropy")._CHUNK_BYTES = options.chunk_gb * 1e9  # type: ignore[attr-defined]
    device, T, V, D = torch.device("cuda"), options.tokens, options.vocabulary, options.width
    ceiling = dense_ceiling()
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, dense bf16 8192^3: {ceiling:.0f} TFLOP/s")
    print(f"{registry.table()['cross_entropy']}, T={T} V={V} D={D}, head in fp32, rows in bf16")

    generator = torch.Generator(device).manual_seed(0)
    head = torch.randn(V, D, device=device, generator=generator) * D**-0.5
    x = torch.randn(T, D, device=device, generator=generator).bfloat16()
    target = torch.randint(0, V, (T,), device=device, generator=generator)
    target[::97] = IGNORED
    rounded, rows = head.bfloat16(), slice(1, 65)
    exact = _exact_rows(x[rows], rounded, target[rows]), _exact_words(x, rounded, target, 512)
    for name in options.peer or PEERS:
        work = PEERS[name]
        try:
            work(x, head, target)  # compiles, and warms the libraries up
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            dx, dhead = work(x, head, target)
            peak = torch.cuda.max_memory_allocated() - before - V * D * 4
            errors = _error(dx[rows], exact[0]), _error(dhead[:512], exact[1])
            del dx, dhead
            spent = milliseconds(lambda work=work: work(x, head, target), runs=5)
        except Exception as failure:  # noqa: BLE001 - a peer that cannot run is a result too
            print(f"  {name:20s} failed: {type(failure).__name__}: {str(failure).splitlines()[0][:110]}")
            continue
        rate = 6 * T * V * D / spent / 1e9
        shown = "" if name == "products" else f"   error of dx {errors[0]:.1e}, of the head's gradient {errors[1]:.1e}"
        print(
            f"  {name:20s} {spent:7.1f} ms {rate:4.0f} TFLOP/s, {rate / ceiling:.2f} of dense   "
            f"peak {peak / GIB:.2f} GiB{shown}"
        )


if __name__ == "__main__":
    raise SystemExit(enter("__main__", "main"))
