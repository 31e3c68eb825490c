# SPDX-License-Identifier: Apache-2.0
"""No key is dead: for each one there is a change of it that a whole training run shows.

A run of three steps is observed from outside: every deterministic metric, the tokens that each step read, the checkpoints
the folder. Two runs of one config are equal in all of it, so a run with one key changed that differs
proves that the key has an effect. A key that is not in `CHANGES` fails its test, so a new key cannot be forgotten.
"""

import dataclasses
import functools
import logging
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils import deterministic
from torch.utils.checkpoint import checkpoint

from nmoe.comm.local import Local
from nmoe.config import Config, Source, parse_config
from nmoe.errors import ConfigError
from nmoe.formats.metrics import MetricWriter, open_store
from nmoe.formats.shards import ShardWriter
from nmoe.formats.tokenizers import ByteTokenizer
from nmoe.rdep.nodes import exchange_of
from nmoe.train.report import ProgressBar
from nmoe.train.run import train

BASE = """
[model]
vocab_size = 260
hidden_size = 16
num_layers = 3
num_dense_layers = 1
ffn_size = 24
[attention]
num_heads = 2
kv_lora_rank = 8
qk_nope_head_dim = 8
qk_rope_head_dim = 8
v_head_dim = 8
[moe]
num_experts = 8
num_shared_experts = 1
top_k = 2
expert_size = 16
[data]
train = ["{data}/a", "{data}/b"]
val = "{data}/val"
seq_len = 32
[train]
steps = 3
batch_size = 4
micro_batch_size = 2
dtype = "fp32"
[optim]
learning_rate = 3e-2
[schedule]
warmup_steps = 1
decay_steps = 1
[checkpoint]
every = 1000
"""
GQA = ["attention.kind=gqa", "attention.kv_lora_rank=0", "attention.num_kv_heads=2"]
YARN = ["rope.scaling=yarn", "rope.factor=8.0", "rope.original_context=1024"]
GROUPS = ["moe.num_groups=2"]
MTP = ["model.mtp_depth=1"]
MUON = ["optim.kind=muon"]
# Key -> what is set beside it in both runs, and its other value; "{data}" is the folder of the fixture.
CHANGES: dict[str, tuple[list[str], str]] = {
    "run.name": ([], "other"),
    "run.root": ([], "elsewhere"),
    "run.start_from": ([], "{data}/earlier/runs/keys"),
    "run.seed": ([], "1"),
    "model.vocab_size": ([], "300"),
    "model.hidden_size": ([], "24"),
    "model.num_layers": ([], "2"),
    "model.num_dense_layers": ([], "2"),
    "model.ffn_size": ([], "32"),
    "model.norm_eps": ([], "1e-2"),
    "model.tie_embeddings": ([], "true"),
    "model.mtp_depth": ([], "1"),
    "model.init_std": ([], "0.1"),
    "model.init_base_width": ([], "64"),
    "model.embedding_scale": ([], "2.0"),
    "model.residual_scale": ([], "2.0"),
    "model.logit_scale": ([], "2.0"),
    "attention.num_heads": ([], "4"),
    "attention.kind": ([], "gqa"),
    "attention.qk_rope_head_dim": ([], "4"),
    "attention.v_head_dim": ([], "4"),
    "attention.kv_lora_rank": ([], "4"),
    "attention.q_lora_rank": ([], "8"),
    "attention.qk_nope_head_dim": ([], "4"),
    "attention.num_kv_heads": (GQA, "1"),
    "attention.qk_norm": (GQA, "true"),
    "attention.window": ([], "4"),
    "attention.global_every": (["attention.window=4"], "2"),
    "rope.theta": ([], "100.0"),
    "rope.scaling": ([], "yarn"),
    "rope.factor": (YARN, "32.0"),
    "rope.original_context": (YARN, "64"),
    "rope.beta_fast": (YARN, "2.0"),
    "rope.beta_slow": (YARN, "0.01"),
    "rope.mscale": (YARN, "0.5"),
    "rope.mscale_all_dim": (YARN, "2.0"),
    "moe.num_experts": ([], "4"),
    "moe.num_shared_experts": ([], "0"),
    "moe.top_k": ([], "3"),
    "moe.expert_size": ([], "8"),
    "moe.scoring": ([], "softmax"),
    "moe.selection_bias": ([], "false"),
    "moe.bias_update_rate": ([], "0.5"),
    "moe.num_groups": ([], "2"),
    "moe.top_k_groups": (GROUPS, "2"),
    "moe.group_score": (GROUPS, "max"),
    "moe.normalize_gates": ([], "false"),
    "moe.route_scale": ([], "3.0"),
    "moe.balance_loss": ([], "0.5"),
    "moe.z_loss": ([], "0.5"),
    "data.seq_len": ([], "16"),
    "data.train": ([], '["{data}/b"]'),
    "data.val": ([], "{data}/a"),
    "data.builtin": (["train.eval_batches=1"], "python-docs"),
    "train.steps": ([], "4"),
    "train.tokens": ([], "500"),
    "train.batch_size": ([], "6"),
    "train.micro_batch_size": ([], "4"),
    "train.dtype": ([], "bf16"),
    "train.grad_clip": ([], "0.01"),
    "train.recompute": ([], '["attention"]'),
    "train.z_loss": ([], "0.5"),
    "train.mtp_weight": (MTP, "3.0"),
    "train.mtp_late_weight": ([*MTP, "train.mtp_late_step=2"], "3.0"),
    "train.mtp_late_step": (MTP, "2"),
    "train.log_every": ([], "2"),
    "train.eval_every": ([], "1"),
    "train.eval_batches": ([], "1"),
    "optim.learning_rate": ([], "1e-2"),
    "optim.betas": ([], "[0.5, 0.6]"),
    "optim.eps": ([], "0.1"),
    "optim.weight_decay": ([], "0.9"),
    "optim.kind": ([], "muon"),
    "optim.momentum": (MUON, "0.5"),
    "optim.newton_schulz_steps": (MUON, "2"),
    "optim.norm_decay": ([], "3.0"),
    "optim.embedding_rate": ([], "0.5"),
    "optim.embedding_decay": ([], "5.0"),
    "optim.router_rate": ([], "0.1"),
    "optim.router_decay": ([], "50.0"),
    "optim.expert_rate": ([], "0.5"),
    "optim.expert_decay": ([], "5.0"),
    "optim.moment_dtype": ([], "bf16"),
    "schedule.warmup_steps": ([], "2"),
    "schedule.warmup_tokens": (["schedule.warmup_steps=0"], "200"),
    "schedule.decay_tokens": (["schedule.decay_steps=0"], "200"),
    "schedule.kind": (["schedule.decay_steps=0"], "cosine"),
    "schedule.decay_steps": ([], "2"),
    "schedule.final_ratio": ([], "0.5"),
    "parallel.ep": ([], "2"),
    "parallel.comm": ([], "shm"),
    "checkpoint.every": ([], "1"),
    "checkpoint.keep": (["checkpoint.every=1"], "3"),
    "metrics.publish_s": ([], "0.01"),
    "metrics.router_every": ([], "2"),
    "data.train.path": ([], '["{data}/a", "{data}/val"]'),
    "data.train.weight": ([], '["{data}/a", {path = "{data}/b", weight = 3}]'),
}
# What only the exchange between ranks reads -> its other value, and what of the exchange changes.
ACROSS = {
    "rdep.capacity": ("0.25", lambda exchange: exchange.rounds),
    "rdep.sizes": ("exact", lambda exchange: exchange.exact),
    "rdep.wire": ("mxfp8", lambda exchange: exchange.wire),
    "rdep.timeout_s": ("5.0", lambda exchange: exchange.timeout_s),
}
# Changes how several ranks work together: tests/distributed/test_layouts.py.
ELSEWHERE = {"parallel.gather", "rdep.node_size"}
# What has to be given up beside a change, where the two contradict each other.
BESIDE = {
    "train.tokens": ["train.steps=0"],
    "rdep.wire": ["model.hidden_size=32"],
    "attention.kind": ["attention.kv_lora_rank=0", "attention.num_kv_heads=2"],
    "data.builtin": ["data.train=[]", "data.val="],
    "rope.scaling": YARN[1:],
}
UNSTEADY = ("speed/", "memory/", "metrics/")


