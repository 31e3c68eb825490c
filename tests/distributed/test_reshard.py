# SPDX-License-Identifier: Apache-2.0
"""A checkpoint belongs to the model, not to the ranks that wrote it: any number of ranks, any share of experts."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch._dynamo
from ranks import run_ranks

from nmoe.checkpoint.save import CheckpointWriter
from nmoe.checkpoint.store import find_checkpoint, verify
from nmoe.config import Config, parse_config
from nmoe.data.builtin import make_python_docs
from nmoe.data.loader import Loader
from nmoe.data.sources import open_train
from nmoe.train.loop import train_step
from nmoe.train.ranks import join_ranks
from nmoe.train.setup import Progress, build, checkpoint_state, checkpoint_tensors, restore

TINY = """
model = {vocab_size = 257, hidden_size = 16, num_layers = 2, num_dense_layers = 1, ffn_size = 24}
attention = {num_heads = 2, kv_lora_rank = 8, qk_nope_head_dim = 8, qk_rope_head_dim = 4, v_head_dim = 8}
moe = {num_experts = 8, num_shared_experts = 1, top_k = 2, expert_size = 16}
data = {train = ["DATA/train"], seq_len = 16}
train = {steps = 1000, batch_size = 8, micro_batch_size = 1, dtype = "fp64"}
optim = {learning_rate = 1e-2}
schedule = {warmup_steps = 1, decay_steps = 10}
checkpoint = {every = 1000}
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Config]:
    text = TINY.replace("DATA", str(make_python_docs(tmp_path_factory.mktemp("python-docs"))))
    return lambda *overrides: parse_config(text, where="tiny.toml", name="tiny", overrides=overrides)


def steps(config: Config, run: Path, *, first: int, last: int, save_at: int = 0) -> list[tuple[float, float]]:
    """Loss and gradient norm of the steps on this rank; what is before `first` comes from the run's checkpoint."""
    ranks = join_ranks(config, torch.device("cpu"))
    sets, weights = open_train(config)
    parts = build(config, ranks)
    progress = restore(parts, find_checkpoint(run)) if first > 1 else Progress()
    writer = CheckpointWriter(run / "checkpoints", config=asdict(config), keep=1, rank=ranks.rank, group=ranks.files)
    found = []
    with Loader.of(
        config, sets, weights, rank=ranks.rank, num_ranks=ranks.size, next_sample=progress.next_sample
    ) as loader:
        for step in range(first, last + 1):
            batch = next(loader)
            assert batch.step == step
            result = train_step(parts, batch, config=config)
            found.append((result.loss, result.grad_norm))
            if step == save_at:
                progress = Progress(step=step, next_sample=loader.next_sample)
                writer.save(step, tensors=checkpoint_tensors(parts), state=checkpoint_state(parts, progress))
                writer.wait()
                assert not writer.last_error, writer.last_error
    ranks.part()
    parts.comm.close()
    return found


@pytest.mark.parametrize(
    ("overrides", "exact"),
    [
        ((), 1e-12),
        (("train.dtype=fp32",), 1e-6),
        (("optim.kind=muon",), 1e-12),
    ],
    ids=["fp64", "fp32", "muon"],
)
def test_checkpoint_of_4_expert_ranks_resumes_anywhere(tiny, tmp_path, overrides, exact):
    config = tiny(*overrides, "parallel.ep=4")

    def work(config: Config, first: int, last: int, save_at: int) -> list[tuple[float, float]]:
        return steps(config, tmp_path, first=first, last=last, save_at=save_at)

    whole = run_ranks(4, work, config, 1, 5, 4)[0]
    info = find_checkpoint(tmp_path)
    assert list(verify(info)) == []
    assert len([name for name in info.files if name.endswith(".distcp")]) == 4
    assert run_ranks(4, work, config, 5, 5, 0)[0] == whole[4:], "the same layout: the same bits"
    for size, experts in ((1, 1), (2, 2), (8, 8), (3, 1)):
        (resumed,) = run_ranks(size, work, tiny(*overrides, f"parallel.ep={experts}"), 5, 5, 0)[0]
        assert resumed == pytest.approx(whole[4], rel=exact), (size, experts)
