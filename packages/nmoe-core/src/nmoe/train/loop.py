# SPDX-License-Identifier: Apache-2.0
"""One optimizer step, on one screen.

The loss is the mean over all valid tokens of the global batch, whatever the micro batches are; the selection biases move
once, by the load of the whole batch; a step whose loss or gradient is not finite changes nothing.
"""

import math
import time
from dataclasses import dataclass

import numpy as np
import torch

from nmoe.config import Config
from nmoe.data.loader import Batch
from nmoe.model.mtp import mtp_weight
from nmoe.optim.clip import clip_gradients, gradient_norm
from nmoe.optim.schedule import learning_rate
from nmoe.train.evaluate import forward
from nmoe.train.setup import Parts

__all__ = ["StepResult", "Stopwatch", "train_step"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a step did.

    Attributes:
        loss: cross entropy, nats a token.
        balance_loss: weighted balance loss of the routers, a token.
        router_z_loss: weighted z-loss of the routers, a token.
        z_loss: weighted z-loss of the head, a token.
        mtp_loss: cross entropy of the further tokens of multi-token prediction, nats a token; 0 without it.
        grad_norm: global, before clipping.
        learning_rate: of this step.
        skipped: why nothing was changed; empty if all went well.
        load_LE: int64, assignments by MoE layer and expert.
        seconds: by part of the step: forward, backward, optimizer.
    """

    loss: float
    balance_loss: float
    router_z_loss: float
    z_loss: float
    mtp_loss: float
    grad_norm: float
    learning_rate: float
    skipped: str
    load_LE: np.ndarray
    seconds: dict[str, float]


def train_step(parts: Parts, batch: Batch, *, config: Config) -> StepResult:
    """Forward and backward over the micro batches, then one update of every parameter and selection bias."""
    model, optimizer, device = parts.model, parts.optimizer, parts.device
    watch = Stopwatch(device)
    sums: list[torch.Tensor] = []
    routers = model.routers()
    model.mtp_weight = mtp_weight(config, step=batch.step)
    load_LE = torch.zeros(len(routers), config.moe.num_experts, dtype=torch.int64, device=device)
    for rows in batch.micro:
        output = forward(model, rows, device)
        watch.lap("forward")
        ((output.loss_sum + output.aux_loss) / batch.num_targets).backward()
        watch.lap("backward")
        losses = (output.loss_sum.detach(), output.balance_loss, output.router_z_loss, output.z_loss, output.mtp_loss)
        sums.append(torch.stack(losses))
        for layer, stats in enumerate(output.router_stats):
            load_LE[layer] += stats.load_E

    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    totals = torch.stack(sums).sum(dim=0) / batch.num_targets
    figures = torch.cat([totals.double(), gradient_norm(gradients).double().view(1)])
    loss, balance_loss, router_z_loss, z_loss, mtp_loss, norm = figures.tolist()  # the step's one wait for the device

    rate = learning_rate(config, step=batch.step)
    skipped = "" if math.isfinite(loss) and math.isfinite(norm) else f"loss {loss}, gradient norm {norm}"
    if not skipped:
        clip_gradients(gradients, norm=norm, limit=config.train.grad_clip)
        optimizer.step(learning_rate=rate)
        for layer, router in enumerate(routers.values()):
            router.update_bias(load_LE[layer], config.moe.bias_update_rate)
    for parameter in model.parameters():
        parameter.grad = None
    watch.lap("optimizer")
    return StepResult(
        loss=loss,
        balance_loss=balance_loss,
        router_z_loss=router_z_loss,
        z_loss=z_loss,
        mtp_loss=mtp_loss,
        grad_norm=norm,
        learning_rate=rate,
        skipped=skipped,
        load_LE=load_LE.cpu().numpy(),
        seconds=watch.seconds(),
    )


class Stopwatch:
    """Splits a step's time into named parts: by events on a GPU's stream, by the clock on a CPU."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []
        self.lap("")

    def lap(self, name: str) -> None:
        """Ends the part `name`, which began at the lap before."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((name, event))
        else:
            self._marks.append((name, time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        """Time of each part; waits for the GPU to reach the last lap."""
        if self._on_gpu:
            torch.cuda.synchronize()
        parts: dict[str, float] = {}
        for (_, begin), (name, end) in zip(self._marks, self._marks[1:], strict=False):
            if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
                spent = begin.elapsed_time(end) / 1e3
            else:
                assert isinstance(begin, float)
                assert isinstance(end, float)
                spent = end - begin
            parts[name] = parts.get(name, 0.0) + spent
        return parts
