# SPDX-License-Identifier: Apache-2.0
"""`nmoe-train CONFIG --profile DIR`: where the time of a step goes, as a Chrome trace and as a table.

Parts of the model are ranges around their modules' forward. An operation of the backward pass belongs to the part whose
forward made it: the profiler gives both the same number. What was recomputed counts as backward. On a GPU times are those
of kernels, and host gaps are the time in which none ran; on a CPU times are those of operations, and host gaps are Python.
What the training thread spends on the next batch and on recording a step's figures is time by the clock on either.
"""

import contextlib
import logging
import math
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from nmoe.config import Config
from nmoe.data.loader import Loader
from nmoe.data.sources import open_train
from nmoe.errors import DataError
from nmoe.formats.files import make_folder
from nmoe.formats.metrics import MetricWriter
from nmoe.model.transformer import Transformer, compute_dtype
from nmoe.optim.optimizer import Optimizer
from nmoe.train.loop import train_step
from nmoe.train.notes import AllNotes, Note
from nmoe.train.ranks import Ranks
from nmoe.train.record import Recorder
from nmoe.train.report import ProgressBar
from nmoe.train.setup import Parts, Progress, build, choose_device, log_device
from nmoe.train.throughput import Peak, device_peak, flop_by_part, measured_bandwidth

__all__ = ["Profile", "format_profile", "profile_steps"]

_log = logging.getLogger(__name__)
_WARM_UP, _STEPS = 3, 3
_MARK = "nmoe:"
_MODULES = {
    "attn": "attention",
    "attn_norm": "norms",
    "ffn_norm": "norms",
    "norm": "norms",
    "router": "router",
    "experts": "experts",
    "mlp": "mlp",
    "shared": "mlp",
}
"""Name of a module in its parent -> part."""
_FUNCTIONS = {"_LinearCrossEntropy": "loss"}
"""Name of an autograd function -> part."""
_BACKWARD = "autograd::engine::evaluate_function: "
_BESIDE = ("loader", "metrics")
"""Work of the training thread beside the model, whose whole range counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Seconds a step, means over the profiled steps.

    Attributes:
        forward: by part; "optimizer", "loader", "metrics" and "rest" (copies, residual sums, clipping) are here, too.
        backward: by part, recomputation among it.
        gaps: in which the device had nothing to do.
        step: of a whole step, with the profiler's own cost.
        tokens: targets a step.
        flop: a step, by part.
        optimizer_bytes: that the optimizer reads and writes a step.
        peak: of the device.
        bandwidth: of its memory, bytes/s, measured by copying.
        trace: the Chrome trace.
    """

    forward: dict[str, float]
    backward: dict[str, float]
    gaps: float
    step: float
    tokens: float
    flop: dict[str, float]
    optimizer_bytes: int
    peak: Peak
    bandwidth: float
    trace: Path


def profile_steps(config: Config, folder: Path) -> Profile:
    """Trains a few steps from the initial values, of which nothing is kept, and writes `folder`/trace.json.

    Raises:
        NmoeError: the data or the machine does not allow it, or there is a trace already.
    """
    trace = folder / "trace.json"
    if trace.exists():
        raise DataError(f"{trace}: exists already; name another folder")
    make_folder(folder, what="--profile")
    sets, weights = open_train(config)
    device = choose_device(config)
    log_device(device)
    parts = build(config, Ranks(rank=0, size=1, device=device))
    parts = replace(parts, optimizer=_Marked(parts.optimizer))
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    loader = Loader.of(config, sets, weights)
    peak, progress = device_peak(device, compute_dtype(config)), Progress()
    with (
        loader,
        TemporaryDirectory() as store,
        MetricWriter(Path(store), publish_s=config.metrics.publish_s) as metrics,
        _marked_modules(parts.model),
    ):
        bar = ProgressBar(sys.stderr)
        recorder = Recorder(config, parts=parts, progress=progress, metrics=metrics, bar=bar, peak=peak)
        _log.info("%d steps to warm up, then %d with the profiler", _WARM_UP, _STEPS)
        _run(parts, loader, recorder, progress, config, _WARM_UP)
        with profile(activities=activities) as profiler:
            seconds, tokens = _run(parts, loader, recorder, progress, config, _STEPS)
        bar.clear()
    profiler.export_chrome_trace(str(trace))
    forward, backward, busy = _by_part(profiler.events() or [], on_gpu=device.type == "cuda")
    flop = {part: number * tokens / _STEPS for part, number in flop_by_part(config).items()}
    return Profile(
        forward={part: time / _STEPS for part, time in forward.items()},
        backward={part: time / _STEPS for part, time in backward.items()},
        gaps=max(0.0, seconds - busy) / _STEPS,
        step=seconds / _STEPS,
        tokens=tokens / _STEPS,
        flop=flop,
        optimizer_bytes=_optimizer_bytes(parts),
        peak=peak,
        bandwidth=measured_bandwidth(device),
        trace=trace,
    )


