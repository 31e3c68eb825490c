# SPDX-License-Identifier: Apache-2.0
"""File descriptors from rank to rank: how processes of one machine come to share memory that has no name.

A memfd has no entry in /dev/shm, so no end of a process, not even SIGKILL, leaves one behind. A peer could open it as
/proc/PID/fd/N, but that takes one PID namespace and the permission to trace the process, which hardened containers and
binaries with capabilities refuse. A Unix socket hands it over by consent, and a pidfd as well, which then cannot come to
mean another process. The sockets have abstract names (no file either) and live as long as the exchange.
"""

import array
import mmap
import os
import secrets
import socket
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from nmoe.comm.foreign import agree

__all__ = ["mapped", "share", "swap"]

_SECRET_BYTES = 16
_PATIENCE_S = 60.0


def swap(own: Sequence[int], group: dist.ProcessGroup, *, what: str) -> list[list[int]]:
    """Give each rank duplicates of this one's descriptors. Collective.

    Args:
        own: As many on each rank.
        group: All ranks, over a backend that moves CPU tensors (gloo).
        what: What they are for, for messages.

    Returns:
        The descriptors of every rank, in rank order; the caller closes them. Those of this rank are `own` themselves.

    Raises:
        EnvironmentFault: On all ranks, where two of them do not reach each other.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    found: list[list[int]] = [[] for _ in range(size)]
    found[rank] = list(own)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mailbox:
        mailbox.settimeout(_PATIENCE_S)
        name = b"\0nmoe-" + secrets.token_hex(_SECRET_BYTES).encode()
        mailbox.bind(name)
        # Names of sockets can be listed by anyone; what a rank sends is believed because it holds the rank's secret.
        secret = secrets.token_bytes(_SECRET_BYTES)
        told = agree(("", secret + name), group, what=what)
        error = ""
        try:
            for step in range(1, size):
                _send(mailbox, own, secret, to=told[(rank + step) % size][_SECRET_BYTES:])
                sender, descriptors = _receive(mailbox, [t[:_SECRET_BYTES] for t in told], len(own))
                found[sender] = descriptors
        except OSError as failure:
            error = (
                f"no descriptor from or to a peer ({failure}); all ranks must share a machine and its network namespace"
            )
    agree((error, b""), group, what=what)
    return found


def _send(mailbox: socket.socket, own: Sequence[int], secret: bytes, *, to: bytes) -> None:
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", own))
    mailbox.sendmsg([secret], [rights], 0, to)  # socket.send_fds drops the address


def _receive(mailbox: socket.socket, secrets_P: list[bytes], count: int) -> tuple[int, list[int]]:
    """The next message of a rank; strangers are ignored."""
    while True:
        payload, descriptors, _, _ = socket.recv_fds(mailbox, _SECRET_BYTES, count, socket.MSG_CMSG_CLOEXEC)
        if payload in secrets_P and len(descriptors) == count:
            return secrets_P.index(payload), list(descriptors)


def share(nbytes: int, group: dist.ProcessGroup, *, what: str) -> list[Tensor]:
    """Zeroed memory of each rank, uint8 in rank order, mapped into all of them. Collective."""
    own, error = -1, ""
    try:
        own = os.memfd_create("nmoe", os.MFD_CLOEXEC)
        os.ftruncate(own, max(nbytes, 1))
    except OSError as failure:
        error = str(failure)
    agree((error, b""), group, what=what)
    descriptors = [files[0] for files in swap([own], group, what=what)]
    tensors: list[Tensor] = []
    try:
        tensors = [mapped(descriptor, nbytes) for descriptor in descriptors]
    except (OSError, ValueError) as failure:  # no room for that many addresses
        error = str(failure)
    for descriptor in descriptors:
        os.close(descriptor)
    agree((error, b""), group, what=what)
    return tensors


def mapped(descriptor: int, nbytes: int) -> Tensor:
    """A uint8 tensor over a file; the mapping ends with the last tensor that uses it."""
    pages = mmap.mmap(descriptor, max(nbytes, 1))
    return torch.frombuffer(pages, dtype=torch.uint8, count=nbytes) if nbytes else torch.empty(0, dtype=torch.uint8)
