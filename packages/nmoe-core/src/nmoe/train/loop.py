# SPDX-License-Identifier: Apache-2.0
"""One optimizer step, on one screen.

The loss is the mean over all valid tokens of the global batch, whatever the micro batches and the ranks are; the
selection biases move once, by the load of the whole batch; a step whose loss or gradient is not finite changes nothing,
on all ranks alike.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nmoe.config import Config
from nmoe.data.loader import Batch
from nmoe.model.mtp import mtp_weight
from nmoe.model.transformer import Transformer
from nmoe.optim.clip import clip_scale, gradient_norm
from nmoe.optim.schedule import learning_rate
from nmoe.pieces import local
from nmoe.train.evaluate import forward
from nmoe.train.ranks import Ranks
from nmoe.train.setup import Parts
from nmoe.train.shard import hold

__all__ = ["StepResult", "train_step"]


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
        load_LE: int64, assignments by MoE layer and expert, over all ranks.
        received_LR: int64, assignments by MoE layer and the rank whose experts received them.
        bias_LE: fp32, selection biases that the step chose with; empty where there are none.
        notes_RN: what each rank had to say, see `train_step`.
        seconds: by part on this rank: forward and backward, and optimizer, which is that of the step before: this one's
            still runs. None of it in the first step of a process.
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
    received_LR: np.ndarray
    bias_LE: np.ndarray
    notes_RN: np.ndarray
    seconds: dict[str, float]


def train_step(
    parts: Parts,
    batch: Batch,
    *,
    config: Config,
    notes: Callable[[], Sequence[float]] = lambda: (),
    before_update: Callable[[], None] = lambda: None,
) -> StepResult:
    """Forward and backward over the micro batches, then one update of every parameter and selection bias.

    It returns while a GPU still updates, so that the next step's kernels are queued before that ends.

    Args:
        parts: model and optimizer, or this rank's part of them.
        batch: this rank's micro batches, as many as the other ranks have.
        config: the run's.
        notes: called behind backward: numbers for all ranks, which travel with the step's figures; as many on each.
        before_update: called before anything that a checkpoint holds changes.
    """
    model, optimizer, device, ranks = parts.model, parts.optimizer, parts.device, parts.ranks
    watch = parts.watch
    watch.lap("")
    sums: list[torch.Tensor] = []
    routers = model.routers()
    model.mtp_weight = mtp_weight(config, step=batch.step)
    load_LE = torch.zeros(len(routers), config.moe.num_experts, dtype=torch.int64, device=device)
    for number, rows in enumerate(batch.micro, start=1):
        if config.parallel.gather == "step":
            hold(model, last=number == len(batch.micro))
        ranks.beat(f"micro batch {number}")
        output = forward(model, rows, device)
        watch.lap("forward")
        counts = 1 if (rows.targets_BT >= 0).any() else 0  # a filler, where other ranks have a row more
        ((output.loss_sum + counts * output.aux_loss) / batch.num_targets).backward()
        watch.lap("backward")
        aux = (output.balance_loss * counts, output.router_z_loss * counts)
        sums.append(torch.stack([output.loss_sum.detach(), *aux, output.z_loss, output.mtp_loss]))
        for layer, stats in enumerate(output.router_stats):
            load_LE[layer] += counts * stats.load_E

    ranks.beat("the sums over ranks")
    gradients = [local(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    received_LR = _add_loads(load_LE, ranks)
    totals = torch.stack(sums).double().sum(dim=0) / batch.num_targets
    square = gradient_norm(gradients).double().square().view(1)
    own = torch.tensor(notes(), dtype=torch.float64, device=device)
    rows_R = ranks.rows(torch.cat([totals, square, own])).cpu().numpy()  # the step's one wait for the device
    loads, received, bias = (found.cpu().numpy() for found in (load_LE, received_LR, _biases(model)))
    seconds = watch.take()
    figures = [float(total) for total in rows_R[:, :6].sum(axis=0)]
    loss, balance_loss, router_z_loss, z_loss, mtp_loss, square_sum = figures
    norm = math.sqrt(square_sum) if square_sum >= 0 else math.nan

    ranks.beat("the update")
    rate = learning_rate(config, step=batch.step)
    skipped = "" if math.isfinite(loss) and math.isfinite(norm) else f"loss {loss}, gradient norm {norm}"
    if not skipped:
        before_update()
        optimizer.step(learning_rate=rate, scale=clip_scale(norm, limit=config.train.grad_clip))
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
        load_LE=loads,
        received_LR=received,
        bias_LE=bias,
        notes_RN=rows_R[:, 6:],
        seconds=seconds,
    )


def _biases(model: Transformer) -> torch.Tensor:
    biases = [router.bias for router in model.routers().values() if router.bias is not None]
    return torch.stack(biases) if biases else torch.zeros(0)


def _add_loads(load_LE: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Makes this rank's loads those of all ranks, and returns the assignments that each rank's experts received."""
    ranks.add(load_LE, over="expert")
    layers, experts = load_LE.shape
    by_place = load_LE.view(layers, ranks.expert_size, experts // ranks.expert_size).sum(dim=2)
    mine = by_place[:, ranks.rank % ranks.expert_size]
    ranks.add(load_LE, over="data")
    return ranks.rows(mine).T
