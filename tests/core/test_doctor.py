# SPDX-License-Identifier: Apache-2.0
"""nmoe-doctor: what it says about this machine, and about one that is asked for more than it has."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nmoe.comm.foreign import tensor_over
from nmoe.doctor import Demand, Finding, examine

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"


def doctor(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "import sys; from nmoe.doctor import main; sys.exit(main())", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def findings(demand: Demand, subject: str) -> list[Finding]:
    return [finding for finding in examine(demand) if finding.subject == subject]


@pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without a GPU")
def test_doctor_on_a_machine_without_a_gpu():
    result = doctor(QUICKSTART)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert all(line[:4] in ("ok  ", "--  ") for line in lines)
    assert any(line.startswith("ok  torch") for line in lines)
    assert any(line.startswith("ok  shared memory") and "free" in line for line in lines)
    assert lines[-1].startswith("--  GPUs")
    asked = findings(Demand(ranks=2, comm="ipc"), "GPUs")
    assert [finding.mark for finding in asked] == ["no"]
    assert "parallel.comm" in asked[0].text


def test_doctor_refuses_a_config_in_one_line():
    result = doctor(QUICKSTART, "--set", "moe.top_k=99")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "moe.top_k = 99" in result.stderr


def test_doctor_counts_the_shared_memory_that_ranks_need():
    (enough,) = findings(Demand(ranks=2, comm="shm", symmetric_bytes=1 << 12), "shared memory")
    (too_much,) = findings(Demand(ranks=2, comm="shm", symmetric_bytes=1 << 60), "shared memory")
    assert (enough.mark, too_much.mark) == ("ok", "no")
    assert not list(Path("/dev/shm").glob("nmoe-doctor-*"))


def test_tensor_over_foreign_memory_copies_nothing():
    memory = (ctypes.c_uint8 * 64)(*range(64))
    found = tensor_over(ctypes.addressof(memory), 64, torch.device("cpu"))
    assert found.tolist() == list(range(64))
    found.view(torch.int64)[7] = -1
    assert bytes(memory)[56:] == b"\xff" * 8


@pytest.mark.gpu
def test_doctor_tries_what_a_gpu_offers():
    (mapped, *_) = findings(Demand(ranks=1, comm="ipc"), "CUDA IPC")
    assert mapped.mark == "ok", mapped
    (gpu,) = findings(Demand(), "GPU 0")
    assert gpu.mark == "ok", gpu
    (heap,) = findings(Demand(comm="nvshmem"), "NVSHMEM")
    assert heap.mark == "ok", heap
