# SPDX-License-Identifier: Apache-2.0
"""Attention on one GPU: the op of this project beside what else could do its work, forward and backward.

    python benchmarks/attention.py [--shape mla] [--peer nmoe] [--csv results.csv]

TFLOP/s count the pairs of tokens that see each other: 2 (H + V) a pair and head forward, 2 (3 H + 2 V) backward, with H
and V the widths of keys and values. The error is that of one row and one key head against fp64, norm over norm, the worst
of out, dq, dk and dv. "Same bits" says whether three backward passes agreed. Work that depends on the documents alone,
once a batch, is not timed. A peer that cannot do a shape, or fails, is printed as such. Needs a CUDA GPU.
"""

import argparse
import csv
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import dense_ceiling, milliseconds
from torch import Tensor

from nmoe.commands import enter
from nmoe.ops.attention import kernels, reference

DEVICE = torch.device("cuda")


@dataclass(frozen=True, kw_only=True)
class Shape:
    rows: int
    length: int
    heads: int
    groups: int
    width: int
    v_width: int
    window: int = 0
    document: int = 0
    """Mean length of a document; 0: a row is one."""


SHAPES = {
    "mla": Shape(rows=8, length=4096, heads=16, groups=16, width=192, v_width=128),
    "mla-documents": Shape(rows=8, length=4096, heads=16, groups=16, width=192, v_width=128, document=700),
    "mla-128-heads": Shape(rows=2, length=4096, heads=128, groups=128, width=192, v_width=128, document=2000),
    "gqa": Shape(rows=8, length=4096, heads=32, groups=4, width=128, v_width=128),
    "gqa-documents": Shape(rows=8, length=4096, heads=32, groups=4, width=128, v_width=128, document=700),
    "gqa-window": Shape(rows=8, length=4096, heads=32, groups=4, width=128, v_width=128, window=512, document=2000),
}
Work = Callable[[Tensor, Tensor, Tensor], Tensor]


def documents(shape: Shape) -> Tensor:
    """Number of each token's document, [B, T] on the CPU; lengths are exponential, as those of web text nearly are."""
    number = torch.zeros(shape.rows, shape.length, dtype=torch.int64)
    if shape.document:
        generator = torch.Generator().manual_seed(1)
        ends = torch.rand(shape.rows, shape.length, generator=generator) < 1 / shape.document
        number[:, 1:] = ends[:, :-1].cumsum(1)
    return number


def _lengths(document_BT: Tensor) -> Tensor:
    rows = torch.arange(len(document_BT)).unsqueeze(1) * document_BT.shape[1]
    return torch.unique_consecutive((document_BT + rows).flatten(), return_counts=True)[1]


