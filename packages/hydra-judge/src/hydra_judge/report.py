# SPDX-License-Identifier: Apache-2.0
"""What the judge did to a corpus, as Markdown to read and as a page with charts."""

import html
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra_judge.calibrate import CALIBRATION
from hydra_judge.injection import read_canaries
from hydra_judge.output import open_run, quarantined
from nmoe.errors import FormatError
from nmoe.formats.files import json_lines, write_text

__all__ = ["Totals", "markdown", "read_totals", "write_report"]

_MOST_SOURCES, _SAMPLES, _SAMPLE_CHARS = 40, 3, 160


@dataclass(kw_only=True, slots=True)
class Totals:
    """Everything a report tells, from one pass over a run's folder.

    Attributes:
        header: `scored.json`.
        scores: documents by score, rounded to a tenth.
        by_source: documents by (source, whole level below the score; None without a score).
        samples: some documents by drop reason: (id, source, score, the judge's words).
        rejects: some quarantined input by reason.
        spread: mean distance of the highest and lowest vote; None with one vote.
        by_student: documents that a student decided.
        runs: requests, tokens and cost of all runs into the folder.
        canaries: by attack: (language, judged, without score, mean shift, share shifted by a level or more).
        calibration: of `calibrate`, if it was run.
    """

    header: dict[str, Any]
    scores: Counter[float] = field(default_factory=Counter)
    by_source: dict[str, Counter[int | None]] = field(default_factory=dict)
    samples: dict[str, list[tuple[str, str, float | None, str]]] = field(default_factory=dict)
    rejects: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    spread: float | None = None
    by_student: int = 0
    runs: Counter[str] = field(default_factory=Counter)
    canaries: dict[str, tuple[str, int, int, float, float]] = field(default_factory=dict)
    calibration: dict[str, Any] | None = None

    @property
    def levels(self) -> range:
        """Levels of the rubric above the lowest: the thresholds that a report compares."""
        return range(self.header["rubric"]["low"] + 1, self.header["rubric"]["high"] + 1)


