# SPDX-License-Identifier: Apache-2.0
"""What a kernel that lost a peer leaves behind, and the error made of it.

Such a kernel writes a record into page-locked host memory and stops the device: nothing that was computed from missing
rows can reach a checkpoint. The host then sees some CUDA error at some later call; `device_fault` says what it means.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from nmoe.comm.alarm import Alarm
from nmoe.comm.remote import Phase
from nmoe.errors import PeerFault

__all__ = ["LATE", "WRONG_ROW", "device_fault", "fault_record", "tell_faults"]

LATE, WRONG_ROW = 1, 2
"""Kinds: a peer did not come to a meeting in time; a row is not the one that was announced."""


@functools.cache
def fault_record() -> Tensor:
    """int64 [8] of this process: kind (0: no fault), rank, peer, layer, phase, expected, seen, unused."""
    return torch.zeros(8, dtype=torch.int64, pin_memory=True)


def tell_faults(alarm: Alarm) -> None:
    """From now on the alarm rings when a kernel reports a fault."""
    fault_record()  # page-locked here, and not by the first kernel: that may be inside a captured graph
    alarm.watcher.device_fault = functools.partial(device_fault, alarm.ranks)


def device_fault(ranks: Sequence[int]) -> PeerFault | None:
    """The fault that a kernel reported, if one did; readable although the device has stopped.

    Args:
        ranks: their numbers in the run, by the number that the kernel knows.
    """
    kind, rank, peer, layer, phase, expected, seen, _ = fault_record().tolist()
    if not kind:
        return None
    where = (
        f"rank {ranks[rank]}: lost rank {ranks[peer]} in layer {layer}, {Phase(phase).name.lower().replace('_', ' ')}"
    )
    if kind == LATE:
        text = f"{where}: expected epoch {expected}, seen epoch {seen} at the end of the wait"
        return PeerFault(text, awaited=ranks[peer])
    source, epoch = seen >> 32, seen & 0x7FFFFFFF
    if 0 <= source < len(ranks):  # it was read from the row, and so may be anything
        source = ranks[source]
    return PeerFault(f"{where}: expected a row of epoch {expected}, seen one of rank {source}, epoch {epoch}")
