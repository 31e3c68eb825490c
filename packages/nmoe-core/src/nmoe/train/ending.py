# SPDX-License-Identifier: Apache-2.0
"""How a rank that fails alone ends: with all others, which wait for it, and with one message."""

import logging
from typing import NoReturn

import torch
import torch.distributed as dist

from nmoe.comm.watcher import LOST, end_process
from nmoe.errors import NmoeError, PeerFault, line_of
from nmoe.train.ranks import Ranks

__all__ = ["end_all", "end_alone"]

# Errors after which another start may go well: a peer, its connection or a GPU is gone.
_LOSSES = (PeerFault, torch.AcceleratorError, dist.DistBackendError, dist.DistNetworkError)
_log = logging.getLogger(__name__)


def end_all(ranks: Ranks, error: Exception) -> None:
    """Ends all ranks with the message of an error; returns where there is one rank, or all know of the error already."""
    watcher = ranks.watcher
    if not (watcher and watcher.awake):
        return
    if not isinstance(error, NmoeError):
        watcher.await_ring()  # this may be what the end of another rank looks like
    if watcher.rung:
        watcher.end()
    text, status = _word(error)
    watcher.fail(f"rank {ranks.rank}: {text}", status=status)


def end_alone(error: Exception) -> NoReturn:
    """Ends this one of several processes, which have not met yet; it is for the launcher to end the others."""
    text, status = _word(error)
    end_process(text, status=status)


def _word(error: Exception) -> tuple[str, int]:
    """Message and exit status."""
    line = line_of(error)
    if line is None:
        _log.error("the run failed", exc_info=error)
    status = LOST if isinstance(error, _LOSSES) else 2 if line else 1
    return line or f"{type(error).__name__}: {error}".splitlines()[0], status
