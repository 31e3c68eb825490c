# SPDX-License-Identifier: Apache-2.0
"""Whole models on the GPU, every op a kernel: against fp64, bit-equal from run to run, without waiting."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nmoe.ops import registry

pytestmark = pytest.mark.gpu
OPS = ["attention", "combine", "cross_entropy", "group", "grouped_gemm", "rms_norm", "rope", "route_topk", "swiglu"]
SCRIPT = Path(__file__).with_name("model_runs.py")
_spec = importlib.util.spec_from_file_location("model_runs", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
model_runs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(model_runs)


@pytest.fixture(scope="module")
def references(tmp_path_factory) -> dict:
    """fp64 on the CPU and plain bf16 on the GPU, by a process of its own: a process has one implementation of an op."""
    path = tmp_path_factory.mktemp("runs") / "references.pt"
    subprocess.run([sys.executable, SCRIPT, path], env={**os.environ, "NMOE_ARCH": "reference"}, check=True)
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("family", model_runs.FAMILIES)
def test_model_on_kernels_against_fp64(family, references):
    sources = registry.table()
    assert not [op for op in OPS if "reference" in sources[op] or "missing" in sources[op]]
    truth, plain = references[family]["truth"], references[family]["plain"]
    found = model_runs.run(family, dtype="bf16", device="cuda")
    assert found.keys() == truth.keys()
    far = []
    for name, exact in truth.items():
        assert torch.isfinite(found[name]).all(), name
        ours, theirs = ((t.double() - exact).norm() / exact.norm().clamp_min(1e-9) for t in (found[name], plain[name]))
        if ours > 1.5 * theirs + 1e-3:
            far.append(f"{name}: {ours:.2e}, plain torch {theirs:.2e}")
    assert not far, "\n".join(far)


@pytest.mark.parametrize("family", ["deepseek_v3", "windows"])
def test_model_on_kernels_is_bit_identical_from_run_to_run(family):
    first, second = (model_runs.run(family, dtype="bf16", device="cuda") for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
