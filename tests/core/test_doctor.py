# SPDX-License-Identifier: Apache-2.0
"""nmoe-doctor: what it says about this machine, and about one that is asked for more than it has."""

import ctypes
from pathlib import Path

import pytest
import torch

from nmoe.comm.foreign import tensor_over
from nmoe.config import load_config
from nmoe.doctor import Demand, Finding, demand_of, examine, main
from nmoe.train.warm_up import Listed

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"


def findings(demand: Demand, subject: str) -> list[Finding]:
    return [finding for finding in examine(demand) if finding.subject == subject]


@pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without a GPU")
def test_doctor_on_a_machine_without_a_gpu(capsys):
    assert main([str(QUICKSTART)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line[:4] in ("ok  ", "--  ") for line in lines)
    assert any(line.startswith("ok  torch") for line in lines)
    assert any(line.startswith("ok  shared memory") and "available" in line for line in lines)
    assert lines[-2].startswith("--  GPUs")
    assert lines[-1].startswith("ok  memory")
    assert main([str(QUICKSTART.with_name("dsv3.toml"))]) == 2
    assert capsys.readouterr().out.splitlines()[-1].startswith("no  memory              10.87 TB at")


@pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without a GPU")
@pytest.mark.parametrize("name", ["sm90a", "other"])
def test_doctor_refuses_the_arch_that_a_start_would(name, monkeypatch):
    monkeypatch.setenv("NMOE_ARCH", name)
    (finding,) = findings(demand_of(load_config(QUICKSTART), gpus=0), "GPUs")
    assert finding.mark == "no"
    assert "NMOE_ARCH" in finding.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without a GPU")
def test_doctor_takes_its_demands_from_the_config(capsys):
    assert main([str(QUICKSTART), "--set", "parallel.ep=2", "--set", "parallel.comm='ipc'"]) == 2
    assert 'no  GPUs                none; parallel.comm = "ipc" needs them' in capsys.readouterr().out
    assert main([str(QUICKSTART), "--set", "parallel.ep=2"]) == 0
    assert "needed by 2 ranks" in capsys.readouterr().out


def test_doctor_refuses_a_config_in_one_line(capsys):
    assert main([str(QUICKSTART), "--set", "moe.top_k=99"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert "moe.top_k = 99" in told.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--warm-up", "sm_90a"], "expected a CONFIG"),
        (
            [str(QUICKSTART), "--set", "train.dtype=bf16", "--warm-up", "sm_80"],
            "found 'sm_80'; expected one of sm_90a,",
        ),
    ],
)
def test_doctor_says_what_it_cannot_compile(arguments, said, capsys):
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert said in told.err


def test_doctor_compiles_nothing_for_plain_torch(capsys):
    assert main([str(QUICKSTART), "--warm-up", "sm_90a"]) == 0
    assert capsys.readouterr().out.startswith("--  kernels")


def test_a_list_of_kernels_belongs_to_what_decides_them():
    def path(*overrides: str, ranks: int = 1) -> Path:
        return Listed.of(load_config(QUICKSTART, overrides), chip="sm_90a", ranks=ranks).path

    here = path()
    assert here == path("optim.learning_rate=1e-3", "run.name=other", "checkpoint.every=7")
    changes = ["model.hidden_size=256", "moe.top_k=1", "data.seq_len=64", "train.micro_batch_size=1", "optim.kind=muon"]
    assert len({here, path(ranks=2), *map(path, changes)}) == 2 + len(changes)


def test_doctor_counts_the_shared_memory_that_ranks_need():
    (enough,) = findings(Demand(ranks=2, comm="shm", symmetric_bytes=1 << 12), "shared memory")
    (too_much,) = findings(Demand(ranks=2, comm="shm", symmetric_bytes=1 << 60), "shared memory")
    assert (enough.mark, too_much.mark) == ("ok", "no")


def test_doctor_says_how_rows_travel_between_nodes():
    config = load_config(QUICKSTART, ["parallel.ep=8", "rdep.node_size=2"])
    (over_cpus,) = findings(demand_of(config, gpus=0), "nodes")
    assert (over_cpus.mark, over_cpus.text.split(";")[0]) == ("ok", "4 of 2 ranks, experts shared by 8")
    over_gpus = demand_of(load_config(QUICKSTART, ["parallel.ep=8"]), gpus=4)
    assert (over_gpus.comm, over_gpus.node_size) == ("nvshmem", 4)
    assert "inside one node alone" in findings(over_gpus, "nodes")[0].text
    assert demand_of(load_config(QUICKSTART, ["parallel.ep=4"]), gpus=4).comm == "ipc"


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
