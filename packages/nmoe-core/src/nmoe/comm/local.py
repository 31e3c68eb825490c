# SPDX-License-Identifier: Apache-2.0
"""One rank that holds all experts: its only peer is itself."""

import torch

from nmoe.comm.buffers import Buffers
from nmoe.comm.communicator import Symmetric

__all__ = ["Local"]


class Local:
    """A `Communicator` of one rank, on any device."""

    rank = 0
    size = 1
    ranks = range(1)
    node_size = 1
    alarm = None

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._buffers = Buffers(self._make)

    def symmetric(self, name: str, *, nbytes: int) -> Symmetric:
        """See `Communicator`."""
        return self._buffers.get(name, nbytes=nbytes)

    def _make(self, name: str, nbytes: int) -> Symmetric:
        del name
        own = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        return Symmetric(local=own, peers=(own,))

    def barrier(self) -> None:
        """Return at once: nobody else is awaited."""

    def close(self) -> None:
        """See `Communicator`."""
        self._buffers.clear()
