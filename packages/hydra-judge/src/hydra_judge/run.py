# SPDX-License-Identifier: Apache-2.0
"""A run of `score`: the blocks that are left, scored here or on a cluster, and joined to the finished folder.

Every process that scores writes whole blocks with their markers, so one process, some workers of a batch system and the
processes of a cluster all do the same thing to the same folder, and whoever finds every block complete joins them.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra_judge.cluster import Cluster, on_cluster
from hydra_judge.corpus import Block
from hydra_judge.engine import Engine, StoppedError
from hydra_judge.injection import judge_canaries, pick_canaries
from hydra_judge.judge import Judge
from hydra_judge.output import QUARANTINE, finished_blocks, is_finished, join_blocks, prepare
from hydra_judge.progress import Progress
from hydra_judge.score import Reading, score_blocks
from hydra_judge.session import Servers, StudentGate, make_engine, make_judge, weighed
from nmoe.errors import ConfigError, DataError
from nmoe.formats.documents import HEADER, Document, ScoredDocument, open_scored

__all__ = ["Job", "run_score"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is scored, and how: all that a process needs that takes a part of it.

    Attributes:
        blocks: the plan of the corpus.
        judge: how documents are judged.
        servers: who is asked.
        reading: how the corpus is read.
        output: folder of the run.
        student: grades what it is sure of, so that the judge is asked for the rest.
    """

    blocks: Sequence[Block]
    judge: Judge
    servers: Servers
    reading: Reading
    output: Path
    student: StudentGate | None = None

    def settings(self) -> dict[str, Any]:
        """Everything that decides the scores."""
        return self.judge.settings() | (self.student.settings() if self.student else {})

    def finished(self, *, with_failed: bool = False) -> set[int]:
        """Numbers of the blocks that need no more work; see `hydra_judge.output.finished_blocks`."""
        return finished_blocks(self.output, self.blocks, extra=self.reading.settings(), with_failed=with_failed)

    def anywhere(self) -> "Job":
        """The same with paths that hold in any working directory."""
        blocks = [replace(block, path=str(Path(block.path).absolute())) for block in self.blocks]
        servers = replace(self.servers, cache=self.servers.cache.absolute())
        return replace(self, blocks=blocks, servers=servers, output=self.output.absolute())


def run_score(
    job: Job,
    *,
    form: str,
    quiet: bool,
    canaries: int = 0,
    batch_poll_s: float | None = None,
    worker: tuple[int, int] = (0, 1),
    cluster: Cluster | None = None,
) -> str:
    """Scores what is not scored yet and completes the folder.

    Args:
        job: what, and how.
        form: answer form or "auto".
        quiet: no progress on standard error.
        canaries: documents that are judged again under every attack.
        batch_poll_s: use the Batch API and look at it every so many seconds; None asks directly.
        worker: (number, count) of workers that share the blocks; the one that ends last completes the folder.
        cluster: where the blocks are scored; None for this process.

    Returns:
        A summary in one line.
    """
    if cluster is None:
        return asyncio.run(
            _run_here(job, form=form, quiet=quiet, canaries=canaries, batch_poll_s=batch_poll_s, worker=worker)
        )
    job = asyncio.run(_settle(job.anywhere(), form=form))
    prepare(job.output, settings=job.settings(), model=job.judge.model)
    left = sorted(set(range(len(job.blocks))) - job.finished())
    totals = on_cluster(partial(_score_one_block, job), left, cluster=cluster, quiet=quiet)
    return asyncio.run(_complete(job, totals, canaries=canaries))


async def _run_here(
    job: Job, *, form: str, quiet: bool, canaries: int, batch_poll_s: float | None, worker: tuple[int, int]
) -> str:
    began = time.time()
    async with make_engine(job.servers, quiet=quiet) as engine:
        job = replace(job, judge=await make_judge(engine, job.judge, form=form))
        prepare(job.output, settings=job.settings(), model=job.judge.model)
        done = job.finished()
        left = [number for number in range(worker[0], len(job.blocks), worker[1]) if number not in done]
        progress = Progress([job.blocks[number] for number in left], stream=None if quiet else sys.stderr)
        shown = asyncio.create_task(progress.show(engine))
        try:
            if batch_poll_s is not None:
                await _fill_by_batch(engine, job, left, poll_s=batch_poll_s, quiet=quiet)
            await _score(job, left, engine=engine, progress=progress)
            done = job.finished(with_failed=True)
            if worker[1] > 1 and len(done) < len(job.blocks):
                return (
                    f"worker {worker[0]}/{worker[1]}: {len(left)} blocks scored, "
                    f"{len(done)} of {len(job.blocks)} complete"
                )
            header = await _join(job, engine, canaries=canaries)
            return _summary(header, _spent(engine, progress))
        finally:
            shown.cancel()
            await asyncio.gather(shown, return_exceptions=True)
            await engine.drain()
            _record(job.output, engine, progress, began)


