# SPDX-License-Identifier: Apache-2.0
"""`nmoe-train` as a command: the dry run needs no torch, and whatever a user can mend is one line and exit status 2."""

import argparse
import json
import logging
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils import deterministic

from nmoe import cli
from nmoe.formats.runs import read_run
from nmoe.formats.shards import ShardWriter
from nmoe.formats.tokenizers import ByteTokenizer
from nmoe.status import exit_status
from nmoe.train.ranks import Ranks
from nmoe.train.room import telling_of_memory

ROOT = Path(__file__).parents[2]
COMMAND = Path(sys.executable).with_name("nmoe-train")
CONFIG = """
[model]
vocab_size = 257
hidden_size = 16
num_layers = 2
num_dense_layers = 1
ffn_size = 24
[attention]
num_heads = 2
kv_lora_rank = 8
qk_nope_head_dim = 8
qk_rope_head_dim = 4
v_head_dim = 8
[moe]
num_experts = 8
num_shared_experts = 1
top_k = 2
expert_size = 16
[data]
train = ["shards"]
seq_len = 32
[train]
steps = 2
batch_size = 2
micro_batch_size = 2
dtype = "fp32"
[optim]
learning_rate = 1e-2
[schedule]
warmup_steps = 0
[checkpoint]
every = 5
"""


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder with `tiny.toml` and its shards, as the working directory."""
    (tmp_path / "tiny.toml").write_text(CONFIG)
    with ShardWriter(tmp_path / "shards", tokenizer=ByteTokenizer(), shard_tokens=300) as writer:
        for number in range(10):
            tokens = np.random.default_rng(number).integers(97, 123, size=60, dtype=np.uint32)
            writer.add(tokens, id=str(number), source="test", text_bytes=60)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def in_process():
    """`nmoe-train` in this process; what a run changes in it is put back."""
    handlers = list(logging.getLogger("nmoe").handlers)
    yield cli.train
    logging.getLogger("nmoe").handlers[:] = handlers
    torch.use_deterministic_algorithms(False)
    deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def refused(status: int, out: str, errors: str) -> str:
    """The one line of a refusal."""
    assert status == 2
    assert out == ""
    assert errors.count("\n") == 1
    assert errors.startswith("error: ")
    return errors[7:-1]


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (("", ""), ["none.toml"], "none.toml: no such config file"),
        (("top_k =", "topk ="), ["tiny.toml"], "tiny.toml: unknown key moe.topk; did you mean moe.top_k?"),
        (("", ""), ["tiny.toml", "--set", "moe.top_k=9"], "tiny.toml: moe.top_k = 9 exceeds moe.num_experts = 8"),
        (('train = ["shards"]\n', ""), ["tiny.toml"], "tiny.toml: data.train is empty; name a folder of shards"),
        (("", ""), ["tiny.toml", "--set", "run.root=tiny.toml/runs"], "run.root = tiny.toml/runs: tiny.toml is not a folder that can"),
    ],
    ids=["no-file", "typo", "top_k", "no-data", "root"],
)  # fmt: skip
def test_train_refuses_a_bad_config_in_one_line(change, arguments, message, place):
    (place / "tiny.toml").write_text(CONFIG.replace(change[0], change[1], 1))
    ended = subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=60)
    assert refused(ended.returncode, ended.stdout, ended.stderr).startswith(message)
    assert not (place / "runs").exists()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


def test_train_as_a_process_refuses_a_flipped_byte(place):
    """The one of these with PyTorch in a process of its own; the others below differ only in what is found."""
    flip(place / "shards" / "shard-00001.npy")
    ended = subprocess.run([COMMAND, "tiny.toml"], capture_output=True, text=True, timeout=120)
    message = refused(ended.returncode, ended.stdout, ended.stderr)
    assert message.startswith("shards/shard-00001.npy: damaged: SHA-256 is ")


def damage_nothing(shards: Path) -> None:
    del shards


def cut_tokens(shards: Path) -> None:
    path = shards / "shard-00000.npy"
    path.write_bytes(path.read_bytes()[:-7])


def cut_index(shards: Path) -> None:
    path = shards / "shard-00000.index.npy"
    path.write_bytes(path.read_bytes()[:40])


def remove_shard(shards: Path) -> None:
    (shards / "shard-00001.npy").unlink()


def empty_manifest(shards: Path) -> None:
    (shards / "manifest.json").write_text("")


def other_manifest(shards: Path) -> None:
    manifest = json.loads((shards / "manifest.json").read_text())
    (shards / "manifest.json").write_text(json.dumps(manifest | {"version": 99}))


def unfinished(shards: Path) -> None:
    (shards / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("damage", "overrides", "message"),
    [
        (damage_nothing, ["model.vocab_size=256"], r"shards: token ids go up to 256 \(tokenizer bytes\), model.vocab_size = 256"),
        (damage_nothing, ['data.train=["nowhere"]'], "nowhere/manifest.json: not found; expected the file that completes"),
        (damage_nothing, ["data.val=nowhere"], "nowhere/manifest.json: not found"),
        (cut_tokens, [], "shards/shard-00000.npy: damaged"),
        (cut_index, [], "shards/shard-00000.index.npy: damaged"),
        (remove_shard, [], "shards/shard-00001.npy: not found; the manifest names it"),
        (empty_manifest, [], "shards/manifest.json: cannot be read as JSON"),
        (other_manifest, [], "shards/manifest.json: nmoe-shards version 99 is newer than this program reads"),
        (unfinished, [], "shards/manifest.json: not found"),
    ],
)  # fmt: skip
def test_train_refuses_bad_data_in_one_line(damage, overrides, message, place, in_process, capsys):
    damage(place / "shards")
    options = [word for override in overrides for word in ("--set", override)]
    status = in_process(["tiny.toml", *options])
    printed = capsys.readouterr()
    assert re.match(message, refused(status, printed.out, printed.err))
    assert not (place / "runs").exists()


def test_train_ends_with_loss_sample_and_place(place, in_process, capsys):
    assert in_process(["tiny.toml", "--set", "data.val=shards", "--set", "run.root=my"]) == 0
    printed = capsys.readouterr()
    assert re.search(r"^held-out loss  \d\.\d{4} nat/byte, \d+ % (above|below) .* \(3\.\d\d\)$", printed.out, re.M)
    assert "\nrun            my/tiny (finished at step 2)\n" in printed.out
    assert "\ncheckpoint     my/tiny/checkpoints/step-00000002\n" in printed.out
    assert printed.out.endswith("look at it     uv run streamlit run nviz -- --runs my\n")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", printed.out)
    assert len(re.findall(r"^step \d/2  loss ", printed.err, re.M)) == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["train.batch_size=100000000", "train.micro_batch_size=100000000"],
            r"train.batch_size = 100000000 of data.seq_len = \d+: [\d.]+ [GT]B are needed .*; lower one of the two",
        ),
        (["data.seq_len=1000000"], r"[\d.,]+ [GT]B are needed in the .*; lower train.micro_batch_size or data.seq_len"),
        (["model.hidden_size=10000000"], r"[\d.]+ [GT]B are needed in the .*; make the model smaller"),
    ],
)
def test_train_says_that_memory_cannot_do_and_the_mended_command_begins_anew(
    overrides, message, place, in_process, capsys
):
    """What failed before its first checkpoint has nothing to go on from, and so does not stand in the way."""
    assert in_process(["tiny.toml", *(word for one in overrides for word in ("--set", one))]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert re.match(f"error: {message}", lines[0])
    assert "but the machine has" in lines[0]
    assert in_process(["tiny.toml", "--set", "train.steps=1"]) == 0
    assert read_run(place / "runs" / "tiny").status == "failed"
    assert read_run(place / "runs" / "tiny-2").status == "finished"


def test_memory_that_runs_out_is_one_line(tiny, capsys):
    def take(options: argparse.Namespace) -> int:
        with (
            telling_of_memory(tiny(), Ranks(rank=0, size=1, device=torch.device("cpu")))
            if options.run
            else nullcontext()
        ):
            return len((np if options.numpy else torch).empty(10**14))  # 47 bits of address cannot hold it

    for options, expected in (
        (
            {"run": True, "numpy": False},
            r"out of memory: by plan [\d.]+ MB are needed in the .*; the machine has [\d.]+ GB; lower",
        ),
        ({"run": False, "numpy": False}, r"out of memory: can't allocate memory: you tried to allocate"),
        ({"run": False, "numpy": True}, r"out of memory: Unable to allocate"),
    ):
        assert exit_status(take, argparse.Namespace(**options)) == 2
        assert re.fullmatch(f"error: {expected}.*\n", capsys.readouterr().err)


def test_train_says_what_a_changed_config_changed(place, in_process, capsys):
    assert in_process(["tiny.toml"]) == 0
    record = place / "runs" / "tiny" / "run.json"
    record.write_text(record.read_text().replace('"status": "finished"', '"status": "stopped"'))
    capsys.readouterr()
    status = in_process(["tiny.toml", "--set", "optim.learning_rate=0.5"])
    printed = capsys.readouterr()
    assert status == 2
    lines = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    assert lines == [printed.err.splitlines()[-1]]
    assert "optim.learning_rate: 0.01 -> 0.5" in lines[0]
    assert "--fresh" in lines[0]


# Parameters, active ones, GPUs of 180 GB (5 % kept free), tokens a step, steps; the first three are what the models are known for.
PLANS = {
    "quickstart": (1.083e6, 640.3e3, 1, 8 * 256, 400),
    "moonlet": (7.34e9, 1.82e9, 1, 256 * 4096, 35_000),
    "moonlight": (15.96e9, 2.92e9, 8, 4096 * 8192, 154_973),
    "dsv2": (235.7e9, 21.4e9, 48, 9216 * 4096, 214_576),
    "dsv3": (671.0e9, 37.55e9, 208, 15360 * 4096, 235_240),
}
UNITS = {"kB": 1e3, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def number(text: str) -> float:
    value, unit = text.split()[:2]
    return float(value) * UNITS[unit]


@pytest.fixture(scope="module")
def plans() -> dict[str, dict[str, str]]:
    """What `--dry-run` prints for each config, from one process that never imports torch."""
    script = (
        "import sys; from nmoe import cli\n"
        "for name in sys.argv[1:]: print('==', name); assert cli.train([f'configs/{name}.toml', '--dry-run']) == 0\n"
        "print('== torch', 'torch' in sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, *PLANS], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert ended.stderr == ""
    *parts, torch_line = ended.stdout.removeprefix("== ").split("== ")
    assert torch_line == "torch False\n"
    return {
        part.split("\n")[0]: dict(re.split(r" {2,}", line, maxsplit=1) for line in part.strip().split("\n")[1:])
        for part in parts
    }


@pytest.mark.parametrize("name", PLANS)
def test_dry_run_states_parameters_memory_gpus_tokens_and_steps(name, plans):
    parameters, active, gpus, tokens_per_step, steps = PLANS[name]
    plan = plans[name]
    total, shown_active = plan["parameters"].split(", ")
    assert number(total) == pytest.approx(parameters, rel=0.005)
    assert number(shown_active) == pytest.approx(active, rel=0.005)
    state, share = number(plan["memory"]), plan["GPUs"].split(": ")[1]
    per_parameter = float(re.search(r"([\d.]+) bytes a parameter", plan["memory"])[1])  # type: ignore[index]
    assert per_parameter == {"moonlet": 12, "moonlight": 12.2}.get(name, 16)  # bf16 moments; Muon's one moment
    assert state == pytest.approx(parameters * per_parameter, rel=0.005)
    assert int(plan["GPUs"].split()[0]) == gpus
    assert number(share) == pytest.approx(state / gpus, rel=0.001)
    peak, *parts = re.findall(r"[\d.]+ [kMGT]B", plan["peak"])
    assert number(peak) == pytest.approx(sum(map(number, parts)), rel=0.001)
    assert number(share) < number(peak) < 180e9
    assert plan["step"].endswith(f" = {tokens_per_step:,} tokens")
    assert plan["steps"] == f"{steps:,}"
    assert number(plan["tokens"]) == pytest.approx(tokens_per_step * steps, rel=0.001)


def test_dry_run_counts_the_bytes_of_each_precision(place, capsys):
    def state(*overrides: str) -> str:
        options = [word for override in overrides for word in ("--set", override)]
        assert cli.train(["tiny.toml", "--dry-run", *options]) == 0
        return capsys.readouterr().out

    assert "16 bytes a parameter (master values 4, gradients 4, moments 8)" in state()
    assert "12 bytes a parameter (master values 4, gradients 4, moments 4)" in state("optim.moment_dtype=bf16")
    assert "32 bytes a parameter (master values 8, gradients 8, moments 16)" in state("train.dtype=fp64")
    assert not (place / "runs").exists()


def test_interrupt_before_a_run_is_no_traceback(monkeypatch, place):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load_config", interrupted)
    assert cli.train(["tiny.toml"]) == 130


def test_commands_state_their_version(capsys):
    for command in (cli.train, cli.prep):
        with pytest.raises(SystemExit) as ended:
            command(["--version"])
        assert ended.value.code == 0
        assert re.fullmatch(r"nmoe-core \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


def test_output_that_nobody_reads_is_no_error():
    """As in `nmoe-train CONFIG --dry-run | head -1`."""
    read, write = os.pipe()
    os.close(read)
    command = [
        sys.executable,
        "-c",
        "import sys; from nmoe.cli import train; sys.exit(train())",
        str(ROOT / "configs" / "moonlet.toml"),
        "--dry-run",
    ]
    result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (result.returncode, result.stderr) == (141, "")
