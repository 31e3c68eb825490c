# SPDX-License-Identifier: Apache-2.0
"""Time of work on a GPU, and the product that it is compared with."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["dense_ceiling", "kernel_table", "milliseconds"]


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


def kernel_table(work: Callable[[], object], *, steps: int, most: int) -> str:
    """The kernels that `work`, which is `steps` steps, runs longest, milliseconds a step, and the time in which none ran.

    Several kernels may run at once, so their sum can be above the time in which any did.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    spans = [event for event in found.events() or [] if event.device_type.name == "CUDA"]
    times: dict[str, list[float]] = defaultdict(list)
    busy, reached = 0.0, float("-inf")
    for event in sorted(spans, key=lambda event: event.time_range.start):
        begin, end = event.time_range.start, event.time_range.end
        times[event.name].append(end - begin)
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    if not spans:
        return "no kernel ran"
    whole = reached - min(event.time_range.start for event in spans)
    lines = [f"{whole / steps / 1e3:9.2f} ms a step, {(whole - busy) / steps / 1e3:.2f} ms without a kernel"]
    for name, spent in sorted(times.items(), key=lambda item: -sum(item[1]))[:most]:
        lines.append(f"{sum(spent) / steps / 1e3:9.3f} ms {len(spent) / steps:6.0f} x  {name[:140]}")
    return "\n".join(lines)
