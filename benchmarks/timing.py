# SPDX-License-Identifier: Apache-2.0
"""Time of work on a GPU, and the product that it is compared with."""

import statistics
from collections.abc import Callable

import torch

__all__ = ["dense_ceiling", "milliseconds"]


def milliseconds(work: Callable[[], object], *, runs: int = 15) -> float:
    """Median time of `work` on the GPU after three warm-ups."""
    times = []
    for run in range(runs + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if run >= 3:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def dense_ceiling() -> float:
    """TFLOP/s of an 8192^3 product in bf16."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / milliseconds(lambda: a @ b) / 1e9
