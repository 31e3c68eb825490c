# SPDX-License-Identifier: Apache-2.0
"""A run from config to result: data checked, folder chosen, state restored, steps, and an orderly end."""

import contextlib
import logging
import math
import os
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from nmoe.checkpoint.save import CheckpointWriter
from nmoe.checkpoint.store import list_checkpoints
from nmoe.config import Config
from nmoe.data.loader import Loader
from nmoe.data.sources import open_train, open_val
from nmoe.errors import NmoeError, PeerFault, is_of_the_disk, is_out_of_memory
from nmoe.formats.metrics import MetricWriter
from nmoe.formats.shards import ShardSet
from nmoe.formats.tokenizers import ByteTokenizer
from nmoe.model.generate import generate
from nmoe.model.transformer import compute_dtype
from nmoe.ops import registry
from nmoe.train.ending import end_all, end_alone
from nmoe.train.environment import world_of
from nmoe.train.evaluate import HeldOut, byte_entropy, held_out_loss
from nmoe.train.folder import RunFolder, open_folder
from nmoe.train.health import WINDOW, is_spike
from nmoe.train.loop import StepResult, train_step
from nmoe.train.notes import AllNotes, Note
from nmoe.train.ranks import Ranks, join_ranks
from nmoe.train.record import Recorder
from nmoe.train.report import ProgressBar, log_to_file
from nmoe.train.room import telling_of_memory
from nmoe.train.sampler import Sampler, gpu_reader
from nmoe.train.setup import (
    Parts,
    Progress,
    build,
    checkpoint_state,
    checkpoint_tensors,
    choose_device,
    log_device,
    log_ranks,
    restore,
    start_from,
)
from nmoe.train.throughput import device_peak
from nmoe.train.warm_up import warm_up_ranks
from nmoe.train.watch import StopSignal, Watch

__all__ = ["Outcome", "Sample", "train"]

# A GPU may be a step behind the host: a place in the program may take this many of the longest steps, of which one counts
# so much less with each step that follows.
_SLOWER, _FORGET = 3.0, 0.95
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
    """Trains a config to its end, or until a signal; on every rank that a launcher's environment names.

    Raises:
        NmoeError: the data, the run's folder or the machine does not allow it; on all ranks, where all can know.
    """
    with StopSignal() as stop:
        try:
            device = choose_device(config)
            ranks = join_ranks(config, device)
        except Exception as error:
            if world_of(os.environ)[1] > 1:  # the others wait, and nobody can tell them
                end_alone(error)
            raise
        try:
            return _train(config, ranks, fresh=fresh, bar=bar, stop=stop)
        except Exception as error:
            end_all(ranks, error)
            raise


def _train(config: Config, ranks: Ranks, *, fresh: bool, bar: ProgressBar, stop: StopSignal) -> Outcome:
    ranks.beat("opening the data")
    sets, weights, val = _open_data(config, ranks)
    opened: list[RunFolder] = []

    def open_here() -> RunFolder:
        opened.append(open_folder(config, fresh=fresh))
        return opened[0].seen_by_others()

    seen = ranks.agree(open_here)
    folder = opened[0] if opened else seen
    log_file = log_to_file(folder.path / "log.txt") if ranks.rank == 0 else None
    try:
        return _Run(config, folder, ranks, sets, weights, val, bar, stop).train()
    finally:
        bar.clear()
        if log_file:
            logging.getLogger("nmoe").removeHandler(log_file)
            log_file.close()
        folder.release()


def _open_data(config: Config, ranks: Ranks) -> tuple[list[ShardSet], list[int], list[ShardSet]]:
    """Training sets, their weights, and the held-out sets. Rank 0 reads checksums, and makes what is to be made."""

    def open_all(*, hashed: bool) -> tuple[list[ShardSet], list[int], list[ShardSet]]:
        sets, weights = open_train(config, hashed=hashed)
        return sets, weights, open_val(config, like=sets[0], hashed=hashed)

    found = []
    ranks.agree(lambda: found.append(open_all(hashed=True)))
    return ranks.together(lambda: found[0] if found else open_all(hashed=False))


