# SPDX-License-Identifier: Apache-2.0
"""The memory plan against every allocation of real steps; recomputation, which gives the same bits for less memory."""

import itertools
import json
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from nmoe.config import Config
from nmoe.model.transformer import ModelOutput
from nmoe.rdep.experts import Experts
from nmoe.rdep.held import rounded
from nmoe.train.memory import kept_activations, plan_memory
from nmoe.train.plan import GPU_BYTES, format_plan, make_plan
from nmoe.train.ranks import Ranks
from nmoe.train.setup import Parts, build

COMMON = ("model.num_layers=4", "train.micro_batch_size=2", "train.batch_size=2", "data.seq_len=128")
ALL = 'train.recompute=["experts", "mlp", "attention"]'
GQA = ("attention.kind=gqa", "attention.kv_lora_rank=0", "attention.num_kv_heads=1", "attention.qk_norm=true")


class Allocations(TorchDispatchMode):
    """Bytes of all tensors that are alive, counted at every operation."""

    def __init__(self, *tensors: torch.Tensor):
        super().__init__()
        self.live, self.peak, self._bytes = 0, 0, {}
        for tensor in tensors:
            self._take(tensor)

    def _take(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._bytes:
            self._bytes[storage._cdata] = storage.nbytes()
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._drop, storage._cdata)

    def _drop(self, key: int) -> None:
        self.live -= self._bytes.pop(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, torch.Tensor):
                self._take(value)
        return out


def forward(parts: Parts, config: Config) -> ModelOutput:
    rows, length = config.train.micro_batch_size, config.data.seq_len
    generator = torch.Generator().manual_seed(1)
    tokens_BT = torch.randint(0, config.model.vocab_size, (rows, length), generator=generator)
    positions_BT = torch.arange(length).repeat(rows, 1)
    parts.model.train()
    return parts.model(
        tokens_BT, positions_BT=positions_BT, document_BT=torch.zeros_like(tokens_BT), targets_BT=tokens_BT
    )


def measured_peak(config: Config, *, copies: bool = False) -> int:
    """Of a step that finds the optimizer's state in place, as every step but the first does."""
    parts = build(config, Ranks(rank=0, size=1, device=torch.device("cpu")))
    state = [*parts.model.parameters(), *parts.model.buffers(), *parts.optimizer.state().values()]
    if copies:  # as on a GPU with room for them
        for experts in [module for module in parts.model.modules() if isinstance(module, Experts)]:
            experts.hold(copies=True)
            state += [rounded(weight, torch.bfloat16) for weight in experts.parameters()]
    with Allocations(*state) as allocations:
        for _ in range(config.train.accumulation):
            output = forward(parts, config)
            loss = output.loss_sum + output.aux_loss
            del output
            loss.backward()
            del loss
        parts.optimizer.step(learning_rate=1e-3)
    return allocations.peak


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("train.dtype=bf16", "train.batch_size=4"),
        ("train.dtype=fp64",),
        ("model.num_dense_layers=4", "train.batch_size=4"),
        ("moe.expert_size=128",),
        ("moe.num_experts=32", "train.batch_size=4"),
        ("model.vocab_size=4000",),
        ("data.seq_len=512",),
        (*GQA,),
        ("attention.q_lora_rank=24", "moe.balance_loss=1e-3", "moe.z_loss=1e-3"),
        ("model.mtp_depth=2", "train.dtype=bf16"),
        ("optim.moment_dtype=bf16", "moe.num_experts=64", "train.micro_batch_size=1"),
        ("optim.kind=muon", "optim.moment_dtype=bf16", "moe.num_experts=64", "train.micro_batch_size=1"),
        (ALL, "train.dtype=bf16"),
        ('train.recompute=["attention"]',),
        ('train.recompute=["mlp"]', "train.batch_size=4"),
        ('train.recompute=["experts"]',),
    ],
    ids=" ".join,
)
def test_planned_peak_is_within_two_percent_of_the_allocations_of_a_step(tiny, overrides):
    config = tiny(*COMMON, *overrides)
    assert plan_memory(config, kernels=False).peak == pytest.approx(measured_peak(config), rel=0.02)


