# SPDX-License-Identifier: Apache-2.0
"""One command, several ranks: how they start, what they leave behind, and how they end, whoever is killed."""

import os
import random
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import CONFIG, Command, alive, figures, losses
from ranks import Ranks, run_ranks

from nmoe import cli
from nmoe.checkpoint import save, store
from nmoe.checkpoint.store import list_checkpoints
from nmoe.comm.watcher import LOST
from nmoe.config import load_config
from nmoe.data import loader
from nmoe.data.builtin import make_python_docs
from nmoe.errors import EnvironmentFault
from nmoe.formats.metrics import open_store
from nmoe.formats.runs import read_run
from nmoe.train import evaluate, run
from nmoe.train import launch as launching
from nmoe.train.environment import first_host, slurm_environment

SOON_S = 12.0
"""A timeout of 1.5 s or, where steps take long, three of them, and 5 s to end; a collective would wait for half an hour."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_python_docs(tmp_path_factory.mktemp("python-docs"))


@pytest.fixture
def folder(tmp_path: Path, data: Path) -> Path:
    (tmp_path / "tiny.toml").write_text(CONFIG.replace("DATA", str(data)))
    return tmp_path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """The run of two ranks that share the experts, from beginning to end."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "tiny.toml").write_text(CONFIG.replace("DATA", str(data)))
    with Command(folder, "--nproc", "2") as command:
        assert command.wait() == 0, command.errors
    return folder / "runs" / "tiny"


def test_two_ranks_make_the_run_of_one(undisturbed, folder):
    with Command(folder) as command:
        assert command.wait() == 0, command.errors
    np.testing.assert_allclose(losses(undisturbed)[:60], losses(command.run)[:60], rtol=1e-5)
    log = (undisturbed / "log.txt").read_text()
    assert log.count("INFO step ") == 40 + 2, "one line for each step and each evaluation"
    with open_store(undisturbed) as metrics:
        received = metrics.execute(
            "SELECT step, sum(value), count(*) FROM metrics WHERE name = 'router/received' GROUP BY step ORDER BY step"
        ).fetchall()
        times = metrics.execute(
            "SELECT step, rank FROM metrics WHERE name = 'speed/rank_step_time' ORDER BY step, rank"
        ).fetchall()
    assert received == [(step, 8 * 32 * 2, 2) for step in range(1, 41)]
    assert times == [(step, rank) for step in range(1, 40) for rank in (0, 1)]
    assert len(list((list_checkpoints(undisturbed / "checkpoints")[-1]).glob("*.distcp"))) == 2


def test_whoever_is_killed_the_run_goes_on_to_the_same_bits(undisturbed, folder):
    moments = [random.randint(first, first + 4) for first in (5, 13, 21, 29)]
    with Command(folder, "--nproc", "2") as command:
        command.wait_for_step(moments[0])
        os.kill(random.choice(command.ranks()), signal.SIGKILL)  # the launcher starts all again
        command.wait_for_step(moments[1])
        for pid in command.ranks():
            os.kill(pid, signal.SIGKILL)
        command.wait_for_step(moments[2])
        ranks = command.ranks()
        os.kill(command.pid, signal.SIGKILL)
        assert command.wait() == -signal.SIGKILL
        until = time.monotonic() + 20
        while any(alive(pid) for pid in ranks):
            assert time.monotonic() < until, "ranks outlive their launcher"
            time.sleep(0.01)
        assert command.errors.count("starting again with 2 ranks") == 2, command.errors
    with Command(folder, "--nproc", "2") as command:
        command.wait_for_step(moments[3])
        os.kill(command.pid, signal.SIGTERM)
        assert command.wait() == 128 + signal.SIGTERM, command.errors
        stopped = read_run(command.run)
        assert stopped.status == "stopped"
        assert list_checkpoints(command.run / "checkpoints")[-1].name == f"step-{stopped.step:08d}"
    with Command(folder, "--nproc", "2") as command:
        assert command.wait() == 0, command.errors
    assert figures(command.run) == figures(undisturbed), moments
    assert read_run(command.run).status == "finished"


