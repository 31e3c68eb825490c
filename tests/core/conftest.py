# SPDX-License-Identifier: Apache-2.0
"""A tiny model, shards of text that comes with Python, and `nmoe-train` as a real process."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
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


class Forked:
    """A command as a process of its own, forked from the tests: PyTorch is loaded already, so a start takes no seconds.

    Args:
        command: what the command calls.
        folder: where it runs.
        arguments: its command line.
    """

    def __init__(self, command: Callable[[list[str]], int], folder: Path, arguments: Sequence[str]):
        import torch._dynamo  # noqa: F401  what a training run imports: seconds, once here and not once a process

        self._files = [folder / f"{name}-{time.monotonic_ns()}" for name in ("stdout", "stderr")]
        self._process = multiprocessing.get_context("fork").Process(target=self._be, args=(command, folder, arguments))
        self._process.start()

    def _be(self, command: Callable[[list[str]], int], folder: Path, arguments: Sequence[str]) -> None:
        import torch

        os.chdir(folder)
        for number, path in enumerate(self._files, start=1):
            os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), number)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)  # OpenMP's threads are not forked; a team of more than one would wait for them
        sys.exit(command([str(argument) for argument in arguments]))

    def poll(self) -> int | None:
        """Its exit status, minus a signal's number; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def finish(self, *, expect: int = 0) -> tuple[str, str]:
        """What it wrote to stdout and to stderr, when it has ended with that exit status."""
        self._process.join(timeout=200)
        if self.poll() is None:
            self._process.kill()
            self._process.join()
        assert self.poll() == expect, self.said
        return self.said

    @property
    def said(self) -> tuple[str, str]:
        out, err = (path.read_text(errors="replace") if path.exists() else "" for path in self._files)
        return out, err


@pytest.fixture(scope="session")
def forked() -> type[Forked]:
    return Forked


@pytest.fixture(scope="session")
def start_train(tiny_text: str) -> Callable[..., Forked]:
    """Starts `nmoe-train` on the tiny config in a folder: `start_train(folder, "train.steps=3", "--fresh")`."""
    from nmoe import cli

    def start(folder: Path, *arguments: str) -> Forked:
        (folder / "tiny.toml").write_text(tiny_text)
        words = [word for one in arguments for word in ([one] if one.startswith("--") else ["--set", one])]
        return Forked(cli.train, folder, ["tiny.toml", *words])

    return start
