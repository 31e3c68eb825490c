# SPDX-License-Identifier: Apache-2.0
"""The judge against people: how far they agree, and which score to cut at.

A threshold is chosen on one half of the labelled documents and what it does is told of the other half, since on the
half that chose it every threshold looks better than it is. The halves are decided by the hash of the id, so they are
the same for every judge that is compared.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hydra_judge.agreement import (
    bootstrap,
    confusion,
    mean_absolute_error,
    precision_threshold,
    quadratic_kappa,
    share_threshold,
    spearman,
)
from hydra_judge.output import open_run
from nmoe.errors import DataError
from nmoe.formats.files import write_json, write_text

__all__ = ["Calibration", "Pairs", "Threshold", "calibrate", "read_pairs", "write_calibration"]

CALIBRATION = "calibration.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Documents with a score and a label.

    Attributes:
        scores: the judge's, float64 [N].
        labels: people's, float64 [N].
        first_half: bool [N], which half of the split.
        low, high: the rubric's scale.
        without_score: labelled documents that the judge could not score, or that are not in the corpus.
    """

    scores: np.ndarray
    labels: np.ndarray
    first_half: np.ndarray
    low: int
    high: int
    without_score: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Threshold:
    """A cut, chosen on one half and measured on the other.

    Attributes:
        wanted: "keep share" or "precision".
        value: how much of it was asked for.
        threshold: lowest score that is kept.
        chosen_on, measured_on: documents of the halves.
        keep_share: share of the second half that is kept.
        precision: share of the kept that people call good; None if nothing is kept.
        recall: share of the good that is kept; None if there are none.
    """

    wanted: str
    value: float
    threshold: float
    chosen_on: int
    measured_on: int
    keep_share: float
    precision: float | None
    recall: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Agreement of the judge with the labels.

    Attributes:
        documents: with score and label.
        without_score: labelled documents without a score.
        spearman, kappa, mae: (value, lower, upper) with a 95% bootstrap interval.
        confusion: documents by [label][score], both rounded to levels.
        good: lowest label that counts as good.
        thresholds: what was asked for.
    """

    documents: int
    without_score: int
    spearman: tuple[float, float, float]
    kappa: tuple[float, float, float]
    mae: tuple[float, float, float]
    confusion: list[list[int]]
    good: float
    thresholds: list[Threshold] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The result in words."""

        def of(value: tuple[float, float, float]) -> str:
            return f"{value[0]:.3f} (95% interval {value[1]:.3f} to {value[2]:.3f})"

        told = [
            f"documents: {self.documents} with score and label, {self.without_score} labelled without a score",
            f"Spearman: {of(self.spearman)}",
            f"quadratic-weighted kappa: {of(self.kappa)}",
            f"mean absolute error: {of(self.mae)}",
        ]
        for one in self.thresholds:
            precision = "none kept" if one.precision is None else f"{one.precision:.3f}"
            recall = "none good" if one.recall is None else f"{one.recall:.3f}"
            if not np.isfinite(one.threshold):
                told.append(
                    f"{one.wanted} {one.value:g}: no score does that on the {one.chosen_on} documents it is chosen on; "
                    "ask for less, or label more"
                )
                continue
            told.append(
                f"{one.wanted} {one.value:g}: --min-score {one.threshold:g}, chosen on {one.chosen_on} documents; on the other "
                f"{one.measured_on}: keeps {one.keep_share:.3f}, precision {precision}, recall {recall} (good: label >= {self.good:g})"
            )
        return told


def _labels(path: Path) -> Iterator[tuple[str, float]]:
    try:
        stream = path.open(
            encoding="utf-8-sig", errors="surrogateescape"
        )  # what is no UTF-8 is found with its line below
    except OSError as error:
        raise DataError(f"{path}: cannot be opened ({error.strerror})") from None
    with stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                label = record["score"]
                if isinstance(label, bool) or not np.isfinite(float(label)):
                    raise ValueError("not finite")
                yield str(record["id"]).encode().decode(), float(label)
            except (ValueError, LookupError, TypeError, RecursionError):
                raise DataError(f'{path}:{number}: expected {{"id": ..., "score": number}}') from None


