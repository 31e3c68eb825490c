# SPDX-License-Identifier: Apache-2.0
"""Kernels against their references in higher precision, on fresh random data, on the GPU they are written for."""

import importlib

import pytest
import torch
from torch import Tensor

from nmoe import arch
from nmoe.comm.local import Local
from nmoe.config import Moe
from nmoe.ops import registry
from nmoe.ops.combine import reference as combine_reference
from nmoe.ops.group import reference as group_reference
from nmoe.ops.grouped_gemm import reference as gemm_reference
from nmoe.ops.heads import reference as heads_reference
from nmoe.ops.rms_norm import reference as norm_reference
from nmoe.ops.rope import reference as rope_reference
from nmoe.ops.route_topk import Routing
from nmoe.ops.route_topk import reference as route_reference
from nmoe.ops.swiglu import reference as swiglu_reference
from nmoe.rdep.layer import MoE

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def kernel(op: str):
    """The file that serves an op on this GPU; a test that ran the reference would prove nothing."""
    source = registry.source_file(op, on=arch.current())
    assert source is not None
    assert source.stem != "reference"
    return importlib.import_module(f"nmoe.ops.{op}.{source.stem}")


def draw(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def error(found: Tensor, truth: Tensor) -> float:
    """Norm of the difference over the norm of the truth."""
    assert torch.isfinite(found).all()
    return float((found.double() - truth.double()).norm() / truth.double().norm().clamp_min(1e-30))


def assert_as_good_as(found: Tensor, plain: Tensor, truth: Tensor, *, factor: float = 1.2) -> None:
    """No further from fp64 than plain torch in the same dtype, but for a small factor."""
    assert error(found, truth) <= factor * error(plain, truth) + 1e-7


def poison() -> None:
    """Fills memory that the allocator will hand out again with NaN."""
    torch.full((1 << 28,), float("nan"), device=DEVICE)
    torch.cuda.synchronize()


def routes(tokens: int, experts: int, top_k: int, *, used: int | None = None) -> tuple[Tensor, Tensor]:
    scores = torch.rand(tokens, experts, device=DEVICE)
    if used is not None:
        scores[:, used:] = -1.0
    return scores.topk(top_k, dim=1).indices.int(), torch.rand(tokens, top_k, device=DEVICE)


SHAPES = [  # one of each class of shapes that has tiles of its own
    (1, 64, 64, 4, 2, None),
    (333, 256, 96, 8, 3, 5),
    (4096, 512, 256, 64, 6, None),
    (1000, 2048, 1408, 16, 6, 7),
    (4096, 256, 640, 8, 4, 6),
    (2048, 3072, 640, 4, 4, None),
    (4096, 256, 128, 8, 4, 7),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("arranged", [True, False])
def test_grouped_products_against_fp64(shape, arranged):
    """Errors of few values are noise, up to 17 times those of plain torch: pooled over draws of at least 64 tokens."""
    drawn = [_grouped_products(shape, arranged) for _ in range(-(-64 // shape[0]))]
    for name in drawn[0]:
        found, plain, truth = (torch.cat([one[name][i].flatten() for one in drawn]) for i in range(3))
        assert_as_good_as(found, plain, truth, factor=1.3)


def _grouped_products(shape, arranged) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Found, plain and true; also with experts that no token chose, in memory full of NaN; with rows as `arrange` wants
    them and as they are."""
    tokens, width, hidden, experts, top_k, used = shape
    ours = kernel("grouped_gemm")
    x, dout = draw(tokens, width), draw(tokens, width)
    w13, w2 = draw(experts, 2 * hidden, width, scale=width**-0.5), draw(experts, width, hidden, scale=hidden**-0.5)
    expert, gate = routes(tokens, experts, top_k, used=used)
    groups = group_reference.group(expert, gate, num_experts=experts, num_slots=tokens * top_k)
    offset, gates = groups.offset_X, groups.gate_S

    def run(gemm, cast):
        def rows(tensor, use):
            if not arranged:
                return cast(tensor), groups.index_S
            return gemm.arrange(cast(tensor), groups.index_S, groups.slot_RK, cast(w13), use=use)

        source, index = rows(x, "up")
        preact, act = gemm.up(source, cast(w13), index, offset)
        y = gemm.down(act, cast(w2), offset)
        source, index = rows(dout, "dout")
        dpreact, gated, dgate = gemm.gated_backward(
            source, cast(w2), preact, cast(gates) if cast(x).dtype == torch.float64 else gates, index, offset
        )
        dx = gemm.dx(dpreact, cast(w13), offset)
        wide = torch.float64 if cast(x).dtype == torch.float64 else torch.float32
        dw13, dw2 = (
            torch.full(w13.shape, 7.0, dtype=wide, device=DEVICE),
            torch.full(w2.shape, 7.0, dtype=wide, device=DEVICE),
        )
        gemm.dw2(source, gated, index, offset, out_XDF=dw2)
        again = dw2.clone()
        gemm.dw2(source, gated, index, offset, out_XDF=again, accumulate=True)
        source, index = rows(x, "dw13")
        gemm.dw13(source, dpreact, index, offset, out_X2FD=dw13)
        return {
            "preact": preact,
            "act": act,
            "y": y,
            "dpreact": dpreact,
            "gated": gated,
            "dgate": dgate,
            "dx": dx,
            "dw13": dw13,
            "dw2": dw2,
            "twice": again,
        }

    truth = run(gemm_reference, lambda tensor: tensor.double())
    plain = run(gemm_reference, lambda tensor: tensor)
    poison()
    found = run(ours, lambda tensor: tensor)
    empty = torch.diff(offset) == 0
    assert used is None or int(empty.sum()) >= experts - used
    for name in ("dw13", "dw2"):
        assert (found[name][empty] == 0).all()
    poison()
    second = run(ours, lambda tensor: tensor)
    assert all(torch.equal(found[name], second[name]) for name in found), "two runs differ"
    return {name: (found[name], plain[name], truth[name]) for name in truth}


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(0, 8, 2), (1, 8, 2), (5000, 64, 6), (777, 256, 8), (40, 5, 3)]
)
@pytest.mark.parametrize("spare", [0, 13])
def test_group_equals_the_reference(tokens, experts, top_k, spare):
    expert, gate = routes(tokens, experts, top_k)
    expert[::3, 1] = -1
    sizes = {"num_experts": experts, "num_slots": tokens * top_k + spare}
    found, truth = kernel("group").group(expert, gate, **sizes), group_reference.group(expert, gate, **sizes)
    for field in ("index_S", "gate_S", "offset_X", "slot_RK"):
        assert torch.equal(getattr(found, field), getattr(truth, field)), field


@pytest.mark.parametrize("gated", [True, False])
def test_combine_against_fp64(gated):
    expert, gate = routes(1000, 16, 4)
    expert[::5, 2] = -1
    groups = group_reference.group(expert, gate, num_experts=16, num_slots=4000)
    y = draw(4000, 384)
    y[int(groups.offset_X[-1]) :] = float("nan")  # the tail is never read
    weights = gate if gated else None
    truth = combine_reference.combine(torch.nan_to_num(y).double(), groups.slot_RK, gate.double() if gated else None)
    plain = combine_reference.combine(torch.nan_to_num(y), groups.slot_RK, weights)
    assert_as_good_as(kernel("combine").combine(y, groups.slot_RK, weights), plain, truth)
    values = torch.randn(4000, device=DEVICE)
    assert torch.equal(
        kernel("combine").collect(values, groups.slot_RK), combine_reference.collect(values, groups.slot_RK)
    )


def test_spread_puts_every_row_in_its_slots():
    expert, gate = routes(1000, 16, 4)
    expert[::5, 2] = -1
    groups = group_reference.group(expert, gate, num_experts=16, num_slots=4000)
    x, used = draw(1000, 384), int(groups.offset_X[-1])
    poison()
    found = kernel("combine").spread(x, groups.slot_RK, num_slots=4000)[:used]
    assert torch.equal(found, x[groups.index_S[:used]])


def test_more_than_2_31_elements():
    """Intermediates whose last rows lie past what 32 bits can number."""
    gemm, ways = kernel("grouped_gemm"), kernel("combine")
    tokens, width, hidden, experts, top_k = 1 << 18, 256, 1280, 8, 4
    x, dout = draw(tokens, width), draw(tokens, width)
    w13, w2 = draw(experts, 2 * hidden, width, scale=0.06), draw(experts, width, hidden, scale=0.03)
    groups = kernel("group").group(*routes(tokens, experts, top_k), num_experts=experts, num_slots=tokens * top_k)
    offset = groups.offset_X
    source, index = gemm.arrange(x, groups.index_S, groups.slot_RK, w13, use="up")
    preact, act = gemm.up(source, w13, index, offset)
    assert preact.numel() > 1 << 31
    y = gemm.down(act, w2, offset)
    source, index = gemm.arrange(dout, groups.index_S, groups.slot_RK, w13, use="dout")
    dpreact, gated, dgate = gemm.gated_backward(source, w2, preact, groups.gate_S, index, offset)
    dx = gemm.dx(dpreact, w13, offset)
    last = slice(tokens * top_k - 256, tokens * top_k)  # of the last expert
    end, rows, gate = torch.tensor([0, 256], device=DEVICE), groups.index_S[last], groups.gate_S[last].double()
    a, b = w13[-1:].double(), w2[-1:].double()
    true_preact, true_act = gemm_reference.up(x[rows].double(), a, None, end)
    truth = gemm_reference.gated_backward(dout[rows].double(), b, true_preact, gate, None, end)
    for found, true in (
        (preact, true_preact),
        (y, gemm_reference.down(true_act, b, end)),
        (dpreact, truth[0]),
        (gated, truth[1]),
        (dgate, truth[2]),
        (dx, gemm_reference.dx(truth[0], a, end)),
    ):
        assert error(found[last], true) < 0.01
    wide = ways.spread(preact[: 1 << 18], groups.slot_RK, num_slots=tokens * top_k)
    assert wide.numel() > 1 << 31
    assert torch.equal(wide[last], preact[rows])
    back = ways.combine(wide, groups.slot_RK, None)
    assert_as_good_as(back[-9:], (4 * preact[tokens - 9 : tokens].float()).bfloat16(), 4 * preact[tokens - 9 : tokens])


ROUTINGS = [
    (64, Routing(top_k=6, scoring="sigmoid", scale=2.446)),
    (256, Routing(top_k=8, scoring="sigmoid", num_groups=8, top_k_groups=4, scale=2.5)),
    (
        160,
        Routing(
            top_k=6, scoring="softmax", num_groups=8, top_k_groups=3, group_score="max", normalize=False, scale=16.0
        ),
    ),
    (5, Routing(top_k=2, scoring="softmax")),
]


@pytest.mark.parametrize(("experts", "routing"), ROUTINGS)
@pytest.mark.parametrize("biased", [True, False])
def test_route_equals_the_reference(experts, routing, biased):
    logits = torch.randn(5001, experts, device=DEVICE)
    bias = torch.randn(experts, device=DEVICE) * 0.1 if biased else None
    expert, gate, load = kernel("route_topk").route(logits, bias, routing)
    true_expert, _, true_load = route_reference.route(logits.double(), None if bias is None else bias.double(), routing)
    same = (expert == true_expert).all(dim=1)
    assert same.float().mean() > 0.998  # choices that are equal to fp32 rounding may fall either way
    assert int((load - true_load).abs().sum()) <= 2 * routing.top_k * int((~same).sum())
    assert int(load.sum()) == 5001 * routing.top_k
    dgate = torch.randn_like(gate)
    found = kernel("route_topk").route_backward(dgate, logits, expert, routing)
    plain = route_reference.route_backward(dgate, logits, expert, routing)
    truth = route_reference.route_backward(dgate.double(), logits.double(), expert, routing)
    assert_as_good_as(found, plain, truth, factor=3.0)


def test_route_gives_ties_to_the_lowest_expert():
    routing = Routing(top_k=3, scoring="sigmoid")
    expert, _, _ = kernel("route_topk").route(torch.zeros(7, 40, device=DEVICE), None, routing)
    assert torch.equal(expert, torch.arange(3, dtype=torch.int32, device=DEVICE).expand(7, 3))


def test_project_keeps_fp32_precision():
    x, weight = draw(3000, 2048), torch.randn(64, 2048, device=DEVICE) * 0.02
    dlogits, other = torch.randn(3000, 64, device=DEVICE), draw(3000, 2048, scale=0.1)
    ours = kernel("route_topk")
    assert error(ours.project(x, weight), x.double() @ weight.double().t()) < 4e-6  # bf16 weights: 2e-3
    exact = dlogits.double().t() @ x.double()
    dx, dweight = ours.project_backward(dlogits, x, weight, other.clone())
    assert error(dweight, exact) < 4e-6
    product = dlogits.double() @ weight.double()
    rounded, truth = other + product.bfloat16(), other.double() + product  # cuBLAS rounds the product, then the sum
    assert_as_good_as(dx, rounded, truth, factor=1.01)  # operands in bf16: 1.33
    half = weight.bfloat16()
    assert error(ours.project(x, half), x.double() @ half.double().t()) < 4e-6
    dx, dweight = ours.project_backward(dlogits, x, half, other.clone())
    product = dlogits.double() @ half.double()
    assert_as_good_as(dx, other + product.bfloat16(), other.double() + product, factor=1.01)
    assert_as_good_as(dweight, exact.bfloat16(), exact)


@pytest.mark.parametrize("width", [64, 1408, 11264])
def test_swiglu_against_fp64(width):
    preact, dact = draw(777, 2 * width, scale=2.0), draw(777, width)
    ours = kernel("swiglu")
    truth = swiglu_reference.forward(preact.double()), swiglu_reference.backward(dact.double(), preact.double())
    assert_as_good_as(ours.forward(preact), swiglu_reference.forward(preact), truth[0])
    assert_as_good_as(ours.backward(dact, preact), swiglu_reference.backward(dact, preact), truth[1])


@pytest.mark.parametrize("width", [512, 2048, 7168])
def test_rms_norm_against_fp64(width):
    x, weight, dy = draw(777, width), torch.randn(width, device=DEVICE), draw(777, width)
    ours = kernel("rms_norm")
    y, rstd = ours.forward(x, weight, eps=1e-6)
    true_y, true_rstd = norm_reference.forward(x.double(), weight.double(), eps=1e-6)
    plain_y, plain_rstd = norm_reference.forward(x, weight, eps=1e-6)
    assert_as_good_as(y, plain_y, true_y)
    assert error(rstd, true_rstd) < 1e-5
    truth = norm_reference.backward(dy.double(), x.double(), weight.double(), true_rstd)
    plain = norm_reference.backward(dy, x, weight, plain_rstd)
    for found, same, true in zip(ours.backward(dy, x, weight, rstd), plain, truth, strict=True):
        assert_as_good_as(found, same, true, factor=1.5)


@pytest.mark.parametrize(("tokens", "heads", "own", "rotated", "values"), [(777, 16, 128, 64, 128), (33, 3, 6, 10, 4)])
def test_joined_heads_against_fp64(tokens, heads, own, rotated, values):
    latent = draw(tokens, 512 + rotated)
    inputs = draw(tokens, heads, own + rotated), draw(tokens, heads, own + values), latent[:, 512:]
    gradients = (draw(tokens, heads, own + rotated), draw(tokens, heads, own + rotated), draw(tokens, heads, values))
    angle = torch.rand(tokens, rotated // 2, device=DEVICE) * 9
    tables, ours = (angle.cos(), angle.sin()), kernel("heads")
    for name, given in (("join", inputs), ("split", gradients)):
        truth = getattr(heads_reference, name)(*(t.double() for t in (*given, *tables)))
        plain = getattr(heads_reference, name)(*given, *tables)
        poison()
        for found, same, true in zip(getattr(ours, name)(*given, *tables), plain, truth, strict=True):
            assert_as_good_as(found, same, true)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_against_fp64(interleaved):
    x = draw(500, 16, 192)
    angle = torch.rand(500, 32, device=DEVICE) * 6
    tables = angle.cos(), angle.sin()
    truth = rope_reference.rotate(x.double(), tables[0].double(), tables[1].double(), interleaved=interleaved)
    plain = rope_reference.rotate(x, *tables, interleaved=interleaved)
    assert_as_good_as(kernel("rope").rotate(x, *tables, interleaved=interleaved), plain, truth)


def _layer(monkeypatch, arch_name: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> dict[str, Tensor]:
    """Results and gradients of a whole layer with fp32 (fp64) master weights and rows of a dtype."""
    tokens, width, hidden, experts, top_k = sizes
    for cached in (arch.current, registry.implementation):
        cached.cache_clear()
    monkeypatch.setenv("NMOE_ARCH", arch_name)
    config = Moe(num_experts=experts, num_shared_experts=0, top_k=top_k, expert_size=hidden)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    with torch.device(DEVICE):
        layer = MoE(hidden_size=width, config=config, comm=Local(DEVICE), shared=None, dtype=wide)
    generator = torch.Generator(device=DEVICE).manual_seed(7)
    with torch.no_grad():
        for parameter in layer.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, device=DEVICE)
            parameter.copy_(drawn * parameter.shape[-1] ** -0.5)
    layer.experts.hold(copies=True)
    x = torch.randn(tokens, width, generator=generator, device=DEVICE).bfloat16().to(dtype).requires_grad_()
    dout = torch.randn(tokens, width, generator=generator, device=DEVICE).bfloat16().to(dtype)
    out = layer(x, 1)[0]
    out.backward(dout)
    assert x.grad is not None
    found = {"out": out.detach(), "x": x.grad} | {
        n: p.grad.clone() for n, p in layer.named_parameters() if p.grad is not None
    }
    layer(x.detach(), 1)[0].backward(dout)  # adds the same once more, in place
    again = {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}
    assert all(torch.equal(again[name], 2 * found[name]) for name in ("experts.w13", "experts.w2"))
    return found


@pytest.mark.parametrize("sizes", [(2048, 512, 320, 16, 4), (4096, 512, 704, 8, 4), (130, 256, 640, 16, 2)])
def test_a_layer_is_as_good_as_plain_torch_in_bf16(monkeypatch, sizes):
    """Outputs and every gradient against fp64: at most 1.2 times the error of the reference in bf16."""
    name = arch.current().name
    truth = _layer(monkeypatch, "reference", torch.float64, sizes)
    plain = _layer(monkeypatch, "reference", torch.bfloat16, sizes)
    found = _layer(monkeypatch, name, torch.bfloat16, sizes)
    for cached in (arch.current, registry.implementation):
        cached.cache_clear()
    assert found.keys() == truth.keys()
    for key, true in truth.items():
        assert_as_good_as(found[key], plain[key], true)


def test_a_graph_of_the_layer_replays_with_other_routings():
    """Captured once: so nothing waits for the device, and no size depends on the routing."""
    gemm, group, combine = kernel("grouped_gemm"), kernel("group"), kernel("combine")
    experts, top_k, tokens, width, hidden = 16, 4, 512, 256, 128
    x, w13, w2 = (
        draw(tokens, width),
        draw(experts, 2 * hidden, width, scale=0.06),
        draw(experts, width, hidden, scale=0.09),
    )
    expert, gate = routes(tokens, experts, top_k)

    def layer() -> Tensor:
        groups = group.group(expert, gate, num_experts=experts, num_slots=tokens * top_k)
        _, act = gemm.up(x, w13, groups.index_S, groups.offset_X)
        return combine.combine(gemm.down(act, w2, groups.offset_X), groups.slot_RK, gate)

    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for used in (None, 5):
        other_expert, other_gate = routes(tokens, experts, top_k, used=used)
        expert.copy_(other_expert)
        gate.copy_(other_gate)
        graph.replay()
        assert torch.equal(out, layer())
