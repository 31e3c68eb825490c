# SPDX-License-Identifier: Apache-2.0
"""A run of the judge: servers, cache, budget and signals put together from the options, and taken down again."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hydra_judge.backends import Backend
from hydra_judge.budget import Budget, load_price
from hydra_judge.cache import Cache, default_cache_path
from hydra_judge.corpus import Block
from hydra_judge.engine import Engine, StoppedError
from hydra_judge.estimate import survey, with_pilot
from hydra_judge.injection import judge_canaries, pick_canaries
from hydra_judge.judge import Judge, choose_form
from hydra_judge.limits import Endpoint, TokenBucket
from hydra_judge.output import QUARANTINE, finished_blocks, join_blocks, prepare
from hydra_judge.progress import Progress
from hydra_judge.rubric import Rubric
from hydra_judge.score import Reading, score_blocks
from hydra_judge.student import judge_by_student, load_student
from nmoe.errors import ConfigError, DataError
from nmoe.formats.documents import HEADER, Document, ScoredDocument, open_scored

__all__ = ["Servers", "StudentGate", "make_engine", "make_judge", "run_estimate", "run_score"]


class StudentGate:
    """A student that decides about documents whose fate it is sure of.

    Args:
        path: the student.
        rubric: of the judge; the student must have learned by it.
        min_score: the score that decides.
        confidence: probability from which on it is sure, in (0.5, 1).

    Raises:
        ConfigError: if the student learned by another rubric.
    """

    def __init__(self, path: Path, *, rubric: Rubric, min_score: float, confidence: float):
        self._student = load_student(path)
        if self._student.about["rubric_sha256"] != rubric.sha256:
            raise ConfigError(f"--student {path}: learned by another rubric than {rubric.name}; fit one on its scores")
        self._min_score, self._confidence = min_score, confidence
        self._probability = self._student.keep_probability(min_score=min_score)

    def settings(self) -> dict[str, Any]:
        """What of this decides the scores."""
        return {"student": self._student.sha256, "min_score": self._min_score, "confidence": self._confidence}

    def judge(self, document: Document) -> ScoredDocument | None:
        """Its verdict, or None if it is not sure."""
        return judge_by_student(
            document,
            student=self._student,
            probability=self._probability,
            min_score=self._min_score,
            confidence=self._confidence,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Servers:
    """Who is asked, how hard, and for how much.

    Attributes:
        urls: base URLs; "#weight=W" behind one sets its share of the load.
        model: name that the servers know.
        api_key_env: environment variable that holds the key.
        concurrency: requests in flight at each server at the most.
        timeout: seconds for one request.
        requests_per_minute, tokens_per_minute: limits of each server; 0 for none.
        deadline: seconds of trying for one request.
        max_outage: seconds for which all servers may be down.
        prices: TOML of prices; None if the model costs nothing.
        max_requests, max_cost: where to stop; None for no limit.
        cache: SQLite file of answers.
    """

    urls: tuple[str, ...]
    model: str
    api_key_env: str = "OPENAI_API_KEY"
    concurrency: int = 32
    timeout: float = 120.0
    requests_per_minute: float = 0.0
    tokens_per_minute: float = 0.0
    deadline: float = 600.0
    max_outage: float = 7200.0
    prices: Path | None = None
    max_requests: int | None = None
    max_cost: float | None = None
    cache: Path = field(default_factory=default_cache_path)


def _weight(url: str) -> tuple[str, float]:
    """The address without its fragment, and the weight that stands there."""
    address, _, fragment = url.partition("#")
    if not fragment:
        return address, 1.0
    key, _, value = fragment.partition("=")
    try:
        weight = float(value)
    except ValueError:
        weight = 0.0
    if key != "weight" or not 0 < weight < float("inf"):
        raise ConfigError(f"--base-url {url}: expected #weight=W with W above 0 behind the address")
    return address, weight


def _connect(servers: Servers) -> list[tuple[Endpoint, Backend]]:
    # The client takes a third of a second to import, which verbs without a server need not wait for.
    from hydra_judge.backends.openai import OpenAIBackend

    if not servers.urls:
        raise ConfigError("--base-url is missing; documents go only to a server that you name")
    key = os.environ.get(servers.api_key_env)
    connected: list[tuple[Endpoint, Backend]] = []
    weighed = [_weight(url) for url in servers.urls]
    heaviest = max(weight for _, weight in weighed)
    for address, weight in weighed:
        # A saturated server takes what it may have in flight, so that must follow the weight as well.
        most = max(1, round(servers.concurrency * weight / heaviest))
        backend = OpenAIBackend(address, api_key=key, timeout=servers.timeout, connections=servers.concurrency)
        endpoint = Endpoint(
            url=urlsplit(address).netloc,
            most=most,
            weight=weight,
            requests=TokenBucket(servers.requests_per_minute),
            tokens=TokenBucket(servers.tokens_per_minute),
            clock=time.monotonic,
        )
        connected.append((endpoint, backend))
    return connected


@asynccontextmanager
async def make_engine(servers: Servers) -> AsyncIterator[Engine]:
    """An engine that SIGINT and SIGTERM stop: what is in flight is waited for and kept, a second signal cuts it off."""
    price = load_price(servers.prices, model=servers.model) if servers.prices else None
    budget = Budget(price=price, max_requests=servers.max_requests, max_cost=servers.max_cost)
    cache = Cache(servers.cache)
    engine = Engine(
        _connect(servers),
        cache=cache,
        budget=budget,
        model=servers.model,
        deadline=servers.deadline,
        max_outage=servers.max_outage,
    )
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def interrupt() -> None:
        if not engine.stopping:
            engine.stop(StoppedError("interrupted; every answer is kept, the same command goes on from here"))
        elif task is not None:
            task.cancel()

    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, interrupt)
    try:
        yield engine
        await engine.drain()
    except BaseException:
        if task is None or not task.cancelling():
            await engine.drain()
        raise
    finally:
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(name)
        await engine.close()
        cache.close()


async def make_judge(engine: Engine, judge: Judge, *, form: str) -> Judge:
    """The judge with its answer form; "auto" asks the server which it understands."""
    if form != "auto":
        return replace(judge, form=form)

    def probe(candidate: str) -> Judge:
        return replace(judge, form=candidate, votes=1, temperature=0.0, attempts=6, faults_allowed=2)

    found, tried = await choose_form(probe, engine.ask)
    if tried:
        sys.stderr.write(f"answer form {found}; not understood: {tried}\n")
    return replace(judge, form=found)


def default_judge(
    rubric: Rubric, *, model: str, votes: int, temperature: float | None, options: dict[str, Any]
) -> Judge:
    """A judge whose form is not settled; several votes need a temperature above 0 to differ."""
    warm = 0.0 if votes == 1 else 0.7
    return Judge(
        rubric=rubric,
        model=model,
        form="json_schema",
        votes=votes,
        temperature=warm if temperature is None else temperature,
        options=options,
    )


async def run_estimate(
    blocks: Sequence[Block], *, judge: Judge, form: str, servers: Servers, reading: Reading, pilot: int, batch: bool
) -> list[str]:
    """What `run_score` would cost, in lines; asks for `pilot` documents only."""
    price = load_price(servers.prices, model=servers.model) if servers.prices else None
    if not pilot:
        cache = Cache(servers.cache)
        judge = replace(judge, form="json_schema" if form == "auto" else form)
        found = await survey(blocks, judge=judge, cache=cache, reading=reading, pilot=0)
        cache.close()
        return found.lines(price, batch=batch)
    async with make_engine(servers) as engine:
        judge = await make_judge(engine, judge, form=form)
        engine.counts.clear()
        found = await survey(blocks, judge=judge, cache=engine.cache, reading=reading, pilot=pilot)
        in_flight = servers.concurrency * len(servers.urls)
        return (await with_pilot(found, judge=judge, engine=engine, concurrency=in_flight)).lines(price, batch=batch)


async def _fill_by_batch(
    engine: Engine,
    blocks: Sequence[Block],
    *,
    judge: Judge,
    servers: Servers,
    reading: Reading,
    output: Path,
    poll_s: float,
    quiet: bool,
) -> None:
    from hydra_judge.backends.openai import make_client
    from hydra_judge.batch import BatchRun

    if len(servers.urls) != 1:
        raise ConfigError("--batch: takes one --base-url")
    key = os.environ.get(servers.api_key_env)
    client = make_client(_weight(servers.urls[0])[0], api_key=key, timeout=max(servers.timeout, 600.0), connections=8)

    def say(text: str) -> None:
        if not quiet:
            sys.stderr.write(f"{text}\n")

    async with client.with_options(max_retries=5):
        run = BatchRun(
            client.with_options(max_retries=5),
            judge=judge,
            cache=engine.cache,
            budget=engine.budget,
            output=output,
            poll_s=poll_s,
            say=say,
        )
        await run.fill(blocks, reading)


async def run_score(
    blocks: Sequence[Block],
    *,
    judge: Judge,
    form: str,
    servers: Servers,
    reading: Reading,
    output: Path,
    quiet: bool,
    batch_poll_s: float | None = None,
    canaries: int = 0,
    student: StudentGate | None = None,
    worker: tuple[int, int] = (0, 1),
) -> str:
    """Scores what is not scored yet and completes the folder.

    Args:
        blocks: the plan of the corpus.
        judge: how documents are judged.
        form: answer form or "auto".
        servers: who is asked.
        reading: how the corpus is read.
        output: folder of the run.
        quiet: no progress on standard error.
        batch_poll_s: use the Batch API and look at it every so many seconds; None asks directly.
        canaries: documents that are judged again under every attack.
        student: grades what it is sure of, so that the judge is asked for the rest.
        worker: (number, count) of workers that share the blocks; the one that ends last completes the folder.

    Returns:
        A summary in one line.
    """
    began = time.time()
    async with make_engine(servers) as engine:
        judge = await make_judge(engine, judge, form=form)
        settings = judge.settings() | (student.settings() if student else {})
        prepare(output, settings=settings, model=judge.model)
        done = finished_blocks(output, blocks, extra=reading.settings())
        left = [(number, block) for number, block in enumerate(blocks) if number not in done]
        left = [(number, block) for number, block in left if number % worker[1] == worker[0]]
        progress = Progress([block for _, block in left], stream=None if quiet else sys.stderr)

        async def score_one(document: Document, order: int) -> ScoredDocument:
            sure = student.judge(document) if student else None
            return sure or await judge.document(document, engine.ask, order=order)

        shown = asyncio.create_task(progress.show(engine))
        try:
            if batch_poll_s is not None:
                await _fill_by_batch(
                    engine,
                    [block for _, block in left],
                    judge=judge,
                    servers=servers,
                    reading=reading,
                    output=output,
                    poll_s=batch_poll_s,
                    quiet=quiet,
                )
            await score_blocks(
                left,
                judge=score_one,
                output=output,
                settings=settings,
                model=judge.model,
                reading=reading,
                active=2 * servers.concurrency * len(servers.urls) + 16,
                progress=progress,
            )
            done = finished_blocks(output, blocks, extra=reading.settings(), with_failed=True)
            if worker[1] > 1 and len(done) < len(blocks):
                return (
                    f"worker {worker[0]}/{worker[1]}: {len(left)} blocks scored, {len(done)} of {len(blocks)} complete"
                )
            header = join_blocks(output, blocks, settings=settings, model=judge.model)
            if not header["documents"]:
                (output / HEADER).unlink()
                listed = ", ".join(f"{count} {name}" for name, count in header["quarantined"].items()) or "no line"
                raise DataError(f"no document in the input ({listed}); see {output / QUARANTINE}")
            if canaries:
                scale = {"low": judge.rubric.low, "high": judge.rubric.high}
                picked = pick_canaries(open_scored(output), count=canaries, **scale)
                await judge_canaries(picked, judge=judge, ask=engine.ask, output=output, order=header["documents"])
        finally:
            shown.cancel()
            await asyncio.gather(shown, return_exceptions=True)
            await engine.drain()
            _record(output, engine, progress, began)
        return _summary(header, engine)


def _record(output: Path, engine: Engine, progress: Progress, began: float) -> None:
    """Appends what this run did to DIR/runs.jsonl."""
    record = {
        "started_at": round(began, 3),
        "seconds": round(time.time() - began, 3),
        "documents": progress.documents,
        "outcomes": dict(progress.outcomes),
        "cost": round(engine.spent, 6),
        **engine.counts,
    }
    with (output / "runs.jsonl").open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(record) + "\n")


def _summary(header: dict[str, Any], engine: Engine) -> str:
    outcomes = ", ".join(f"{count} {name}" for name, count in header["outcomes"].items() if count)
    rejects = ", ".join(f"{count} {name}" for name, count in header["quarantined"].items())
    return (
        f"{header['documents']} documents: {outcomes or 'none'}; quarantined: {rejects or 'none'}; "
        f"{engine.counts['requests']} requests, {engine.counts['cached']} from the cache, ${engine.spent:.4f}"
    )