class _Run:
    """The state of one call of `train` on one rank."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        ranks: Ranks,
        sets: list[ShardSet],
        weights: list[int],
        val: list[ShardSet],
        bar: ProgressBar,
        stop: StopSignal,
    ):
        self.config, self.folder, self.ranks = config, folder, ranks
        self.sets, self.weights, self.val = sets, weights, val
        self.bar, self.stop = bar, stop
        self.progress = Progress(step=folder.first_step - 1)
        self.stopped_by = 0
        self.held_out: HeldOut | None = None
        self.kernels = 0
        """Compiled so far."""

    def train(self) -> Outcome:
        """From the first step to the outcome; an error that ends the run is in `run.json` before it goes on its way."""
        watcher = self.ranks.watcher
        if watcher:
            watcher.on_end = lambda line: self.folder.finish("failed", step=self.progress.step, error=line)
        try:
            with telling_of_memory(self.config, self.ranks):
                self._build()
                outcome = self._end(self._train())
        except Exception as error:
            end_all(self.ranks, error)
            if not (isinstance(error, NmoeError) or is_out_of_memory(error) or is_of_the_disk(error)):
                _log.error("the run failed", exc_info=True)
            line = f"{type(error).__name__}: {error}".splitlines()[0]
            self.folder.finish("failed", step=self.progress.step, error=line)
            raise
        self.parts.comm.close()
        self.ranks.part()
        return outcome

    def _build(self) -> None:
        config, checkpoint = self.config, self.folder.checkpoint
        log_device(self.ranks.device)
        log_ranks(self.ranks, gather=config.parallel.gather)
        self.ranks.beat("making the model")
        self.parts: Parts = build(config, self.ranks)
        self.ranks.beat("filling the model")
        if checkpoint:
            self.progress = restore(self.parts, checkpoint)
        elif config.run.start_from:
            start_from(self.parts, Path(config.run.start_from))
        self.peak = device_peak(self.ranks.device, compute_dtype(config))
        _log.info("peak %.4g TFLOP/s (%s)", self.peak.flops / 1e12, self.peak.origin)

    def _train(self) -> CheckpointWriter:
        """The steps; everything logged is published and every checkpoint written when it returns."""
        config, folder, ranks = self.config, self.folder, self.ranks
        verb = "going on with" if folder.resumed else "beginning"
        _log.info("%s %s at step %d of %d", verb, folder.path, folder.first_step, config.train.steps)
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: self.ranks.beat("the end of training", long=True))
            watch = stack.enter_context(Watch(folder.record))
            ranks.beat("compiling kernels")
            warm_up_ranks(
                config, ranks
            )  # only now: what the user can mend was said before, and the run shows that it lives
            metrics = stack.enter_context(self._metrics()) if ranks.rank == 0 else None
            checkpoints = CheckpointWriter(
                folder.path / "checkpoints",
                config=asdict(config),
                keep=config.checkpoint.keep,
                before_commit=metrics.flush if metrics else lambda: None,
                on_failure=lambda step, failures: metrics and metrics.log(step, {"checkpoint/failures": failures}),
                rank=ranks.rank,
                group=ranks.files,
            )
            stack.callback(checkpoints.wait)
            stack.callback(lambda: self.ranks.beat("the last checkpoint", long=True))
            recorder = None
            if metrics:
                recorder = Recorder(
                    config, parts=self.parts, progress=self.progress, metrics=metrics, bar=self.bar, peak=self.peak
                )
                if ranks.device.type == "cuda" and (read := gpu_reader(world_of(os.environ)[3])) is not None:
                    stack.enter_context(Sampler(read, metrics=metrics, step=lambda: self.progress.step))
            loader = stack.enter_context(self._loader())
            if self.progress.step < config.train.steps:
                try:
                    self._steps(loader, recorder, checkpoints, watch)
                except PeerFault as error:  # no orderly way out: the checkpoint's thread waits for the lost rank, too
                    end_all(self.ranks, error)
                    raise
            elif self.val:
                self._evaluate(watch)
        return checkpoints

    def _metrics(self) -> MetricWriter:
        resume_step = self.folder.first_step if self.folder.resumed else None
        return MetricWriter(self.folder.path, publish_s=self.config.metrics.publish_s, resume_step=resume_step)

    def _loader(self) -> Loader:
        config = self.config
        return Loader.of(
            config,
            self.sets,
            self.weights,
            rank=self.ranks.rank,
            num_ranks=self.ranks.size,
            next_sample=self.progress.next_sample,
        )

    def _say_compiled(self, step: int) -> None:
        """Logs that a step was slow because it compiled kernels."""
        seconds = registry.compile_seconds()[self.kernels :]
        if seconds:
            _log.info(
                "step %d compiled %d kernels in %.1f s; the next run finds them", step, len(seconds), sum(seconds)
            )
        self.kernels += len(seconds)

    def _steps(self, loader: Loader, recorder: Recorder | None, checkpoints: CheckpointWriter, watch: Watch) -> None:
        train, progress, device = self.config.train, self.progress, self.ranks.device
        watch.progress(progress.step)
        last, spent, slowest, exchange = False, math.nan, math.nan, self.parts.exchange
        while not (last or self.stopped_by):
            began = time.perf_counter()
            self.ranks.beat("waiting for data", step=progress.step + 1)
            batch = next(loader)
            waited = time.perf_counter() - began
            # Read once, behind backward: all ranks see the same, and a stop always has its checkpoint.
            note = partial(Note.of, device, last_step_time=spent, data_wait=waited)
            result = train_step(
                self.parts,
                batch,
                config=self.config,
                notes=lambda: note(stop=self.stop.number),  # noqa: B023
                before_update=checkpoints.before_update,
            )
            notes = AllNotes(result.notes_RN)
            spent = time.perf_counter() - began
            self._say_compiled(batch.step)
            if exchange:  # the kernels are compiled: who is late from now on is late for another reason
                exchange.arm()
                exchange = None
            slowest = 0.0 if math.isnan(slowest) else max(spent, _FORGET * slowest)  # the first step compiles
            if self.ranks.watcher and slowest:
                self.ranks.watcher.limit(max(self.config.rdep.timeout_s, _SLOWER * slowest))
            self._count(batch.step, batch.num_targets, loader.next_sample, result)
            last, self.stopped_by = progress.step == train.steps, notes.stop
            if recorder:
                recorder.step(result, batch, notes, step_time=spent)
            watch.progress(progress.step)
            if self.val and (last or (train.eval_every and progress.step % train.eval_every == 0)):
                held_out, seconds = self._evaluate(watch)
                if recorder:
                    recorder.held_out(held_out, seconds)
            if progress.step % self.config.checkpoint.every == 0 or last or self.stopped_by:
                self.ranks.beat("a checkpoint", long=True)
                state = checkpoint_state(self.parts, progress)
                pause = checkpoints.save(progress.step, tensors=checkpoint_tensors(self.parts), state=state)
                if recorder:
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
        began = time.perf_counter()

        def tick() -> None:
            watch.progress(self.progress.step)
            self.ranks.beat("an evaluation")

        first, exchange = self.held_out is None, self.parts.exchange
        if first and exchange:  # it may compile kernels of its own
            exchange.be_patient()
        self.ranks.beat("an evaluation", long=first)
        self.held_out = held_out_loss(
            self.parts.model,
            self.val,
            config=self.config,
            ranks=self.ranks,
            tick=tick,
        )
        if first and exchange:
            exchange.arm()
        return self.held_out, time.perf_counter() - began

    def _end(self, checkpoints: CheckpointWriter) -> Outcome:
        finished = self.progress.step >= self.config.train.steps
        complete = list_checkpoints(self.folder.path / "checkpoints")
        name = f"step-{self.progress.step:08d}"
        lost = checkpoints.last_error if not complete or complete[-1].name != name else ""
        status = "failed" if lost else "finished" if finished else "stopped"
        self.folder.finish(status, step=self.progress.step, error=lost or None)
        sound = self.held_out is not None and math.isfinite(self.held_out.loss)
        readable = self.sets[0].tokenizer_sha256 == ByteTokenizer.sha256
        return Outcome(
            path=self.folder.path,
            status=status,
            signal=0 if finished else self.stopped_by,
            step=self.progress.step,
            checkpoint=complete[-1] if complete else None,
            checkpoint_error=lost,
            held_out=self.held_out if finished else None,
            byte_entropy=byte_entropy(self.val, ByteTokenizer()) if self.val and readable else None,
            sample=self._sample(self.val[0]) if self.val and readable and finished and sound else None,
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
            agree=self._agree_on,
        )
        return Sample(prompt=tokenizer.decode(prompt), text=tokenizer.decode(new))

    def _agree_on(self, token: int) -> int:
        self.ranks.beat("the sample", long=True)
        return self.ranks.agree(lambda: token)