def read_pairs(scored: Path, labels: Path) -> Pairs:
    """Joins the scores of a run with labels by document id.

    Args:
        scored: folder of a complete run.
        labels: jsonl of id and score; the mean is taken where an id stands several times (several people).

    Raises:
        DataError: if a file cannot be read, a label is off the scale, or fewer than ten documents have both.
    """
    opened = open_run(scored)
    low, high = int(opened.header["rubric"]["low"]), int(opened.header["rubric"]["high"])
    given: dict[str, list[float]] = {}
    for id, label in _labels(labels):
        if not low <= label <= high:
            raise DataError(f"{labels}: label {label:g} of {id!r}; the rubric's scale is {low} to {high}")
        given.setdefault(id, []).append(label)
    found: dict[str, float] = {}
    for document in opened:
        if document.score is not None and document.id in given:
            if document.id in found:
                raise DataError(
                    f"{scored}: id {document.id!r} stands twice; labels need ids that are unique in the corpus"
                )
            found[document.id] = document.score
    if len(found) < 10:
        raise DataError(
            f"{labels}: {len(found)} documents have score and label; expected at least 10 with the ids of {scored}"
        )
    ids = sorted(found)
    halves = [hashlib.sha256(id.encode()).digest()[0] < 128 for id in ids]
    return Pairs(
        scores=np.array([found[id] for id in ids]),
        labels=np.array([sum(given[id]) / len(given[id]) for id in ids]),
        first_half=np.array(halves),
        low=low,
        high=high,
        without_score=len(given) - len(found),
    )


def _rounded(values: np.ndarray) -> np.ndarray:
    return np.floor(values + 0.5).astype(np.int64)


def calibrate(
    pairs: Pairs, *, good: float, shares: list[float], precisions: list[float], resamples: int = 1000
) -> Calibration:
    """Measures agreement and chooses thresholds.

    Args:
        pairs: scores and labels.
        good: lowest label that counts as good.
        shares: wanted keep shares, each in (0, 1].
        precisions: wanted precisions, each in (0, 1].
        resamples: of the bootstrap.
    """
    scores, labels = pairs.scores, pairs.labels

    def kappa(one: np.ndarray, other: np.ndarray) -> float:
        return quadratic_kappa(_rounded(one), _rounded(other), low=pairs.low, high=pairs.high)

    def measured(measure: Any) -> tuple[float, float, float]:
        return (measure(labels, scores), *bootstrap(measure, labels, scores, resamples=resamples))

    chosen, held = pairs.first_half, ~pairs.first_half
    if not chosen.any() or not held.any():
        raise DataError("too few labelled documents to split in halves; label more")
    thresholds = []
    for share in shares:
        cut = share_threshold(scores[chosen], share=share)
        thresholds.append(_measure("keep share", share, cut, pairs, good))
    for precision in precisions:
        cut = precision_threshold(scores[chosen], labels[chosen] >= good, precision=precision)
        thresholds.append(_measure("precision", precision, cut, pairs, good))
    return Calibration(
        documents=len(scores),
        without_score=pairs.without_score,
        spearman=measured(spearman),
        kappa=measured(kappa),
        mae=measured(mean_absolute_error),
        confusion=confusion(_rounded(labels), _rounded(scores), low=pairs.low, high=pairs.high).tolist(),
        good=good,
        thresholds=thresholds,
    )


def _measure(wanted: str, value: float, cut: float, pairs: Pairs, good: float) -> Threshold:
    """What a threshold does to the half that did not choose it."""
    held = ~pairs.first_half
    kept, right = pairs.scores[held] >= cut, pairs.labels[held] >= good
    return Threshold(
        wanted=wanted,
        value=value,
        threshold=cut,
        chosen_on=int(pairs.first_half.sum()),
        measured_on=int(held.sum()),
        keep_share=float(kept.mean()),
        precision=float(right[kept].mean()) if kept.any() else None,
        recall=float(kept[right].mean()) if right.any() else None,
    )


def write_calibration(result: Calibration, pairs: Pairs, output: Path) -> None:
    """Writes calibration.json, and calibration.html with the plot, into `output`."""
    from hydra_judge.charts import calibration_page

    values = json.loads(json.dumps(asdict(result)), parse_constant=lambda _: None)
    write_json(output / CALIBRATION, values)
    write_text(output / "calibration.html", calibration_page(result, pairs))