async def _score(job: Job, numbers: Sequence[int], *, engine: Engine, progress: Progress) -> None:
    """Scores the blocks of these numbers."""

    async def score_one(document: Document, order: int) -> ScoredDocument:
        sure = job.student.judge(document) if job.student else None
        return sure or await job.judge.document(document, engine.ask, order=order)

    await score_blocks(
        [(number, job.blocks[number]) for number in numbers],
        judge=score_one,
        output=job.output,
        settings=job.settings(),
        model=job.judge.model,
        reading=job.reading,
        active=2 * job.servers.concurrency * len(job.servers.urls) + 16,
        progress=progress,
    )


async def _join(job: Job, engine: Engine, *, canaries: int) -> dict[str, Any]:
    """Completes the folder, whose blocks all are complete; returns its header."""
    header = join_blocks(job.output, job.blocks, settings=job.settings(), model=job.judge.model)
    if not header["documents"]:
        (job.output / HEADER).unlink()
        listed = ", ".join(f"{count} {name}" for name, count in header["quarantined"].items()) or "no line"
        raise DataError(f"no document in the input ({listed}); see {job.output / QUARANTINE}")
    if canaries:
        scale = {"low": job.judge.rubric.low, "high": job.judge.rubric.high}
        picked = pick_canaries(open_scored(job.output), count=canaries, **scale)
        await judge_canaries(picked, judge=job.judge, ask=engine.ask, output=job.output, order=header["documents"])
    return header


async def _settle(job: Job, *, form: str) -> Job:
    """The job with its answer form, found once for all processes."""
    async with make_engine(job.servers, quiet=False) as engine:
        return replace(job, judge=await make_judge(engine, job.judge, form=form))


def _score_one_block(job: Job, number: int) -> dict[str, float]:
    """Scores a block in a process of a cluster, unless an attempt whose answer was lost has completed it."""
    if is_finished(job.output, number, job.blocks[number], extra=job.reading.settings()):
        return {}

    async def work() -> dict[str, float]:
        began, progress = time.time(), Progress([job.blocks[number]])
        async with make_engine(job.servers, signals=False) as engine:
            engine.probe = job.judge.probe
            try:
                await _score(job, [number], engine=engine, progress=progress)
            finally:
                await engine.drain()
                _record(job.output, engine, progress, began)
        return _spent(engine, progress)

    return asyncio.run(work())


async def _complete(job: Job, totals: Mapping[str, float], *, canaries: int) -> str:
    """Joins what the processes of a cluster have scored."""
    async with make_engine(job.servers) as engine:
        return _summary(await _join(job, engine, canaries=canaries), totals)


async def _fill_by_batch(engine: Engine, job: Job, numbers: Sequence[int], *, poll_s: float, quiet: bool) -> None:
    from hydra_judge.backends.openai import make_client
    from hydra_judge.batch import BatchRun

    servers = job.servers
    if len(servers.urls) != 1:
        raise ConfigError("--batch: takes one --base-url")
    key = os.environ.get(servers.api_key_env)
    client = make_client(weighed(servers.urls[0])[0], api_key=key, timeout=max(servers.timeout, 600.0), connections=8)

    def say(text: str) -> None:
        if not quiet:
            sys.stderr.write(f"{text}\n")

    async with client.with_options(max_retries=5):
        run = BatchRun(
            client.with_options(max_retries=5),
            judge=job.judge,
            cache=engine.cache,
            budget=engine.budget,
            output=job.output,
            poll_s=poll_s,
            say=say,
        )
        await run.fill([job.blocks[number] for number in numbers], job.reading)


def _spent(engine: Engine, progress: Progress) -> dict[str, float]:
    """What a process did, to be added up."""
    return {"documents": progress.documents, "cost": round(engine.spent, 6), **engine.counts}


def _record(output: Path, engine: Engine, progress: Progress, began: float) -> None:
    """Appends what this run did to DIR/runs.jsonl."""
    record = {
        "started_at": round(began, 3),
        "seconds": round(time.time() - began, 3),
        "outcomes": dict(progress.outcomes),
        **_spent(engine, progress),
    }
    with (output / "runs.jsonl").open("ab") as stream:
        stream.write(json.dumps(record).encode() + b"\n")


def _summary(header: dict[str, Any], totals: Mapping[str, float]) -> str:
    """What a run did, in a line.

    Raises:
        StoppedError: if every document failed, so that a script does not go on with nothing.
    """
    outcomes = ", ".join(f"{count} {name}" for name, count in header["outcomes"].items() if count)
    rejects = ", ".join(f"{count} {name}" for name, count in header["quarantined"].items())
    told = (
        f"{header['documents']} documents: {outcomes or 'none'}; quarantined: {rejects or 'none'}; "
        f"{totals.get('requests', 0):.0f} requests, {totals.get('cached', 0):.0f} from the cache, "
        f"${totals.get('cost', 0):.4f}"
    )
    if header["outcomes"]["failed"] == header["documents"]:
        raise StoppedError(f"no answer to any document; the same command asks again. {told}")
    return told
