# SPDX-License-Identifier: Apache-2.0
"""From one command to as many ranks as there are GPUs, and from their ends to one exit status and one message.

On one machine the ranks are started by PyTorch's elastic launcher; where torchrun or Slurm has started this process as a
rank already, it is that rank. A rank that ends in an error leaves its one line where the launcher reads it; the others
end by themselves (`nmoe.comm.watcher`). After a rank was lost (killed, out of memory, a GPU that fell off the bus) all start
again from the newest checkpoint, with as many ranks as there are GPUs by then. A launcher that dies takes its ranks along.
"""

import ctypes
import importlib
import json
import logging
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from nmoe.checkpoint.store import list_checkpoints
from nmoe.comm.watcher import LOST
from nmoe.config import Config
from nmoe.errors import EnvironmentFault, line_of
from nmoe.train.environment import check_meeting, slurm_environment, threads_of, world_of
from nmoe.train.folder import run_folders
from nmoe.train.report import set_up_logging
from nmoe.train.run import Outcome, train

__all__ = ["End", "launch"]

_PR_SET_PDEATHSIG = 1
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """How the command ends.

    Attributes:
        status: exit status.
        outcome: of the run, on the process that speaks for it; None where there is nothing to tell.
        error: one line, or empty.
    """

    status: int
    outcome: Outcome | None = None
    error: str = ""


def launch(config: Config, *, nproc: int | None, restarts: int, fresh: bool) -> End:
    """Trains with the ranks that a launcher has started, or starts them.

    Args:
        config: the run's.
        nproc: ranks on this machine; None: one a visible GPU, or one.
        restarts: most starts after a rank was lost, without a new checkpoint in between.
        fresh: see `nmoe.train.folder`.

    Raises:
        EnvironmentFault: what a launcher says of this rank cannot be.
        NmoeError: with one rank, what `train` raises.
    """
    threads_of(os.environ)  # refused here, once, not by every rank
    if not nproc:
        os.environ.update(slurm_environment(os.environ))
        if world_of(os.environ)[1] > 1:
            check_meeting(os.environ)
            return _be_one_of_many(config, fresh=fresh)
    # PyTorch's launcher asks whether there are GPUs. Asked of the driver, that would be the last use of CUDA in any fork of
    # this process; NVIDIA's management library may be asked.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    size = _ranks_here(nproc)
    if size == 1:
        return _end(train(config, fresh=fresh, bar=set_up_logging()))
    if torch.cuda.is_initialized():  # never in a command of its own
        raise EnvironmentFault(
            "this process uses CUDA already, so that its ranks could not; start nmoe-train as a command"
        )
    return _launch_here(config, size, nproc=nproc, restarts=restarts, fresh=fresh)


def _end(outcome: Outcome) -> End:
    if outcome.checkpoint_error:
        return End(status=1, outcome=outcome, error=outcome.checkpoint_error)
    return End(status=128 + outcome.signal if outcome.signal else 0, outcome=outcome)


def _be_one_of_many(config: Config, *, fresh: bool) -> End:
    """A rank under torchrun or Slurm: rank 0 speaks for all, another one only where it fails alone."""
    end = _train_rank(config, fresh=fresh)
    if world_of(os.environ)[0] == 0:
        return end
    return End(status=end.status)


def _ranks_here(nproc: int | None) -> int:
    gpus = torch.cuda.device_count()
    if nproc and gpus and nproc > gpus:
        raise EnvironmentFault(f"--nproc {nproc}: {gpus} GPUs are visible; give {gpus} or less, or leave it out")
    return nproc or max(1, gpus)


