# SPDX-License-Identifier: Apache-2.0
"""What a run would cost and how long it would take, before it is begun.

The corpus is read and every question is put together, but none is asked. Tokens are guessed from characters; a pilot
of a few documents, spread over the corpus by their hash, replaces the guesses by what the server bills. Its answers
are kept, so a pilot is not paid for again.
"""

import asyncio
import hashlib
import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from hydra_judge.backends import RejectedError
from hydra_judge.budget import Price
from hydra_judge.cache import Cache
from hydra_judge.corpus import Block
from hydra_judge.engine import Engine, Request
from hydra_judge.judge import Judge
from hydra_judge.score import Reading, read_items
from hydra_judge.verdict import Reply
from nmoe.formats.documents import Document, Reject

__all__ = ["Estimate", "survey", "with_pilot"]


@dataclass(kw_only=True, slots=True)
class Estimate:
    """What lies ahead.

    Attributes:
        documents: documents that can be judged.
        quarantined: lines and files that cannot.
        requests: questions without an answer in the cache, each asked once.
        cached: questions whose answer is there.
        prompt_tokens: of those requests.
        answer_tokens: of those requests; without a pilot the most that is allowed.
        seconds: time it would take; None without a pilot.
        pilot: documents of the pilot.
        sample: documents that a pilot would judge.
    """

    documents: int = 0
    quarantined: int = 0
    requests: int = 0
    cached: int = 0
    prompt_tokens: float = 0.0
    answer_tokens: float = 0.0
    seconds: float | None = None
    pilot: int = 0
    sample: list[Document] = field(default_factory=list)

    def lines(self, price: Price | None, *, batch: bool) -> list[str]:
        """The estimate in words."""
        most = "" if self.pilot else "at most "
        cost = price.cost(self.prompt_tokens, self.answer_tokens) * (price.batch if batch else 1.0) if price else None
        told = [
            f"documents: {self.documents}, quarantined: {self.quarantined}",
            f"requests: {self.requests}, in the cache: {self.cached}",
            f"tokens: {self.prompt_tokens:.0f} in the prompts, {most}{self.answer_tokens:.0f} in the answers",
            "cost: unknown, no --prices" if cost is None else f"cost: {most}${cost:.4f}",
        ]
        if self.seconds is not None:
            told.append(f"time: {self.seconds:.0f} s at the pilot's speed")
        told.append(
            f"by a pilot of {self.pilot} documents"
            if self.pilot
            else "guessed from characters; --pilot N asks for N documents"
        )
        return told


async def survey(blocks: Sequence[Block], *, judge: Judge, cache: Cache, reading: Reading, pilot: int) -> Estimate:
    """Reads the corpus and counts its questions.

    Args:
        blocks: the corpus.
        judge: how documents would be judged.
        cache: where answers may be.
        reading: how the corpus is read.
        pilot: documents to pick for a pilot: those with the lowest hashes, so the same in every run.
    """
    found = Estimate()
    picked: list[tuple[int, int, Document]] = []

    async def count(request: Request) -> Reply:
        if cache.get(request.key) is not None:
            found.cached += 1
        else:
            found.requests += 1
            found.prompt_tokens += request.prompt_tokens
            found.answer_tokens += request.answer_tokens
        raise RejectedError("counted", outcome="failed")

    for _, _, item in read_items(enumerate(blocks), reading):
        found.quarantined += isinstance(item, Reject)
        if isinstance(item, Document):
            found.documents += 1
            await judge.document(item, count)
            rank = -int.from_bytes(hashlib.sha256(item.text.encode()).digest()[:8], "big")
            heapq.heappush(picked, (rank, found.documents, item))
            if len(picked) > pilot:
                heapq.heappop(picked)
    found.sample = [document for _, _, document in sorted(picked, key=lambda entry: entry[1])]
    return found


async def with_pilot(estimate: Estimate, *, judge: Judge, engine: Engine, concurrency: int) -> Estimate:
    """The estimate with the tokens and the speed that a pilot measured.

    Args:
        estimate: of `survey`, with its sample.
        judge: how documents are judged.
        engine: asks the servers.
        concurrency: requests in flight of the run that is to come.
    """
    guessed = {"prompt": 0, "requests": 0}

    async def ask(request: Request) -> Reply:
        guessed["prompt"] += request.prompt_tokens
        guessed["requests"] += 1
        return await engine.ask(request)

    began = time.monotonic()
    await asyncio.gather(*[judge.document(one, ask, order=order) for order, one in enumerate(estimate.sample)])
    seconds = time.monotonic() - began
    answers, counts = engine.counts["answers"], engine.counts
    estimate.pilot = len(estimate.sample)
    left = max(estimate.requests - answers, 0)
    if answers:
        # Questions repeated after unusable answers are in the pilot's count, hence in the estimate.
        repeats = (
            guessed["requests"]
            / max(estimate.pilot, 1)
            / max((estimate.requests + estimate.cached) / max(estimate.documents, 1), 1e-9)
        )
        per_request = counts["prompt_tokens"] / answers
        scale = per_request / max(guessed["prompt"] / guessed["requests"], 1e-9)
        estimate.prompt_tokens *= scale * repeats * left / max(estimate.requests, 1)
        estimate.answer_tokens = counts["answer_tokens"] / answers * left * repeats
        in_flight = min(concurrency, answers)
        estimate.seconds = left * repeats * seconds / answers * in_flight / concurrency
    estimate.requests = left
    return estimate
