# SPDX-License-Identifier: Apache-2.0
"""The Batch API: everything that is not in the cache is handed over in files, at a discount, and collected hours later.

A round walks through the corpus, writes the questions whose answers are missing, submits them, waits and puts the
answers into the cache. Unusable answers lead to further questions, hence further rounds, until none is missing; then
the corpus is scored from the cache as ever. What was submitted is written down before it is submitted, so a run that
is killed at any moment finds its batches again and pays for none twice.
"""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import openai

from hydra_judge.backends import ServerError
from hydra_judge.backends.openai import read_completion
from hydra_judge.budget import Budget, BudgetError
from hydra_judge.cache import Cache
from hydra_judge.corpus import Block
from hydra_judge.engine import Request, StoppedError
from hydra_judge.judge import Judge
from hydra_judge.score import Reading, read_items
from hydra_judge.verdict import Reply
from nmoe.errors import EnvironmentFault, FormatError
from nmoe.formats.documents import Document
from nmoe.formats.files import write_json

__all__ = ["BatchRun"]

# Limits of the API: 50,000 requests and 200 MB a file.
_MOST_REQUESTS, _MOST_BYTES = 50_000, 180 << 20
_ENDED = ("completed", "failed", "expired", "cancelled")
JOURNAL = "batches.json"


class _MissingError(Exception):
    """An answer that is not in the cache yet."""


