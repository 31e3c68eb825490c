# SPDX-License-Identifier: Apache-2.0
"""What a user can mend is one line and exit status 2 in every command, and leaves nothing that the next try trips over."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nmoe import arch
from nmoe.checkpoint.cli import main as checkpoint
from nmoe.checkpoint.save import CheckpointWriter, write_tensors
from nmoe.checkpoint.store import find_checkpoint
from nmoe.cli import prep, train
from nmoe.commands import find_empty
from nmoe.convert import main as convert
from nmoe.doctor import main as doctor
from nmoe.errors import CheckpointError, DataError, EnvironmentFault
from nmoe.formats.files import new_folder, write_text
from nmoe.sample import main as generate

BIN = Path(sys.executable).parent
QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.toml")
SPEAK = "from nmoe.commands import enter; enter('speaks', 'main')"


def refused(capsys, command: Callable[[list[str]], int], *arguments: object) -> str:
    """The one line that a command ends with."""
    capsys.readouterr()
    assert command([str(argument) for argument in arguments]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n"), printed.err[:7]) == ("", 1, "error: ")
    return printed.err[7:-1]


@pytest.fixture
def run(tmp_path) -> Path:
    writer = CheckpointWriter(tmp_path / "run" / "checkpoints", config={}, keep=9)
    writer.save(1, tensors={"model.w": torch.ones(1 << 16)}, state={})
    writer.wait()
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (train, ["\udcff.toml"]),
        (train, [QUICKSTART, "--set", "run.name=\udcff", "--dry-run"]),
        (prep, ["\udcff", "--output", "x"]),
        (convert, ["to-hf", "\udcff", "x"]),
        (checkpoint, ["ls", "\udcff"]),
        (generate, ["run", "--prompt", "\udcff"]),
        (doctor, ["\udcff"]),
    ],
)
def test_argument_that_is_not_utf8_is_refused_by_every_command(command, arguments, capsys):
    assert "\\xff" in (line := refused(capsys, command, *arguments))
    assert "not UTF-8" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "model.num_layers=1000000"], "expected an integer >= 1 and <= 1024"),
        (["--nproc", "0"], "--nproc 0: expected 1 or more"),
        (["--restarts", "-1"], "--restarts -1: expected 0 or more"),
        (["--set", "parallel.ep=4", "--nproc", "6"], "6 ranks: parallel.ep = 4 does not divide them"),
        (["--set", f"run.name={'a' * 300}"], "run.name has 300 bytes; a folder's name may have 240"),
        (["--set", "train.steps=99999999999999999999"], ">= 0, at most 9223372036854775807"),
        (["--set", 'run.name="a\\u0000"'], "without NUL"),
        (["--set", 'run.name="a\\nb"'], "line ends"),
    ],
)
def test_dry_run_refuses_what_a_start_would(arguments, message, capsys):
    assert message in refused(capsys, train, QUICKSTART, "--dry-run", *arguments)


def test_dry_run_plans_for_the_gpus_it_is_told(tmp_path, capsys):
    (tmp_path / "bom.toml").write_bytes(b"\xef\xbb\xbf" + Path(QUICKSTART).read_bytes())
    steps = ["--set", "train.steps=10000000000000"]
    assert train([str(tmp_path / "bom.toml"), "--dry-run", "--nproc", "8", *steps]) == 0
    out = capsys.readouterr().out
    assert "GPUs        8 of 180 GB" in out
    assert "tokens      20,480 T" in out


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "0", "WORLD_SIZE": "16"},
        {
            "SLURM_STEP_NUM_TASKS": "16",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": "0",
            "SLURM_JOB_ID": "1",
            "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
            "SLURM_STEP_NODELIST": "gpu[1-2]",
        },
    ],
    ids=["torchrun", "srun"],
)
def test_dry_run_plans_once_for_the_ranks_of_a_launcher(environment, monkeypatch, capsys):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert train([QUICKSTART, "--dry-run"]) == 0
    assert "GPUs        16 of 180 GB" in capsys.readouterr().out
    monkeypatch.setenv("RANK" if "RANK" in environment else "SLURM_PROCID", "3")
    assert train([QUICKSTART, "--dry-run"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("more", [["--dry-run"], []], ids=["plan", "start"])
@pytest.mark.parametrize(
    ("name", "value"), [("WORLD_SIZE", "two"), ("RANK", "7"), ("RANK", "-1"), ("SLURM_STEP_NUM_TASKS", "8(x2)")]
)
def test_what_no_launcher_says_of_a_rank_is_named(name, value, more, monkeypatch, capsys):
    monkeypatch.setenv(name, value)
    assert f"{name}={value} in the environment" in refused(capsys, train, QUICKSTART, *more)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is missing in the environment beside WORLD_SIZE=2"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT is missing"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"}, "MASTER_PORT=x"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_PROCID is not in the environment of a task of 2"),
        ({"OMP_NUM_THREADS": "x"}, "OMP_NUM_THREADS=x in the environment"),
    ],
)
def test_start_names_what_its_ranks_cannot_meet_by(environment, message, monkeypatch, tmp_path, capsys):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert message in refused(capsys, train, QUICKSTART, "--set", f"run.root={tmp_path}")


@pytest.mark.parametrize(("capability", "found"), [(None, "no GPU"), ((9, 0), "compute capability 9.0")])
def test_kernels_of_another_device_are_refused_before_they_are_called(capability, found, monkeypatch):
    monkeypatch.setenv("NMOE_ARCH", "sm100a")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(arch, "current", lambda: arch.arch_of(capability, override="sm100a"))
    with pytest.raises(EnvironmentFault, match=f"NMOE_ARCH=sm100a: .*sm_100a, found {found}; unset it"):
        arch.decide("bf16")


@pytest.mark.parametrize(
    ("command", "where"),
    [
        (
            "hydra-judge score corpus.jsonl --output",
            "argument 4, behind --output, is empty",
        ),  # one that would pay, or write over
        ("nmoe-prep --output=x", "argument 2, behind --output=x, is empty"),
        ("nmoe-convert to-hf", "argument 2, behind to-hf, is empty"),
        ("nviz --runs", "argument 2, behind --runs, is empty"),
    ],
)
def test_empty_argument_is_not_the_current_folder(command, where, tmp_path):
    name, *words = command.split()
    ended = subprocess.run([BIN / name, *words, ""], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert ended.stderr.startswith(f"error: {where}")
    assert find_empty(["--prompt", "", "--prompt=", "--set", "run.name=", "--set=run.name=", "--", "="]) == ""
    assert find_empty(["--tokenizer="]).startswith("--tokenizer= is empty")


def test_closed_streams_are_nowhere_and_never_the_next_file(run, tmp_path):
    def ends(*words: object) -> int:
        return subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *map(str, words)]).returncode

    assert ends(BIN / "nmoe-checkpoint", "verify", run) == 0
    assert ends(BIN / "nmoe-checkpoint", "verify", "none") == 2
    (tmp_path / "speaks.py").write_text(
        "import os\ndef main():\n    file = open('file', 'w')\n    os.system('echo a child')\n    print('more')\n"
    )
    assert ends("env", f"PYTHONPATH={tmp_path}", "sh", "-c", f'cd {tmp_path}; exec {sys.executable} -c "{SPEAK}"') == 0
    assert (tmp_path / "file").read_text() == ""


def test_folders_that_cannot_be_made_are_named_with_what_asked_for_them(tmp_path, run, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("dangling").symlink_to("nowhere")
    Path("a.txt").write_text("text")
    assert refused(capsys, train, QUICKSTART, "--set", "run.root=dangling").startswith("run.root = dangling: ")
    assert "--output 'a.txt': " in refused(capsys, prep, "a.txt", "--output", "a.txt")
    assert "dangling is a link to nowhere" in refused(capsys, prep, "a.txt", "--output", "dangling")
    assert "a.txt is not a folder" in refused(capsys, checkpoint, "consolidate", run, "a.txt/one")


def test_full_disk_leaves_nothing_that_a_retry_trips_over(run, tmp_path, capsys):
    """A limit on the size of files stands for the disk: the same calls fail, at the same places."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, before[1]))
    try:
        line = refused(capsys, checkpoint, "consolidate", run, tmp_path / "deep" / "one")
        (tmp_path / "raw").mkdir()
        with pytest.raises(CheckpointError, match=r"disk is .*full.* free at .* 262\.1 kB to write"):
            write_tensors(tmp_path / "raw", {"w": torch.ones(1 << 16)})
        (tmp_path / "page").write_text("whole")
        with pytest.raises(OSError, match="too large"):
            write_text(tmp_path / "page", "x" * (1 << 15))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert line.startswith(f"{tmp_path}/deep/one: cannot write: File too large")
    assert not (tmp_path / "deep").exists()
    assert [path.read_text() for path in tmp_path.glob("*page*")] == ["whole"]
    assert checkpoint(["consolidate", str(run), str(tmp_path / "deep" / "one")]) == 0
    assert find_checkpoint(tmp_path / "deep" / "one").step == 1


