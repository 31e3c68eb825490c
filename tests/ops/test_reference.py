# SPDX-License-Identifier: Apache-2.0
"""Reference ops against plain autograd in fp64: the oracle has to be right itself."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nmoe.ops import attention, combine, cross_entropy, group, grouped_gemm, rms_norm, rope, route_topk, swiglu
from nmoe.ops.cross_entropy import reference as cross_entropy_reference
from nmoe.ops.heads import join_heads
from nmoe.ops.route_topk import Routing

pytestmark = pytest.mark.usefixtures("reference_arch")


@pytest.fixture
def reference_arch(monkeypatch):
    monkeypatch.setenv("NMOE_ARCH", "reference")


def _leaf(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1000 * len(shape) + sum(shape))
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).requires_grad_()


def _assert_same_gradients(ours, plain, *leaves: Tensor, atol: float = 1e-12) -> None:
    """Outputs and gradients, for a random direction, of two functions of the leaves."""
    a, b = ours(*leaves), plain(*leaves)
    torch.testing.assert_close(a, b, atol=atol, rtol=1e-11)
    direction = torch.randn(a.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    for ga, gb in zip(
        torch.autograd.grad((a * direction).sum(), leaves),
        torch.autograd.grad((b * direction).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(ga, gb, atol=atol, rtol=1e-11)


def test_rms_norm_matches_autograd():
    def plain(x, w):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w

    _assert_same_gradients(lambda x, w: rms_norm.rms_norm(x, w, eps=1e-6), plain, _leaf(3, 5, 24), _leaf(24))


def test_rms_norm_in_bf16_rounds_once():
    x, w = torch.randn(64, 96), torch.randn(96)
    y = rms_norm.rms_norm(x.bfloat16(), w, eps=1e-6)
    exact = rms_norm.rms_norm(x.bfloat16().double(), w.double(), eps=1e-6)
    # Within half a step of bf16, up to what fp32 rounds before; a second rounding to bf16 would add as much again.
    half_step = torch.ldexp(torch.ones_like(exact), torch.frexp(exact).exponent - 9)
    assert ((y.double() - exact).abs() <= 1.001 * half_step).all()


def test_swiglu_matches_autograd():
    def plain(p):
        return F.silu(p[:, 0::2]) * p[:, 1::2]

    _assert_same_gradients(swiglu.swiglu, plain, _leaf(7, 26))


def test_spread_puts_every_row_in_its_slots():
    slot = torch.tensor([[2, 0], [-1, 3]], dtype=torch.int32)
    x = torch.randn(2, 4)
    found = combine.kernels().spread(x, slot, num_slots=5)
    assert found.shape == (5, 4)
    assert torch.equal(found[[2, 0, 3]], x[[0, 0, 1]])


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_turns_the_last_columns(interleaved):
    tokens, half = 6, 4
    angle = torch.rand(tokens, half, dtype=torch.float64) * 9

    def plain(x):
        kept, turned = x[..., :3], x[..., 3:]
        a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
        z = torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle).unsqueeze(1)
        parts = (z.real, z.imag)
        joined = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
        return torch.cat((kept, joined), -1)

    def ours(x):
        return rope.rope(x, angle.cos(), angle.sin(), interleaved=interleaved)

    _assert_same_gradients(ours, plain, _leaf(tokens, 2, 3 + 2 * half))


def test_joined_heads_are_rotated_queries_and_keys_with_the_shared_columns_behind():
    tokens, heads, own, half, values = 6, 3, 4, 3, 5
    angle = torch.rand(tokens, half, dtype=torch.float64) * 9

    def turned(x):
        return rope.rope(x, angle.cos(), angle.sin(), interleaved=True)

    def plain(q, kv, shared):
        k = torch.cat((kv[..., :own], turned(shared.unsqueeze(1)).expand(-1, heads, -1)), dim=-1)
        return torch.cat((turned(q), k, kv[..., own:]), dim=-1)

    def ours(q, kv, shared):
        return torch.cat(join_heads(q, kv, shared, angle.cos(), angle.sin()), dim=-1)

    width = own + 2 * half
    leaves = _leaf(tokens, heads, width), _leaf(tokens, heads, own + values), _leaf(tokens, 2 * half)
    _assert_same_gradients(ours, plain, *leaves)


@pytest.mark.parametrize("window", [0, 3])
def test_attention_sees_its_document_only(window):
    document = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 2], [4, 5, 5, 5, 5, 5, 5, 5]])
    q, k, v = _leaf(2, 8, 4, 6), _leaf(2, 8, 2, 6), _leaf(2, 8, 2, 5)

    def ours(q, k, v):
        kernels = attention.kernels()
        return kernels.attention(q, k, v, kernels.prepare(document, window=window, device=document.device), scale=0.3)

    def plain(q, k, v):  # one query, one head, one key set at a time
        out = []
        for b in range(2):
            for i in range(8):
                seen = [j for j in range(i + 1) if document[b, j] == document[b, i] and (not window or i - j < window)]
                for n in range(4):
                    g = n // 2
                    p = torch.softmax(k[b, seen, g] @ q[b, i, n] * 0.3, dim=0)
                    out.append(p @ v[b, seen, g])
        return torch.stack(out).view(2, 8, 4, 5)

    _assert_same_gradients(ours, plain, q, k, v)


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [1, 16, 1 << 20])
def test_cross_entropy_matches_autograd(z_loss, chunk, monkeypatch):
    monkeypatch.setattr(cross_entropy_reference, "_CHUNK_LOGITS", chunk * 11)
    target = torch.randint(0, 11, (37,))
    target[::5] = cross_entropy.IGNORED

    def plain(x, w):
        logits = (x @ w.t())[target >= 0]
        z = z_loss * torch.logsumexp(logits, -1).square().sum()
        return F.cross_entropy(logits, target[target >= 0], reduction="sum") + z

    def ours(x, w):
        nll, z = cross_entropy.linear_cross_entropy(x, w, target, z_loss=z_loss)
        return nll + z

    _assert_same_gradients(ours, plain, _leaf(37, 8), _leaf(11, 8))


def test_cross_entropy_of_ignored_targets_alone_is_zero():
    x, w = _leaf(5, 8), _leaf(11, 8)
    nll, z = cross_entropy.linear_cross_entropy(x, w, torch.full((5,), cross_entropy.IGNORED), z_loss=0.1)
    assert nll == 0
    assert z == 0
    assert all((g == 0).all() for g in torch.autograd.grad(nll, (x, w)))


def test_cross_entropy_computes_no_gradients_that_nobody_wants(monkeypatch):
    asked, forward = [], cross_entropy_reference.forward

    def spy(*args, gradients: bool, **keys):
        asked.append(gradients)
        return forward(*args, gradients=gradients, **keys)

    monkeypatch.setattr(cross_entropy_reference, "forward", spy)
    x, w = torch.randn(5, 3), torch.randn(7, 3, requires_grad=True)
    cross_entropy.linear_cross_entropy(x, w, torch.zeros(5, dtype=torch.int64))
    with torch.no_grad():  # a held-out set: the head is a parameter there, too
        cross_entropy.linear_cross_entropy(x, w, torch.zeros(5, dtype=torch.int64))
    assert asked == [True, False]


def test_cross_entropy_keeps_no_logits():
    x = torch.randn(4096, 16, requires_grad=True)
    w = torch.randn(1024, 16, requires_grad=True)
    largest = 0

    def pack(t: Tensor) -> Tensor:
        nonlocal largest
        largest = max(largest, t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        cross_entropy.linear_cross_entropy(x, w, torch.zeros(4096, dtype=torch.int64))
    assert largest <= max(x.numel(), w.numel())


ROUTINGS = {
    "sigmoid": Routing(top_k=3, scoring="sigmoid", scale=2.446),
    "sigmoid_groups": Routing(top_k=4, scoring="sigmoid", num_groups=4, top_k_groups=2, scale=2.5),
    "softmax_plain": Routing(
        top_k=3, scoring="softmax", num_groups=4, top_k_groups=2, group_score="max", normalize=False, scale=16.0
    ),
    "softmax": Routing(top_k=2, scoring="softmax"),
    "one": Routing(top_k=1, scoring="sigmoid", normalize=False),
}


def _plain_route(logits: Tensor, bias: Tensor, routing: Routing) -> tuple[Tensor, list[list[int]]]:
    """Gates and choices, one token at a time, by sorting lists in Python."""
    gates, chosen = [], []
    for row in logits:
        score = torch.sigmoid(row) if routing.scoring == "sigmoid" else torch.softmax(row, 0)
        choice = (score + bias).tolist()
        size = len(choice) // routing.num_groups
        groups = [choice[i * size : (i + 1) * size] for i in range(routing.num_groups)]
        members = 2 if routing.group_score == "top2_sum" else 1
        worth = [sum(sorted(g)[-members:]) for g in groups]
        kept = sorted(range(routing.num_groups), key=lambda i: (-worth[i], i))[: routing.top_k_groups]
        allowed = [e for e in range(len(choice)) if e // size in kept]
        best = sorted(allowed, key=lambda e: (-choice[e], e))[: routing.top_k]
        gate = score[best]
        gates.append((gate / gate.sum() if routing.normalize else gate) * routing.scale)
        chosen.append(best)
    return torch.stack(gates), chosen


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS.keys())
def test_route_matches_the_paper(routing):
    logits, bias = _leaf(50, 16), _leaf(16, scale=0.3).detach()
    expert, gate, load = route_topk.route(logits, bias, routing=routing)
    _, chosen = _plain_route(logits, bias, routing)
    assert expert.tolist() == chosen
    assert load.tolist() == [sum(e in row for row in chosen) for e in range(16)]
    assert gate.shape == (50, routing.top_k)
    _assert_same_gradients(
        lambda x: route_topk.route(x, bias, routing=routing)[1], lambda x: _plain_route(x, bias, routing)[0], logits
    )


def test_route_gives_ties_to_the_lowest_expert():
    expert, _, _ = route_topk.route(torch.zeros(3, 300), None, routing=Routing(top_k=5, scoring="sigmoid"))
    assert expert.tolist() == [[0, 1, 2, 3, 4]] * 3
    grouped = Routing(top_k=5, scoring="softmax", num_groups=6, top_k_groups=2)
    expert, _, _ = route_topk.route(torch.zeros(3, 18), None, routing=grouped)
    assert expert.tolist() == [[0, 1, 2, 3, 4]] * 3


def test_route_bias_selects_and_never_weighs():
    logits, bias = torch.zeros(1, 8), torch.zeros(8)
    bias[6] = 0.5
    expert, gate, _ = route_topk.route(logits, bias, routing=Routing(top_k=2, scoring="sigmoid"))
    assert expert.tolist() == [[6, 0]]
    assert gate.tolist() == [[0.5, 0.5]]


def test_project_keeps_full_precision_and_saves_the_row_as_it_is():
    x = torch.randn(40, 64).bfloat16().requires_grad_()
    w = torch.randn(8, 64, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        logits, again = route_topk.project(x, w)
    assert again.data_ptr() == x.data_ptr()
    assert logits.dtype == torch.float32
    assert sum(t.numel() * t.element_size() for t in saved) == x.numel() * 2 + w.numel() * 4
    torch.testing.assert_close(logits, x.float() @ w.t())

    def ours(x, w):
        logits, x = route_topk.project(x, w)
        return torch.cat((logits, x.square()), dim=1)

    def plain(x, w):
        return torch.cat((x @ w.t(), x.square()), dim=1)

    _assert_same_gradients(ours, plain, _leaf(9, 12), _leaf(5, 12))
    logits, _ = route_topk.project(x, w)  # used by nothing else, then
    logits.sum().backward()
    torch.testing.assert_close(x.grad, w.detach().sum(dim=0).expand(40, 64).bfloat16())


@pytest.mark.parametrize("spare", [0, 7])
def test_group_is_a_stable_sort_by_expert(spare):
    expert = torch.tensor([[2, 0], [-1, 2], [0, -1], [-1, -1], [5, 2]], dtype=torch.int32)
    gate = torch.arange(1.0, 11.0).view(5, 2)
    groups = group.kernels().group(expert, gate, num_experts=6, num_slots=10 + spare)
    assert groups.offset_X.tolist() == [0, 2, 2, 5, 5, 5, 6]
    assert groups.index_S.tolist() == [0, 2, 0, 1, 4, 4] + [0] * (4 + spare)
    assert groups.gate_S.tolist() == [2, 5, 1, 4, 10, 9] + [0] * (4 + spare)
    assert groups.slot_RK.tolist() == [[2, 0], [-1, 3], [1, -1], [-1, -1], [5, 4]]
    assert {t.dtype for t in (groups.index_S, groups.offset_X, groups.slot_RK)} == {torch.int32}


def test_group_of_no_rows():
    groups = group.kernels().group(torch.zeros(0, 3, dtype=torch.int32), torch.zeros(0, 3), num_experts=4, num_slots=0)
    assert groups.offset_X.tolist() == [0] * 5
    assert groups.slot_RK.shape == (0, 3)


def test_combine_skips_absent_assignments_whatever_their_memory_holds():
    y = torch.tensor([[1.0, 2.0], [10.0, 20.0], [float("nan"), float("nan")]])
    slot = torch.tensor([[1, 0], [-1, 0], [-1, -1]], dtype=torch.int32)
    gate = torch.tensor([[0.5, 2.0], [float("nan"), 3.0], [float("nan"), float("nan")]])
    kernels = combine.kernels()
    assert kernels.combine(y, slot, gate).tolist() == [[7.0, 14.0], [3.0, 6.0], [0.0, 0.0]]
    assert kernels.combine(y, slot, None).tolist() == [[11.0, 22.0], [1.0, 2.0], [0.0, 0.0]]
    value = torch.tensor([5.0, 6.0, float("nan")])
    assert kernels.collect(value, slot).tolist() == [[6.0, 5.0], [0.0, 5.0], [0.0, 0.0]]
    # absent slots read slot 0: NaN there must not leak either
    assert kernels.combine(y.roll(1, 0), slot.clamp(max=-1), None).tolist() == [[0.0, 0.0]] * 3


def test_grouped_products_ignore_the_tail():
    torch.manual_seed(0)
    expert = torch.tensor([[1, -1], [-1, -1], [0, 1]], dtype=torch.int32)
    x, w13, w2 = torch.randn(3, 4), torch.randn(3, 10, 4), torch.randn(3, 4, 5)
    kernels = grouped_gemm.kernels()
    results = []
    for slots in (3, 8):
        g = group.kernels().group(expert, torch.rand(3, 2), num_experts=3, num_slots=slots)
        preact, act = kernels.up(x, w13, g.index_S, g.offset_X)
        preact[3:] = float("nan")
        dw13 = torch.full_like(w13, float("nan"))
        kernels.dw13(x, preact, g.index_S, g.offset_X, out_X2FD=dw13)
        results.append((kernels.down(act, w2, g.offset_X)[:3], dw13.clone()))
        kernels.dw13(x, preact, g.index_S, g.offset_X, out_X2FD=dw13, accumulate=True)
        torch.testing.assert_close(dw13, 2 * results[-1][1])
        assert (dw13[2] == 0).all()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