def _run(
    parts: Parts, loader: Loader, recorder: Recorder, progress: Progress, config: Config, steps: int
) -> tuple[float, int]:
    """Seconds and targets of some steps, with what a run does in each."""
    began, tokens, spent = time.perf_counter(), 0, math.nan
    for _ in range(steps):
        start = time.perf_counter()
        with record_function(_MARK + "loader"):
            batch = next(loader)
        waited = time.perf_counter() - start
        note = partial(Note.of, parts.device, stop=0, last_step_time=spent, data_wait=waited)
        result = train_step(parts, batch, config=config, notes=note)
        progress.step, spent = batch.step, time.perf_counter() - start
        progress.tokens += batch.num_targets
        with record_function(_MARK + "metrics"):
            recorder.step(result, batch, AllNotes(result.notes_RN), step_time=spent)
        tokens += batch.num_targets
    if parts.device.type == "cuda":  # the last update still runs
        torch.cuda.synchronize()
    return time.perf_counter() - began, tokens


class _Marked:
    """An optimizer whose steps are a range of the trace."""

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self, **arguments: float) -> None:
        with record_function(_MARK + "optimizer"):
            self._optimizer.step(**arguments)


@contextlib.contextmanager
def _marked_modules(model: Transformer) -> Iterator[None]:
    """Makes the forward of each part a range of the trace, for as long as the block runs."""
    handles = []
    for name, module in model.named_modules():
        parent, _, own = name.rpartition(".")
        part = _MODULES.get(own)
        if part is None or parent.endswith(".attn"):  # norms of latents belong to attention
            continue
        ranges: list[record_function] = []

        def begin(*_: object, part: str = part, ranges: list[record_function] = ranges) -> None:
            ranges.append(record_function(_MARK + part))
            ranges[-1].__enter__()

        def end(*_: object, ranges: list[record_function] = ranges) -> None:
            ranges.pop().__exit__(None, None, None)

        handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _by_part(events: Iterable[Any], *, on_gpu: bool) -> tuple[dict[str, float], dict[str, float], float]:
    """Seconds of the forward and of the backward pass by part, and in which the device was busy."""
    host = [event for event in events if event.device_type.name == "CPU"]
    made_by = {}
    for event in host:
        part = _enclosing(event)
        # What is not differentiated carries the number of the next operation that is.
        if part not in (None, *_BESIDE) and event.sequence_nr >= 0 and not _node(event):
            made_by[event.thread, event.sequence_nr] = part
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    for event in host:
        if (beside := _beside(event)) is not None:
            forward[beside] = forward.get(beside, 0.0) + event.time_range.elapsed_us() / 1e6
        if (_enclosing(event) in _BESIDE) or (not on_gpu and _is_frame(event)):
            continue
        seconds = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
        node = _node(event)
        part = _enclosing(event)
        if part is None and node is not None:
            part = made_by.get((node.fwd_thread, node.sequence_nr))
        times = forward if node is None else backward
        times[part or "rest"] = times.get(part or "rest", 0.0) + seconds
    working = [e for e in events if e.device_type.name == "CUDA"] if on_gpu else [e for e in host if not _is_frame(e)]
    working += [event for event in host if _beside(event)]
    return forward, backward, _union((e.time_range.start, e.time_range.end) for e in working) / 1e6


