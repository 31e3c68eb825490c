# SPDX-License-Identifier: Apache-2.0
"""Time of the parts of a step, by events on a GPU's stream, by the clock on a CPU."""

import time

import torch

__all__ = ["Stopwatch"]


class Stopwatch:
    """Splits time into named parts.

    Args:
        device: whose time it is.
    """

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []

    def lap(self, name: str) -> None:
        """Ends the part `name`, which began at the lap before; without a name what lies between is nobody's."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((name, event))
        else:
            self._marks.append((name, time.perf_counter()))

    def take(self) -> dict[str, float]:
        """Seconds of each part since this was last called. A GPU has to have reached the last lap, or it is waited for."""
        parts: dict[str, float] = {}
        for (_, begin), (name, end) in zip(self._marks, self._marks[1:], strict=False):
            if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
                end.synchronize()
                spent = begin.elapsed_time(end) / 1e3
            else:
                assert isinstance(begin, float)
                assert isinstance(end, float)
                spent = end - begin
            if name:
                parts[name] = parts.get(name, 0.0) + spent
        del self._marks[:-1]
        return parts
