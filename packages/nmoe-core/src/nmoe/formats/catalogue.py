# SPDX-License-Identifier: Apache-2.0
"""Every metric the trainer may write, with its unit and meaning. A name that is not listed here raises.

The list is copied into each store, so a reader shows metrics of a newer trainer without knowing them.
"""

from dataclasses import dataclass
from typing import Literal

__all__ = ["CATALOGUE", "Metric"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: `area/snake_case`.
        unit: unit of the value; "1" for a pure number, "fraction" for 0 to 1.
        kind: "gauge" (a value at a step) or "counter" (a total since the run began).
        meaning: one sentence.
    """

    name: str
    unit: str
    kind: Literal["gauge", "counter"]
    meaning: str


def _gauge(name: str, unit: str, meaning: str) -> Metric:
    return Metric(name=name, unit=unit, kind="gauge", meaning=meaning)


def _counter(name: str, unit: str, meaning: str) -> Metric:
    return Metric(name=name, unit=unit, kind="counter", meaning=meaning)


_METRICS = (
    _gauge("train/loss", "nat/token", "Cross entropy, mean over the valid tokens of the global batch."),
    _gauge("train/z_loss", "1", "Weighted penalty on the logarithm of the head's normaliser, part of the objective."),
    _gauge(
        "train/balance_loss",
        "1",
        "Weighted sequence-wise load balance loss, summed over layers, part of the objective.",
    ),
    _gauge(
        "train/router_z_loss",
        "1",
        "Weighted penalty on the routers' log normaliser, summed over layers, part of the objective.",
    ),
    _gauge(
        "train/mtp_loss",
        "nat/token",
        "Cross entropy of the multi-token prediction heads, mean over depths, before its weight.",
    ),
    _gauge("train/grad_norm", "1", "L2 norm of the global batch's gradient over all parameters, before clipping."),
    _gauge("train/learning_rate", "1", "Learning rate of this step."),
    _counter("train/tokens", "token", "Tokens that training has seen, padding left out."),
    _counter("train/skipped_steps", "step", "Steps left out because loss or gradient were not finite."),
    _counter("train/loss_spikes", "1", "Steps whose loss stood far above the recent ones."),
    _gauge("val/loss", "nat/token", "Cross entropy on held-out documents, mean over valid tokens."),
    _gauge("val/loss_per_byte", "nat/byte", "Cross entropy on held-out documents per UTF-8 byte of their text."),
    _gauge(
        "val/source_loss",
        "nat/token",
        "Cross entropy on the held-out documents of one folder of several, which stands in brackets after the name.",
    ),
    _gauge("speed/tokens_per_second", "token/s", "Tokens of the step over its time, all ranks together."),
    _gauge("speed/step_time", "s", "Wall time of the step, without evaluation and checkpoints."),
    _gauge("speed/mfu", "fraction", "Model FLOP utilisation: FLOP of the step over time and the devices' dense peak."),
    _gauge("speed/data_wait", "s", "Time the step waited for the loader."),
    _gauge("speed/forward_time", "s", "Time of the step in the forward pass."),
    _gauge("speed/backward_time", "s", "Time of the step in the backward pass."),
    _gauge("speed/optimizer_time", "s", "Time of the update before this step."),
    _gauge("speed/rank_step_time", "s", "Wall time of the step on one rank."),
    _gauge("speed/checkpoint_time", "s", "Time that training paused for a checkpoint."),
    _counter("checkpoint/failures", "1", "Checkpoints of the last process that could not be written; older ones stay."),
    _gauge("speed/eval_time", "s", "Time that training paused for an evaluation."),
    _gauge(
        "memory/gpu_peak", "byte", "Largest amount of GPU memory allocated so far in this process, largest over ranks."
    ),
    _gauge("memory/host_rss", "byte", "Resident memory of the process, largest over ranks."),
    _gauge("gpu/utilisation", "fraction", "Share of time in which a kernel ran, as the driver reports it."),
    _gauge("gpu/power", "W", "Power draw."),
    _gauge("gpu/memory", "byte", "Memory of the device in use, by all its processes."),
    _gauge("gpu/temperature", "degree Celsius", "Core temperature."),
    _gauge("router/load", "fraction", "Share of a layer's assignments that one expert received."),
    _gauge("router/max_over_mean", "1", "Load of the fullest expert of a layer over the mean."),
    _gauge("router/dead_experts", "expert", "Experts of a layer that received no token in the step."),
    _gauge("router/entropy", "fraction", "Entropy of a layer's loads over that of equal loads."),
    _gauge("router/bias_range", "1", "Largest minus smallest selection bias of a layer, as the step chose with them."),
    _gauge("router/received", "assignment", "Assignments of a layer that the experts of one rank received."),
    _gauge("router/overload", "1", "Rows received by the fullest rank over the mean, largest over layers."),
    _counter("metrics/dropped_rows", "row", "Rows of this store that could not be written and were lost."),
    _gauge("metrics/publish_time", "s", "Cost of the last publication of this store."),
)

CATALOGUE: dict[str, Metric] = {metric.name: metric for metric in _METRICS}
