# SPDX-License-Identifier: Apache-2.0
"""Muon on matrices whose rows lie on several ranks."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from nmoe.config import Optim
from nmoe.optim.muon import Muon

RATE = 1e-2
SHAPES = {"layers.0.mlp.w13": (48, 20), "layers.0.mlp.w2": (19, 24), "layers.1.moe.experts.w13": (3, 20, 12)}


def values(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def compare() -> None:
    """The work of one rank: whole matrices and its shards of them take the same steps."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    config = Optim(learning_rate=RATE, kind="muon")
    whole = {name: torch.nn.Parameter(value) for name, value in values(0).items()}
    sharded = {name: torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for name, p in whole.items()}
    optimizers = [Muon(x.items(), config=config, seed=0, dtype=torch.float64) for x in (whole, sharded)]
    for step in range(1, 4):
        for name, gradient in values(step).items():
            whole[name].grad, sharded[name].grad = gradient, distribute_tensor(gradient, mesh, [Shard(0)])
        for optimizer in optimizers:
            optimizer.step(learning_rate=RATE)
    for name, p in whole.items():
        part = sharded[name].data
        assert isinstance(part, DTensor)
        assert part.to_local().shape[0] < p.shape[0], name
        if p.ndim == 2:
            assert torch.equal(part.full_tensor(), p), name
        else:  # each rank multiplies its own matrices: another batch, another order of sums
            assert (part.full_tensor() - p).abs().max() < 1e-13, name


@pytest.mark.parametrize("ranks", [2, 3])
def test_muon_on_shards_takes_the_steps_of_muon_on_whole_matrices(ranks):
    """Of three ranks one has no matrix to make the factor of."""
    run_ranks(ranks, compare)
