# SPDX-License-Identifier: Apache-2.0
"""From scored documents to token shards: what is good enough is kept, with its way back to document and score."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hydra_judge.explain import VERDICTS, verdict_line
from nmoe.errors import DataError
from nmoe.formats.documents import ScoredDocument, open_scored
from nmoe.formats.shards import ShardWriter
from nmoe.formats.tokenizers import load_tokenizer

__all__ = ["PackTotals", "pack"]

_BATCH_CHARS = 4 << 20


@dataclass(kw_only=True, slots=True)
class PackTotals:
    """What `pack` did.

    Attributes:
        kept: documents written.
        tokens: token ids written, an EOS after each document included.
        dropped: documents left out, by reason ("below_score", or the outcome of one without a score).
    """

    kept: int = 0
    tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


def _kept(scored: Path, min_score: float, totals: PackTotals) -> Iterator[ScoredDocument]:
    for document in open_scored(scored):
        if document.score is None:
            totals.dropped[document.outcome] += 1
        elif document.score < min_score:
            totals.dropped["below_score"] += 1
        else:
            yield document


def _batches(documents: Iterator[ScoredDocument]) -> Iterator[list[ScoredDocument]]:
    batch: list[ScoredDocument] = []
    chars = 0
    for document in documents:
        batch.append(document)
        chars += len(document.text)
        if chars >= _BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def pack(
    scored: Path, *, tokenizer: str, min_score: float, output: Path, shard_tokens: int, max_document_tokens: int | None
) -> PackTotals:
    """Writes the documents of `scored` that reach `min_score` as shards.

    Args:
        scored: folder of a complete run.
        tokenizer: see `nmoe.formats.tokenizers.load_tokenizer`.
        min_score: lowest score that is kept, on the rubric's scale.
        output: folder for the shards.
        shard_tokens: size of a shard, in tokens.
        max_document_tokens: longer documents are split; None: `shard_tokens` - 1.

    Raises:
        DataError: if there is nothing to read, nothing left to write, or `output` holds shards.
    """
    loaded = load_tokenizer(tokenizer)
    open_scored(scored)  # before the output is touched
    totals = PackTotals()
    with (
        ShardWriter(
            output, tokenizer=loaded, shard_tokens=shard_tokens, max_document_tokens=max_document_tokens
        ) as writer,
        (output / VERDICTS).open("w", encoding="utf-8", newline="\n") as verdicts,
    ):
        for batch in _batches(_kept(scored, min_score, totals)):
            for document, tokens in zip(batch, loaded.encode_batch([one.text for one in batch]), strict=True):
                size = len(document.text.encode("utf-8"))
                writer.add(tokens, id=document.id, source=document.source, score=document.score, text_bytes=size)
                verdicts.write(verdict_line(document))
                totals.kept += 1
                totals.tokens += len(tokens) + 1
        if not totals.kept:
            dropped = ", ".join(f"{count} {reason}" for reason, count in totals.dropped.items()) or "no documents"
            raise DataError(f"{scored}: nothing reaches --min-score {min_score:g} ({dropped}); no shards written")
    return totals
