# SPDX-License-Identifier: Apache-2.0
"""`nmoe-train` as a process of its own, forked from the tests: PyTorch is loaded already, so a start takes no seconds."""

import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path

import torch
import torch._dynamo

from nmoe import cli
from nmoe.formats.metrics import open_store

CONFIG = """
model = {vocab_size = 257, hidden_size = 16, num_layers = 2, num_dense_layers = 1, ffn_size = 24}
attention = {num_heads = 2, kv_lora_rank = 8, qk_nope_head_dim = 8, qk_rope_head_dim = 4, v_head_dim = 8}
moe = {num_experts = 8, num_shared_experts = 1, top_k = 2, expert_size = 16}
data = {train = ["DATA/train"], val = "DATA/val", seq_len = 32}
train = {steps = 40, batch_size = 8, micro_batch_size = 2, dtype = "fp32", eval_every = 20, eval_batches = 3}
optim = {learning_rate = 1e-3}
schedule = {warmup_steps = 3, decay_steps = 10}
checkpoint = {every = 4}
metrics = {publish_s = 0.1}
"""


class Command:
    """`nmoe-train tiny.toml ...` in a folder: started by the constructor, ended at the latest by the context manager.

    Args:
        folder: where it runs; `tiny.toml` is there.
        arguments: options, or overrides of the config.
    """

    def __init__(self, folder: Path, *arguments: str):
        self.run, self.error_path = folder / "runs" / "tiny", folder / f"stderr-{time.monotonic_ns()}"
        command = ["tiny.toml"]
        for argument in arguments:
            command += [argument] if argument[0] in "-0123456789" else ["--set", argument]
        sys.stdout.flush()
        sys.stderr.flush()
        self.status: int | None = None
        self.error_path.touch()
        self.pid = os.fork()
        if self.pid == 0:
            self._be(folder, command)

    def _be(self, folder: Path, command: list[str]) -> None:
        status = 1
        try:
            os.setsid()
            os.chdir(folder)
            with self.error_path.open("w") as file, Path(os.devnull).open("w") as null:
                for number in (1, 2):
                    os.dup2((null, file)[number - 1].fileno(), number)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            os.environ["OMP_NUM_THREADS"] = "1"
            torch.set_num_threads(1)
            status = cli.train(command)
        finally:
            sys.stderr.flush()
            os._exit(status)

    @property
    def errors(self) -> str:
        """What it and its ranks wrote to stderr so far, step lines among it; the last character may be half there."""
        return self.error_path.read_text(errors="replace")

    def ranks(self) -> list[int]:
        """Process ids of its ranks."""
        with contextlib.suppress(FileNotFoundError):
            return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]
        return []

    def wait_for_step(self, step: int) -> None:
        """Returns once a line of a step that is `step` or later was logged by this command."""
        until = time.monotonic() + 240
        while not any(int(n) >= step for n in re.findall(r"^step +(\d+)/", self.errors, re.MULTILINE)):
            assert self._poll() is None, self.errors
            assert time.monotonic() < until, f"no step {step}: {self.errors}"
            time.sleep(0.01)

    def _poll(self) -> int | None:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status

    def wait(self, timeout_s: float = 240.0) -> int:
        """Its exit status; minus a signal's number."""
        until = time.monotonic() + timeout_s
        while self._poll() is None:
            assert time.monotonic() < until, f"it hangs: {self.errors}"
            time.sleep(0.01)
        assert self.status is not None
        return self.status

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_: object) -> None:
        ranks = self.ranks()
        for pid in [] if self.status is not None else [self.pid, *ranks]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.status is None:
            os.waitpid(self.pid, 0)


def alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def figures(run: Path) -> list[tuple]:
    """Every value that the arithmetic decides, bit for bit, in order; times and speeds left out."""
    with open_store(run) as store:
        return store.execute(
            "SELECT name, step, layer, expert, rank, value FROM metrics WHERE name NOT LIKE 'speed/%'"
            " AND name NOT LIKE 'memory/%' AND name NOT LIKE 'metrics/%' AND name NOT LIKE 'gpu/%' ORDER BY ALL"
        ).fetchall()


def losses(run: Path) -> list[float]:
    """Loss and gradient norm of every step."""
    names = "('train/loss', 'train/grad_norm')"
    with open_store(run) as store:
        found = store.execute(f"SELECT value FROM metrics WHERE name IN {names} ORDER BY step, name").fetchall()
    return [value for (value,) in found]
