# SPDX-License-Identifier: Apache-2.0
"""The symmetric buffers that a communicator has made: each is allocated once and given to whoever asks for it again."""

from collections.abc import Callable

import torch.distributed as dist

from nmoe.comm.communicator import Symmetric
from nmoe.comm.foreign import agree
from nmoe.errors import EnvironmentFault

__all__ = ["Buffers", "agree_on_buffer"]


class Buffers:
    """Buffers by name.

    Args:
        make: Allocates the buffer of a name and a number of bytes.
    """

    def __init__(self, make: Callable[[str, int], Symmetric]) -> None:
        self._make = make
        self._found: dict[str, Symmetric] = {}

    def get(self, name: str, *, nbytes: int) -> Symmetric:
        """The buffer of that name, made if there is none.

        Raises:
            ValueError: The name exists with another size.
        """
        if name not in self._found:
            self._found[name] = self._make(name, nbytes)
        found = self._found[name]
        if found.local.numel() != nbytes:
            raise ValueError(f"symmetric buffer {name!r} exists with {found.local.numel()} bytes, not {nbytes}")
        return found

    def clear(self) -> None:
        """Forget them all."""
        self._found.clear()


def agree_on_buffer(name: str, nbytes: int, group: dist.ProcessGroup, *, what: str) -> None:
    """Make sure that all ranks are about to make the same buffer: an allocation of different sizes would damage a heap.

    Raises:
        EnvironmentFault: On all ranks, where they ask for different buffers.
    """
    request = f"{name} {nbytes}".encode()
    for peer, asked in enumerate(agree(("", request), group, what=what)):
        if asked != request:
            raise EnvironmentFault(f"{what}: rank {peer} asks for {asked.decode()} (name, bytes)")
