# SPDX-License-Identifier: Apache-2.0
"""The MoE layer against plain autograd: outputs, every gradient, what it saves, and the edges of routing."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nmoe.comm.local import Local
from nmoe.config import Moe
from nmoe.errors import ConfigError
from nmoe.model.mlp import MLP
from nmoe.ops import registry
from nmoe.rdep.exchange import owned_experts
from nmoe.rdep.layer import MoE
from nmoe.rdep.one_rank import ExpertsHere

D, F_, E = 12, 10, 6


@pytest.fixture(autouse=True)
def reference_arch(monkeypatch):
    monkeypatch.setenv("NMOE_ARCH", "reference")


def _moe(*, dtype: torch.dtype = torch.float64, seed: int = 0, shared: bool = False, **keys) -> MoE:
    config = Moe(
        **{"num_experts": E, "num_shared_experts": 0, "top_k": 3, "expert_size": F_, "route_scale": 2.5} | keys
    )
    net = MLP(hidden_size=D, ffn_size=F_, dtype=dtype) if shared else None
    layer = MoE(hidden_size=D, config=config, comm=Local(), shared=net, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
        if layer.router.bias is not None:
            layer.router.bias.copy_(torch.randn(E, generator=generator, dtype=torch.float64) * 0.2)
    return layer


def _rows(tokens: int, *, dtype: torch.dtype = torch.float64) -> Tensor:
    x = torch.randn(tokens, D, generator=torch.Generator().manual_seed(tokens), dtype=torch.float64)
    return x.to(dtype).requires_grad_()


def _bias(layer: MoE) -> Tensor:
    assert layer.router.bias is not None
    return layer.router.bias


def _plain(layer: MoE, x: Tensor) -> Tensor:
    """Every expert on every token, weighted by a dense matrix of gates."""
    routing = layer.router.routing
    logits = x @ layer.router.weight.t()
    score = torch.sigmoid(logits) if routing.scoring == "sigmoid" else torch.softmax(logits, -1)
    choice = score if layer.router.bias is None else score + layer.router.bias
    chosen = torch.zeros_like(score).scatter(1, choice.topk(routing.top_k).indices, 1.0)
    gate = score * chosen
    if routing.normalize:
        gate = gate / gate.sum(-1, keepdim=True)
    gate = gate * routing.scale
    out = torch.zeros_like(x)
    for e in range(E):
        w1, w3 = layer.experts.w13[e, 0::2], layer.experts.w13[e, 1::2]
        out = out + gate[:, e : e + 1] * ((F.silu(x @ w1.t()) * (x @ w3.t())) @ layer.experts.w2[e].t())
    if isinstance(layer.shared, MLP):
        w1, w3 = layer.shared.w13[0::2], layer.shared.w13[1::2]
        out = out + (F.silu(x @ w1.t()) * (x @ w3.t())) @ layer.shared.w2.t()
    return out


def _gradients(out: Tensor, *leaves: Tensor) -> list[Tensor]:
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(out.dtype)
    return [*torch.autograd.grad((out * direction).sum(), leaves)]


@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"top_k": 1, "normalize_gates": False},
        {"top_k": E, "scoring": "softmax"},
        {"scoring": "softmax", "normalize_gates": False, "selection_bias": False},
        {"shared": True},
    ],
    ids=["sigmoid", "one", "all", "softmax_plain", "shared"],
)
def test_moe_gradients_match_plain_autograd(keys, tokens):
    layer, x = _moe(**keys), _rows(tokens)
    leaves = (x, *layer.parameters())
    out, _, load = layer(x, 1)
    expected = _plain(layer, x)
    assert load.sum() == tokens * layer.router.routing.top_k
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-11)
    for ours, plain in zip(_gradients(out, *leaves), _gradients(expected, *leaves), strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-11, rtol=1e-10)


def test_moe_of_no_tokens_has_zero_gradients():
    layer, x = _moe(shared=True), _rows(0)
    out, aux, load = layer(x, 1)
    assert out.shape == (0, D)
    assert aux.tolist() == [0, 0]
    assert load.tolist() == [0] * E
    assert all(
        (g == 0).all()
        for g in torch.autograd.grad(out.sum(), [*layer.parameters()], allow_unused=True)
        if g is not None
    )


@pytest.mark.parametrize("busy", [[0, 1, 2], [1, 3, 5]])
def test_experts_without_tokens_have_exactly_zero_gradients(busy):
    layer, x = _moe(), _rows(33)
    with torch.no_grad():
        _bias(layer).fill_(-9.0)[busy] = 9.0
    # Fill memory with NaN and free it, so that a gradient left unwritten would show.
    poison = [torch.full_like(p, float("nan")) for p in layer.parameters() for _ in range(4)]
    del poison
    out, _, load = layer(x, 1)
    dw13, dw2 = _gradients(out, layer.experts.w13, layer.experts.w2)
    idle = [e for e in range(E) if e not in busy]
    assert load[busy].tolist() == [33] * 3
    for gradient in (dw13, dw2):
        assert (gradient[idle] == 0).all()
        assert gradient[busy].abs().sum(dim=(1, 2)).min() > 0
        assert gradient.isfinite().all()


def test_moe_saves_rows_preactivations_and_metadata_only():
    layer, x = _moe(dtype=torch.float32), _rows(64, dtype=torch.bfloat16)
    routes = layer.router(x, 1)
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in weights:
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        ExpertsHere.apply(x, routes.gate_TK, layer.experts.w13, layer.experts.w2, routes.expert_TK)
    slots = 64 * 3
    rows, preact, metadata = 64 * D * 2, slots * 2 * F_ * 2, slots * 3 * 4 + (E + 1) * 4
    assert sum(saved.values()) == rows + preact + metadata


def test_moe_is_bit_identical_from_run_to_run():
    layer, x = _moe(dtype=torch.float32, shared=True), _rows(501, dtype=torch.float32)
    runs = []
    for _ in range(2):
        out, aux, _ = layer(x, 1)
        runs.append([out.detach(), aux, *_gradients(out, x, *layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_moe_in_bf16_keeps_weight_gradients_in_master_precision():
    layer, x = _moe(dtype=torch.float32), _rows(257, dtype=torch.bfloat16)
    exact = _moe(dtype=torch.float64)
    leaves, exact_leaves = ([m.experts.w13, m.experts.w2] for m in (layer, exact))
    ours = _gradients(layer(x, 1)[0], *leaves)
    truth = _gradients(exact(x.detach().double(), 1)[0], *exact_leaves)
    for a, b in zip(ours, truth, strict=True):
        assert a.dtype == torch.float32
        assert not torch.equal(a, a.bfloat16().float())  # never rounded to bf16 on the way
        assert (a.double() - b).norm() / b.norm() < 0.01


def test_router_loss_gradients_match_the_papers():
    layer, x = _moe(balance_loss=0.7, z_loss=0.03), _rows(24)
    _, aux, _ = layer(x, 3)

    def plain():
        logits = x @ layer.router.weight.t()
        z_loss, balance = 0.03 * torch.logsumexp(logits, -1).square().sum(), logits.new_zeros(())
        for row in logits.view(3, 8, E):
            score = torch.sigmoid(row)
            chosen = torch.zeros_like(score).scatter(1, (score + _bias(layer)).topk(3).indices, 1.0)
            fraction = chosen.sum(0) * E / (3 * 8)
            balance = balance + 0.7 * 8 * (fraction * (score / score.sum(-1, keepdim=True)).mean(0)).sum()
        return torch.stack([balance, z_loss])

    torch.testing.assert_close(aux, plain())
    leaves = (x, layer.router.weight)
    for a, b in zip(_gradients(aux, *leaves), _gradients(plain(), *leaves), strict=True):
        torch.testing.assert_close(a, b)


def test_router_bias_moves_towards_an_even_load():
    layer = _moe()
    before = _bias(layer).clone()
    layer.router.update_bias(torch.tensor([4, 0, 2, 2, 3, 1]), 0.125)
    assert ((_bias(layer) - before) / 0.125).round(decimals=6).tolist() == [-1, 1, 0, 0, -1, 1]
    assert _bias(layer).requires_grad is False
    plain = _moe(selection_bias=False).router
    plain.update_bias(torch.tensor([4, 0, 2, 2, 3, 1]), 0.125)
    assert plain.bias is None


def test_router_of_zero_rate_leaves_the_load_alone():
    layer = _moe()
    before = _bias(layer).clone()
    layer.router.update_bias(torch.arange(E), 0.0)
    assert torch.equal(_bias(layer), before)


def test_local_communicator_is_its_own_peer():
    comm = Local()
    buffer = comm.symmetric("rows", nbytes=64)
    (own,) = buffer.peers
    assert own is not None
    own[:] = 7
    assert comm.symmetric("rows", nbytes=64).local.tolist() == [7] * 64
    with pytest.raises(ValueError, match="64 bytes, not 65"):
        comm.symmetric("rows", nbytes=65)
    comm.barrier()
    comm.close()
    assert comm.symmetric("rows", nbytes=65).local.sum() == 0


def test_experts_are_owned_in_blocks():
    class Third(Local):
        rank, size = 2, 3

    assert owned_experts(6, Third()) == range(4, 6)
    with pytest.raises(ConfigError, match="num_experts = 8 is not divisible by the 3"):
        owned_experts(8, Third())


def test_layer_asks_the_registry_for_every_op(monkeypatch):
    asked = []
    real = registry.implementation
    for op in ("group", "grouped_gemm", "combine", "route_topk"):
        monkeypatch.setattr(f"nmoe.ops.{op}.implementation", lambda name: asked.append(name) or real(name))
    layer, x = _moe(), _rows(8)
    layer(x, 1)[0].sum().backward()
    assert set(asked) == {"group", "grouped_gemm", "combine", "route_topk"}
