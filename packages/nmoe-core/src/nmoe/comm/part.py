# SPDX-License-Identifier: Apache-2.0
"""Some of a communicator's ranks as one of their own: those of a node, or those of equal place in all nodes.

The memory is allocated by all ranks of the whole, and each part sees what its ranks have of it; so a part costs no
process group, and a fault in one part is heard in all.
"""

import torch

from nmoe.comm.alarm import Alarm
from nmoe.comm.communicator import Communicator, Symmetric

__all__ = ["Part", "node_of", "rail_of"]


class Part:
    """A `Communicator` of some ranks of another one. All ranks of the whole make theirs, with parts of equal size.

    Args:
        whole: All ranks.
        ranks: Those of the part in the whole, this process's among them.
    """

    def __init__(self, whole: Communicator, ranks: range) -> None:
        self._whole, self.ranks = whole, ranks
        self.rank, self.size = ranks.index(whole.rank), len(ranks)
        self.node_size = sum(rank // whole.node_size == whole.rank // whole.node_size for rank in ranks)

    @property
    def device(self) -> torch.device:
        """See `Communicator`."""
        return self._whole.device

    @property
    def alarm(self) -> Alarm | None:
        """That of the whole."""
        return self._whole.alarm

    def symmetric(self, name: str, *, nbytes: int) -> Symmetric:
        """See `Communicator`; collective over the whole, and buffers of different parts have different names."""
        found = self._whole.symmetric(name, nbytes=nbytes)
        return Symmetric(
            local=found.local,
            peers=tuple(found.peers[rank] for rank in self.ranks),
            beyond=tuple(found.beyond[rank] for rank in self.ranks) if found.beyond else (),
        )

    def barrier(self) -> None:
        """Wait for all ranks of the whole."""
        self._whole.barrier()

    def close(self) -> None:
        """Nothing to give back: the whole does."""


def node_of(whole: Communicator) -> Part:
    """The ranks of this process's node."""
    first = whole.rank - whole.rank % whole.node_size
    return Part(whole, range(first, first + whole.node_size))


def rail_of(whole: Communicator) -> Part:
    """The ranks of equal place in all nodes: one a node, in the order of nodes."""
    return Part(whole, range(whole.rank % whole.node_size, whole.size, whole.node_size))
