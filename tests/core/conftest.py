# SPDX-License-Identifier: Apache-2.0
"""A tiny model, shards of text that comes with Python, and `nmoe-train` as a real process."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nmoe.config import Config, parse_config
from nmoe.data.builtin import make_python_docs

TINY = """
[model]
vocab_size = 257
hidden_size = 32
num_layers = 2
num_dense_layers = 1
ffn_size = 64

[attention]
num_heads = 2
kv_lora_rank = 16
qk_nope_head_dim = 16
qk_rope_head_dim = 8
v_head_dim = 16

[moe]
num_experts = 4
num_shared_experts = 1
top_k = 2
expert_size = 32

[data]
train = ["DATA/train"]
val = "DATA/val"
seq_len = 64

[train]
steps = 60
batch_size = 4
micro_batch_size = 2
dtype = "fp32"
eval_every = 20
eval_batches = 2

[optim]
learning_rate = 3e-3

[schedule]
warmup_steps = 3
decay_steps = 10

[checkpoint]
every = 10

[metrics]
publish_s = 0.1
router_every = 5
"""


@pytest.fixture(scope="session")
def python_docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the shards `train` and `val` of the builtin corpus."""
    return make_python_docs(tmp_path_factory.mktemp("python-docs"))


@pytest.fixture(scope="session")
def tiny_text(python_docs: Path) -> str:
    """A config that trains in seconds, as TOML."""
    return TINY.replace("DATA", str(python_docs))


@pytest.fixture
def tiny(tiny_text: str) -> Callable[..., Config]:
    """The tiny config with overrides: `tiny("train.steps=3")`."""
    return lambda *overrides: parse_config(tiny_text, where="tiny.toml", name="tiny", overrides=overrides)


@pytest.fixture(scope="session")
def start_train(tiny_text: str) -> Callable[..., "subprocess.Popen[str]"]:
    """Starts `nmoe-train` on the tiny config in a folder: `start_train(folder, "train.steps=3", "--fresh")`."""

    def start(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
        (folder / "tiny.toml").write_text(tiny_text)
        command = [str(Path(sys.executable).parent / "nmoe-train"), "tiny.toml"]
        for argument in arguments:
            command += [argument] if argument.startswith("--") else ["--set", argument]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=folder, env=environment, text=True, stdout=pipe, stderr=pipe)

    return start
