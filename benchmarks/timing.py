# SPDX-License-Identifier: Apache-2.0
"""Time of work on a GPU, and the product that it is compared with."""

import statistics
import time
from collections.abc import Callable

import torch

__all__ = ["dense_ceiling", "milliseconds"]


def milliseconds(work: Callable[[], object], *, runs: int = 15) -> float:
    """Median time of `work` after three warm-ups: on the GPU, or by the clock where there is none."""
    return statistics.median([_once(work) for _ in range(runs + 3)][3:])


def _once(work: Callable[[], object]) -> float:
    if not torch.cuda.is_available():
        began = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - began)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def dense_ceiling() -> float:
    """TFLOP/s of an 8192^3 product in bf16."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / milliseconds(lambda: a @ b) / 1e9
