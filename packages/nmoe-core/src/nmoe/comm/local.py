# SPDX-License-Identifier: Apache-2.0
"""One rank that holds all experts: its only peer is itself."""

import torch

from nmoe.comm.communicator import Symmetric

__all__ = ["Local"]


class Local:
    """A `Communicator` of one rank, on any device."""

    rank = 0
    size = 1
    alarm = None

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._buffers: dict[str, Symmetric] = {}

    def symmetric(self, name: str, *, nbytes: int) -> Symmetric:
        """See `Communicator`."""
        if name not in self._buffers:
            own = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
            self._buffers[name] = Symmetric(local=own, peers=(own,))
        found = self._buffers[name]
        if found.local.numel() != nbytes:
            raise ValueError(f"symmetric buffer {name!r} exists with {found.local.numel()} bytes, not {nbytes}")
        return found

    def barrier(self) -> None:
        """Return at once: nobody else is awaited."""

    def close(self) -> None:
        """See `Communicator`."""
        self._buffers.clear()
