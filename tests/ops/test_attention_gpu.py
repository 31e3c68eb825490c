# SPDX-License-Identifier: Apache-2.0
"""Attention and the linear cross entropy on the GPU: against fp64, bit-equal from run to run, without waiting."""

import importlib

import pytest
import torch
from torch import Tensor

from nmoe import arch
from nmoe.errors import EnvironmentFault
from nmoe.ops import registry
from nmoe.ops.attention import reference as attention_reference
from nmoe.ops.cross_entropy import IGNORED
from nmoe.ops.cross_entropy import reference as loss_reference

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


def kernel(op: str):
    """The file that serves an op on this GPU; a test that ran the reference would prove nothing."""
    source = registry.source_file(op, on=arch.current())
    assert source is not None
    assert source.stem != "reference"
    return importlib.import_module(f"nmoe.ops.{op}.{source.stem}")


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).bfloat16()


def error(found: Tensor, truth: Tensor) -> float:
    """Norm of the difference over the norm of the truth."""
    assert torch.isfinite(found).all()
    return float((found.double() - truth.double()).norm() / truth.double().norm().clamp_min(1e-30))


def poison() -> None:
    """Fills memory that the allocator will hand out again with NaN."""
    torch.full((1 << 28,), float("nan"), device=DEVICE)
    torch.cuda.synchronize()


def documents(rows: int, length: int, lengths: list[int]) -> Tensor:
    """Numbers of documents, on the CPU: the lengths over and over, each row cut where it is full."""
    number, count = [], 0
    while len(number) < length:
        number += [count] * lengths[count % len(lengths)]
        count += 1
    return torch.tensor([number[:length]] * rows)


# rows, tokens a row, query heads, key heads, their width, the values' width, window, lengths of documents
ATTENTION = {
    "mla": (2, 333, 4, 4, 192, 128, 0, [130, 1, 1, 77, 64]),
    "mla_window": (2, 333, 4, 4, 192, 128, 50, [200, 1, 300]),
    "mla_one_token_each": (2, 301, 2, 2, 192, 128, 0, [1, 2, 1, 1]),  # more than 256 documents
    "gqa": (1, 1000, 8, 2, 128, 128, 0, [1000]),
    "gqa_window": (2, 517, 8, 2, 128, 128, 64, [511, 1, 5]),
    "multi_query_wide_window": (1, 400, 4, 1, 64, 64, 4096, [129, 128, 127]),
    "quickstart": (2, 256, 4, 4, 48, 32, 0, [100, 3]),
    "odd_widths": (1, 130, 2, 2, 75, 33, 0, [70, 60]),
    "gqa_wide_keys": (1, 300, 4, 2, 192, 128, 0, [299, 1]),  # filled up to equal widths
    "widest": (1, 300, 4, 2, 256, 256, 0, [299, 1]),
}


@pytest.mark.parametrize("case", ATTENTION)
def test_attention_against_fp64(case):
    rows, length, heads, groups, width, v_width, window, lengths = ATTENTION[case]
    ours, document = kernel("attention"), documents(rows, length, lengths)
    q = draw(rows, length, heads, width)
    kv = draw(rows, length, groups, width + v_width)  # keys and values are views of one tensor, as the model has them
    dout = draw(rows, length, heads, v_width)
    scale = width**-0.5

    def run(op, dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (q, kv)]
        k, v = leaves[1].split((width, v_width), dim=-1)
        mask = op.prepare(document, window=window, device=DEVICE)
        out = op.attention(leaves[0], k, v, mask, scale=scale)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))]

    truth, plain = run(attention_reference, torch.float64), run(attention_reference, torch.bfloat16)
    poison()
    found = run(ours, torch.bfloat16)
    for name, a, b, c in zip(("out", "dq", "dkv"), found, plain, truth, strict=True):
        assert a.dtype == torch.bfloat16
        # Backward reads the rounded result where plain torch has its weights in fp32.
        assert error(a, c) <= 1.5 * error(b, c), f"{name}: {error(a, c):.2e}, plain torch {error(b, c):.2e}"
    poison()
    assert all(torch.equal(a, b) for a, b in zip(found, run(ours, torch.bfloat16), strict=True)), "two runs differ"


def test_attention_waits_for_nothing():
    ours, document = kernel("attention"), documents(2, 256, [100, 3])
    q, k, v = (draw(2, 256, 4, width).requires_grad_() for width in (192, 192, 128))
    dout = draw(2, 256, 4, 128)

    def step() -> None:
        out = ours.attention(q, k, v, ours.prepare(document, window=0, device=DEVICE), scale=0.1)
        torch.autograd.grad(out, (q, k, v), dout)

    step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("width", "v_width", "dtype"), [(264, 128, torch.bfloat16), (64, 64, torch.float32)])
def test_attention_refuses_what_it_cannot_do(width, v_width, dtype):
    ours, document = kernel("attention"), documents(1, 16, [16])
    q, k, v = (torch.zeros(1, 16, 2, w, dtype=dtype, device=DEVICE) for w in (width, width, v_width))
    with pytest.raises(EnvironmentFault, match="NMOE_ARCH=reference"):
        ours.attention(q, k, v, ours.prepare(document, window=0, device=DEVICE), scale=1.0)


@pytest.mark.parametrize(
    ("tokens", "words", "width", "z_loss"), [(1, 8, 64, 0.0), (777, 521, 128, 1e-2), (3000, 50257, 256, 1e-4)]
)
def test_cross_entropy_against_fp64(tokens, words, width, z_loss):
    ours = kernel("cross_entropy")
    x = draw(tokens, width)
    head = torch.randn(words, width, device=DEVICE) * 4 * width**-0.5  # logits of spread 4
    target = torch.randint(0, words, (tokens,), device=DEVICE)
    target[1::7] = IGNORED

    def run(op, x: Tensor, head: Tensor) -> list[Tensor]:
        results = op.forward(x, head, target, z_loss=z_loss, gradients=True)
        assert all(t is not None for t in results)
        return list(results)

    truth = run(loss_reference, x.double(), head.bfloat16().double())
    plain = run(loss_reference, x, head)
    poison()
    found = run(ours, x, head)
    for name, a, b, c in zip(("nll", "z", "dx", "dhead"), found, plain, truth, strict=True):
        assert a.dtype == b.dtype
        assert error(a, c) <= 1.05 * error(b, c) + 1e-6, f"{name}: {error(a, c):.2e}, plain torch {error(b, c):.2e}"
    assert (found[2][1::7] == 0).all()
    poison()
    assert all(torch.equal(a, b) for a, b in zip(found, run(ours, x, head), strict=True)), "two runs differ"
    alone = ours.forward(x, head, target, z_loss=z_loss, gradients=False)
    assert torch.equal(alone[0], found[0])
    assert alone[2] is None
    assert alone[3] is None


def test_cross_entropy_keeps_its_memory():
    """At 32768 tokens and 201088 words: at most 2.5 GiB above rows, head and the head's gradient."""
    ours = kernel("cross_entropy")
    x, target = draw(32768, 2048), torch.randint(0, 201088, (32768,), device=DEVICE)
    head = torch.randn(201088, 2048, device=DEVICE) * 0.02
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ours.forward(x, head, target, z_loss=0.0, gradients=True)
    peak = torch.cuda.max_memory_allocated() - before - head.numel() * 4
    assert peak <= 2.5 * 2**30, f"{peak / 2**30:.2f} GiB"
