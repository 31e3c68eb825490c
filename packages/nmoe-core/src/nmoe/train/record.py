# SPDX-License-Identifier: Apache-2.0
"""A step's figures: into the metric store, into the log line, onto the progress bar."""

import logging
import math
import time

import numpy as np

from nmoe.config import Config
from nmoe.data.loader import Batch
from nmoe.formats.metrics import MetricWriter
from nmoe.train.evaluate import HeldOut
from nmoe.train.health import RouterHealth, router_health
from nmoe.train.loop import StepResult
from nmoe.train.notes import AllNotes
from nmoe.train.report import ProgressBar, StepFigures, format_step
from nmoe.train.setup import Parts, Progress
from nmoe.train.throughput import Peak, flop_per_token

__all__ = ["Recorder"]

_log = logging.getLogger(__name__)


class Recorder:
    """Records the steps of one process.

    Args:
        config: names, units and intervals depend on it.
        parts: for the selection biases and the device.
        progress: the run's counters, read as they change.
        metrics: the store.
        bar: the terminal's progress bar.
        peak: of the device, for MFU.
    """

    def __init__(
        self,
        config: Config,
        *,
        parts: Parts,
        progress: Progress,
        metrics: MetricWriter,
        bar: ProgressBar,
        peak: Peak,
    ):
        self._config, self._parts, self._progress = config, parts, progress
        self._metrics, self._bar, self._peak = metrics, bar, peak
        self._flop_per_token = flop_per_token(config)
        self._began, self._first_step = time.monotonic(), progress.step

    def step(self, result: StepResult, batch: Batch, notes: AllNotes, *, step_time: float) -> None:
        """Records a step that has just been counted in `progress`: what it read always, its figures when they are due.

        Args:
            result: what it did.
            batch: what it read.
            notes: of all ranks.
            step_time: seconds, the wait for data among them.
        """
        step, config, layers = batch.step, self._config, list(self._parts.model.routers())
        last = step == config.train.steps
        health = router_health(result.load_LE) if layers else None
        self._metrics.log_batches(step, batch.spans)
        if health and (step % config.metrics.router_every == 0 or step == 1 or last):
            self._metrics.log_array(step, "router/load", health.share_LE, axes=("layer", "expert"), layers=layers)
        if step % config.train.log_every == 0 or last or result.skipped:
            self._figures(result, batch, notes, health, step_time=step_time)
        self._bar.show(step, config.train.steps, eta_s=self._eta())

    def _figures(
        self, result: StepResult, batch: Batch, notes: AllNotes, health: RouterHealth | None, *, step_time: float
    ) -> None:
        step, config = batch.step, self._config
        tokens_per_second = batch.num_targets / step_time
        mfu = tokens_per_second * self._flop_per_token / (self._peak.flops * self._parts.ranks.size)
        memory, rss = notes.gpu_peak_R.max(), notes.host_rss_R.max()
        overload = 1.0
        values = {
            "train/loss": result.loss,
            "train/grad_norm": result.grad_norm,
            "train/learning_rate": result.learning_rate,
            "train/tokens": self._progress.tokens,
            "train/skipped_steps": self._progress.skipped_steps,
            "train/loss_spikes": self._progress.loss_spikes,
            "speed/tokens_per_second": tokens_per_second,
            "speed/step_time": step_time,
            "speed/mfu": mfu,
            "speed/data_wait": notes.data_wait_R.max(),
            "memory/host_rss": rss,
        }
        values |= {f"speed/{part}_time": seconds for part, seconds in result.seconds.items()}
        if memory:
            values["memory/gpu_peak"] = memory
        if config.train.z_loss:
            values["train/z_loss"] = result.z_loss
        if config.model.mtp_depth:
            values["train/mtp_loss"] = result.mtp_loss
        if config.moe.balance_loss and health:
            values["train/balance_loss"] = result.balance_loss
        if config.moe.z_loss and health:
            values["train/router_z_loss"] = result.router_z_loss
        if health:
            overload = values["router/overload"] = self._received(step, result.received_LR)
            self._router(result, step, health)
        self._metrics.log(step, values)
        if step > self._first_step + 1 and self._parts.ranks.size > 1:
            self._metrics.log_array(step - 1, "speed/rank_step_time", notes.last_step_time_R, axes=("rank",))
        _log.info(
            "%s",
            format_step(
                StepFigures(
                    step=step,
                    steps=config.train.steps,
                    loss=result.loss,
                    grad_norm=result.grad_norm,
                    learning_rate=result.learning_rate,
                    tokens_per_second=tokens_per_second,
                    step_time=step_time,
                    mfu=mfu,
                    overload=overload,
                    max_over_mean=float(health.max_over_mean.max()) if health else math.nan,
                    memory_bytes=int(memory or rss),
                    eta_s=self._eta(),
                )
            ),
        )

    def _received(self, step: int, received_LR: np.ndarray) -> float:
        """Records what each rank received; the fullest rank's share over the mean, largest over layers."""
        if self._parts.ranks.size > 1:
            layers = list(self._parts.model.routers())
            self._metrics.log_array(step, "router/received", received_LR, axes=("layer", "rank"), layers=layers)
        mean_L = received_LR.mean(axis=1)
        return float((received_LR.max(axis=1) / np.maximum(mean_L, 1e-9)).max(initial=0.0))

    def _router(self, result: StepResult, step: int, health: RouterHealth) -> None:
        figures = [
            ("router/max_over_mean", health.max_over_mean),
            ("router/dead_experts", health.dead_experts),
            ("router/entropy", health.entropy),
        ]
        if result.bias_LE.size:  # read by the step: a look at the model would wait for its update
            figures.append(("router/bias_range", np.ptp(result.bias_LE, axis=1)))
        for name, values in figures:
            self._metrics.log_array(step, name, values, axes=("layer",), layers=list(self._parts.model.routers()))

    def _eta(self) -> float:
        """Seconds to the end at the pace of this process so far, evaluations and checkpoints among it."""
        done = self._progress.step - self._first_step
        left = self._config.train.steps - self._progress.step
        return left * (time.monotonic() - self._began) / done if done else math.nan

    def held_out(self, held_out: HeldOut, seconds: float) -> None:
        """Records an evaluation after the step that was counted last."""
        step = self._progress.step
        values = {"val/loss": held_out.loss, "val/loss_per_byte": held_out.loss_per_byte, "speed/eval_time": seconds}
        values |= {f"val/source_loss[{source}]": loss for source, loss in held_out.by_source.items()}
        self._metrics.log(step, values)
        _log.info(
            "step %d: held-out loss %.4f nat/token, %.4f nat/byte, %.1f s",
            step,
            held_out.loss,
            held_out.loss_per_byte,
            seconds,
        )
        for source, loss in held_out.by_source.items():
            _log.info("step %d: held-out loss of %s %.4f nat/token", step, source, loss)

    def checkpoint(self, pause: float) -> None:
        """Records how long training paused for a checkpoint."""
        self._metrics.log(self._progress.step, {"speed/checkpoint_time": pause})
