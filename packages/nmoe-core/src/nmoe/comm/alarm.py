# SPDX-License-Identifier: Apache-2.0
"""The alarm as the ranks of one group use it; what it does is `nmoe.comm.watcher`, which all groups of a run share."""

import contextlib
from collections.abc import Iterator

import numpy as np
import torch.distributed as dist

from nmoe.comm.watcher import Watcher
from nmoe.errors import PeerFault

__all__ = ["Alarm"]


class Alarm:
    """One rank's end. Made by all ranks of the group together.

    Args:
        group: The ranks, over gloo.
        watcher: That of the run, which is left as it is at the end; None: one for this group alone.

    Attributes:
        group: See above.
        ranks: Their numbers in the run, which are those of all messages, by rank in the group.
    """

    def __init__(self, group: dist.ProcessGroup, watcher: Watcher | None = None) -> None:
        self.group, self.ranks = group, dist.get_process_group_ranks(group)
        self.watcher, self._is_own = watcher or Watcher(group), watcher is None

    @property
    def rung(self) -> bool:
        """Whether somebody rang, in this group or elsewhere."""
        return self.watcher.rung

    @property
    def awake(self) -> bool:
        """Whether this rank has not taken its leave."""
        return self.watcher.awake

    @property
    def arrivals(self) -> np.ndarray:
        """int64 [P]: barriers that each rank has come to."""
        return self.watcher.arrivals(self.ranks)

    def gone(self) -> set[int]:
        """Ranks in the group whose process has ended although they did not take their leave."""
        gone = self.watcher.gone()
        return {rank for rank, number in enumerate(self.ranks) if number in gone}

    def waits(self, rank: int) -> bool:
        """See `Watcher.waits`; a rank of the group."""
        return self.watcher.waits(self.ranks[rank])

    def ring(self, text: str) -> PeerFault:
        """See `Watcher.ring`."""
        return self.watcher.ring(text)

    @contextlib.contextmanager
    def told_of_errors(self) -> Iterator[None]:
        """Whatever is raised in the block ends the other ranks as well."""
        try:
            yield
        except PeerFault:
            raise
        except BaseException as error:
            if fault := self.watcher.await_report():  # the error is what the driver made of it
                raise self.watcher.ring(str(fault)) from None
            self.watcher.ring(f"rank {self.watcher.rank} failed: {type(error).__name__}: {error}")
            raise

    def close(self) -> None:
        """Take leave: from now on the end of this process is no fault, unless the run goes on watching."""
        if self._is_own:
            self.watcher.close()
