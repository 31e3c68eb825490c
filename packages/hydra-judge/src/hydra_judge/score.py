# SPDX-License-Identifier: Apache-2.0
"""Scoring a corpus: blocks in, a folder of scored documents out, in the order of the corpus and in flat memory.

A reader thread fills a window of documents, tasks judge them in any order, a writer takes the results in the order of
the corpus. The window is bounded by the text it holds, so neither a corpus of 2 TB nor a document of 16 MiB is more
than that in memory, and one slow document does not stop the others until the window is full of finished ones.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra_judge.corpus import Block, read_block
from hydra_judge.output import BlockWriter
from hydra_judge.progress import Progress
from nmoe.formats.documents import MAX_DOCUMENT_BYTES, Document, Reject, ScoredDocument

__all__ = ["Reading", "read_items", "score_blocks"]

_READ_ITEMS, _READ_CHARS = 64, 1 << 20
_WINDOW_CHARS, _WINDOW_DOCUMENTS = 48 << 20, 20_000

JudgeDocument = Callable[[Document, int], Awaitable[ScoredDocument]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How the corpus is read.

    Attributes:
        text_key, id_key: keys or columns of text and id.
        max_bytes: larger documents are quarantined.
        limit: documents to score at the most; None for all.
    """

    text_key: str = "text"
    id_key: str = "id"
    max_bytes: int = MAX_DOCUMENT_BYTES
    limit: int | None = None

    def settings(self) -> dict[str, Any]:
        """What of this decides the content of a block."""
        return {
            "text_key": self.text_key,
            "id_key": self.id_key,
            "max_document_bytes": self.max_bytes,
            "limit": self.limit,
        }


class _Window:
    """Room for documents between reader and writer."""

    def __init__(self) -> None:
        self.chars = self.documents = 0
        self._changed = asyncio.Event()

    async def enter(self, chars: int) -> None:
        while self.documents and (self.chars + chars > _WINDOW_CHARS or self.documents >= _WINDOW_DOCUMENTS):
            self._changed.clear()
            await self._changed.wait()
        self.chars += chars
        self.documents += 1

    def leave(self, chars: int) -> None:
        self.chars -= chars
        self.documents -= 1
        self._changed.set()


def read_items(
    blocks: Iterable[tuple[int, Block]], reading: Reading
) -> Iterator[tuple[int, Block, Document | Reject | None]]:
    """Everything in (number, block) pairs; None ends a block. A second document of an id in a block is rejected."""
    left = itertools.count() if reading.limit is None else iter(range(reading.limit))
    for number, block in blocks:
        seen: set[int] = set()
        found = read_block(block, text_key=reading.text_key, id_key=reading.id_key, max_bytes=reading.max_bytes)
        for item in found:
            if isinstance(item, Document):
                key = hash(item.id)  # in place of the id: 60 bytes a document instead of its length
                if key in seen:
                    item = Reject(source=item.source, line=item.line, reason="duplicate_id", detail=item.id[:200])
                elif next(left, None) is None:
                    break
                elif not _is_hash(item.id):
                    seen.add(key)
            yield number, block, item
        yield number, block, None


def _is_hash(id: str) -> bool:
    """Whether an id looks like the hash that stands for a missing one; equal texts then share it."""
    return len(id) == 16 and all(digit in "0123456789abcdef" for digit in id)


def _take(items: Iterator[Any]) -> list[Any]:
    """The next items, about a MiB of text; empty at the end."""
    taken, chars = [], 0
    for item in items:
        taken.append(item)
        chars += len(item[2].text) if isinstance(item[2], Document) else 0
        if len(taken) >= _READ_ITEMS or chars >= _READ_CHARS:
            break
    return taken


async def score_blocks(
    blocks: Sequence[tuple[int, Block]],
    *,
    judge: JudgeDocument,
    output: Path,
    settings: Mapping[str, Any],
    model: str,
    reading: Reading,
    active: int,
    progress: Progress,
) -> None:
    """Scores blocks and writes each when it is complete.

    Args:
        blocks: (number, block) in order.
        judge: scores one document, given its number in this run.
        output: folder of the run.
        settings: how it is judged, kept with every block.
        model: by whom.
        reading: how the corpus is read.
        active: documents that are being judged at once.
        progress: is told of every document.

    Raises:
        Exception: the first one that `judge` raised, in the order of the corpus; complete blocks are kept.
    """
    window, slots = _Window(), asyncio.Semaphore(active)
    waiting: asyncio.Queue[tuple[int, Block, Any] | None] = asyncio.Queue()

    async def one(document: Document, order: int) -> ScoredDocument:
        try:
            return await judge(document, order)
        finally:
            slots.release()

    async def read() -> None:
        items, order = read_items(blocks, reading), itertools.count()
        with ThreadPoolExecutor(1, thread_name_prefix="judge-reader") as thread:
            while taken := await asyncio.get_running_loop().run_in_executor(thread, _take, items):
                for number, block, item in taken:
                    if isinstance(item, Document):
                        await window.enter(len(item.text))
                        await slots.acquire()
                        item = asyncio.create_task(one(item, next(order)))
                    else:
                        await window.enter(0)
                    waiting.put_nowait((number, block, item))
        waiting.put_nowait(None)

    reader = asyncio.create_task(read())
    try:
        await _write(
            waiting, reader, window, output=output, settings=settings, model=model, reading=reading, progress=progress
        )
    finally:
        reader.cancel()
        left = [waiting.get_nowait() for _ in range(waiting.qsize())]
        tasks = [entry[2] for entry in left if entry is not None and isinstance(entry[2], asyncio.Task)]
        await asyncio.gather(reader, *tasks, return_exceptions=True)


async def _write(
    waiting: asyncio.Queue[Any],
    reader: asyncio.Task[None],
    window: _Window,
    *,
    output: Path,
    settings: Mapping[str, Any],
    model: str,
    reading: Reading,
    progress: Progress,
) -> None:
    """Writes results in order until the reader's end."""
    reader.add_done_callback(lambda _: waiting.put_nowait(None))  # also when reading fails
    writer: BlockWriter | None = None
    try:
        while (entry := await waiting.get()) is not None:
            number, block, item = entry
            if writer is None:
                writer = BlockWriter(
                    output, number=number, block=block, settings=settings, model=model, extra=reading.settings()
                )
            chars = 0
            if isinstance(item, asyncio.Task):
                scored: ScoredDocument = await item
                writer.add(scored)
                chars = len(scored.text)
                progress.scored(scored)
            elif isinstance(item, Reject):
                writer.reject(item)
                progress.rejected(item)
            else:
                writer.close()
                writer = None
                progress.block_done(block)
            window.leave(chars)
    finally:
        if writer is not None:
            writer.abandon()
    await reader