def test_folder_of_a_killed_process_is_made_anew_and_somebodys_is_not(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(DataError, match="exists already"), new_folder(tmp_path / "out"):
        pass
    assert (tmp_path / "out" / "mine").exists()
    (tmp_path / "out" / ".unfinished").touch()
    with new_folder(tmp_path / "out"):
        (tmp_path / "out" / "whole").touch()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["whole"]


def test_prep_says_what_it_did_not_read(tmp_path, capsys):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name in ("a.txt", "b.pdf", os.fsdecode(b"\xff.txt")):
        (corpus / name).write_text(f"text {name!a}")
    (corpus / "link").symlink_to(tmp_path)
    assert prep([str(corpus), str(corpus / "a.txt"), "--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert ": 2 documents, " in printed.out
    assert sorted(printed.err[len("not read: ") : -1].split(", ")) == ["1 .pdf", "1 given twice", "1 linked folder"]


def test_list_goes_on_after_a_path_that_is_none(run, tmp_path, capsys):
    assert checkpoint(["ls", str(tmp_path / "none"), str(run)]) == 2
    printed = capsys.readouterr()
    assert printed.out.endswith("run/checkpoints/step-00000001\n")
    assert printed.err.startswith("error: ")
    for options, expected in (
        (["--temperature", "-1"], "--temperature -1.0: expected 0 or more"),
        (["--seed", "1" + "0" * 30], "expected 0 to 9223372036854775807"),
    ):
        assert expected in refused(capsys, generate, run, *options)


@pytest.mark.parametrize(
    ("command", "ends", "says"),
    [
        (["nmoe-train", QUICKSTART], 130, "stopped before the run began"),
        (["nmoe-checkpoint", "ls", "none"], 130, "stopped"),
        (["hydra-judge", "--help"], 1, "error: interrupted before anything was done"),
        (["nviz", "export", "none"], 130, "stopped"),
    ],
)
def test_interrupt_while_modules_load_is_one_line(command, ends, says):
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", BIN / command[0], *command[1:]], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr
    while not (line := process.stderr.readline()).rstrip().endswith("nmoe.commands"):
        assert line, "it ended"
    for _ in range(5):  # it begins to load the command
        assert process.stderr.readline()
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read().splitlines()
    assert process.wait() == ends
    assert [line for line in rest if not line.startswith("import time:")] == [says]


@pytest.mark.parametrize("command", ["train", "checkpoint"])
def test_output_that_nobody_reads_ends_as_other_commands_do(command, run):
    read, write = os.pipe()
    os.close(read)
    arguments = {"train": ["--help"], "checkpoint": ["ls", run]}[command]
    ended = subprocess.run(
        [BIN / f"nmoe-{command}", *arguments],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": ""},  # argparse keeps to itself what a write to the pipe says
    )
    os.close(write)
    assert (ended.returncode, ended.stderr) == (141, "")
