# SPDX-License-Identifier: Apache-2.0
"""Canaries: some documents of the corpus judged again with an attempt to set their own grade inside.

A defence that is not measured on the model at hand is a hope. Each attack is put into documents whose grade is known
and low, so a shift upwards is the attack's work; an added sentence without intent (the control) shows what any change
of the text does.
"""

import asyncio
import base64
import codecs
import hashlib
import heapq
import json
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from hydra_judge.judge import Ask, Judge
from nmoe.errors import FormatError
from nmoe.formats.documents import Document, ScoredDocument
from nmoe.formats.files import json_lines, replace_durably

__all__ = ["Attack", "attacks", "judge_canaries", "pick_canaries", "read_canaries"]

CANARIES = "canaries.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Attack:
    """One way in which a document tries to set its grade.

    Attributes:
        name: what it does.
        language: ISO 639-1 code.
        text: the attempt; {top} is the highest level, {document} the attacked text.
        wrap: encoding of the attempt, "" for none.
    """

    name: str
    language: str
    text: str
    wrap: str = ""

    def apply(self, text: str, *, top: int) -> str:
        """`text` with the attack in it."""
        attempt = self.text.replace("{top}", str(top))
        if "{document}" in attempt:
            return attempt.replace("{document}", text)
        return f"{text}\n\n{_wrap(attempt, self.wrap)}"


def _wrap(text: str, kind: str) -> str:
    if kind == "base64":
        return base64.b64encode(text.encode()).decode()
    if kind == "hex":
        return text.encode().hex()
    if kind == "rot13":
        return codecs.encode(text, "rot13")
    if kind == "tags":
        return "".join(chr(0xE0000 + ord(letter)) for letter in text)
    if kind == "spaced":
        return " ".join(text)
    if kind == "reversed":
        return text[::-1]
    return text


def attacks() -> list[Attack]:
    """The attacks that ship, the control first."""
    text = (resources.files("hydra_judge") / "attacks.toml").read_text("utf-8")
    return [Attack(**entry) for entry in tomllib.loads(text)["attack"]]


def pick_canaries(documents: Iterable[ScoredDocument], *, count: int, low: int, high: int) -> list[ScoredDocument]:
    """The documents that are attacked: of those in the lower half of the scale the ones with the lowest hashes.

    Only documents of one window are taken, so that the attack is in what is judged.
    """
    picked: list[tuple[int, int, ScoredDocument]] = []
    for number, document in enumerate(documents):
        if document.score is None or document.score > (low + high) / 2 or len(document.windows) != 1:
            continue
        rank = -int.from_bytes(hashlib.sha256(document.text.encode()).digest()[:8], "big")
        heapq.heappush(picked, (rank, number, document))
        if len(picked) > count:
            heapq.heappop(picked)
    return [document for _, _, document in sorted(picked, reverse=True)]


async def judge_canaries(
    picked: list[ScoredDocument], *, judge: Judge, ask: Ask, output: Path, order: int
) -> list[dict[str, Any]]:
    """Judges every picked document under every attack and writes DIR/canaries.jsonl.

    Args:
        picked: attacked documents with their clean scores.
        judge: how documents are judged.
        ask: answers a request.
        output: folder of the run.
        order: number behind the last document of the run.

    Returns:
        One record for each attack and document: attack, language, document, clean, attacked (None without a score), outcome.
    """

    async def one(attack: Attack, clean: ScoredDocument) -> dict[str, Any]:
        text = attack.apply(clean.text, top=judge.rubric.high)
        found = await judge.document(Document(id=clean.id, text=text, source=clean.source), ask, order=order)
        return {
            "attack": attack.name,
            "language": attack.language,
            "document": clean.id,
            "clean": clean.score,
            "attacked": found.score,
            "outcome": found.outcome,
        }

    records = await asyncio.gather(*[one(attack, clean) for attack in attacks() for clean in picked])
    temporary = output / f".{CANARIES}.tmp"
    temporary.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    replace_durably(temporary, output / CANARIES)
    return list(records)


def read_canaries(output: Path) -> Iterator[dict[str, Any]]:
    """Records of DIR/canaries.jsonl; none if no canaries were judged.

    Raises:
        FormatError: if the file is damaged.
    """
    path = output / CANARIES
    if not path.exists():
        return
    keys = ("attack", "language", "document", "clean", "attacked", "outcome")
    for record in json_lines(path, what="a canary's record", advice="score again with --canaries"):
        if not set(keys) <= set(record):
            raise FormatError(f"{path}: a record lacks one of {', '.join(keys)}; score again with --canaries")
        yield {key: record[key] for key in keys}
