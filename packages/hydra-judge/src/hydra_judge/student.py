# SPDX-License-Identifier: Apache-2.0
"""A cheap student of the judge: it grades everything, and knows when it does not know.

Ridge regression on hashed words and word pairs, solved by conjugate gradients: no learning rate, no random start, the
same student from the same scores. Documents are split by the hash of their text: seven tenths train, one tenth chooses
the regularisation, one tenth turns a grade into the probability that the judge would keep the document, one tenth is
seen by nothing and reported. Identical texts fall into the same part.
"""

import hashlib
import json
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hydra_judge.agreement import mean_absolute_error, spearman
from hydra_judge.features import DENSE, FEATURE_BITS, Features, features
from hydra_judge.output import open_run
from nmoe.errors import DataError, FormatError
from nmoe.formats.documents import Document, ScoredDocument

__all__ = ["KeepProbability", "Student", "fit", "judge_by_student", "load_student"]

_VERSION = 1
_DIMENSION = (1 << FEATURE_BITS) + DENSE + 1
_PENALTIES = (0.03, 0.3, 3.0, 30.0)
_STEPS = 60
_MOST_CALIBRATION = 20_000
_LEAST_DOCUMENTS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Student:
    """A fitted student.

    Attributes:
        weight: float64 [2^FEATURE_BITS + DENSE + 1]: words, dense features, constant.
        predicted, judged: float64 [C], its grades and the judge's on the calibration part.
        low, high: the rubric's scale.
        about: what it learned from and how well it does, as JSON values.
    """

    weight: np.ndarray
    predicted: np.ndarray
    judged: np.ndarray
    low: int
    high: int
    about: dict[str, Any]

    @property
    def sha256(self) -> str:
        """Hash of everything that decides its grades."""
        digest = hashlib.sha256()
        for array in (self.weight, self.predicted, self.judged):
            digest.update(np.ascontiguousarray(array, dtype="<f8").tobytes())
        return digest.hexdigest()

    def grade(self, text: str) -> float:
        """Its grade of a text, in [low, high]; the same whatever else is graded."""
        return float(np.clip(_predict(self.weight, features(text)), self.low, self.high))

    def keep_probability(self, *, min_score: float) -> "KeepProbability":
        """How sure it is that the judge gives at least `min_score`."""
        return KeepProbability(self.predicted, self.judged >= min_score)

    def save(self, path: Path) -> None:
        """Writes the student to one file."""
        about = json.dumps({"version": _VERSION, "low": self.low, "high": self.high, "about": self.about})
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as stream:
            np.savez_compressed(
                stream,
                about=np.frombuffer(about.encode(), dtype=np.uint8),
                weight=self.weight,
                predicted=self.predicted,
                judged=self.judged,
            )


class KeepProbability:
    """Probability that the judge would keep a document, from the student's grade: isotonic, so never falling.

    Args:
        predicted: grades [C] of documents that the student did not learn from.
        kept: bool [C], whether the judge's score was high enough.

    Source: Zadrozny & Elkan 2002 (isotonic calibration); pool-adjacent-violators.
    """

    def __init__(self, predicted: np.ndarray, kept: np.ndarray):
        order = np.argsort(predicted, kind="stable")
        blocks: list[list[float]] = []  # [kept, documents, highest grade]
        for grade, keep in zip(predicted[order], kept[order], strict=True):
            blocks.append([float(keep), 1.0, float(grade)])
            while len(blocks) > 1 and blocks[-2][0] * blocks[-1][1] >= blocks[-1][0] * blocks[-2][1]:
                count, documents, top = blocks.pop()
                blocks[-1] = [blocks[-1][0] + count, blocks[-1][1] + documents, top]
        self._tops = np.array([top for _, _, top in blocks])
        # One document more on each side, so that a small block is never certain.
        self._shares = np.array([(count + 0.5) / (documents + 1.0) for count, documents, _ in blocks])
        self._shares = np.maximum.accumulate(self._shares)

    def __call__(self, grade: float) -> float:
        position = min(int(np.searchsorted(self._tops, grade)), len(self._shares) - 1)
        return float(self._shares[position])


def judge_by_student(
    document: Document, *, student: Student, probability: KeepProbability, min_score: float, confidence: float
) -> ScoredDocument | None:
    """The student's verdict, or None if the judge must be asked.

    A document that it keeps scores at least `min_score`, one that it drops scores less.
    """
    grade = student.grade(document.text)
    share = probability(grade)
    if share >= confidence:
        score = max(grade, min_score)
    elif share <= 1 - confidence:
        score = min(grade, min_score - 1e-6)
    else:
        return None
    return ScoredDocument(
        id=document.id,
        text=document.text,
        source=document.source,
        line=document.line,
        outcome="ok",
        score=round(score, 6),
        reason=f"student: probability {share:.3f} of {min_score:g} or more",
    )


def _predict(weight: np.ndarray, found: Features) -> float:
    index, value, dense = found
    return float(value @ weight[index] + dense @ weight[-DENSE - 1 : -1] + weight[-1])


class _Rows:
    """Documents as sparse rows."""

    def __init__(self, rows: list[Features]):
        dense = np.arange(_DIMENSION - DENSE - 1, _DIMENSION)
        self.columns = np.concatenate([np.concatenate([index, dense]) for index, _, _ in rows])
        self.values = np.concatenate([np.concatenate([value, numbers, [1.0]]) for _, value, numbers in rows])
        self.lengths = np.array([len(index) + DENSE + 1 for index, _, _ in rows])
        self._starts = np.concatenate([[0], np.cumsum(self.lengths)[:-1]])

    def times(self, weight: np.ndarray) -> np.ndarray:
        """Grades [N]."""
        return np.add.reduceat(self.values * weight[self.columns], self._starts)

    def transposed(self, residual: np.ndarray) -> np.ndarray:
        """Weights' gradient [_DIMENSION]."""
        return np.bincount(self.columns, self.values * np.repeat(residual, self.lengths), minlength=_DIMENSION)


