# SPDX-License-Identifier: Apache-2.0
"""The same training, however it is split over ranks: losses, gradient norms, loads and weights.

12 steps of each layout, or as many as NMOE_LAYOUT_STEPS says: 300 of all layouts took five minutes on two busy cores.
"""

import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # here, once: a device mesh imports it, seconds in every rank
from ranks import run_ranks

from nmoe.config import Config, parse_config
from nmoe.data.builtin import make_python_docs
from nmoe.data.loader import Loader
from nmoe.data.sources import open_train, open_val
from nmoe.model.functional import Norm
from nmoe.rdep.router import Router
from nmoe.train import setup
from nmoe.train.evaluate import held_out_loss
from nmoe.train.loop import train_step
from nmoe.train.ranks import join_ranks
from nmoe.train.setup import build

# Everything that could count a token twice or not at all: balance and z-losses, selection bias, further tokens, norms.
TINY = """
model = {vocab_size = 257, hidden_size = 16, num_layers = 2, num_dense_layers = 1, ffn_size = 24, mtp_depth = 1}
attention = {num_heads = 2, kv_lora_rank = 8, qk_nope_head_dim = 8, qk_rope_head_dim = 4, v_head_dim = 8}
moe = {num_experts = 4, num_shared_experts = 1, top_k = 2, expert_size = 16, balance_loss = 0.01, z_loss = 0.01}
data = {train = ["DATA/train"], val = ["DATA/val", "DATA/train"], seq_len = 16}
train = {steps = 1000, batch_size = 8, micro_batch_size = 4, dtype = "fp64", z_loss = 0.001}
optim = {learning_rate = 1e-3}
schedule = {warmup_steps = 3, decay_steps = 10}
checkpoint = {every = 1000}
"""
Configure = Callable[..., Config]
STEPS = int(os.environ.get("NMOE_LAYOUT_STEPS", "12"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Configure:
    data: Path = make_python_docs(tmp_path_factory.mktemp("python-docs"))
    text = TINY.replace("DATA", str(data))
    return lambda *overrides: parse_config(text, where="tiny.toml", name="tiny", overrides=overrides)


def train(config: Config, steps: int) -> dict[str, Any]:
    """What each of `steps` steps reported on this rank, and the rows of the model that it holds in the end."""
    ranks = join_ranks(config, torch.device("cpu"))
    sets, weights = open_train(config)
    parts = build(config, ranks)
    figures, loads = [], []
    with Loader.of(config, sets, weights, rank=ranks.rank, num_ranks=ranks.size) as loader:
        for batch in itertools.islice(loader, steps):
            result = train_step(parts, batch, config=config)
            losses = (result.loss, result.balance_loss, result.router_z_loss, result.z_loss, result.mtp_loss)
            figures.append((*losses, result.grad_norm))
            loads.append(result.load_LE)
            assert result.received_LR.shape == (2, ranks.size)
            assert (result.received_LR.sum(axis=1) == result.load_LE.sum(axis=1)).all()
    rows = replace(config.train, eval_batches=24 // config.train.micro_batch_size)  # the same rows in all layouts
    val = open_val(config, like=sets[0])
    held_out = held_out_loss(parts.model, val, config=replace(config, train=rows), ranks=ranks, tick=lambda: None)
    held = {name: (piece.start, piece.shape, piece.tensor.clone()) for name, piece in parts.pieces.items()}
    ranks.part()
    parts.comm.close()
    found = np.array([held_out.loss, held_out.loss_per_byte, *held_out.by_source.values()])
    facts = {"figures": np.array(figures), "loads": np.array(loads), "held": held, "held_out": found}
    kept = [vars(parameter)["held"].copies for parameter in parts.model.parameters() if hasattr(parameter, "held")]
    return facts | {"exchange": type(parts.exchange).__name__, "copies": sum(len(by_dtype or ()) for by_dtype in kept)}


def joined(results: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The model's tensors, made of the rows that the ranks hold; each row is somewhere, and where twice, it is equal."""
    tensors = {}
    for name, (_, shape, rows) in results[0]["held"].items():
        whole, seen = torch.empty(shape, dtype=rows.dtype), torch.zeros(shape[0], dtype=torch.bool)
        for start, _, rows in (result["held"][name] for result in results):
            end = start + len(rows)
            assert not seen[start:end].any() or torch.equal(whole[start:end], rows), name
            whole[start:end], seen[start:end] = rows, True
        assert seen.all(), name
        tensors[name] = whole
    return tensors


@pytest.fixture(scope="module")
def alone(tiny) -> dict[str, Any]:
    """The steps of one rank that takes each batch at once."""
    return run_ranks(1, train, tiny("train.micro_batch_size=8"), STEPS)[0]


# (ranks, expert ranks, rows of a micro batch, parallel.gather)
LAYOUTS = [
    (1, 1, 4, "layer"),
    (2, 1, 4, "layer"),
    (2, 1, 2, "step"),
    (3, 1, 1, "step"),  # a filler: 8 rows are 3 + 3 + 2
    (2, 2, 4, "layer"),
    (2, 2, 2, "step"),
    (4, 1, 2, "layer"),
    (4, 2, 1, "layer"),
    (4, 2, 2, "step"),
    (4, 4, 2, "layer"),
    (4, 4, 1, "layer"),
]


@pytest.mark.parametrize(("size", "experts", "micro", "gather"), LAYOUTS, ids=lambda value: str(value))
def test_losses_norms_loads_and_weights_do_not_depend_on_the_layout(tiny, alone, size, experts, micro, gather):
    config = tiny(f"parallel.ep={experts}", f"train.micro_batch_size={micro}", f'parallel.gather="{gather}"')
    results = run_ranks(size, train, config, STEPS, timeout_s=2.0 * STEPS + 240.0)
    for result in results:
        np.testing.assert_array_equal(result["figures"], results[0]["figures"], err_msg="ranks see one step")
        np.testing.assert_allclose(result["figures"], alone["figures"], rtol=1e-9)
        np.testing.assert_array_equal(result["loads"], alone["loads"])
        np.testing.assert_array_equal(result["held_out"], results[0]["held_out"])
        np.testing.assert_allclose(result["held_out"], alone["held_out"], rtol=1e-9)
    for name, values in joined([alone]).items():
        torch.testing.assert_close(joined(results)[name], values, rtol=0, atol=1e-9)


@pytest.fixture(scope="module")
def alone_in_fp32(tiny) -> dict[str, Any]:
    return run_ranks(1, train, tiny("train.dtype=fp32", "train.micro_batch_size=8"), 30)[0]


@pytest.mark.parametrize(("size", "experts", "micro"), [(2, 1, 2), (2, 2, 2), (4, 2, 1), (4, 4, 2)])
def test_losses_and_norms_of_fp32_differ_by_rounding(tiny, alone_in_fp32, size, experts, micro):
    config = tiny("train.dtype=fp32", f"parallel.ep={experts}", f"train.micro_batch_size={micro}")
    found = run_ranks(size, train, config, 30)[0]
    np.testing.assert_allclose(found["figures"], alone_in_fp32["figures"], rtol=1e-5)


@pytest.mark.parametrize(("size", "experts", "micro", "gather"), [(2, 2, 4, "layer"), (4, 2, 2, "step")])
def test_bf16_differs_by_its_rounding(tiny, size, experts, micro, gather):
    """Found: losses 2e-5 apart, norms 6e-4."""
    alone = run_ranks(1, train, tiny("train.dtype=bf16", "train.micro_batch_size=8"), 4)[0]
    changes = (f"parallel.ep={experts}", f"train.micro_batch_size={micro}", f'parallel.gather="{gather}"')
    figures = run_ranks(size, train, tiny("train.dtype=bf16", *changes), 4)[0]["figures"]
    np.testing.assert_allclose(figures[0, :-1], alone["figures"][0, :-1], rtol=2e-6)
    np.testing.assert_allclose(figures[:, :-1], alone["figures"][:, :-1], rtol=1e-4)
    np.testing.assert_allclose(figures[:, -1], alone["figures"][:, -1], rtol=1e-3)


@pytest.mark.parametrize("gather", ["layer", "step"])
def test_norms_and_routers_are_not_rounded_on_the_way(tiny, gather):
    """A norm begins as ones, which bf16 holds: so each weight is moved a little, and what a layer computes with is that."""
    config = tiny("train.dtype=bf16", "parallel.ep=2", "train.micro_batch_size=2", f'parallel.gather="{gather}"')
    results = run_ranks(2, weights_in_use, config)
    masters = joined(results)
    for result in results:
        assert result["used"].keys() == masters.keys()
        for name, used in result["used"].items():
            assert (masters[name] != masters[name].bfloat16()).any(), name
            assert torch.equal(used, masters[name]), name


def weights_in_use(config: Config) -> dict[str, Any]:
    """Of norms and routers, in a step: the rows that this rank holds, and the weights that it computes with."""
    ranks = join_ranks(config, torch.device("cpu"))
    sets, weights = open_train(config)
    parts, held, used = build(config, ranks), {}, {}

    def keep(key: str, module: torch.nn.Module, _: object) -> None:
        assert isinstance(module.weight, torch.Tensor)
        used[key] = module.weight.detach().clone()

    for name, module in parts.model.named_modules():
        if isinstance(module, Norm | Router):
            key = f"{name}.weight"
            piece = parts.pieces[key]
            with torch.no_grad():
                piece.tensor.add_(1e-3 * torch.rand_like(piece.tensor))
            held[key] = (piece.start, piece.shape, piece.tensor.clone())
            module.register_forward_pre_hook(partial(keep, key))
    with Loader.of(config, sets, weights, rank=ranks.rank, num_ranks=ranks.size) as loader:
        train_step(parts, next(loader), config=config)
    ranks.part()
    parts.comm.close()
    return {"held": held, "used": used}


def test_experts_that_are_kept_rounded_are_never_stale(tiny, monkeypatch):
    """As on a GPU with room for them: ranks that share the experts round them once an update, and every bit is the same."""
    config = tiny("train.dtype=bf16", "parallel.ep=2", "train.micro_batch_size=2")
    without = run_ranks(2, train, config, 4)
    monkeypatch.setattr(setup, "planned_memory", lambda *_: Namespace(copies=1))
    for plain, kept in zip(without, run_ranks(2, train, config, 4), strict=True):
        assert (plain["copies"], kept["copies"]) == (0, 4)
        np.testing.assert_array_equal(kept["figures"], plain["figures"])
        np.testing.assert_array_equal(kept["held_out"], plain["held_out"])


@pytest.mark.parametrize(("size", "experts", "micro"), [(2, 2, 4), (3, 1, 1), (4, 2, 2)])
def test_bf16_moments_are_rounded_alike_in_every_layout(tiny, narrow_alone, size, experts, micro):
    """Figures differ by 3e-7 of themselves, as in fp32; with other random bits on each rank by 1e-4."""
    config = tiny(*NARROW, f"parallel.ep={experts}", f"train.micro_batch_size={micro}")
    found = run_ranks(size, train, config, 12)[0]
    np.testing.assert_allclose(found["figures"], narrow_alone["figures"], rtol=3e-6)


NARROW = ("train.dtype=fp32", "optim.moment_dtype=bf16")


@pytest.fixture(scope="module")
def narrow_alone(tiny) -> dict[str, Any]:
    return run_ranks(1, train, tiny(*NARROW, "train.micro_batch_size=8"), 12)[0]


def test_nodes_change_nothing(tiny, alone):
    """Four ranks, two a node: rows cross once for a node, and every number is that of one rank."""
    config = tiny("parallel.ep=4", "train.micro_batch_size=2", "rdep.node_size=2")
    results = run_ranks(4, train, config, 8, timeout_s=240.0)
    for result in results:
        assert result["exchange"] == "NodeExchange"
        np.testing.assert_array_equal(result["figures"], results[0]["figures"], err_msg="ranks see one step")
        np.testing.assert_allclose(result["figures"], alone["figures"][:8], rtol=1e-9)
        np.testing.assert_array_equal(result["loads"], alone["loads"][:8])


def test_recomputation_changes_nothing_where_ranks_share_experts_and_shards(tiny, alone):
    """Four ranks, two an expert: backward gathers and travels as often as before, and every number is the same."""
    config = tiny('train.recompute=["experts", "mlp", "attention"]', "parallel.ep=2", "train.micro_batch_size=2")
    results = run_ranks(4, train, config, 6, timeout_s=240.0)
    for result in results:
        np.testing.assert_allclose(result["figures"], alone["figures"][:6], rtol=1e-9)
        np.testing.assert_array_equal(result["loads"], alone["loads"][:6])


def test_ranks_of_unequal_nodes_agree_on_how_many_share_experts(tiny):
    assert run_ranks(4, _expert_size_beside, tiny(), (2, 2, 1, 1), timeout_s=60.0) == [1] * 4
    assert run_ranks(4, _expert_size_beside, tiny(), (2, 2, 2, 2), timeout_s=60.0) == [2] * 4


def _expert_size_beside(config: Config, local_sizes: tuple[int, ...]) -> int:
    """Of a rank whose launcher says how many ranks its node has, each node something else."""
    os.environ["LOCAL_WORLD_SIZE"] = str(local_sizes[int(os.environ["RANK"])])
    ranks = join_ranks(config, torch.device("cpu"))
    size = ranks.expert_size
    ranks.part()
    return size
