# SPDX-License-Identifier: Apache-2.0
"""Several ranks as processes of this machine, for tests: 4 of them, process group included, are there in 0.2 s.

They are forked from the test process, which has PyTorch loaded and so needs no import of seconds; any function will do,
also a local one. A rank has one thread of OpenMP, stands alone (nothing of pytest runs in it) and dies with its parent.

    losses = run_ranks(4, work, config)                # work(config) on each of 4 ranks, results in rank order
    losses = run_ranks(4, over_shm, work, config)      # work(comm, config), comm over shared memory
    with Ranks(4, work) as ranks: ...                  # to stop or kill some, and to look at how each ends
"""

import contextlib
import ctypes
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe, connection
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # what a backward imports: seconds, once here and not once a rank

__all__ = ["Outcome", "Ranks", "over_shm", "run_ranks"]

_PR_SET_PDEATHSIG = 1
TIMEOUT_S = 240.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a rank ended."""

    exit_code: int
    """0; 1 after an exception; minus the signal's number where one ended it."""
    result: Any = None
    """What the function returned."""
    error: BaseException | None = None
    """What it raised."""
    text: str = ""
    """The traceback."""
    seconds: float = 0.0
    """From start to end."""


class Ranks:
    """`size` processes that each call `work(*arguments)` and find each other by PyTorch's environment variables.

    As a context manager it leaves no process behind, however the block is left.
    """

    def __init__(self, size: int, work: Callable[..., Any], *arguments: Any) -> None:
        with socket.socket() as place:
            place.bind(("127.0.0.1", 0))
            port = place.getsockname()[1]
        self.size, self._began = size, time.monotonic()
        self.pids: list[int] = []
        self._pipes: list[connection.Connection] = []
        self._outcomes: dict[int, Outcome] = {}
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        for rank in range(size):
            ours, theirs = Pipe(duplex=False)
            pid = os.fork()
            if pid == 0:
                _be_rank(rank, size, port, parent, theirs, work, arguments)
            theirs.close()
            self._pipes.append(ours)
            self.pids.append(pid)

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank that has not been awaited yet."""
        os.kill(self.pids[rank], number)

    def wait(self, timeout_s: float = TIMEOUT_S, *, only: set[int] | None = None) -> list[Outcome]:
        """The outcomes of all ranks (or of some), when they have ended.

        Raises:
            AssertionError: They have not after `timeout_s`.
        """
        wanted, deadline = set(range(self.size)) if only is None else only, time.monotonic() + timeout_s
        while missing := wanted - self._outcomes.keys():
            left = deadline - time.monotonic()
            ready = connection.wait([self._pipes[rank] for rank in missing], timeout=max(0.0, left))
            assert ready, f"ranks {sorted(missing)} of {self.size} hang"
            for rank in missing:
                if self._pipes[rank] in ready:
                    self._outcomes[rank] = self._outcome(rank)
        return [self._outcomes[rank] for rank in sorted(wanted)]

    def _outcome(self, rank: int) -> Outcome:
        facts: dict[str, Any] = {"text": "died without a word"}
        with contextlib.suppress(EOFError):
            facts = pickle.loads(self._pipes[rank].recv_bytes())
        status = os.waitstatus_to_exitcode(os.waitpid(self.pids[rank], 0)[1])
        return Outcome(exit_code=status, seconds=time.monotonic() - self._began, **facts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in set(range(self.size)) - self._outcomes.keys():
            self.signal(rank, signal.SIGKILL)
            os.waitpid(self.pids[rank], 0)
        for pipe in self._pipes:
            pipe.close()


def run_ranks(
    size: int, work: Callable[..., Any], *arguments: Any, timeout_s: float = TIMEOUT_S, **options: Any
) -> list[Any]:
    """`work(*arguments, **options)` on `size` ranks; the results in rank order.

    Raises:
        AssertionError: A rank raised, died or hung. The others are ended.
    """
    with Ranks(size, partial(work, **options), *arguments) as ranks:
        left, deadline = set(range(size)), time.monotonic() + timeout_s
        while left:  # whichever ends first, so that one failure is told at once
            pipes = [ranks._pipes[rank] for rank in left]
            ready = connection.wait(pipes, timeout=max(0.0, deadline - time.monotonic()))
            assert ready, f"ranks {sorted(left)} of {size} hang"
            done = {rank for rank in left if ranks._pipes[rank] in ready}
            for rank, outcome in zip(sorted(done), ranks.wait(only=done), strict=True):
                assert outcome.exit_code == 0, f"rank {rank} of {size}, exit code {outcome.exit_code}: {outcome.text}"
            left -= done
        return [outcome.result for outcome in ranks.wait()]


def over_shm(work: Callable[..., Any], *arguments: Any, node_size: int = 0) -> Any:
    """`work(comm, *arguments)` over shared memory, of one node or of several; itself to be called on each rank."""
    from nmoe.comm.shm import Shm

    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    comm = Shm(dist.group.WORLD, node_size=node_size)
    result = work(comm, *arguments)
    comm.close()
    dist.destroy_process_group()
    return result


def _be_rank(
    rank: int,
    size: int,
    port: int,
    parent: int,
    pipe: connection.Connection,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """All that a forked process does; never returns."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        torch.set_num_threads(1)  # OpenMP's threads are not forked; a team of more than one would wait for them
        torch.manual_seed(0)
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        pipe.send_bytes(pickle.dumps({"result": work(*arguments)}))
        status = 0
    except BaseException as error:  # noqa: BLE001  also SystemExit: this process ends here
        pipe.send_bytes(_pickled_error(error))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _pickled_error(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        whole = pickle.dumps({"error": error, "text": text})
        pickle.loads(whole)
    except Exception:  # noqa: BLE001  an error that cannot travel: its text can
        return pickle.dumps({"text": text})
    return whole
