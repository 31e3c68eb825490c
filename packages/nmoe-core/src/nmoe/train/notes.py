# SPDX-License-Identifier: Apache-2.0
"""What each rank tells the others in every step, beside the step's sums: whether to stop, and figures of its own."""

from dataclasses import astuple, dataclass, fields

import numpy as np
import torch

from nmoe.train.throughput import gpu_peak_bytes, host_rss_bytes

__all__ = ["AllNotes", "Note"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Of one rank; all numbers, so that they travel with the sums.

    Attributes:
        stop: number of the signal that asks to stop, or 0.
        last_step_time: seconds of the step before this one; NaN before there is one.
        data_wait: seconds that this step waited for data.
        host_rss: bytes of resident memory.
        gpu_peak: bytes of GPU memory at most so far; 0 on a CPU.
    """

    stop: int
    last_step_time: float
    data_wait: float
    host_rss: int
    gpu_peak: int

    @classmethod
    def of(cls, device: torch.device, *, stop: int, last_step_time: float, data_wait: float) -> tuple[float, ...]:
        """A note with this process's memory, as it travels."""
        note = cls(
            stop=stop,
            last_step_time=last_step_time,
            data_wait=data_wait,
            host_rss=host_rss_bytes(),
            gpu_peak=gpu_peak_bytes(device),
        )
        return astuple(note)


class AllNotes:
    """The notes of all ranks; each attribute of `Note` is an array over ranks."""

    def __init__(self, notes_RN: np.ndarray):
        columns = dict(zip((field.name for field in fields(Note)), notes_RN.T, strict=True))
        self.stop = int(columns["stop"].max())
        """Of any rank: they stop together."""
        self.last_step_time_R, self.data_wait_R = columns["last_step_time"], columns["data_wait"]
        self.host_rss_R, self.gpu_peak_R = columns["host_rss"], columns["gpu_peak"]
