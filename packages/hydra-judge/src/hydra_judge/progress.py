# SPDX-License-Identifier: Apache-2.0
"""What a run says while it works, on standard error: one line that is rewritten on a terminal, one every 10 s elsewhere."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import TextIO

from hydra_judge.corpus import Block
from hydra_judge.engine import Engine
from nmoe.formats.documents import Reject, ScoredDocument

__all__ = ["Progress"]


class Progress:
    """Counts documents and shows where the run stands.

    Args:
        blocks: what will be scored, for the estimate of the time left.
        stream: where to write; None for silence.
    """

    def __init__(self, blocks: Sequence[Block], *, stream: TextIO | None = None):
        self.outcomes: Counter[str] = Counter()
        self.rejects: Counter[str] = Counter()
        self._total = sum(block.bytes for block in blocks) if all(block.bytes for block in blocks) else 0
        self._done = 0
        self._stream = stream
        self._began = time.monotonic()
        self._current = 0

    @property
    def documents(self) -> int:
        """Documents scored in this run."""
        return sum(self.outcomes.values())

    def scored(self, document: ScoredDocument) -> None:
        """Counts a scored document."""
        self.outcomes[document.outcome] += 1
        self._current += len(document.text)

    def rejected(self, reject: Reject) -> None:
        """Counts a quarantined line."""
        self.rejects[reject.reason] += 1

    def block_done(self, block: Block) -> None:
        """Counts a complete block."""
        self._done += block.bytes
        self._current = 0

    def line(self, engine: Engine | None) -> str:
        """The state in one line."""
        seconds = max(time.monotonic() - self._began, 1e-3)
        parts = [f"{self.documents} documents", f"{self.documents / seconds:.1f}/s"]
        if engine is not None:
            counts = engine.counts
            asked = max(counts["requests"], 1)
            faults = sum(counts[kind] for kind in ("timeout", "dropped", "status", "garbled"))
            parts += [
                f"{(counts['prompt_tokens'] + counts['answer_tokens']) / seconds:.0f} tokens/s",
                f"${engine.spent:.4f}",
                f"{engine.in_flight} in flight",
                f"{counts['cached']} cached",
                f"429 {counts['rate_limited'] / asked:.1%}",
                f"faults {faults / asked:.1%}",
            ]
        if self.documents:
            parts.append(f"ok {self.outcomes['ok'] / self.documents:.1%}")
        if self.rejects:
            parts.append(f"quarantined {self.rejects.total()}")
        # Characters stand for the bytes of the block that is under way: close enough for an estimate.
        share = min((self._done + self._current) / self._total, 1.0) if self._total else 0.0
        if 0 < share < 1:
            left = int(seconds * (1 - share) / share)
            parts.append(f"ETA {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}")
        return "  ".join(parts)

    async def show(self, engine: Engine | None) -> None:
        """Shows the line until cancelled."""
        if self._stream is None:
            return
        terminal = self._stream.isatty()
        try:
            while True:
                await asyncio.sleep(1.0 if terminal else 10.0)
                text = self.line(engine)
                self._stream.write(f"\r\x1b[K{text}" if terminal else f"{text}\n")
                self._stream.flush()
        finally:
            if terminal:
                self._stream.write("\r\x1b[K")
