# SPDX-License-Identifier: Apache-2.0
"""From scored documents to token shards: what is good enough is kept, with its way back to document and score."""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra_judge.cluster import Cluster, on_cluster
from hydra_judge.explain import VERDICTS, verdict
from hydra_judge.stage import STAGE, Packed, only_one, read_part, remove_stage, stage_part, staged
from nmoe.errors import DataError
from nmoe.formats.documents import ScoredDocument, ScoredSet, open_scored
from nmoe.formats.shards import MANIFEST, ShardWriter
from nmoe.formats.tokenizers import Tokenizer, load_tokenizer

__all__ = ["PackTotals", "Packing", "pack", "pack_on_cluster", "pack_share"]

_BATCH_CHARS = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """What is packed, and how.

    Attributes:
        scored: folder of a complete run.
        tokenizer: see `nmoe.formats.tokenizers.load_tokenizer`.
        min_score: lowest score that is kept, on the rubric's scale.
        output: folder for the shards.
        shard_tokens: size of a shard, in tokens.
        max_document_tokens: longer documents are split; None: `shard_tokens` - 1.
    """

    scored: Path
    tokenizer: str
    min_score: float
    output: Path
    shard_tokens: int = 100_000_000
    max_document_tokens: int | None = None

    def made(self, part: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
        """What decides the content of a part."""
        return {"scored": part["sha256"], "tokenizer": tokenizer.sha256, "min_score": self.min_score}


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


def _kept(documents: Iterable[ScoredDocument], min_score: float, dropped: Counter[str]) -> Iterator[ScoredDocument]:
    for document in documents:
        if document.score is None:
            dropped[document.outcome] += 1
        elif document.score < min_score:
            dropped["below_score"] += 1
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


def _packed(
    documents: Iterable[ScoredDocument], *, tokenizer: Tokenizer, min_score: float, dropped: Counter[str]
) -> Iterator[Packed]:
    """The documents that are kept, tokenized; what is not is counted in `dropped`."""
    for batch in _batches(_kept(documents, min_score, dropped)):
        for document, tokens in zip(batch, tokenizer.encode_batch([one.text for one in batch]), strict=True):
            size = len(document.text.encode("utf-8"))
            yield Packed(tokens=tokens, text_bytes=size, verdict=verdict(document))


def _write(packing: Packing, tokenizer: Tokenizer, documents: Iterable[Packed], dropped: Counter[str]) -> PackTotals:
    """Cuts documents into shards."""
    totals = PackTotals(dropped=dropped)
    limits = {"shard_tokens": packing.shard_tokens, "max_document_tokens": packing.max_document_tokens}
    with (
        ShardWriter(packing.output, tokenizer=tokenizer, **limits) as writer,
        (packing.output / VERDICTS).open("w", encoding="utf-8", newline="\n") as verdicts,
    ):
        for one in documents:
            named = {name: one.verdict[name] for name in ("id", "source", "score")}
            writer.add(one.tokens, text_bytes=one.text_bytes, **named)
            verdicts.write(json.dumps(one.verdict, ensure_ascii=False) + "\n")
            totals.kept += 1
            totals.tokens += len(one.tokens) + 1
        if not totals.kept:
            told = ", ".join(f"{count} {reason}" for reason, count in dropped.items()) or "no documents"
            raise DataError(
                f"{packing.scored}: nothing reaches --min-score {packing.min_score:g} ({told}); no shards written"
            )
    remove_stage(packing.output)
    return totals


def pack(packing: Packing) -> PackTotals:
    """Writes the documents that reach the score as shards, in this process.

    Raises:
        DataError: if there is nothing to read, nothing left to write, or the output holds shards.
    """
    tokenizer, scored = load_tokenizer(packing.tokenizer), open_scored(packing.scored)
    dropped: Counter[str] = Counter()
    documents = _packed(scored, tokenizer=tokenizer, min_score=packing.min_score, dropped=dropped)
    return _write(packing, tokenizer, documents, dropped)


def _begin(packing: Packing) -> tuple[Tokenizer, ScoredSet]:
    """Checks what `ShardWriter` would refuse at the end before the work is done."""
    tokenizer, scored = load_tokenizer(packing.tokenizer), open_scored(packing.scored)
    if (packing.output / MANIFEST).exists():
        raise DataError(f"{packing.output}: holds a finished shard set already; choose another folder or remove it")
    (packing.output / STAGE).mkdir(parents=True, exist_ok=True)
    return tokenizer, scored


def _tokenize_part(packing: Packing, number: int) -> dict[str, float]:
    """Tokenizes one part, unless that is done."""
    tokenizer, scored = load_tokenizer(packing.tokenizer), open_scored(packing.scored)
    made = packing.made(scored.header["parts"][number], tokenizer)
    if staged(packing.output, number, made=made):
        return {}
    dropped: Counter[str] = Counter()
    documents = _packed(scored.part(number), tokenizer=tokenizer, min_score=packing.min_score, dropped=dropped)
    return {"documents": stage_part(packing.output, number, documents, dropped=dropped, made=made)}


def _cut(packing: Packing, tokenizer: Tokenizer, markers: list[dict[str, Any]]) -> PackTotals:
    """Shards from complete parts."""
    dropped: Counter[str] = Counter()
    for marker in markers:
        dropped.update(marker["dropped"])
    documents = (one for number in range(len(markers)) for one in read_part(packing.output, number))
    return _write(packing, tokenizer, documents, dropped)


def _markers(packing: Packing, tokenizer: Tokenizer, scored: ScoredSet) -> list[dict[str, Any]]:
    """Markers of the parts that are complete."""
    made = (packing.made(part, tokenizer) for part in scored.header["parts"])
    found = (staged(packing.output, number, made=one) for number, one in enumerate(made))
    return [marker for marker in found if marker is not None]


def pack_share(packing: Packing, worker: tuple[int, int], *, quiet: bool = False) -> PackTotals | str:
    """Tokenizes every N-th part as worker (I, N); the one that finds all parts complete cuts the shards.

    Returns:
        What was packed, or from a worker that is not the last, a line that says how far all are.

    Raises:
        DataError: as `pack`.
    """
    parts = len(open_scored(packing.scored).header["parts"])
    share = range(worker[0], parts, worker[1])
    if not share:
        return f"worker {worker[0]}/{worker[1]}: there are {parts} parts, none for this worker"
    tokenizer, scored = _begin(packing)
    for count, number in enumerate(share, start=1):
        _tokenize_part(packing, number)
        if not quiet:
            sys.stderr.write(f"part {count} of {len(share)}\n")
    with only_one(packing.output) as first:
        markers = _markers(packing, tokenizer, scored)
        if first and len(markers) == parts:
            return _cut(packing, tokenizer, markers)
    if (packing.output / MANIFEST).exists():
        return f"worker {worker[0]}/{worker[1]}: {len(share)} parts tokenized; another has completed {packing.output}"
    return f"worker {worker[0]}/{worker[1]}: {len(share)} parts tokenized, {len(markers)} of {parts} complete"


def pack_on_cluster(packing: Packing, cluster: Cluster, *, quiet: bool) -> PackTotals:
    """Tokenizes the parts in processes of a cluster and cuts the shards in this one.

    Raises:
        DataError: as `pack`.
    """
    absolute = {name: getattr(packing, name).absolute() for name in ("scored", "output")}
    spec = packing.tokenizer if packing.tokenizer == "bytes" else str(Path(packing.tokenizer).absolute())
    tokenizer, scored = _begin(packing)
    numbers = range(len(scored.header["parts"]))
    on_cluster(
        partial(_tokenize_part, replace(packing, **absolute, tokenizer=spec)), numbers, cluster=cluster, quiet=quiet
    )
    return _cut(packing, tokenizer, _markers(packing, tokenizer, scored))