def test_stopped_rank_is_named_and_all_start_again(folder):
    """Dense gradients alone: no rank waits for rows of another, all stand in collectives."""
    with Command(folder, "--nproc", "2", "parallel.ep=1", "rdep.timeout_s=1.5") as command:
        command.wait_for_step(6)
        ranks = command.ranks()
        os.kill(ranks[1], signal.SIGSTOP)
        began = time.monotonic()
        while any(alive(pid) for pid in ranks):
            assert time.monotonic() - began < SOON_S, "ranks live on"
            time.sleep(0.01)
        assert command.wait() == 0, command.errors
    lines = [line for line in command.errors.splitlines() if "starting again with 2 ranks" in line]
    assert len(lines) == 1, command.errors
    place = r"step \d+, (waiting for data|micro batch \d|the sums over ranks|the update|a checkpoint)"
    # The launcher also says how the rank ended that it saw end first: the stopped one, or the one that told of it.
    line = rf"lost rank 1: no progress for \d+ s in {place}; its process does not run( \(rank 1 was ended by SIGKILL\))?: .*"
    assert re.fullmatch(line, lines[0]), lines[0]
    assert "Traceback" not in command.errors
    assert "going on with runs/tiny at step" in command.errors
    assert read_run(command.run).status == "finished"


@pytest.mark.parametrize("ep", [2, 4])
def test_ranks_of_two_nodes_end_together(folder, ep):
    """As torchrun numbers the nodes; experts are shared inside a node, or across."""

    def rank() -> int:
        os.environ["GROUP_RANK"] = str(int(os.environ["RANK"]) // 2)
        os.chdir(folder)
        settings = (f"parallel.ep={ep}", "rdep.timeout_s=1.5", "train.steps=100000", "checkpoint.every=2")
        return cli.train(["tiny.toml", *(word for setting in settings for word in ("--set", setting))])

    tiny = folder / "runs" / "tiny"
    with Ranks(4, rank) as ranks:
        until = time.monotonic() + 120
        while len(list_checkpoints(tiny / "checkpoints")) < 2:
            assert time.monotonic() < until
            time.sleep(0.01)
        ranks.signal(3, signal.SIGSTOP)
        began = time.monotonic()
        outcomes = ranks.wait()
        assert time.monotonic() - began < SOON_S
    assert [outcome.exit_code for outcome in outcomes] == [LOST, LOST, LOST, -signal.SIGKILL]
    record = read_run(tiny)
    assert record.status == "failed"
    assert record.error
    assert "lost rank 3" in record.error


def test_slow_rank_is_waited_for(folder, monkeypatch):
    """A disk that is slow for one checkpoint, and an evaluation in which one rank falls far behind."""
    commit, read = store.commit, loader.held_out_batches

    def slow_commit(*arguments, **options):
        if options["step"] == 2:
            time.sleep(4.0)  # the third one comes before it is over
        commit(*arguments, **options)

    def slow_read(*arguments, rank, **options):
        for batch in read(*arguments, rank=rank, **options):
            time.sleep(0.6 * rank)
            yield batch

    monkeypatch.setattr(save, "commit", slow_commit)
    monkeypatch.setattr(evaluate, "held_out_batches", slow_read)
    monkeypatch.setattr(run, "_SLOWER", 0.0)  # a second, whatever a step takes
    slow = ("train.steps=4", "train.eval_every=2", "train.eval_batches=8", "checkpoint.every=1", "rdep.timeout_s=1.0")
    with Command(
        folder, "--nproc", "2", "--restarts", "0", "parallel.ep=1", "schedule.decay_steps=0", *slow
    ) as command:
        assert command.wait() == 0, command.errors


def test_run_goes_on_with_another_number_of_ranks(undisturbed, folder):
    for size, steps in (("4", 6), ("3", 12), ("1", 18)):  # 3 do not divide batch or experts
        with Command(folder, "--nproc", size) as command:
            command.wait_for_step(steps)
            os.kill(command.pid, signal.SIGTERM)
            assert command.wait() == 128 + signal.SIGTERM, command.errors
    with Command(folder, "--nproc", "2") as command:
        assert command.wait() == 0, command.errors
    np.testing.assert_allclose(losses(command.run)[:60], losses(undisturbed)[:60], rtol=1e-5)
    first = []
    for size in ("1", "2"):
        new = (f"run.name=from-{size}", "run.start_from=runs/tiny", "train.steps=1", "schedule.warmup_steps=0")
        with Command(folder, "--nproc", size, *new, "schedule.decay_steps=0") as command:
            assert command.wait() == 0, command.errors
        first.append(losses(folder / "runs" / f"from-{size}"))
    np.testing.assert_allclose(first[1], first[0], rtol=1e-5)
    assert first[0][1] < losses(undisturbed)[1], "not the initial values"


def test_error_of_one_rank_ends_all_with_one_line(folder, data):
    own = folder / "own"
    own.symlink_to(make_python_docs(folder / "copy"))
    text = (folder / "tiny.toml").read_text().replace(str(data), str(own))
    (folder / "tiny.toml").write_text(text)
    with Command(folder, "--nproc", "2", "train.steps=100000") as command:
        command.wait_for_step(2)
        for shard in (own / "train").glob("shard-*.npy"):
            if "index" not in shard.name:
                with shard.open("r+b") as file:  # mapped by the ranks, which read it on
                    file.seek(128)
                    file.write(b"\xff" * (shard.stat().st_size - 128))
        assert command.wait() == 2
    lines = [line for line in command.errors.splitlines() if line.startswith("error")]
    assert len(lines) == 1, command.errors
    assert "damaged: token" in lines[0]
    assert "Traceback" not in command.errors
    assert read_run(command.run).status == "failed"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--nproc", "3", "parallel.ep=2"), "error: parallel.ep = 2 does not divide the 3 ranks of this start; "),
        (("--nproc", "0"), "error: --nproc 0: expected 1 or more"),
        (("--nproc", "2", 'data.train=["nowhere"]'), "error: nowhere"),
    ],
)
def test_start_that_cannot_be_is_one_line(folder, arguments, message):
    with Command(folder, *arguments) as command:
        assert command.wait() == 2
    assert command.errors.startswith(message), command.errors
    assert len(command.errors.splitlines()) == 1, command.errors