def test_planned_peak_counts_the_rounded_experts_that_are_kept(tiny):
    config = tiny(*COMMON, "train.dtype=bf16", "moe.expert_size=128")
    plan = plan_memory(config, kernels=False, memory=1e12)
    assert plan.peak == pytest.approx(measured_peak(config, copies=True), rel=0.02)
    assert plan.copies > 0.02 * plan.peak
    assert plan_memory(config, kernels=False, memory=plan.peak).copies == 0  # no room
    shared = plan_memory(
        tiny(*COMMON, "train.dtype=bf16", "moe.expert_size=128", "parallel.ep=2"), kernels=False, ranks=2, memory=1e12
    )
    assert shared.copies == plan.copies / 2
    assert plan_memory(config, kernels=False, ranks=16, memory=1e12).copies == 0  # owned twice, gathered anew


@pytest.mark.parametrize("overrides", [(), ("train.dtype=bf16", *GQA), (ALL,), ("model.mtp_depth=1",)], ids=" ".join)
def test_planned_activations_are_those_that_a_forward_keeps(tiny, overrides):
    config = tiny(*COMMON, *overrides)
    parts = build(config, Ranks(rank=0, size=1, device=torch.device("cpu")))
    with Allocations(*parts.model.parameters(), *parts.model.buffers()) as allocations:
        before = allocations.live
        output = forward(parts, config)
        kept = allocations.live - before
    inputs = 8 * config.train.micro_batch_size * config.data.seq_len
    assert output.num_targets
    assert sum(kept_activations(config, kernels=False).values()) == pytest.approx(kept - inputs, rel=0.002)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_recomputed_parts_give_the_same_bits(tiny, dtype):
    """Each part alone and all together: loss, routing and every gradient."""
    found = []
    for parts_named in ((), ("experts",), ("mlp",), ("attention",), ("experts", "mlp", "attention")):
        names = ", ".join(f'"{name}"' for name in parts_named)
        config = tiny(*COMMON, f"train.dtype={dtype}", f"train.recompute=[{names}]", "model.mtp_depth=1")
        parts = build(config, Ranks(rank=0, size=1, device=torch.device("cpu")))
        output = forward(parts, config)
        (output.loss_sum + output.aux_loss).backward()
        gradients = {name: p.grad for name, p in parts.model.named_parameters()}
        found.append((output.loss_sum.detach(), [stats.load_E for stats in output.router_stats], gradients))
    for (loss, loads, gradients), (other_loss, other_loads, other) in itertools.pairwise(found):
        assert torch.equal(loss, other_loss)
        assert all(torch.equal(a, b) for a, b in zip(loads, other_loads, strict=True))
        for name, gradient in gradients.items():
            assert gradient is not None
            assert torch.equal(gradient, other[name]), name


def test_planner_names_recomputation_where_it_saves_gpus(tiny):
    """One sequence of 2M tokens needs a node; without its activations one GPU."""
    long = ("model.num_layers=40", "train.micro_batch_size=1", "train.batch_size=1", "train.dtype=bf16")
    config = tiny(*long, "data.seq_len=4000000")
    plan = make_plan(config)
    assert plan.gpus != 1
    assert plan.alternative is not None
    parts, gpus = plan.alternative
    assert gpus == 1
    chosen = tiny(*long, "data.seq_len=4000000", f"train.recompute={json.dumps(parts)}")
    assert plan_memory(chosen, kernels=True).peak <= GPU_BYTES < plan_memory(config, kernels=True).peak
    assert make_plan(chosen).alternative is None
    assert f"train.recompute = {json.dumps(parts)}: GPUs 1" in format_plan(plan, config=config)
