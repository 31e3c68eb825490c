# SPDX-License-Identifier: Apache-2.0
"""Training on two GPUs that share the experts: the loss of one GPU, as far as bf16 goes; and after a kill the same bits."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import figures

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]

ROOT = Path(__file__).parents[2]
LAYOUTS = {
    # ranks, rows a micro batch, settings
    "one": (1, 8, ()),
    "shared": (2, 4, ("parallel.ep=2",)),
    "copied": (2, 4, ("parallel.ep=1",)),
    "gathered once": (2, 2, ("parallel.ep=2", 'parallel.gather="step"')),
    "recomputed": (2, 4, ("parallel.ep=2", 'train.recompute=["experts", "mlp", "attention"]')),
    "little room": (2, 4, ("parallel.ep=2", "rdep.capacity=0.5")),
    "just the room": (2, 4, ("parallel.ep=2", "rdep.sizes=exact")),
    "nvshmem": (2, 4, ("parallel.ep=2", "parallel.comm=nvshmem")),
}
WIRES = ("mxfp8", "nvfp4")


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

    def loss(ranks: int, rows: int, layout: tuple[str, ...]) -> float:
        batch = ("train.dtype=bf16", "train.batch_size=8", f"train.micro_batch_size={rows}")
        return loss_after(6, *batch, *layout, ranks=ranks)

    with ThreadPoolExecutor(3) as pool:
        losses = {name: pool.submit(loss, *layout) for name, layout in LAYOUTS.items()}
        losses |= {wire: pool.submit(loss, 2, 4, ("parallel.ep=2", f"rdep.wire={wire}")) for wire in WIRES}
    found = {name: future.result() for name, future in losses.items()}
    print(found)
    assert all(found[name] == pytest.approx(found["one"], rel=2e-3) for name in LAYOUTS), found
    assert found["recomputed"] == found["shared"]
    for wire in WIRES:  # few bits are another computation, and not a wrong one
        assert found[wire] != found["shared"]
        assert found[wire] == pytest.approx(found["one"], rel=1e-2), found


def trained(folder: Path, *, killed_at: int | None = None) -> Path:
    """The folder of a run of 24 steps, whose second rank is killed when that step has been logged."""
    settings = {
        "train.dtype": "bf16",
        "parallel.ep": 2,
        "train.micro_batch_size": 2,
        "train.steps": 24,
        "train.eval_every": 12,
        "checkpoint.every": 5,
        "schedule.warmup_steps": 4,
        "schedule.decay_steps": 8,
    }
    code = "import sys; from nmoe.commands import train; sys.exit(train())"
    command = [sys.executable, "-c", code, str(ROOT / "configs" / "quickstart.toml"), "--nproc", "2"]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    folder.mkdir()
    log = folder / "stderr"
    with log.open("w") as file, subprocess.Popen(command, cwd=folder, stdout=file, stderr=file) as process:
        until = time.monotonic() + 200
        while killed_at is not None and not re.search(rf"^step +{killed_at}/", log.read_text(), re.MULTILINE):
            assert process.poll() is None, log.read_text()[-6000:]
            assert time.monotonic() < until, log.read_text()[-6000:]
            time.sleep(0.01)
        if killed_at is not None:
            ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(ranks[1]), signal.SIGKILL)
        assert process.wait(300) == 0, log.read_text()[-6000:]
    assert ("starting again" in log.read_text()) == (killed_at is not None)
    return folder / "runs" / "quickstart"


def test_a_killed_run_goes_on_with_the_same_bits(tmp_path):
    """From the checkpoint of step 10, by the command itself: every figure is that of a run that nobody disturbed."""
    assert figures(trained(tmp_path / "killed", killed_at=13)) == figures(trained(tmp_path / "whole"))
