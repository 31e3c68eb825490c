# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: one finished scored set a block, joined at the end.

    DIR/blocks/00000/part-00000.jsonl   scored documents of block 0, in the order of the corpus
    DIR/blocks/00000/quarantine.jsonl   what was no document: path, line, reason, detail
    DIR/blocks/00000/scored.json        written when the block is complete: its marker
    DIR/quarantine.jsonl                all quarantined input
    DIR/scored.json                     written last: names the parts of every block
    DIR/runs.jsonl                      a line a run: requests, tokens, cost (nothing above depends on it)

Blocks do not depend on the number of workers, and nothing in them on timing, so the folder is the same however the
work was divided or interrupted.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra_judge.corpus import Block
from nmoe.errors import DataError, FormatError
from nmoe.formats.documents import FORMAT, HEADER, VERSION, Reject, ScoredDocument, ScoredSet, ScoredWriter, open_scored
from nmoe.formats.files import json_lines, replace_durably, write_json

__all__ = [
    "QUARANTINE",
    "BlockWriter",
    "block_folder",
    "finished_blocks",
    "is_finished",
    "join_blocks",
    "open_run",
    "prepare",
    "quarantined",
]

QUARANTINE = "quarantine.jsonl"


def block_folder(output: Path, number: int) -> Path:
    """Folder of one block."""
    return output / "blocks" / f"{number:05d}"


def _block_header(output: Path, number: int) -> dict[str, Any] | None:
    """`scored.json` of a block; None if it is not complete or cannot be read."""
    try:
        return open_scored(block_folder(output, number)).header
    except DataError:
        return None


def _settings(header: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in header["rubric"].items() if key != "block"} | {"model": header["model"]}


def prepare(output: Path, *, settings: Mapping[str, Any], model: str) -> None:
    """Makes the folder, or checks that what it holds was judged in the same way.

    Raises:
        DataError: if it holds scores of another rubric, model or form, or other files.
    """
    wanted = {**json.loads(json.dumps(settings)), "model": model}
    ours = (output / "blocks").is_dir()
    blocks = sorted((output / "blocks").glob("*")) if ours else []
    if not ours and output.exists() and any(output.iterdir()):
        raise DataError(f"{output}: holds files that are no scores; choose another folder")
    for folder in blocks:
        header = _block_header(output, int(folder.name)) if folder.name.isdigit() else None
        if header is not None and _settings(header) != wanted:
            other = _settings(header)
            differ = ", ".join(key for key in wanted if other.get(key) != wanted[key])
            raise DataError(f"{output}: holds scores with another {differ}; choose another folder or remove it")
    (output / "blocks").mkdir(parents=True, exist_ok=True)


def finished_blocks(
    output: Path, blocks: Sequence[Block], *, extra: Mapping[str, Any], with_failed: bool = False
) -> set[int]:
    """Numbers of the blocks that are complete and whose input is unchanged.

    Args:
        output: folder of the run.
        blocks: the plan of the corpus.
        extra: what else decides the content of a block.
        with_failed: count blocks in which documents failed, too. Those are worth another try: the documents may
            succeed now, and all others are in the cache.
    """
    return {
        number
        for number, block in enumerate(blocks)
        if is_finished(output, number, block, extra=extra, with_failed=with_failed)
    }


def is_finished(
    output: Path, number: int, block: Block, *, extra: Mapping[str, Any], with_failed: bool = False
) -> bool:
    """Whether one block is complete; see `finished_blocks`."""
    header = _block_header(output, number)
    if header is None or not block.stamp:
        return False
    if not (block_folder(output, number) / QUARANTINE).is_file():
        return False
    same = header["rubric"].get("block") == {**block.fingerprint(), **extra}
    return same and (with_failed or not header["outcomes"].get("failed"))


