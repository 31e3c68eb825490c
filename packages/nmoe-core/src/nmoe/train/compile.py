# SPDX-License-Identifier: Apache-2.0
"""The process behind `nmoe.train.warm_up`: lists the kernels of a config, compiles what is missing, says how far it is.

    python -m nmoe.train.compile --ranks P --list FILE < config.toml        # with the environment that `warm_up` sets

Every kernel is compiled by one process, whichever run it belongs to: quack's cache takes a lock that ends with its holder,
and an object file appears whole or not at all.
"""

import argparse
import ctypes
import os
import signal
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import nmoe
from nmoe.comm.communicator import Symmetric
from nmoe.config import Config
from nmoe.config.load import parse_config
from nmoe.model.transformer import Transformer, compute_dtype
from nmoe.ops._cute.listing import Task, listing
from nmoe.optim.optimizer import make_optimizer
from nmoe.rdep.experts import Experts
from nmoe.rdep.nodes import exchange_of
from nmoe.train.warm_up import Listed, checksum

__all__ = ["tasks_of", "told"]

_MOST_PROCESSES = 16  # each takes up to 1 GB
_PR_SET_PDEATHSIG = 1
_SILENCE_S = 5.0  # between two lines about progress


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class _Peers:
    """The communicator of the first of some ranks, whose memory is not there."""

    rank, device, alarm = 0, torch.device("cpu"), None

    def __init__(self, size: int, node_size: int) -> None:
        self.size, self.ranks, self.node_size = size, range(size), node_size

    def symmetric(self, name: str, *, nbytes: int) -> Symmetric:
        del name
        memory = torch.empty(nbytes, dtype=torch.uint8)
        return Symmetric(local=memory, peers=tuple(memory if p < self.node_size else None for p in self.ranks))

    def barrier(self) -> None: ...

    def close(self) -> None: ...


def tasks_of(config: Config, *, ranks: int) -> list[Task]:
    """Everything that a step and an evaluation of this config ask for, in the order in which they do."""
    config = replace(config, rdep=replace(config.rdep, sizes="bound"))  # others are known in a step only
    rows, length = config.train.micro_batch_size, config.data.seq_len
    with FakeTensorMode(), listing() as tasks:
        peers = _Peers(ranks, config.rdep.node_size or ranks)
        model = Transformer(config, comm=peers)
        if ranks > 1:
            model.connect(exchange_of(config, peers, dtype=model.dtype))
        else:  # as the trainer does
            for experts in [module for module in model.modules() if isinstance(module, Experts)]:
                experts.hold(copies=False)
        ids = torch.zeros(rows, length, dtype=torch.int64)
        batch: dict[str, Any] = {"positions_BT": ids, "document_BT": ids, "targets_BT": ids}
        for _ in range(2):  # gradients that are new, and gradients that are added to those
            output = model(ids, **batch)
            (output.loss_sum + output.aux_loss).backward()
        optimizer = make_optimizer(model.named_parameters(), config=config.optim, seed=0, dtype=compute_dtype(config))
        optimizer.step(learning_rate=config.optim.learning_rate)
        with torch.no_grad():
            model(ids, **batch)
    return tasks


def told(error: Exception) -> str:
    """An error in one line, with the line of this package that met it: a list goes through many libraries."""
    root = Path(nmoe.__file__).parent
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(root)]
    where = f" (in nmoe/{Path(ours[-1].filename).relative_to(root)}:{ours[-1].lineno}, {ours[-1].name})" if ours else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{where}"


def _damaged(path: Path, sums: dict[Path, str]) -> bool:
    """Whether an object file is not what was written; without a checksum, whether it is cut off."""
    if path in sums:
        return checksum(path) != sums[path]
    data = path.read_bytes()
    if data[:4] != b"\x7fELF" or len(data) < 64:
        return True
    table, size, count = (int.from_bytes(data[at : at + n], "little") for at, n in ((40, 8), (58, 2), (60, 2)))
    return len(data) < table + size * count


def _missing(tasks: list[Task], folder: Path) -> list[Task]:
    """Those tasks of which something is not on disk; what is damaged there is removed, and said."""
    sums = {}
    for path in (folder / "lists").glob("*.json"):
        listed = Listed.read(path)
        sums |= {folder / name: found for name, found in listed.sums.items()}
    for task in tasks:
        for path, name in task.kernels.items():
            if path.exists() and _damaged(path, sums):
                _say(f"{path}: damaged ({name}); compiling it again")
                path.unlink(missing_ok=True)
    return [task for task in tasks if not all(path.exists() for path in task.kernels)]


_tasks: list[Task] = []  # of the processes that compile, who are forked with it


def _compile(number: int) -> float:
    """Compiles one task; returns the seconds it took."""
    began = time.perf_counter()
    try:
        _tasks[number].compile()
    except Exception as error:  # noqa: BLE001  the compiler's cannot always be sent to another process
        names = ", ".join(_tasks[number].kernels.values())
        raise RuntimeError(f"{names}: {told(error)}") from None
    lost = [name for path, name in _tasks[number].kernels.items() if not path.exists()]
    if lost:
        raise OSError(f"{', '.join(lost)}: compiled, but not stored; is there room on the disk?")
    return time.perf_counter() - began


def _begin() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _compile_all(tasks: list[Task], *, processes: int) -> None:
    """Compiles all tasks, and says how far it is."""
    global _tasks
    _tasks = tasks
    began = said = time.perf_counter()
    done, total = 0, sum(len(task.kernels) for task in tasks)
    with ProcessPoolExecutor(processes, mp_context=get_context("fork"), initializer=_begin) as pool:
        running = {pool.submit(_compile, number): task for number, task in enumerate(tasks)}
        try:
            for future in as_completed(running):
                future.result()
                done += len(running[future].kernels)
                now = time.perf_counter()
                if now - said > _SILENCE_S and done < total:
                    said, left = now, (now - began) * (total - done) / done
                    _say(f"{done} of {total} kernels in {now - began:.0f} s, about {left:.0f} s left")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    _say(f"compiled {total} kernels in {time.perf_counter() - began:.1f} s")


def main() -> int:
    """Reads the config, and compiles; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, required=True, help="that share the experts")
    parser.add_argument("--list", type=Path, required=True, help="file for the list")
    options = parser.parse_args()
    _begin()
    chip = os.environ["CUTE_DSL_ARCH"]
    config = parse_config(sys.stdin.read(), where="stdin", name="run")
    try:
        tasks = tasks_of(config, ranks=options.ranks)
    except Exception as error:  # noqa: BLE001  of any library that a model goes through
        sys.stderr.write(f"listing the kernels: {told(error)}; with PyTorch {torch.__version__}\n")
        return 1
    listed = Listed.read(options.list)
    missing = _missing(tasks, listed.folder)
    kernels = {path: name for task in tasks for path, name in task.kernels.items()}
    number = sum(not path.exists() for path in kernels)
    processes = min(len(os.sched_getaffinity(0)), len(missing), _MOST_PROCESSES)
    if missing:
        _say(
            f"compiling {number} kernels for {chip} with {processes} processes, {len(kernels) - number} found in {listed.folder}"
        )
        try:
            _compile_all(missing, processes=processes)
        except BrokenProcessPool:
            sys.stderr.write("a process that compiled was killed; is there memory enough?\n")
            return 1
    listed.write(kernels)
    return 0


if __name__ == "__main__":
    sys.exit(main())