def _launch_here(config: Config, size: int, *, nproc: int | None, restarts: int, fresh: bool) -> End:
    """Starts the ranks, again where one was lost, until they end by themselves."""
    importlib.import_module("torch._dynamo")  # here, once: a device mesh imports it, seconds in every rank
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # its stories are told in one line below
    set_up_logging()
    left, before, folders = restarts, _newest(config), _folders(config)
    while True:
        with _pass_on_signals() as taken, tempfile.TemporaryDirectory(prefix="nmoe-") as words:
            try:
                ends = elastic_launch(_launch_config(size, words), _rank)(config, fresh)
                return ends[0]
            except ChildFailedError as failed:
                end, lost = _why(failed, Path(words))
        newest = _newest(config)
        left, before = (restarts if newest != before else left), newest
        if taken or not lost or left == 0:
            return End(status=128 + taken[0]) if taken else end
        left -= 1
        fresh = fresh and _folders(config) == folders  # a new run that was begun goes on
        if not nproc:
            size = _ranks_here(None)
        _log.warning("%s: starting again with %d ranks (%d more times without a new checkpoint)", end.error, size, left)


def _launch_config(size: int, words: str) -> LaunchConfig:
    return LaunchConfig(
        logs_specs=DefaultLogsSpecs(log_dir=words),
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        run_id=f"nmoe-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        start_method="fork",  # PyTorch is loaded already, and nothing has run in it yet
        signals_to_handle="SIGQUIT",  # the others are ours to pass on
    )


def _folders(config: Config) -> list[Path]:
    """Folders of the runs of this name."""
    root = Path(config.run.root)
    return run_folders(root, config.run.name) if root.is_dir() else []


def _newest(config: Config) -> Path | None:
    """The newest checkpoint of any run of this name."""
    found = [path for run in _folders(config) for path in list_checkpoints(run / "checkpoints")]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


@contextmanager
def _pass_on_signals() -> Iterator[list[int]]:
    """Gives SIGINT and SIGTERM to the ranks, which stop after the step; the numbers of those that came."""
    taken: list[int] = []

    def take(number: int, frame: FrameType | None) -> None:
        del frame
        taken.append(number)
        for child in multiprocessing.active_children():
            if child.pid:
                os.kill(child.pid, number)

    before = {number: signal.signal(number, take) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield taken
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _why(failed: ChildFailedError, words: Path) -> tuple[End, bool]:
    """What to say about a start that failed, and whether a rank was lost through no fault of the program."""
    rank, first = failed.get_first_failure()
    signalled = first.exitcode < 0
    how = f"rank {rank} was ended by {signal.Signals(-first.exitcode).name}" if signalled else f"rank {rank} was lost"
    for place in words.rglob("error.json"):  # of any rank: all say the same, and which ended first says nothing
        word = json.loads(place.read_text(encoding="utf-8"))
        if "status" in word:  # from `nmoe.comm.watcher`
            lost = word["status"] == LOST
            text = f"{word['message']} ({how})" if signalled else word["message"]
            return End(status=1 if lost else word["status"], error=text), lost
    if signalled or not Path(first.error_file).is_file():
        return End(status=1, error=how), True
    return End(status=first.exitcode, error=first.message), False


def _rank(config: Config, fresh: bool) -> End:
    """Entry of a forked rank: what the launcher gets from it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):  # until the run takes them, they end the process
        signal.signal(number, signal.SIG_DFL)
    torch.set_num_threads(threads_of(os.environ) or max(1, (os.cpu_count() or 1) // world_of(os.environ)[3]))
    logging.getLogger("nmoe").handlers.clear()
    return _train_rank(config, fresh=fresh)


def _train_rank(config: Config, *, fresh: bool) -> End:
    """Trains as one of several ranks. What all ranks know is returned; what this one knows ends it at once."""
    bar = set_up_logging()
    if world_of(os.environ)[0]:
        logging.getLogger("nmoe").setLevel(logging.ERROR)
    try:
        return _end(train(config, fresh=fresh, bar=bar))
    except Exception as error:  # noqa: BLE001 - handed to the launcher, which speaks for all ranks
        line = line_of(error, place=config.run.root)
        return End(status=2 if line else 1, error=line or f"{type(error).__name__}: {error}".splitlines()[0])
