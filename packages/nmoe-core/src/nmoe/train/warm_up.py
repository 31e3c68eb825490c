# SPDX-License-Identifier: Apache-2.0
"""Every kernel that a config will use, compiled before its first step, from shapes and dtypes alone.

Which they are is found by running the model forward and backward on tensors without memory (`nmoe.train.compile`), in a
process of its own that sees no GPU: so an image for GPUs can be filled on a machine that has none. That process compiles
what is not on disk, on all cores. Then it leaves a list of the object files with their checksums beside them, so that the
next start of this config reads those and starts nothing.
"""

import hashlib
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import nmoe
from nmoe import arch
from nmoe.config import Config
from nmoe.config.schema import Checkpoint, Data, Metrics, Optim, Run, Schedule, Train
from nmoe.config.text import to_toml
from nmoe.errors import EnvironmentFault
from nmoe.ops._cute.folder import kernel_folder
from nmoe.train.environment import world_of
from nmoe.train.ranks import Ranks

__all__ = ["CHIPS", "Listed", "checksum", "warm_up", "warm_up_ranks"]

_log = logging.getLogger(__name__)

CHIPS = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 148}
"""Chip -> its multiprocessors (H200, B200, B300), where there is no GPU to ask."""
_PACKAGES = ("torch", "nvidia-cutlass-dsl", "quack-kernels", "flash-attn-4", "apache-tvm-ffi")


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """The list of a config's kernels. Its name holds everything that it could depend on, so a list that exists is right.

    Attributes:
        path: of the list.
        sums: SHA-256 of each object file, by path below the chip's folder.
        names: what each file holds, in a few words.
    """

    path: Path
    sums: dict[str, str]
    names: dict[str, str]

    @classmethod
    def of(cls, config: Config, *, chip: str, ranks: int) -> "Listed":
        """That of before; empty where there is none."""
        return cls.read(kernel_folder(chip) / "lists" / f"{_digest(config, ranks=ranks)}.json")

    @classmethod
    def read(cls, path: Path) -> "Listed":
        """The list in a file; empty where it cannot be read."""
        try:
            found = json.loads(path.read_text())
            return cls(path=path, sums=found["sums"], names=found["names"])
        except (OSError, ValueError, KeyError):
            return cls(path=path, sums={}, names={})

    @property
    def folder(self) -> Path:
        """Of the chip."""
        return self.path.parent.parent

    def complete(self) -> bool:
        """Whether there is a list, and all its files are what they were."""
        return bool(self.sums) and all(checksum(self.folder / name) == found for name, found in self.sums.items())

    def write(self, kernels: dict[Path, str]) -> None:
        """Keeps the list, at once or not at all."""
        names = {str(path.relative_to(self.folder)): name for path, name in kernels.items()}
        sums = {name: checksum(self.folder / name) for name in names}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self.path.parent, suffix=".tmp", delete=False) as file:
            json.dump({"sums": sums, "names": names}, file, indent=1)
        Path(file.name).replace(self.path)


def checksum(path: Path) -> str:
    """SHA-256 of a file; empty where it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _digest(config: Config, *, ranks: int) -> str:
    """Of what decides which kernels there are: the model's part of the config, all sources, all compilers."""
    train, optim = config.train, config.optim
    relevant = replace(
        config,
        run=Run(),
        schedule=Schedule(),
        metrics=Metrics(),
        checkpoint=Checkpoint(every=1),
        data=Data(seq_len=config.data.seq_len),
        train=Train(
            batch_size=1, micro_batch_size=train.micro_batch_size, dtype=train.dtype, recompute=train.recompute
        ),
        optim=Optim(learning_rate=1.0, kind=optim.kind, moment_dtype=optim.moment_dtype),
    )
    state = hashlib.sha256(to_toml(relevant).encode())
    state.update(f"{ranks} {sys.version_info[:2]}".encode())
    for package in _PACKAGES:
        state.update(importlib.metadata.version(package).encode())
    root = Path(nmoe.__file__).parent
    for source in sorted(root.rglob("*.py")):
        state.update(source.relative_to(root).as_posix().encode())
        state.update(hashlib.sha256(source.read_bytes()).digest())
    return state.hexdigest()[:32]


def warm_up(
    config: Config, *, chip: str, ranks: int, multiprocessors: int | None = None, say: Callable[[str], None]
) -> Listed:
    """Makes sure that every kernel of a config lies on disk.

    Args:
        config: the run's.
        chip: one of `CHIPS`; need not be this machine's.
        ranks: that share the experts.
        multiprocessors: of the GPU; None: as in `CHIPS`.
        say: takes each line of progress.

    Returns:
        Their list.

    Raises:
        EnvironmentFault: something did not compile.
    """
    listed = Listed.of(config, chip=chip, ranks=ranks)
    if not listed.complete():
        _compile(config, listed, chip=chip, ranks=ranks, multiprocessors=multiprocessors or CHIPS[chip], say=say)
        listed = Listed.read(listed.path)
    return listed


def warm_up_ranks(config: Config, ranks: Ranks) -> None:
    """`warm_up` of a run on GPUs: on each machine the first of its ranks sees to it, and the others wait."""
    chip = arch.current().target
    _, _, place, here = world_of(os.environ)
    if not config.rdep.node_size and ranks.expert_size > here:  # the ranks of a machine are a node
        config = replace(config, rdep=replace(config.rdep, node_size=here))

    def work() -> None:
        if chip is None or ranks.device.type != "cuda" or place != 0:
            return
        count = torch.cuda.get_device_properties(ranks.device).multi_processor_count
        try:
            warm_up(config, chip=chip, ranks=ranks.expert_size, multiprocessors=count, say=_log.info)
        except EnvironmentFault as fault:
            _log.warning("%s; what is missing will be compiled where it is first used", fault)

    ranks.together(work)


def _compile(
    config: Config, listed: Listed, *, chip: str, ranks: int, multiprocessors: int, say: Callable[[str], None]
) -> None:
    """Runs the process that compiles; its environment says for what."""
    number = chip.removeprefix("sm_").rstrip("a")
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "NMOE_ARCH": "sm90a" if number == "90" else "sm100a",
        "CUTE_DSL_ARCH": chip,
        "QUACK_ARCH": number,
        "FLASH_ATTENTION_ARCH": f"sm_{number}",
        "FLASH_ATTENTION_NUM_SMS": str(multiprocessors),
        "OMP_NUM_THREADS": "1",
    }
    arguments = ["--ranks", str(ranks), "--list", str(listed.path)]
    command = [sys.executable, "-P", "-W", "ignore", "-m", "nmoe.train.compile", *arguments]
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(to_toml(config))
                process.stdin.close()
                for line in process.stdout:
                    say(line.rstrip("\n"))
            except BaseException:
                process.terminate()
                raise
        if process.returncode:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or [f"exit status {process.returncode}"])[-1]
            raise EnvironmentFault(f"kernels for {chip}: {last}")
