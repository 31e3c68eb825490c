# SPDX-License-Identifier: Apache-2.0
"""Training with every kind of model and optimizer on a GPU: its kernels lead to the losses of plain torch, as far as bf16 goes."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
VARIANTS = {
    "as it is": (),
    "two micro batches": ("train.micro_batch_size=4",),
    "recomputed": ('train.recompute=["experts", "mlp", "attention"]',),
    "muon": ("optim.kind=muon",),
    "moments in bf16": ("optim.moment_dtype=bf16",),
    "grouped queries in a window": (
        "attention.kind=gqa",
        "attention.num_kv_heads=2",
        "attention.qk_norm=true",
        "attention.window=48",
        "attention.kv_lora_rank=0",
        "attention.qk_nope_head_dim=0",
        "attention.qk_rope_head_dim=64",
        "attention.v_head_dim=64",
    ),
    "latent queries, stretched": (
        "attention.q_lora_rank=64",
        "rope.scaling=yarn",
        "rope.factor=4.0",
        "rope.original_context=64",
    ),
    "softmax in groups": (
        "moe.scoring=softmax",
        "moe.selection_bias=false",
        "moe.bias_update_rate=0.0",
        "moe.num_groups=4",
        "moe.top_k_groups=2",
        "moe.group_score=max",
        "moe.balance_loss=0.01",
        "moe.z_loss=0.001",
    ),
    "further tokens": ("model.mtp_depth=2",),
    "tied, scaled": (
        "model.tie_embeddings=true",
        "model.embedding_scale=4.0",
        "model.logit_scale=0.5",
        "train.z_loss=0.001",
    ),
}


def loss_after(steps: int, overrides: tuple[str, ...], arch: str) -> float:
    """That of the last of some steps of the quickstart in bf16."""
    command = [sys.executable, "benchmarks/train_step.py", "configs/quickstart.toml", f"--steps={steps}", "--warm-up=0"]
    command += [f"--set={override}" for override in ("train.dtype=bf16", *overrides)]
    environment = os.environ | ({"NMOE_ARCH": arch} if arch else {})
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])["loss"]


def test_kernels_train_as_plain_torch_does():
    """Twelve steps, in which the loss falls by a third."""
    with ThreadPoolExecutor(5) as pool:
        plain = {name: pool.submit(loss_after, 12, overrides, "reference") for name, overrides in VARIANTS.items()}
        ours = {name: pool.submit(loss_after, 12, overrides, "") for name, overrides in VARIANTS.items()}
    found = {name: (ours[name].result(), plain[name].result()) for name in VARIANTS}
    print(found)
    assert all(loss == pytest.approx(truth, rel=2e-3) for loss, truth in found.values()), found
    assert found["recomputed"][0] == found["as it is"][0]  # to the bit
    assert len({truth for _, truth in found.values()}) >= len(found) - 1  # the others did change something
