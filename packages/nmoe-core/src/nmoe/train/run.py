# SPDX-License-Identifier: Apache-2.0
"""A run from config to result: data checked, folder chosen, state restored, steps, and an orderly end."""

import contextlib
import logging
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from nmoe.checkpoint.save import CheckpointWriter
from nmoe.checkpoint.store import list_checkpoints
from nmoe.config import Config
from nmoe.data.loader import Loader
from nmoe.data.sources import open_train, open_val
from nmoe.errors import NmoeError
from nmoe.formats.metrics import MetricWriter
from nmoe.formats.shards import ShardSet
from nmoe.formats.tokenizers import ByteTokenizer
from nmoe.model.generate import generate
from nmoe.model.transformer import compute_dtype
from nmoe.train.evaluate import HeldOut, byte_entropy, held_out_loss
from nmoe.train.folder import RunFolder, open_folder
from nmoe.train.health import WINDOW, is_spike
from nmoe.train.loop import StepResult, train_step
from nmoe.train.record import Recorder
from nmoe.train.report import ProgressBar, log_to_file
from nmoe.train.sampler import Sampler, gpu_reader
from nmoe.train.setup import (
    Parts,
    Progress,
    build,
    checkpoint_state,
    checkpoint_tensors,
    choose_device,
    log_device,
    restore,
    start_from,
)
from nmoe.train.throughput import device_peak
from nmoe.train.watch import StopSignal, Watch