class BlockWriter:
    """Writes one block; use `close` only when it is complete.

    Args:
        output: folder of the run.
        number: number of the block.
        block: the block, whose fingerprint is kept.
        settings: how it is judged.
        model: by whom.
        extra: what else decides the content.
    """

    def __init__(
        self,
        output: Path,
        *,
        number: int,
        block: Block,
        settings: Mapping[str, Any],
        model: str,
        extra: Mapping[str, Any],
    ):
        self._folder = block_folder(output, number)
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / HEADER).unlink(missing_ok=True)
        rubric = {**settings, "block": {**block.fingerprint(), **extra}}
        self._writer = ScoredWriter(self._folder, rubric=rubric, model=model)
        self._temporary = self._folder / f"{QUARANTINE}.tmp"
        self._quarantine = self._temporary.open("w", encoding="utf-8", newline="\n")

    def add(self, document: ScoredDocument) -> None:
        """Appends a scored document."""
        self._writer.add(document)

    def reject(self, reject: Reject) -> None:
        """Appends to the quarantine."""
        values = asdict(reject)
        record = {"path": values.pop("source"), **values}
        self._quarantine.write(json.dumps(record, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Completes the block."""
        self._quarantine.close()
        replace_durably(self._temporary, self._folder / QUARANTINE)
        self._writer.close()

    def abandon(self) -> None:
        """Closes the files of a block that is not complete."""
        self._quarantine.close()
        self._writer.__exit__(KeyboardInterrupt, None, None)


def open_run(output: Path) -> ScoredSet:
    """The scores of a complete run of `score`, whose header says by which rubric and on which scale.

    Raises:
        DataError: if the run is not complete.
        FormatError: if the scores are not of this program.
    """
    opened = open_scored(output)
    rubric = opened.header["rubric"]
    for key, kind in {"name": str, "sha256": str, "low": int, "high": int}.items():
        if not isinstance(rubric.get(key), kind):
            raise FormatError(
                f"{output / HEADER}: rubric.{key} is {rubric.get(key)!r}; expected scores of `hydra-judge score`"
            )
    if not rubric["low"] < rubric["high"]:
        raise FormatError(
            f"{output / HEADER}: rubric.low = {rubric['low']}, rubric.high = {rubric['high']}; expected low < high"
        )
    if not isinstance(opened.header.setdefault("quarantined", {}), dict):
        raise FormatError(f"{output / HEADER}: quarantined is no table; expected scores of `hydra-judge score`")
    return opened


def quarantined(folder: Path) -> Iterator[dict[str, Any]]:
    """Lines of a quarantine file."""
    for record in json_lines(folder / QUARANTINE, what="a quarantined line", advice="score the corpus again"):
        if not {"path", "line", "reason", "detail"} <= set(record):
            raise FormatError(
                f"{folder / QUARANTINE}: a line lacks path, line, reason or detail; score the corpus again"
            )
        yield record


def join_blocks(output: Path, blocks: Sequence[Block], *, settings: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Completes the folder from its complete blocks; the same by whichever worker it is done.

    Returns:
        The header that was written.

    Raises:
        DataError: if a block is not complete.
    """
    parts: list[dict[str, Any]] = []
    outcomes: Counter[str] = Counter()
    rejects: Counter[str] = Counter()
    temporary = output / f".{QUARANTINE}.{os.getpid()}.tmp"
    with temporary.open("w", encoding="utf-8", newline="\n") as stream:
        for number in range(len(blocks)):
            folder = block_folder(output, number)
            header = open_scored(folder).header
            parts += [{**part, "path": f"blocks/{folder.name}/{part['path']}"} for part in header["parts"]]
            outcomes.update(header["outcomes"])
            for record in quarantined(folder):
                rejects[record["reason"]] += 1
                stream.write(json.dumps(record, ensure_ascii=False) + "\n")
    replace_durably(temporary, output / QUARANTINE)
    header = {
        "format": FORMAT,
        "version": VERSION,
        "rubric": dict(settings),
        "model": model,
        "documents": sum(outcomes.values()),
        "outcomes": dict(outcomes),
        "quarantined": dict(sorted(rejects.items())),
        "parts": parts,
    }
    write_json(output / HEADER, header)
    for folder in sorted((output / "blocks").iterdir()):
        if folder.name.isdigit() and int(folder.name) >= len(blocks):
            shutil.rmtree(folder, ignore_errors=True)  # another worker may be at it
    return header