def pairs(shape: Shape) -> int:
    """Pairs of tokens that see each other, in all rows."""
    n = _lengths(documents(shape))
    seen = n.clamp(max=shape.window) if shape.window else n
    return int((seen * (seen + 1) // 2 + (n - seen) * seen).sum())


def nmoe(shape: Shape) -> Work:
    mask = kernels().prepare(documents(shape), window=shape.window, device=DEVICE)
    return lambda q, k, v: kernels().attention(q, k, v, mask, scale=shape.width**-0.5)


def _flash(shape: Shape, *, deterministic: bool) -> Work:
    from flash_attn.cute import flash_attn_varlen_func

    length = _lengths(documents(shape))
    offset = F.pad(length.cumsum(0), (1, 0)).int().to(DEVICE)
    bound = max(int(length.max()), 512)

    def work(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, _ = flash_attn_varlen_func(
            *(t.flatten(0, 1) for t in (q, k, v)),
            cu_seqlens_q=offset,
            cu_seqlens_k=offset,
            max_seqlen_q=bound,
            max_seqlen_k=bound,
            softmax_scale=shape.width**-0.5,
            causal=not shape.window,
            window_size=(shape.window - 1, 0) if shape.window else (None, None),
            deterministic=deterministic,
        )
        return out.unflatten(0, q.shape[:2])

    return work


def flash_free(shape: Shape) -> Work:
    return _flash(shape, deterministic=False)


def torch_varlen(shape: Shape) -> Work:
    from torch.nn.attention.varlen import varlen_attn

    length = _lengths(documents(shape))
    offset, longest = F.pad(length.cumsum(0), (1, 0)).int().to(DEVICE), int(length.max())
    options = {"scale": shape.width**-0.5, "window_size": (shape.window - 1 if shape.window else -1, 0)}
    shared = shape.heads // shape.groups
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"], shared = shared > 1, 1

    def work(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(shared, dim=2) if shared > 1 else t for t in (k, v))
        v = F.pad(v, (0, shape.width - shape.v_width))
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        out = varlen_attn(q, k, v, offset, offset, longest, longest, **options)
        assert isinstance(out, Tensor)
        return out[..., : shape.v_width].unflatten(0, (shape.rows, -1))

    return work


def sdpa_cudnn(shape: Shape) -> Work:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if shape.document or shape.window:
        raise ValueError("takes documents and windows only as a mask of all pairs")

    def work(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            grouped = shape.heads > shape.groups
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=shape.width**-0.5, enable_gqa=grouped)
        return out.transpose(1, 2)

    return work


def flex(shape: Shape) -> Work:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    document = documents(shape).to(DEVICE)

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        inside = (j <= i) & (document[b, i] == document[b, j])
        return inside & (i - j < shape.window) if shape.window else inside

    mask = create_block_mask(seen, shape.rows, None, shape.length, shape.length, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)

    def work(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        grouped = shape.heads > shape.groups
        out = compiled(q, k, v, block_mask=mask, scale=shape.width**-0.5, enable_gqa=grouped)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)

    return work


PEERS = {
    "nmoe": nmoe,
    "flash-attn-4, any order": flash_free,
    "torch varlen_attn": torch_varlen,
    "SDPA cuDNN": sdpa_cudnn,
    "flex_attention": flex,
}


def exact(shape: Shape, tensors: list[Tensor]) -> list[Tensor]:
    """Out and gradients of the first row and its first key head, in fp64."""
    shared = shape.heads // shape.groups
    q, k, v, dout = (t[:1, :, :n].detach().double() for t, n in zip(tensors, (shared, 1, 1, shared), strict=True))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    mask = reference.prepare(documents(shape)[:1], window=shape.window, device=DEVICE)
    out = reference.attention(q, k, v, mask, scale=shape.width**-0.5)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def measure(shape: Shape, work: Work, tensors: list[Tensor], truth: list[Tensor]) -> tuple[float, float, float, bool]:
    """Forward ms, forward and backward ms, error, same bits."""
    *leaves, dout = tensors

    def train() -> list[Tensor]:
        out = work(*leaves)
        return [out, *torch.autograd.grad(out, leaves, dout)]

    first = [t.clone() for t in train()]
    same = all(all(torch.equal(a, b) for a, b in zip(first, train(), strict=True)) for _ in range(2))
    errors = [float((a[:1, :, : b.shape[2]].double() - b).norm() / b.norm()) for a, b in zip(first, truth, strict=True)]
    del first

    def forward() -> None:
        with torch.no_grad():
            work(*leaves)

    return milliseconds(forward, runs=9), milliseconds(train, runs=9), max(errors), same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="may be repeated (default: all)")
    parser.add_argument("--peer", choices=PEERS, action="append", help="may be repeated (default: all)")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    torch.use_deterministic_algorithms(True, warn_only=True)  # as the trainer asks of PyTorch's own kernels
    ceiling = dense_ceiling()
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, dense bf16 8192^3: {ceiling:.0f} TFLOP/s")
    rows = []
    for name in options.shape or SHAPES:
        shape = SHAPES[name]
        print(f"{name}: {shape}")
        torch.manual_seed(0)
        sizes = [(shape.heads, shape.width), (shape.groups, shape.width), (shape.groups, shape.v_width)]
        leaves = [
            torch.randn(shape.rows, shape.length, *size, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
            for size in sizes
        ]
        dout = torch.randn(shape.rows, shape.length, shape.heads, shape.v_width, device=DEVICE, dtype=torch.bfloat16)
        truth = exact(shape, [*leaves, dout])
        forward_flop = pairs(shape) * shape.heads * 2 * (shape.width + shape.v_width)
        backward_flop = pairs(shape) * shape.heads * 2 * (3 * shape.width + 2 * shape.v_width)
        for peer in options.peer or PEERS:
            try:
                forward, both, error, same = measure(shape, PEERS[peer](shape), [*leaves, dout], truth)
            except Exception as failure:  # noqa: BLE001 - a peer that cannot run is a result too
                print(f"  {peer:24s} failed: {type(failure).__name__}: {str(failure).splitlines()[0][:110]}")
                continue
            rates = forward_flop / forward / 1e9, (forward_flop + backward_flop) / both / 1e9
            print(
                f"  {peer:24s} forward {forward:7.3f} ms {rates[0]:4.0f} TFLOP/s   with backward {both:7.3f} ms "
                f"{rates[1]:4.0f} TFLOP/s, {rates[1] / ceiling:.2f} of dense   error {error:.1e}   "
                f"same bits: {'yes' if same else 'NO'}"
            )
            sys.stdout.flush()
            rows.append([name, peer, forward, rates[0], both, rates[1], ceiling, error, same])
        torch.cuda.empty_cache()
    if options.csv:
        header = [
            "shape",
            "peer",
            "forward_ms",
            "forward_tflops",
            "both_ms",
            "both_tflops",
            "dense_tflops",
            "error",
            "same_bits",
        ]
        with options.csv.open("w", newline="") as stream:
            csv.writer(stream).writerows([header, *rows])


if __name__ == "__main__":
    raise SystemExit(enter("__main__", "main"))