class BatchRun:
    """Fills the cache for a corpus through the Batch API.

    Args:
        client: to the server; it may retry, since batches are found again by their content.
        judge: how documents are judged, with its form settled.
        cache: where answers go.
        budget: what may be spent; a batch is reserved when it is submitted.
        output: folder of the run, for the journal.
        poll_s: seconds between two looks at a batch.
        say: is told what happens, a line at a time.
    """

    def __init__(
        self,
        client: openai.AsyncOpenAI,
        *,
        judge: Judge,
        cache: Cache,
        budget: Budget,
        output: Path,
        poll_s: float,
        say: Callable[[str], None],
    ):
        self._client, self._judge, self._cache, self._budget = client, judge, cache, budget
        self._journal, self._poll_s, self._say = output / JOURNAL, poll_s, say
        self._submitted: dict[str, dict[str, Any]] = self._read_journal()

    def _read_journal(self) -> dict[str, dict[str, Any]]:
        if not self._journal.exists():
            return {}
        try:
            return dict(json.loads(self._journal.read_text(encoding="utf-8")))
        except ValueError as error:
            raise FormatError(f"{self._journal}: not a journal of batches ({error})") from None

    async def fill(self, blocks: Sequence[Block], reading: Reading) -> None:
        """Submits, waits and collects until every answer for the blocks is in the cache.

        Raises:
            StoppedError: if a round brings nothing.
            BudgetError: if the next batch would pass a limit; what was submitted is collected first.
            EnvironmentFault: if the server has no such API, or refuses.
        """
        try:
            await self._collect_all()
            while True:
                reached: BudgetError | None = None
                submitted = 0
                try:
                    async for chunk in self._chunks(blocks, reading):
                        await self._submit(chunk)
                        submitted += len(chunk)
                except BudgetError as error:
                    reached = error
                collected = await self._collect_all()
                if reached is not None:
                    raise reached
                if not submitted:
                    return
                if not collected:
                    raise StoppedError(
                        "the Batch API gave no answer in a whole round; the same command goes on from here"
                    )
        except openai.OpenAIError as error:
            raise EnvironmentFault(f"the Batch API failed: {' '.join(str(error).split())[:300]}") from None

    async def _chunks(self, blocks: Sequence[Block], reading: Reading) -> AsyncIterator[list[Request]]:
        """Lists of requests that are not answered yet, each within the limits of a file."""
        seen: set[bytes] = set()
        chunk: list[Request] = []
        size = 0
        items = (item for _, _, item in read_items(enumerate(blocks), reading))
        documents = (item for item in items if isinstance(item, Document))
        for order, document in enumerate(documents):
            for request in await self._missing(document, order):
                if request.key in seen:
                    continue
                try:
                    self._budget.reserve(self._cost(request.prompt_tokens, request.answer_tokens))
                except BudgetError:
                    if chunk:
                        yield chunk
                    raise
                seen.add(request.key)
                chunk.append(request)
                size += len(_line(request))
                if len(chunk) >= _MOST_REQUESTS or size >= _MOST_BYTES:
                    yield chunk
                    chunk, size = [], 0
        if chunk:
            yield chunk

    async def _missing(self, document: Document, order: int) -> list[Request]:
        """The next requests of a document whose answers are not in the cache."""
        missing: list[Request] = []

        async def ask(request: Request) -> Reply:
            known = self._cache.get(request.key)
            if known is None:
                missing.append(request)
                raise _MissingError
            return known

        with contextlib.suppress(_MissingError):
            await self._judge.document(document, ask, order=order)
        return missing

    def _cost(self, prompt_tokens: float, answer_tokens: float) -> float:
        price = self._budget.price
        return price.cost(prompt_tokens, answer_tokens) * price.batch if price else 0.0

    async def _submit(self, chunk: list[Request]) -> None:
        data = b"".join(_line(request) for request in chunk)
        digest = hashlib.sha256(data).hexdigest()
        reserved = sum(self._cost(request.prompt_tokens, request.answer_tokens) for request in chunk)
        self._submitted[digest] = {"id": None, "requests": len(chunk), "reserved": reserved}
        write_json(self._journal, self._submitted)
        file = await self._client.files.create(file=("judge.jsonl", data), purpose="batch")
        batch = await self._client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            metadata={"hydra_judge": digest[:64]},
        )
        self._submitted[digest]["id"] = batch.id
        write_json(self._journal, self._submitted)
        self._say(f"batch {batch.id}: {len(chunk)} requests submitted")

    async def _collect_all(self) -> int:
        """Waits for every submitted batch; returns the number of answers."""
        collected = 0
        for digest, entry in list(self._submitted.items()):
            name = entry["id"] or await self._find(digest)
            if name is not None:
                collected += await self._collect(name, float(entry["reserved"]))
            del self._submitted[digest]
            write_json(self._journal, self._submitted)
        return collected

    async def _find(self, digest: str) -> str | None:
        """A batch that was submitted by a run that was killed before it could write down its name."""
        async for batch in self._client.batches.list(limit=100):
            if (batch.metadata or {}).get("hydra_judge") == digest[:64]:
                return batch.id
        return None

    async def _collect(self, name: str, reserved: float) -> int:
        batch = await self._client.batches.retrieve(name)
        while batch.status not in _ENDED:
            await asyncio.sleep(self._poll_s)
            batch = await self._client.batches.retrieve(name)
        waits: list[Awaitable[None]] = []
        spent = 0.0
        if batch.output_file_id:
            content = await self._client.files.content(batch.output_file_id)
            for key, reply in _answers(content.content):
                spent += self._cost(reply.prompt_tokens, reply.completion_tokens)
                waits.append(self._cache.put(key, reply, model=self._judge.model))
        await asyncio.gather(*waits)
        self._budget.settle(reserved=min(reserved, self._budget.reserved), cost=spent)
        self._say(f"batch {name}: {batch.status}, {len(waits)} answers")
        return len(waits)


def _line(request: Request) -> bytes:
    line = {"custom_id": request.key.hex(), "method": "POST", "url": "/v1/chat/completions", "body": request.body}
    return json.dumps(line).encode("ascii") + b"\n"


def _answers(data: bytes) -> Iterator[tuple[bytes, Reply]]:
    """Answers of a result file; lines that are none are left to the next round."""
    for line in data.splitlines():
        try:
            entry = json.loads(line)
            if entry["response"]["status_code"] == 200:
                yield bytes.fromhex(entry["custom_id"]), read_completion(json.dumps(entry["response"]["body"]).encode())
        except (ValueError, LookupError, TypeError, ServerError):
            continue