__all__ = ["Outcome", "Sample", "train"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A continuation by the trained model.

    Attributes:
        prompt: the beginning of a held-out document.
        text: what the model made of it.
    """

    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a run ended.

    Attributes:
        path: the run's folder.
        status: "finished", or "stopped" by a signal.
        signal: number of that signal, or 0.
        step: steps done.
        checkpoint: newest complete checkpoint, if there is one.
        checkpoint_error: why the last checkpoint could not be written; empty if it was.
        held_out: loss after the last step; None without held-out data or when stopped.
        byte_entropy: nats a byte of the held-out text without any context; None where the text cannot be read.
        sample: a continuation, where the tokenizer is known and the loss is finite.
    """

    path: Path
    status: str
    signal: int
    step: int
    checkpoint: Path | None
    checkpoint_error: str
    held_out: HeldOut | None
    byte_entropy: float | None
    sample: Sample | None


def train(config: Config, *, fresh: bool, bar: ProgressBar) -> Outcome:
    """Trains a config to its end, or until a signal.

    Raises:
        NmoeError: the data, the run's folder or the machine does not allow it.
    """
    with StopSignal() as stop:
        sets, weights = open_train(config)
        val = open_val(config, like=sets[0])
        device = choose_device(config)
        folder = open_folder(config, fresh=fresh)
        log_file = log_to_file(folder.path / "log.txt")
        try:
            return _Run(config, folder, device, sets, weights, val, bar, stop).train()
        finally:
            bar.clear()
            logging.getLogger("nmoe").removeHandler(log_file)
            log_file.close()
            folder.lock.release()


class _Run:
    """The state of one call of `train`."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        device: torch.device,
        sets: list[ShardSet],
        weights: list[int],
        val: ShardSet | None,
        bar: ProgressBar,
        stop: StopSignal,
    ):
        self.config, self.folder, self.device = config, folder, device
        self.sets, self.weights, self.val = sets, weights, val
        self.bar, self.stop = bar, stop
        self.progress = Progress(step=folder.first_step - 1)
        self.held_out: HeldOut | None = None

    def train(self) -> Outcome:
        """From the first step to the outcome; an error that ends the run is in `run.json` before it goes on its way."""
        try:
            self._build()
            checkpoints = self._train()
            return self._end(checkpoints)
        except Exception as error:
            line = f"{type(error).__name__}: {error}".splitlines()[0]
            self.folder.record.finish("failed", step=self.progress.step, error=line)
            if not isinstance(error, NmoeError):
                _log.error("the run failed", exc_info=True)
            raise

    def _build(self) -> None:
        config, checkpoint = self.config, self.folder.checkpoint
        log_device(self.device)
        self.parts: Parts = build(config, self.device)
        if checkpoint:
            self.progress = restore(self.parts, checkpoint)
        elif config.run.start_from:
            start_from(self.parts, Path(config.run.start_from))
        self.peak = device_peak(self.device, compute_dtype(config))
        _log.info("peak %.4g TFLOP/s (%s)", self.peak.flops / 1e12, self.peak.origin)

    def _train(self) -> CheckpointWriter:
        """The steps; everything logged is published and every checkpoint written when it returns."""
        config, folder = self.config, self.folder
        verb = "going on with" if folder.resumed else "beginning"
        _log.info("%s %s at step %d of %d", verb, folder.path, folder.first_step, config.train.steps)
        resume_step = folder.first_step if folder.resumed else None
        with contextlib.ExitStack() as stack:
            watch = stack.enter_context(Watch(folder.record))
            metrics = stack.enter_context(
                MetricWriter(folder.path, publish_s=config.metrics.publish_s, resume_step=resume_step)
            )
            checkpoints = CheckpointWriter(
                folder.path / "checkpoints",
                config=asdict(config),
                keep=config.checkpoint.keep,
                before_commit=metrics.flush,
                on_failure=lambda step, failures: metrics.log(step, {"checkpoint/failures": failures}),
            )
            stack.callback(checkpoints.wait)
            recorder = Recorder(
                config, parts=self.parts, progress=self.progress, metrics=metrics, bar=self.bar, peak=self.peak
            )
            if self.device.type == "cuda" and (read := gpu_reader(1)) is not None:
                stack.enter_context(Sampler(read, metrics=metrics, step=lambda: self.progress.step))
            loader = stack.enter_context(self._loader())
            if self.progress.step < config.train.steps:
                self._steps(loader, recorder, checkpoints, watch)
            elif self.val:
                self._evaluate(watch)
        return checkpoints

    def _loader(self) -> Loader:
        config = self.config
        return Loader(
            self.sets,
            weights=self.weights,
            seq_len=config.data.seq_len,
            vocab_size=config.model.vocab_size,
            batch_size=config.train.batch_size,
            micro_batch_size=config.train.micro_batch_size,
            seed=config.run.seed,
            next_sample=self.progress.next_sample,
        )

    def _steps(self, loader: Loader, recorder: Recorder, checkpoints: CheckpointWriter, watch: Watch) -> None:
        train, progress = self.config.train, self.progress
        watch.progress(progress.step)
        last, stopping = False, bool(self.stop.number)
        while not (last or stopping):
            began = time.perf_counter()
            batch = next(loader)
            waited = time.perf_counter() - began
            result = train_step(self.parts, batch, config=self.config)
            spent = time.perf_counter() - began
            self._count(batch.step, batch.num_targets, loader.next_sample, result)
            last = progress.step == train.steps
            recorder.step(result, batch, step_time=spent, data_wait=waited)
            watch.progress(progress.step)
            if self.val and (last or (train.eval_every and progress.step % train.eval_every == 0)):
                recorder.held_out(*self._evaluate(watch))
            stopping = bool(self.stop.number)  # read once: a stop always has its checkpoint
            if progress.step % self.config.checkpoint.every == 0 or last or stopping:
                state = checkpoint_state(self.parts, progress)
                pause = checkpoints.save(progress.step, tensors=checkpoint_tensors(self.parts), state=state)
                recorder.checkpoint(pause)
                watch.progress(progress.step)

    def _count(self, step: int, num_targets: int, next_sample: int, result: StepResult) -> None:
        progress = self.progress
        progress.step, progress.next_sample = step, next_sample
        progress.tokens += num_targets
        if result.skipped:
            progress.skipped_steps += 1
            _log.warning("step %d skipped: %s (%d skipped so far)", step, result.skipped, progress.skipped_steps)
            return
        if is_spike(result.loss, progress.recent_losses):
            progress.loss_spikes += 1
            _log.warning("step %d: loss %.4f stands far above the recent ones", step, result.loss)
        progress.recent_losses = [*progress.recent_losses, result.loss][-WINDOW:]

    def _evaluate(self, watch: Watch) -> tuple[HeldOut, float]:
        """Held-out loss, and the seconds it took."""
        assert self.val is not None
        began = time.perf_counter()
        self.held_out = held_out_loss(
            self.parts.model,
            self.val,
            config=self.config,
            device=self.parts.device,
            tick=lambda: watch.progress(self.progress.step),
        )
        return self.held_out, time.perf_counter() - began

    def _end(self, checkpoints: CheckpointWriter) -> Outcome:
        finished = self.progress.step >= self.config.train.steps
        complete = list_checkpoints(self.folder.path / "checkpoints")
        name = f"step-{self.progress.step:08d}"
        lost = checkpoints.last_error if not complete or complete[-1].name != name else ""
        status = "failed" if lost else "finished" if finished else "stopped"
        self.folder.record.finish(status, step=self.progress.step, error=lost or None)
        sound = self.held_out is not None and math.isfinite(self.held_out.loss)
        readable = self.val is not None and self.val.tokenizer_sha256 == ByteTokenizer.sha256
        return Outcome(
            path=self.folder.path,
            status=status,
            signal=0 if finished else self.stop.number,
            step=self.progress.step,
            checkpoint=complete[-1] if complete else None,
            checkpoint_error=lost,
            held_out=self.held_out if finished else None,
            byte_entropy=byte_entropy(self.val, ByteTokenizer()) if self.val and readable else None,
            sample=self._sample(self.val) if self.val and readable and finished and sound else None,
        )

    def _sample(self, val: ShardSet) -> Sample:
        tokenizer, length = ByteTokenizer(), min(64, self.config.data.seq_len // 2)
        document = val.shards[0].tokens[:length]
        prompt = [tokenizer.eos_id, *(int(token) for token in document if int(token) != tokenizer.eos_id)]
        new = generate(
            self.parts.model,
            prompt,
            max_tokens=max(1, min(200, self.config.data.seq_len - len(prompt))),
            temperature=0.7,
            top_p=0.95,
            seed=self.config.run.seed,
            eos_id=tokenizer.eos_id,
        )
        return Sample(prompt=tokenizer.decode(prompt), text=tokenizer.decode(new))
