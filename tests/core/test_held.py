# SPDX-License-Identifier: Apache-2.0
"""Held weights of the experts: the same bits as weights that are rounded for every product, after whatever changes them."""

import copy

import pytest
import torch

from nmoe.comm.local import Local
from nmoe.config import Moe, Optim
from nmoe.optim.optimizer import make_optimizer
from nmoe.rdep.held import rounded
from nmoe.rdep.layer import MoE


@pytest.fixture(autouse=True)
def reference_arch(monkeypatch):
    monkeypatch.setenv("NMOE_ARCH", "reference")


def _pair() -> tuple[MoE, MoE]:
    """A layer with held weights, and its double without; fp32 masters."""
    config = Moe(num_experts=4, num_shared_experts=0, top_k=2, expert_size=24)
    layer = MoE(hidden_size=32, config=config, comm=Local(), shared=None, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    double = copy.deepcopy(layer)
    layer.experts.hold(copies=True)
    return layer, double


def _micro_batches(layer: MoE, *, seed: int) -> torch.Tensor:
    """Results of three micro batches in bf16, whose gradients add up."""
    generator = torch.Generator().manual_seed(seed)
    results = []
    for _ in range(3):
        x = torch.randn(50, 32, generator=generator).bfloat16().requires_grad_()
        out = layer(x, 1)[0]
        out.backward(torch.randn(out.shape, generator=generator).to(out.dtype))
        assert x.grad is not None
        results += [out.detach(), x.grad]
    return torch.stack(results)


def _assert_same(layer: MoE, double: MoE, *, seed: int) -> None:
    assert torch.equal(_micro_batches(layer, seed=seed), _micro_batches(double, seed=seed))
    for (name, ours), plain in zip(layer.named_parameters(), double.parameters(), strict=True):
        assert ours.grad is not None
        assert plain.grad is not None
        assert torch.equal(ours.grad, plain.grad), name


@pytest.mark.parametrize("keys", [{}, {"moment_dtype": "bf16"}, {"kind": "muon"}], ids=["adamw", "narrow", "muon"])
def test_held_weights_follow_every_optimizer(keys):
    config = Optim(learning_rate=0.05, **keys)
    layers = _pair()
    optimizers = [
        make_optimizer(layer.named_parameters(), config=config, seed=1, dtype=torch.float32) for layer in layers
    ]
    for step in range(3):
        _assert_same(*layers, seed=step)
        for layer, optimizer in zip(layers, optimizers, strict=True):
            optimizer.step(learning_rate=0.05)
            for parameter in layer.parameters():
                parameter.grad = None


def test_held_weights_follow_a_checkpoint():
    layers = _pair()
    _assert_same(*layers, seed=0)
    for layer in layers:
        for name, tensor in layer.state_dict().items():  # what loading a checkpoint writes into
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
        for parameter in layer.parameters():
            parameter.grad = None
    _assert_same(*layers, seed=1)


def test_a_held_weight_is_rounded_once_a_change_into_one_buffer():
    layer, _ = _pair()
    weight = layer.experts.w13
    first = rounded(weight, torch.bfloat16)
    assert rounded(weight, torch.bfloat16) is first
    with torch.no_grad():
        weight.mul_(2.0)
    assert rounded(weight, torch.bfloat16).data_ptr() == first.data_ptr()
    assert torch.equal(first, weight.bfloat16())
    assert rounded(weight, torch.float32) is weight


def test_gradients_add_up_in_place():
    layer, _ = _pair()
    _micro_batches(layer, seed=0)
    gradient = layer.experts.w13.grad
    assert gradient is not None
    before = gradient.clone()
    _micro_batches(layer, seed=1)
    assert layer.experts.w13.grad is gradient
    assert not torch.equal(gradient, before)
