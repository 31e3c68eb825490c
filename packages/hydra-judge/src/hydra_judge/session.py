# SPDX-License-Identifier: Apache-2.0
"""Servers, cache, budget and signals of a run, put together from the options and taken down again."""

import asyncio
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

import click

from hydra_judge.backends import Backend
from hydra_judge.budget import Budget, load_price
from hydra_judge.cache import Cache, default_cache_path
from hydra_judge.corpus import Block
from hydra_judge.engine import Engine, StoppedError
from hydra_judge.estimate import survey, with_pilot
from hydra_judge.judge import Judge, choose_form
from hydra_judge.limits import Endpoint, TokenBucket
from hydra_judge.rubric import Rubric
from hydra_judge.score import Reading
from hydra_judge.student import judge_by_student, load_student
from nmoe.errors import ConfigError
from nmoe.formats.documents import Document, ScoredDocument

__all__ = ["Servers", "StudentGate", "default_judge", "make_engine", "make_judge", "run_estimate", "weighed"]


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

    def share(self, number: int, count: int) -> "Servers":
        """What worker `number` of `count` may spend, so that all together stay within the limits."""
        requests = self.max_requests
        return replace(
            self,
            max_requests=None if requests is None else requests // count + (number < requests % count),
            max_cost=None if self.max_cost is None else self.max_cost / count,
        )


def weighed(url: str) -> tuple[str, float]:
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
        raise ConfigError(f"--base-url ...#{fragment}: expected #weight=W with W above 0 behind the address")
    return address, weight


def _connect(servers: Servers) -> list[tuple[Endpoint, Backend]]:
    # The client takes a third of a second to import, which verbs without a server need not wait for.
    from hydra_judge.backends.openai import OpenAIBackend

    if not servers.urls:
        raise ConfigError("--base-url is missing; documents go only to a server that you name")
    key = os.environ.get(servers.api_key_env)
    connected: list[tuple[Endpoint, Backend]] = []
    pairs = [weighed(url) for url in servers.urls]
    heaviest = max(weight for _, weight in pairs)
    for address, weight in pairs:
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
async def make_engine(servers: Servers, *, signals: bool = True, quiet: bool = True) -> AsyncIterator[Engine]:
    """An engine that SIGINT and SIGTERM stop: what is in flight is waited for and kept, a second signal cuts it off.

    Args:
        servers: who is asked.
        signals: whether to listen to them; not inside a process that another program looks after.
        quiet: do not tell on standard error of a server that cannot be reached.
    """
    price = load_price(servers.prices, model=servers.model) if servers.prices else None
    budget = Budget(price=price, max_requests=servers.max_requests, max_cost=servers.max_cost)
    cache = Cache(servers.cache)
    engine = Engine(
        _connect(servers),
        cache=cache,
        budget=budget,
        model=servers.model,
        timeout=servers.timeout,
        deadline=servers.deadline,
        max_outage=servers.max_outage,
        say=(lambda _: None) if quiet else (lambda text: click.echo(text, err=True)),
    )
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def interrupt() -> None:
        if not engine.stopping:
            engine.stop(StoppedError("interrupted; every answer is kept, the same command goes on from here"))
        elif task is not None:
            task.cancel()

    heeded = (signal.SIGINT, signal.SIGTERM) if signals else ()
    for name in heeded:
        loop.add_signal_handler(name, interrupt)
    try:
        yield engine
        await engine.drain()
    except BaseException:
        if task is None or not task.cancelling():
            await engine.drain()
        raise
    finally:
        for name in heeded:
            loop.remove_signal_handler(name)
        await engine.close()
        cache.close()


async def make_judge(engine: Engine, judge: Judge, *, form: str) -> Judge:
    """The judge with its answer form; "auto" asks the server which it understands."""
    if form != "auto":
        judge = replace(judge, form=form)
        engine.probe = judge.probe
        return judge

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
    async with make_engine(servers, quiet=False) as engine:
        judge = await make_judge(engine, judge, form=form)
        engine.counts.clear()
        found = await survey(blocks, judge=judge, cache=engine.cache, reading=reading, pilot=pilot)
        in_flight = servers.concurrency * len(servers.urls)
        return (await with_pilot(found, judge=judge, engine=engine, concurrency=in_flight)).lines(price, batch=batch)