def keys() -> list[str]:
    sections = {field.name: field.type for field in dataclasses.fields(Config)}
    found = [f"{name}.{field.name}" for name, kind in sections.items() for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return found + [f"data.train.{field.name}" for field in dataclasses.fields(Source)]


@pytest.fixture(scope="module", autouse=True)
def process_as_it_was():
    """A run makes the arithmetic of the whole process repeatable; the tests after these get theirs back.

    PyTorch's checkpoint code logs a thousand lines at the level that pytest captures, half of the time of these tests.
    """
    logging.disable(logging.DEBUG)
    yield
    logging.disable(logging.NOTSET)
    torch.use_deterministic_algorithms(False)
    deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Three small shard sets, and a finished run to start from."""
    root = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(5)
    for name in ("a", "b", "val"):
        with ShardWriter(root / name, tokenizer=ByteTokenizer()) as writer:
            for number in range(12 if name != "val" else 4):
                tokens = random.integers(97, 123, size=60, dtype=np.uint32)
                writer.add(tokens, id=f"{name}-{number}", source=name, text_bytes=60)
    observe(("run.seed=7",), root, root / "earlier")
    return root


def observe(overrides: tuple[str, ...], data: Path, place: Path) -> dict[str, Any]:
    """Trains in the folder `place` and returns all that is the same at every run of one config."""
    place.mkdir()
    before = Path.cwd()
    os.chdir(place)
    try:
        text = BASE.replace("{data}", str(data))
        config = parse_config(text, where="keys.toml", name="keys", overrides=overrides)
        with (
            mock.patch("nmoe.train.run.MetricWriter", wraps=MetricWriter) as writer,
            mock.patch("nmoe.model.functional.checkpoint", wraps=checkpoint) as recomputed,
        ):
            try:
                outcome = train(config, fresh=False, bar=ProgressBar(sys.stderr))
            except ConfigError as error:
                if not overrides[-1].startswith("parallel."):  # what a single rank cannot do
                    raise
                return {"refused": str(error)}
        with open_store(outcome.path / "metrics.duckdb") as store:
            rows = store.execute("SELECT name, step, layer, expert, value FROM metrics ORDER BY ALL").fetchall()
            spans = store.execute('SELECT step, shard, start, "end" FROM batches ORDER BY ALL').fetchall()
        return {
            "path": str(outcome.path),
            "metrics": [row for row in rows if not row[0].startswith(UNSTEADY)],
            "spans": spans,
            "checkpoints": sorted(path.parent.name for path in outcome.path.glob("checkpoints/*/manifest.json")),
            "recomputed": recomputed.call_count,  # it changes no value
            "interval": writer.call_args.kwargs["publish_s"],  # when it publishes depends on the machine
        }
    finally:
        os.chdir(before)


@pytest.fixture(scope="module")
def observed(data, tmp_path_factory):
    """`observe`, once for each set of overrides."""

    @functools.cache
    def run(*overrides: str) -> dict[str, Any]:
        return observe(overrides, data, tmp_path_factory.mktemp("run") / "here")

    return run


def test_every_key_has_a_change():
    assert CHANGES.keys() | ACROSS.keys() | ELSEWHERE == set(keys())


@pytest.mark.parametrize(
    "beside", [[], YARN, GQA, MTP, MUON, ["train.dtype=bf16"]], ids=lambda beside: "-".join(beside[:1])
)
def test_equal_configs_are_observed_as_equal(beside, observed, data, tmp_path):
    """What the other tests stand on: a difference comes from the key and from nothing else."""
    assert observe(tuple(beside), data, tmp_path / "again") == observed(*beside)


@pytest.mark.parametrize("key", CHANGES)
def test_key_changes_the_run(key, observed, data):
    beside, value = CHANGES[key]
    name = "data.train" if key.startswith("data.train.") else key
    change = f"{name}={value}".replace("{data}", str(data))
    assert observed(*beside, *BESIDE.get(key, []), change) != observed(*beside)


@pytest.mark.parametrize("key", ACROSS)
def test_key_changes_the_exchange_between_ranks(key, data):
    value, reads = ACROSS[key]
    text, beside = BASE.replace("{data}", str(data)), BESIDE.get(key, [])
    overrides = (beside, [*beside, f"{key}={value}"])
    configs = [parse_config(text, where="keys.toml", name="keys", overrides=o) for o in overrides]
    base, changed = (reads(exchange_of(config, Local(), dtype=torch.float32)) for config in configs)
    assert base != changed