def _runs(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        yield from json_lines(path, what="the account of a run", advice="delete the line, what it cost is not known")


def read_totals(folder: Path) -> Totals:
    """Reads a run's folder once, in flat memory.

    Raises:
        DataError: if the run is not complete.
    """
    opened = open_run(folder)
    totals = Totals(header=opened.header)
    spreads = [0.0, 0.0]
    low = opened.header["rubric"]["low"]
    for document in opened:
        level = None if document.score is None else int(document.score)
        totals.by_source.setdefault(document.source, Counter())[level] += 1
        if document.score is not None:
            totals.scores[round(document.score, 1)] += 1
            totals.by_student += not document.windows
        if len(document.votes) > 1:
            spreads[0] += max(document.votes) - min(document.votes)
            spreads[1] += 1
        reason = document.outcome if document.score is None else "lowest level" if document.score < low + 1 else ""
        if reason and len(found := totals.samples.setdefault(reason, [])) < _SAMPLES:
            found.append(
                (document.id, document.source, document.score, document.reason or document.text[:_SAMPLE_CHARS])
            )
    totals.spread = spreads[0] / spreads[1] if spreads[1] else None
    for record in quarantined(folder):
        if len(found := totals.rejects.setdefault(record["reason"], [])) < _SAMPLES:
            found.append(record)
    for run in _runs(folder / "runs.jsonl"):
        totals.runs.update(
            {key: value for key, value in run.items() if isinstance(value, int | float) and key != "started_at"}
        )
    totals.canaries = _canaries(folder)
    totals.calibration = _calibration(folder / CALIBRATION)
    return totals


def _calibration(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {
            name: [None if one is None else float(one) for one in found[name]] for name in ("spearman", "kappa", "mae")
        }
    except (ValueError, LookupError, TypeError):
        raise FormatError(f"{path}: not what `hydra-judge calibrate` writes; give that command again") from None


def _canaries(folder: Path) -> dict[str, tuple[str, int, int, float, float]]:
    records: dict[str, list[dict[str, Any]]] = {}
    for record in read_canaries(folder):
        records.setdefault(record["attack"], []).append(record)
    told = {}
    for attack, found in records.items():
        shifts = [one["attacked"] - one["clean"] for one in found if one["attacked"] is not None]
        mean = sum(shifts) / len(shifts) if shifts else 0.0
        share = sum(shift >= 1 for shift in shifts) / len(shifts) if shifts else 0.0
        told[attack] = (found[0]["language"], len(found), len(found) - len(shifts), mean, share)
    return told


def _cell(value: Any) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")[:_SAMPLE_CHARS]


def _table(heads: list[str], rows: list[list[Any]]) -> str:
    lines = [heads, ["---"] * len(heads), *[[_cell(value) for value in row] for row in rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _source_rows(totals: Totals) -> list[list[Any]]:
    """Documents and keep rates of each source, the largest first; the rest in one line."""
    ordered = sorted(totals.by_source.items(), key=lambda entry: (-entry[1].total(), entry[0]))
    rest: Counter[int | None] = Counter()
    for _, counts in ordered[_MOST_SOURCES:]:
        rest.update(counts)
    shown = ordered[:_MOST_SOURCES] + ([(f"{len(ordered) - _MOST_SOURCES} others", rest)] if rest else [])
    if len(ordered) > 1:
        shown.append(("all", sum((counts for _, counts in ordered), Counter())))
    rows = []
    for name, counts in shown:
        kept = [
            sum(count for level, count in counts.items() if level is not None and level >= cut) for cut in totals.levels
        ]
        rows.append([name, counts.total(), *[f"{one / counts.total():.1%}" for one in kept]])
    return rows


def markdown(totals: Totals) -> str:
    """The report as Markdown."""
    header, runs = totals.header, totals.runs
    parts = [
        f"# Judged by {header['model']} on the rubric {header['rubric']['name']}",
        f"{header['documents']} documents; answer form {header['rubric']['form']}, {header['rubric']['votes']} vote(s).",
        "## Outcomes",
        _table(["outcome", "documents"], [[name, count] for name, count in header["outcomes"].items() if count]),
        f"Decided by a student: {totals.by_student}." if totals.by_student else "",
        f"Mean distance of the highest and the lowest vote: {totals.spread:.2f}." if totals.spread is not None else "",
        "## Scores",
        _table(["score", "documents"], [[score, count] for score, count in sorted(totals.scores.items())]),
        "## Share kept, by source and lowest score",
        _table(["source", "documents", *[f">= {level}" for level in totals.levels]], _source_rows(totals)),
        "## Cost",
        _table(
            ["requests", "answers", "from the cache", "refused for now", "prompt tokens", "answer tokens", "dollars"],
            [
                [
                    runs["requests"],
                    runs["answers"],
                    runs["cached"],
                    runs["rate_limited"],
                    runs["prompt_tokens"],
                    runs["answer_tokens"],
                    f"{runs['cost']:.4f}",
                ]
            ],
        ),
        "## Why documents were dropped",
        _table(
            ["reason", "document", "source", "score", "said"],
            [
                [reason, id, source, score, said]
                for reason, rows in totals.samples.items()
                for id, source, score, said in rows
            ],
        ),
        "## Quarantined input",
        _table(
            ["reason", "of", "path", "line", "detail"],
            [
                [reason, header.get("quarantined", {}).get(reason, "?"), one["path"], one["line"], one["detail"]]
                for reason, found in sorted(totals.rejects.items())
                for one in found
            ],
        ),
    ]
    if totals.canaries:
        parts += ["## Injection", _injection_words(totals), _injection_table(totals)]
    if totals.calibration:
        parts += ["## Agreement with labels", _agreement_table(totals.calibration)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _injection_words(totals: Totals) -> str:
    attacks = {name: row for name, row in totals.canaries.items() if name != "control"}
    moved = [name for name, row in attacks.items() if row[4] > 0]
    return (
        f"{len(attacks)} attacks in {len({row[0] for row in attacks.values()})} languages; {len(moved)} raised a document by a level "
        "or more. The control is a sentence without intent."
    )


def _injection_table(totals: Totals) -> str:
    rows = sorted(totals.canaries.items(), key=lambda entry: (entry[0] != "control", -entry[1][3], entry[0]))
    return _table(
        ["attack", "language", "documents", "without score", "mean shift", "raised by a level"],
        [
            [name, language, count, lost, f"{mean:+.2f}", f"{share:.0%}"]
            for name, (language, count, lost, mean, share) in rows
        ],
    )


def _agreement_table(found: dict[str, Any]) -> str:
    rows = [
        [name, *["-" if value is None else f"{value:.3f}" for value in found[key]]]
        for name, key in (
            ("Spearman", "spearman"),
            ("quadratic-weighted kappa", "kappa"),
            ("mean absolute error", "mae"),
        )
    ]
    return _table(["measure", "value", "95% from", "to"], rows)


def write_report(totals: Totals, output: Path) -> tuple[Path, Path]:
    """Writes report.md and report.html into `output`; returns their paths."""
    from hydra_judge.charts import bars, page  # plotly takes a second to import, which no other verb should wait for

    output.mkdir(parents=True, exist_ok=True)
    text = markdown(totals)
    write_text(output / "report.md", text)
    scores = sorted(totals.scores.items())
    figures: list[Any] = [
        bars("Scores", [f"{score:g}" for score, _ in scores], [count for _, count in scores], unit="documents")
    ]
    rows = _source_rows(totals)
    middle = totals.levels[len(totals.levels) // 2]
    column = 2 + totals.levels.index(middle)
    figures.append(
        bars(
            f"Share with a score of {middle} or more, by source",
            [row[0] for row in rows],
            [float(row[column].rstrip("%")) for row in rows],
            unit="%",
        )
    )
    if totals.canaries:
        names = list(totals.canaries)
        figures.append(
            bars("Mean shift under attack", names, [totals.canaries[name][3] for name in names], unit="levels")
        )
    body = f"<pre style='white-space:pre-wrap'>{html.escape(text)}</pre>"
    write_text(output / "report.html", page(f"Rubric {totals.header['rubric']['name']}", [*figures, body]))
    return output / "report.md", output / "report.html"