def _beside(event: Any) -> str | None:
    """What of `_BESIDE` an event is the whole range of."""
    name = event.name.removeprefix(_MARK)
    return name if event.name != name and name in _BESIDE else None


def _is_frame(event: Any) -> bool:
    """Whether an event is only a range around others."""
    return event.name.startswith((_MARK, _BACKWARD, "ProfilerStep"))


def _ancestors(event: Any) -> Iterator[Any]:
    while event is not None:
        yield event
        event = event.cpu_parent


def _enclosing(event: Any) -> str | None:
    """Part whose range the event lies in."""
    for ancestor in _ancestors(event):
        if ancestor.name.startswith(_MARK):
            return ancestor.name.removeprefix(_MARK)
        if ancestor.name in _FUNCTIONS:
            return _FUNCTIONS[ancestor.name]
    return None


def _node(event: Any) -> Any | None:
    """Node of the autograd graph that the event is part of the backward of."""
    return next((ancestor for ancestor in _ancestors(event) if ancestor.name.startswith(_BACKWARD)), None)


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _optimizer_bytes(parts: Parts) -> int:
    """Gradients read, master values and moments read and written."""
    values = sum(p.numel() * p.element_size() for p in parts.model.parameters())
    return 3 * values + 2 * sum(t.numel() * t.element_size() for t in parts.optimizer.state().values())


def format_profile(found: Profile) -> str:
    """The table: a line a part, longest first, with what it reaches of the device's peak."""
    named = {*found.forward, *found.backward}
    times = {part: found.forward.get(part, 0.0) + found.backward.get(part, 0.0) for part in named}
    lines = [f"{'part':14}  {'forward':>11}  {'backward':>11}  {'share':>7}  {'rate':>13}  of peak"]
    for part in sorted(times, key=lambda part: (part == "rest", -times[part])):
        rate = ("", "")
        if part in found.flop and times[part]:
            flops = found.flop[part] / times[part]
            rate = f"{flops / 1e12:.4g} TFLOP/s", f"{100 * flops / found.peak.flops:5.1f} %"
        if part == "optimizer" and times[part]:
            moved = found.optimizer_bytes / times[part]
            rate = f"{moved / 1e9:.4g} GB/s", f"{100 * moved / found.bandwidth:5.1f} %"
        cells = (found.forward.get(part, 0.0), found.backward.get(part, 0.0))
        lines.append(_line(part, *cells, times[part] / found.step, *rate))
    lines.append(_line("host gaps", found.gaps, 0.0, found.gaps / found.step, "", ""))
    flops = sum(found.flop.values()) / found.step
    rate = f"{flops / 1e12:.4g} TFLOP/s", f"{100 * flops / found.peak.flops:5.1f} %"
    lines.append(_line("step", found.step, 0.0, 1.0, *rate))
    lines += [
        f"{found.tokens / found.step:,.0f} token/s, with the profiler's own cost, mean of {_STEPS} steps",
        f"peak {found.peak.flops / 1e12:.4g} TFLOP/s ({found.peak.origin}), {found.bandwidth / 1e9:.4g} GB/s (measured copy)",
    ]
    return "\n".join(lines)


def _line(part: str, forward: float, backward: float, share: float, rate: str, of_peak: str) -> str:
    cells = [f"{1e3 * seconds:8.2f} ms" if seconds else "" for seconds in (forward, backward)]
    return f"{part:14}  {cells[0]:>11}  {cells[1]:>11}  {100 * share:5.1f} %  {rate:>13}  {of_peak}".rstrip()