def _ridge(rows: _Rows, target: np.ndarray, penalty: float) -> np.ndarray:
    """Minimises |X w - y|^2 + penalty |w|^2, the constant nearly free.

    Source: Hestenes & Stiefel 1952, conjugate gradients on the normal equations, with the diagonal as preconditioner.
    """
    shrink = np.full(_DIMENSION, penalty)
    shrink[-DENSE - 1 :] = 1e-3
    diagonal = np.bincount(rows.columns, rows.values**2, minlength=_DIMENSION) + shrink
    weight = np.zeros(_DIMENSION)
    residual = rows.transposed(target)
    step = residual / diagonal
    direction, energy = step, float(residual @ step)
    first = energy
    for _ in range(_STEPS):
        if energy <= 1e-10 * first:
            break
        bent = rows.transposed(rows.times(direction)) + shrink * direction
        length = energy / float(direction @ bent)
        weight += length * direction
        residual -= length * bent
        step = residual / diagonal
        energy, last = float(residual @ step), energy
        direction = step + energy / last * direction
    return weight


def _part(text: str) -> int:
    """Part of a document, 0 to 9, by its text."""
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()[0] * 10 // 256


def _teacher(documents: Iterable[ScoredDocument]) -> Iterator[tuple[int, Features, float]]:
    for document in documents:
        if document.score is not None and document.windows:  # without windows it was scored by a student
            yield _part(document.text), features(document.text), document.score


def fit(scored: Path) -> Student:
    """Learns from the judge's scores.

    Args:
        scored: folder of a complete run.

    Raises:
        DataError: if there are too few scores, or all are the same.
    """
    opened = open_run(scored)
    rubric = opened.header["rubric"]
    parts: list[list[tuple[Features, float]]] = [[] for _ in range(10)]
    for part, found, score in _teacher(opened):
        parts[part].append((found, score))
    count = sum(len(part) for part in parts)
    train, choose, hold, test = [row for part in parts[:7] for row in part], parts[7], parts[8], parts[9]
    if count < _LEAST_DOCUMENTS or min(len(choose), len(hold), len(test)) < 3:
        raise DataError(f"{scored}: {count} scores of the judge; a student needs at least {_LEAST_DOCUMENTS}")
    target = np.array([score for _, score in train])
    if target.min() == target.max():
        raise DataError(f"{scored}: every score is {target[0]:g}; there is nothing to learn")
    rows = _Rows([found for found, _ in train])
    tried = [(penalty, _ridge(rows, target, penalty)) for penalty in _PENALTIES]
    errors = [_error(weight, choose) for _, weight in tried]
    penalty, weight = tried[int(np.argmin(errors))]
    hold = hold[:_MOST_CALIBRATION]
    student = Student(
        weight=weight,
        predicted=_grades(weight, hold, rubric),
        judged=np.array([score for _, score in hold]),
        low=int(rubric["low"]),
        high=int(rubric["high"]),
        about={
            "rubric": rubric["name"],
            "rubric_sha256": rubric["sha256"],
            "teacher": opened.header["model"],
            "penalty": penalty,
        },
    )
    student.about.update(_held_out(student, test, rubric), trained_on=len(train), held_out=len(test))
    return student


def _grades(weight: np.ndarray, rows: list[tuple[Features, float]], rubric: dict[str, Any]) -> np.ndarray:
    return np.clip(np.array([_predict(weight, found) for found, _ in rows]), rubric["low"], rubric["high"])


def _error(weight: np.ndarray, rows: list[tuple[Features, float]]) -> float:
    return float(np.mean([(_predict(weight, found) - score) ** 2 for found, score in rows]))


def _held_out(student: Student, rows: list[tuple[Features, float]], rubric: dict[str, Any]) -> dict[str, Any]:
    """Agreement with the judge on documents that nothing was chosen by, and what it would decide alone at each level."""
    graded = _grades(student.weight, rows, rubric)
    judged = np.array([score for _, score in rows])
    decisions = []
    for level in range(student.low + 1, student.high + 1):
        probability = student.keep_probability(min_score=level)
        share = np.array([probability(grade) for grade in graded])
        sure = (share >= 0.95) | (share <= 0.05)
        right = (share > 0.5) == (judged >= level)
        decisions.append(
            {
                "min_score": level,
                "decides": round(float(sure.mean()), 4),
                "right": round(float(right[sure].mean()), 4) if sure.any() else None,
            }
        )
    return {
        "spearman": round(spearman(judged, graded), 4),
        "mae": round(mean_absolute_error(judged, graded), 4),
        "decisions_at_0.95": decisions,
    }


def load_student(path: Path) -> Student:
    """Reads a student.

    Raises:
        DataError: if there is no such file.
        FormatError: if it is no student, or of a newer version.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            values = dict(json.loads(bytes(file["about"]).decode()))
            weight, predicted, judged = file["weight"], file["predicted"], file["judged"]
    except FileNotFoundError:
        raise DataError(f"{path}: not found; `hydra-judge fit` makes it") from None
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise FormatError(
            f"{path}: not a student ({type(error).__name__}); make it again with `hydra-judge fit`"
        ) from None
    if values.get("version") != _VERSION or weight.shape != (_DIMENSION,):
        raise FormatError(
            f"{path}: student of version {values.get('version')}, this program knows {_VERSION}; fit it again"
        )
    return Student(
        weight=weight, predicted=predicted, judged=judged, low=values["low"], high=values["high"], about=values["about"]
    )
