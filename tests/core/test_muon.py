# SPDX-License-Identifier: Apache-2.0
"""Muon against the singular value decomposition, against PyTorch's own, on shards, and resumed."""

import math
from collections.abc import Mapping

import pytest
import torch

from nmoe.config import Optim
from nmoe.model.params import parameter_shapes
from nmoe.optim.groups import group_of, is_matrix_rule, pace_of
from nmoe.optim.muon import COEFFICIENTS, Muon, join_matrices, orthogonalize, split_matrices
from nmoe.optim.optimizer import make_optimizer

RATE = 1e-2


def random(*shape: int, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def quintic(singular: torch.Tensor, steps: int) -> torch.Tensor:
    """What the iteration does to a singular value."""
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        singular = a * singular + b * singular**3 + c * singular**5
    return singular


@pytest.mark.parametrize("shape", [(4, 20, 50), (4, 50, 20), (1, 16, 16), (3, 1, 9)])
def test_orthogonal_factor_has_the_singular_vectors_of_its_matrix_and_values_near_one(shape):
    matrices = random(*shape) * torch.tensor([1e-6, 1.0, 3.0, 1e6])[: shape[0], None, None]
    found = orthogonalize(matrices, steps=5)
    u, s, vt = torch.linalg.svd(matrices, full_matrices=False)
    inside = u.mT @ found @ vt.mT
    expected = quintic(s / s.square().sum(dim=-1, keepdim=True).sqrt(), 5)
    assert (inside - torch.diag_embed(expected)).abs().max() < 1e-10
    assert (found - u @ inside @ vt).abs().max() < 1e-10, "something outside the span of the matrix"
    significant = expected[s > 0.02 * s.max()]
    assert significant.min() > 0.65
    assert significant.max() < 1.21


def test_orthogonal_factor_of_zeros_is_zeros_and_bf16_stays_near_fp64():
    assert orthogonalize(torch.zeros(2, 3, 4), steps=5).tolist() == torch.zeros(2, 3, 4).tolist()
    wide = random(2, 64, 96)
    narrow = orthogonalize(wide.bfloat16(), steps=5).double()
    expected = orthogonalize(wide, steps=5)
    assert (narrow - expected).norm() < 0.05 * expected.norm()


def test_gate_and_up_are_two_matrices_and_come_back_in_their_places():
    gate, up = random(3, 8, 5, seed=1), random(3, 8, 5, seed=2)
    w13 = torch.stack((gate, up), dim=2).flatten(1, 2)
    found = split_matrices("layers.1.moe.experts.w13", w13)
    assert torch.equal(found, torch.stack((gate, up), dim=1).flatten(0, 1))
    assert torch.equal(join_matrices("layers.1.moe.experts.w13", found, w13), w13)
    assert torch.equal(join_matrices("mlp.w2", split_matrices("mlp.w2", gate), gate), gate)


def run(named: dict[str, torch.nn.Parameter], optimizer, steps: int, *, first: int = 0) -> None:
    for step in range(first, first + steps):
        for number, parameter in enumerate(named.values()):
            parameter.grad = random(*parameter.shape, seed=100 * step + number).to(parameter.dtype)
        optimizer.step(learning_rate=RATE)


SHAPES = {"layers.0.mlp.w13": (48, 20), "layers.0.mlp.w2": (20, 24), "layers.1.moe.experts.w2": (3, 20, 12)}


def parameters(dtype=torch.float32) -> dict[str, torch.nn.Parameter]:
    return {
        name: torch.nn.Parameter(random(*shape, seed=i, dtype=dtype)) for i, (name, shape) in enumerate(SHAPES.items())
    }


def test_muon_takes_the_steps_of_pytorchs_own():
    """Theirs computes in bf16, one matrix at a time, gate and up apart; so does the check here."""
    ours = parameters()
    apart = {
        f"{name}/{i}": torch.nn.Parameter(matrix.detach().clone())
        for name, p in ours.items()
        for i, matrix in enumerate(split_matrices(name, p))
    }
    start = {name: p.detach().clone() for name, p in apart.items()}
    config = Optim(learning_rate=RATE, kind="muon", weight_decay=0.3)
    optimizer = Muon(ours.items(), config=config, seed=0, dtype=torch.bfloat16)
    reference = torch.optim.Muon(apart.values(), lr=RATE, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    for step in range(6):
        for number, (name, p) in enumerate(ours.items()):
            p.grad = random(*p.shape, seed=10 * step + number, dtype=torch.float32)
            for i, matrix in enumerate(split_matrices(name, p.grad)):
                apart[f"{name}/{i}"].grad = matrix.clone()
        optimizer.step(learning_rate=RATE)
        reference.step()
    for name, p in ours.items():
        for i, matrix in enumerate(split_matrices(name, p)):
            theirs, began = apart[f"{name}/{i}"], start[f"{name}/{i}"]
            assert (matrix - theirs).norm() < 0.02 * (theirs - began).norm(), name


def test_update_of_muon_has_the_size_of_adamws():
    parameter = torch.nn.Parameter(torch.zeros(96, 160))
    config = Optim(learning_rate=RATE, kind="muon", weight_decay=0.0)
    optimizer = Muon([("w", parameter)], config=config, seed=0, dtype=torch.float32)
    parameter.grad = random(96, 160, dtype=torch.float32)
    optimizer.step(learning_rate=RATE)
    # sqrt(min) singular values near 1 on rows * columns entries, times 0.2 sqrt(max): 0.2 in the root mean square.
    assert float(parameter.detach().square().mean().sqrt()) == pytest.approx(0.2 * RATE, rel=0.15)


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_muon_resumed_in_the_middle_gives_the_same_bits(moments):
    config = Optim(learning_rate=RATE, kind="muon", moment_dtype=moments)

    def build(values: Mapping[str, torch.Tensor]):
        named = {name: torch.nn.Parameter(value.detach().clone()) for name, value in values.items()}
        return named, make_optimizer(named.items(), config=config, seed=3, dtype=torch.float32)

    values = {**parameters(), "embed": random(30, 20, dtype=torch.float32), "norm.weight": torch.ones(20)}
    whole, optimizer = build(values)
    run(whole, optimizer, 3)
    saved = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    assert {name.rpartition(".")[2] for name in saved} == {"momentum", "first", "second"}
    assert all(tensor.dtype == (torch.bfloat16 if moments == "bf16" else torch.float32) for tensor in saved.values())
    resumed, second = build(whole)
    second.num_updates = optimizer.num_updates
    for name, moment in second.state().items():
        moment.copy_(saved[name])
    run(whole, optimizer, 3, first=3)
    run(resumed, second, 3, first=3)
    for name, p in whole.items():
        assert torch.equal(p, resumed[name]), name
    assert second.num_updates == 6


def test_every_parameter_has_its_group_rule_and_pace(tiny):
    config = tiny("model.mtp_depth=1", "model.num_layers=2").optim
    groups: dict[str, set[str]] = {}
    for name, shape in parameter_shapes(tiny("model.mtp_depth=1")).items():
        groups.setdefault(group_of(name), set()).add(name)
        assert is_matrix_rule(name, len(shape)) == (len(shape) > 1 and group_of(name) in ("dense", "expert"))
    assert groups["embedding"] == {"embed", "head"}
    assert groups["router"] == {"layers.1.moe.router.weight", "mtp.0.block.moe.router.weight"}
    assert groups["expert"] == {f"{b}.moe.experts.{w}" for b in ("layers.1", "mtp.0.block") for w in ("w13", "w2")}
    assert pace_of("norm.weight", 1, config=config).decay == 0.0
    assert pace_of("norm.weight", 1, config=Optim(learning_rate=1.0, norm_decay=2.0)).decay == pytest.approx(0.2)
    changed = Optim(learning_rate=1.0, weight_decay=0.5, router_rate=3.0, router_decay=0.1)
    pace = pace_of("layers.1.moe.router.weight", 2, config=changed)
    assert (pace.rate, pace.decay) == (3.0, pytest.approx(0.05))


def test_paces_are_what_the_update_uses():
    """At a gradient of zero, decay alone moves a value: by rate times decay."""
    named = {
        name: torch.nn.Parameter(torch.ones(4, 4))
        for name in ("embed", "layers.1.moe.router.weight", "layers.1.moe.experts.w2", "layers.0.mlp.w2")
    }
    factors = {"embedding_rate": 2.0, "router_decay": 3.0, "expert_rate": 0.5, "expert_decay": 4.0}
    for kind in ("adamw", "muon"):
        config = Optim(learning_rate=1.0, kind=kind, weight_decay=0.1, **factors)  # type: ignore[arg-type]
        optimizer = make_optimizer(named.items(), config=config, seed=0, dtype=torch.float32)
        for p in named.values():
            p.data.fill_(1.0)
            p.grad = torch.zeros_like(p)
        optimizer.step(learning_rate=1e-2)
        found = [math.log1p(float(p.detach()[0, 0]) - 1.0) for p in named.values()]
        assert found == pytest.approx([-2e-3, -3e-3, -2e-3, -1e-3], rel=1e-2), kind