def test_launcher_leaves_cuda_to_the_ranks(folder, monkeypatch):
    """Who asks the driver how many GPUs there are has begun CUDA, and CUDA outlives no fork: no rank could use its GPU."""
    asked, started = [], []
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: asked.append("driver") or 2)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 2)
    monkeypatch.setattr(launching, "elastic_launch", lambda config, _: lambda *_: [started.append(config) or "end"])
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "0")  # so that it is restored
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK")
    monkeypatch.chdir(folder)
    assert launching.launch(load_config("tiny.toml"), nproc=None, restarts=0, fresh=False) == "end"
    assert [config.nproc_per_node for config in started] == [2]
    assert not asked


def test_ranks_of_another_launcher_are_taken_as_they_are(undisturbed, folder, capfd):
    def rank() -> int:
        os.chdir(folder)
        return cli.train(["tiny.toml", "--set", "train.steps=40"])

    assert run_ranks(2, rank) == [0, 0]
    assert figures(folder / "runs" / "tiny") == figures(undisturbed)
    assert capfd.readouterr().out.count("finished at step 40") == 1


def test_slurm_tasks_become_ranks_where_srun_started_them():
    step = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NUM_TASKS": "16",
        "SLURM_PROCID": "11",
        "SLURM_LOCALID": "3",
        "SLURM_NODEID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
        "SLURM_STEP_NODELIST": "gpu[03-04]",
    }
    found = slurm_environment(step)
    assert {**found, "MASTER_PORT": ""} == {
        "RANK": "11",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "3",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "",
    }
    assert 1024 < int(found["MASTER_PORT"]) < 32768
    uneven = {**step, "SLURM_STEP_TASKS_PER_NODE": "8,4(x2)"}
    counts = [slurm_environment({**uneven, "SLURM_NODEID": str(node)})["LOCAL_WORLD_SIZE"] for node in range(3)]
    assert counts == ["8", "4", "4"]
    with pytest.raises(EnvironmentFault, match="SLURM_NODEID=3"):
        slurm_environment({**uneven, "SLURM_NODEID": "3"})
    with pytest.raises(EnvironmentFault, match="SLURM_LOCALID is not in the environment"):
        slurm_environment({name: value for name, value in step.items() if name != "SLURM_LOCALID"})
    assert slurm_environment({**step, "MASTER_ADDR": "10.0.0.1"})["MASTER_ADDR"] == "10.0.0.1"
    assert slurm_environment({**step, "RANK": "0"}) == {}, "torchrun inside a job"
    assert slurm_environment({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "16", "SLURM_PROCID": "0"}) == {}, "a batch script"
    assert [first_host(text) for text in ("a1", "a1,b2", "n[7]", "n[1,4-9],m")] == ["a1", "a1", "n7", "n1"]
