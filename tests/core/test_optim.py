# SPDX-License-Identifier: Apache-2.0
"""AdamW against PyTorch's, stochastic rounding and scaled gradients."""

import math

import pytest
import torch

from nmoe.config import Optim
from nmoe.ops.adamw.rounding import noise, round_up_at_random
from nmoe.optim.adamw import AdamW
from nmoe.optim.clip import clip_scale, gradient_norm
from nmoe.optim.noise import noise_key
from nmoe.optim.optimizer import make_optimizer
from nmoe.pieces import Piece


def parameters(dtype=torch.float32) -> list[tuple[str, torch.nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (20, 30), "experts": (3, 8, 5), "norm.weight": (30,)}
    return [
        (name, torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)))
        for name, shape in shapes.items()
    ]


def train(optimizer: AdamW, named, steps: int, *, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for _, parameter in named:
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        optimizer.step(learning_rate=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adamw_is_that_of_torch_with_decay_on_matrices_alone(dtype):
    ours, theirs = parameters(dtype), parameters(dtype)
    matrices = [p for _, p in theirs if p.ndim >= 2]
    vectors = [p for _, p in theirs if p.ndim < 2]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    optimizer = AdamW(ours, config=Optim(learning_rate=1e-2), seed=0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(30):
        for (_, a), (_, b) in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator, dtype=dtype)
            b.grad = a.grad.clone()
        optimizer.step(learning_rate=1e-2)
        reference.step()
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    for (name, a), (_, b) in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() < tolerance, name


def test_adamw_with_bf16_moments_stays_near_fp32_moments():
    narrow, wide = parameters(), parameters()
    start = [p.detach().clone() for _, p in narrow]
    train(AdamW(narrow, config=Optim(learning_rate=1e-2, moment_dtype="bf16"), seed=0), narrow, 40)
    train(AdamW(wide, config=Optim(learning_rate=1e-2), seed=0), wide, 40)
    for (_, a), (_, b), begin in zip(narrow, wide, start, strict=True):
        assert (a - b).norm() < 0.02 * (b - begin).norm()
        assert not torch.equal(a, b)


def test_adamw_with_bf16_moments_follows_a_second_moment_that_changes_by_less_than_a_rounding_step():
    parameter = torch.nn.Parameter(torch.zeros(4000, 1))
    config = Optim(learning_rate=1e-3, betas=(0.9, 0.9995), moment_dtype="bf16")
    optimizer = AdamW([("w", parameter)], config=config, seed=0)
    for _ in range(2000):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step(learning_rate=0.0)
    second = optimizer.state()["w.second"].float().mean()
    assert second == pytest.approx(1 - 0.9995**2000, rel=0.02)


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_adamw_resumed_in_the_middle_gives_the_same_bits(moments):
    config = Optim(learning_rate=1e-2, moment_dtype=moments)
    whole = parameters()
    optimizer = AdamW(whole, config=config, seed=5)
    train(optimizer, whole, 3)
    saved = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    resumed = [(name, torch.nn.Parameter(p.detach().clone())) for name, p in whole]
    train(optimizer, whole, 3, seed=2)
    second = AdamW(resumed, config=config, seed=5)
    second.num_updates = 3
    for name, moment in second.state().items():
        moment.copy_(saved[name])
    train(second, resumed, 3, seed=2)
    for (_, a), (_, b) in zip(whole, resumed, strict=True):
        assert torch.equal(a, b)


def test_adamw_moves_a_master_value_by_less_than_bf16_could_hold():
    parameter = torch.nn.Parameter(torch.ones(10))
    optimizer = AdamW([("norm.weight", parameter)], config=Optim(learning_rate=1e-4), seed=0)
    parameter.grad = torch.ones(10)
    optimizer.step(learning_rate=1e-4)
    assert torch.allclose(parameter, torch.full((10,), 1 - 1e-4), atol=1e-6)
    assert torch.equal(parameter.bfloat16(), torch.ones(10).bfloat16())


def test_stochastic_rounding_keeps_the_mean_and_special_values():
    value = 1.0 + 0.3 / 128
    bits = noise(3, offset=0, count=200_000, device=torch.device("cpu"))
    rounded = round_up_at_random(torch.full((200_000,), value), bits).float()
    assert set(rounded.unique().tolist()) == {1.0, 1.0 + 1 / 128}
    assert float(rounded.double().mean()) == pytest.approx(value, abs=5e-5)
    special = torch.tensor([0.0, -2.0, math.inf, -math.inf, math.nan])
    kept = round_up_at_random(special, bits[:5]).float()
    assert torch.equal(kept[:4], special[:4])
    assert kept[4].isnan()


def mixed(bits: int) -> int:
    """The hash in whole numbers, as its author writes it."""
    bits ^= bits >> 16
    bits = bits * 0x7FEB352D % (1 << 32)
    bits ^= bits >> 15
    bits = bits * 0x846CA68B % (1 << 32)
    return bits ^ bits >> 16


def test_noise_is_the_hash_of_key_and_place_however_the_places_are_cut():
    key, first, device = 0xFEDCBA98_76543210, (5 << 32) - 3, torch.device("cpu")  # across a boundary of 32 bits
    whole = noise(key, offset=first, count=6, device=device)
    expected = [
        mixed(mixed(place % (1 << 32) ^ 0x76543210) ^ place >> 32 ^ 0xFEDCBA98) for place in range(first, first + 6)
    ]
    assert [bits % (1 << 32) for bits in whole.tolist()] == expected
    assert torch.equal(noise(key, offset=first + 2, count=3, device=device), whole[2:5])


def test_noise_has_no_bias_and_no_memory_of_place_update_moment_or_name():
    keys = [noise_key(7, update=update, name=name) for update in (1, 2) for name in ("a", "b")]
    drawn = [noise(key, offset=0, count=1 << 16, device=torch.device("cpu")) for key in keys]
    halves = torch.stack([half.double() for bits in drawn for half in (bits & 0xFFFF, bits >> 16 & 0xFFFF)])
    rows = torch.cat([halves, halves.roll(1, dims=1)]) / 65536 - 0.5
    rows = rows * math.sqrt(12.0)
    error = 1.0 / math.sqrt(1 << 16)
    assert rows.mean(dim=1).abs().max() < 4.5 * error
    gram = rows @ rows.T / (1 << 16) - torch.eye(len(rows))
    assert gram.fill_diagonal_(0.0).abs().max() < 4.5 * error


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_bf16_moments_of_rows_on_several_ranks_are_the_bits_of_the_whole(kind):
    """Equal gradients give equal moments, wherever the rows are: also on ranks without any."""
    whole, generator = parameters(), torch.Generator().manual_seed(1)
    config = Optim(learning_rate=1e-2, kind=kind, moment_dtype="bf16")
    cuts = {"matrix": (0, 7, 7 if kind == "adamw" else 9, 20), "experts": (0, 1, 2, 3), "norm.weight": (0, 10, 20, 30)}
    ranks, optimizers = [], []
    for rank in range(3):
        rows = {name: slice(*cuts[name][rank : rank + 2]) for name, _ in whole}
        ranks.append([(name, torch.nn.Parameter(p.detach()[rows[name]].clone())) for name, p in whole])
        pieces = {
            name: Piece(tensor=mine, shape=tuple(p.shape), start=rows[name].start)
            for (name, p), (_, mine) in zip(whole, ranks[-1], strict=True)
        }
        optimizers.append(make_optimizer(ranks[-1], config=config, seed=5, dtype=torch.float32, pieces=pieces))
    optimizer = make_optimizer(whole, config=config, seed=5, dtype=torch.float32)
    for _ in range(3):
        for number, (name, p) in enumerate(whole):
            p.grad = torch.randn(p.shape, generator=generator)
            for rank, mine in enumerate(ranks):
                mine[number][1].grad = p.grad[slice(*cuts[name][rank : rank + 2])].clone()
        for each in (optimizer, *optimizers):
            each.step(learning_rate=1e-2)
    for name, moment in optimizer.state().items():
        assert moment.dtype == torch.bfloat16
        assert torch.equal(torch.cat([each.state()[name] for each in optimizers]), moment), name
    if kind == "adamw":
        for number, (name, p) in enumerate(whole):
            assert torch.equal(torch.cat([mine[number][1] for mine in ranks]), p), name


def test_gradient_norm_is_that_of_all_gradients_and_clipping_brings_it_to_the_limit():
    norm = float(gradient_norm([torch.full((3,), 2.0), torch.full((1, 4), 1.0)]))
    assert norm == pytest.approx(4.0)
    assert [clip_scale(norm, limit=limit) for limit in (0.0, 1.0, 4.0, 8.0)] == [1.0, 0.25, 1.0, 1.0]


@pytest.mark.parametrize(("kind", "moments"), [("adamw", "fp32"), ("adamw", "bf16"), ("muon", "fp32")])
def test_an_update_scales_its_gradients(kind, moments):
    generator, config = torch.Generator().manual_seed(1), Optim(learning_rate=1e-2, kind=kind, moment_dtype=moments)
    scaled, plain = parameters(), parameters()
    for named, factor in ((scaled, 0.3), (plain, 1.0)):
        generator.manual_seed(1)
        optimizer = make_optimizer(named, config=config, seed=0, dtype=torch.float32)
        for _ in range(3):
            for _, parameter in named:
                parameter.grad = torch.randn(parameter.shape, generator=generator) * (0.3 if factor == 1.0 else 1.0)
            optimizer.step(learning_rate=1e-2, scale=factor)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(scaled, plain, strict=True))
