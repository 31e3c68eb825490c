# SPDX-License-Identifier: Apache-2.0
"""Training on two GPUs that share the experts against training on one: the same loss, as far as bf16 goes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]

ROOT = Path(__file__).parents[2]
LAYOUTS = {
    "one": (1, 8, ()),
    "shared": (2, 4, ("parallel.ep=2",)),
    "copied": (2, 4, ("parallel.ep=1",)),
    "gathered once": (2, 2, ("parallel.ep=2", 'parallel.gather="step"')),
}


def loss_after(steps: int, *overrides: str, ranks: int) -> float:
    """That of the last of some steps of the quickstart, by a process a GPU."""
    command = [sys.executable, "benchmarks/train_step.py", "configs/quickstart.toml", f"--steps={steps}"]
    if ranks > 1:
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command[1:1] = start
    command += [f"--set={override}" for override in overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])["loss"]


def test_loss_does_not_depend_on_how_gpus_share_a_model():
    """Six steps of real routing, uneven as it falls, with latent attention and a shared expert."""
    found = {}
    for name, (ranks, rows, layout) in LAYOUTS.items():
        batch = ("train.dtype=bf16", "train.batch_size=8", f"train.micro_batch_size={rows}")
        found[name] = loss_after(6, *batch, *layout, ranks=ranks)
    assert all(loss == pytest.approx(found["one"], rel=2e-3) for loss in found.values()), found
