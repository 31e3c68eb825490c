# SPDX-License-Identifier: Apache-2.0
"""The rubric: what the judge looks for, as a TOML file with anchored levels.

A level without a description means something else to every model, so each level of each axis must be described. The
version of a rubric is the SHA-256 of its parsed content: comments and layout may change, a word of a level may not
without every document being judged anew.
"""

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any

from nmoe.errors import ConfigError

__all__ = ["Axis", "Example", "Rubric", "load_rubric", "shipped_rubrics"]

_RESERVED = {"code", "reason", "score"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """One property that is graded.

    Attributes:
        name: key of the answer, a lower-case identifier.
        question: what is asked about the document.
        levels: description of each level, index 0 is the level `Rubric.low`.
        weight: share of this axis in the score, > 0; weights need not sum to one.
    """

    name: str
    question: str
    levels: tuple[str, ...]
    weight: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A text with its answer to the question of `p_yes`; a small model takes from cases what it cannot take from rules.

    Attributes:
        text: the text.
        good: whether the question is answered with Yes.
    """

    text: str
    good: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Rubric:
    """Everything that decides what a score means.

    Attributes:
        name: short name, shown in reports.
        sha256: hex SHA-256 of the content; part of every cache key.
        purpose: what the documents are wanted for.
        guidance: how to treat languages, domains and doubtful cases.
        question: the yes-or-no question of the answer form `p_yes`.
        opposite: a question that is answered with No where `question` is answered with Yes; "" for none.
        opposite_weight: share of the opposite's odds that is taken off, in (0, 1].
        fenced: whether the text of the form `p_yes` stands between two lines with its hash; the other forms always have them.
        examples: answered before the document, in the form `p_yes`.
        axes: what is graded, in the order of the answer.
        low: lowest level of every axis and of the score.
        high: highest level.
        window_chars: a longer document is judged by windows of at most this many characters, > 0.
        windows: the most windows of one document, >= 1.
        answer_tokens: what the model may answer, in tokens.
    """

    name: str
    sha256: str
    purpose: str
    guidance: str
    question: str
    opposite: str
    opposite_weight: float
    fenced: bool
    examples: tuple[Example, ...]
    axes: tuple[Axis, ...]
    low: int
    high: int
    window_chars: int
    windows: int
    answer_tokens: int

    def score(self, levels: Mapping[str, float]) -> float:
        """Weighted mean of the axes' levels, in [low, high], rounded to 1e-6."""
        total = sum(axis.weight for axis in self.axes)
        return round(sum(axis.weight * levels[axis.name] for axis in self.axes) / total, 6)


class _Table:
    """A TOML table whose keys must all be taken, each with its type."""

    def __init__(self, where: str, values: Any):
        if not isinstance(values, dict):
            raise ConfigError(f"{where}: found {type(values).__name__}, expected a table")
        self.where = where
        self.values = dict(values)
        self.known: list[str] = []

    def take(self, key: str, kind: type, default: Any = None) -> Any:
        self.known.append(key)
        value = self.values.pop(key, default)
        if value is None:
            raise ConfigError(f"{self.where}: {key} is missing")
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"{self.where}: {key} = {value!r}, expected {kind.__name__}")
        if isinstance(value, str) and not value.strip():
            raise ConfigError(f"{self.where}: {key} is empty")
        return value.strip() if isinstance(value, str) else value

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.take(key, int, default)
        if value < least:
            raise ConfigError(f"{self.where}: {key} = {value}, expected at least {least}")
        return value

    def finish(self) -> None:
        for key in self.values:
            near = get_close_matches(key, self.known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(self.known)}"
            raise ConfigError(f"{self.where}: unknown key {key}{hint}")


def _axis(where: str, values: Any, low: int, high: int) -> Axis:
    table = _Table(where, values)
    name = table.take("name", str)
    where = table.where = f"{where} ({name})"
    if not name.isidentifier() or not name.islower() or name in _RESERVED:
        raise ConfigError(f"{where}: name must be a lower-case identifier other than {', '.join(sorted(_RESERVED))}")
    question = table.take("question", str)
    weight = table.take("weight", float, 1.0)
    if not 0 < weight < float("inf"):
        raise ConfigError(f"{where}: weight = {weight}, expected a finite number above 0")
    levels = table.take("levels", dict)
    table.finish()
    wanted = [str(level) for level in range(low, high + 1)]
    if sorted(levels) != sorted(wanted):
        raise ConfigError(f"{where}: levels are {sorted(levels)}, expected one description for each of {wanted}")
    for level, text in levels.items():
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f"{where}: level {level} has no description")
    return Axis(name=name, question=question, levels=tuple(levels[level].strip() for level in wanted), weight=weight)


def _example(where: str, values: Any) -> Example:
    table = _Table(where, values)
    text, answer = table.take("text", str), table.take("answer", str)
    table.finish()
    if answer not in ("yes", "no"):
        raise ConfigError(f'{where}: answer = {answer!r}, expected "yes" or "no"')
    return Example(text=text, good=answer == "yes")


def shipped_rubrics() -> list[str]:
    """Names of the rubrics inside the package."""
    folder = resources.files("hydra_judge") / "rubrics"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_rubric(spec: str) -> Rubric:
    """Loads the rubric that `spec` names.

    Args:
        spec: name of a shipped rubric, or path of a TOML file.

    Raises:
        ConfigError: if there is no such rubric, or it says something that cannot be.
    """
    if spec in shipped_rubrics():
        text, where = (resources.files("hydra_judge") / "rubrics" / f"{spec}.toml").read_text("utf-8"), spec
    else:
        try:
            text, where = Path(spec).read_text(encoding="utf-8"), spec
        except (OSError, UnicodeDecodeError) as error:
            names = ", ".join(shipped_rubrics())
            reason = getattr(error, "strerror", None) or "not UTF-8"
            raise ConfigError(f"rubric {spec}: {reason}; expected a TOML file or one of {names}") from None
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"rubric {where}: not TOML ({error})") from None
    return _rubric(f"rubric {where}", values)


def _rubric(where: str, values: dict[str, Any]) -> Rubric:
    digest = hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()
    table = _Table(where, values)
    low, high = table.take("low", int, 0), table.take("high", int, 5)
    if not 0 <= low < high <= 10:
        raise ConfigError(f"{where}: low = {low}, high = {high}, expected 0 <= low < high <= 10")
    axes = table.take("axes", list)
    rubric = Rubric(
        name=table.take("name", str),
        sha256=digest,
        purpose=table.take("purpose", str),
        guidance=table.take("guidance", str),
        question=table.take("question", str),
        opposite=table.take("opposite", str) if "opposite" in values else "",
        opposite_weight=table.take("opposite_weight", float, 1.0),
        fenced=table.take("fenced", bool, True),
        examples=tuple(
            _example(f"{where}: examples[{number}]", one) for number, one in enumerate(table.take("examples", list, []))
        ),
        axes=tuple(_axis(f"{where}: axes[{number}]", axis, low, high) for number, axis in enumerate(axes)),
        low=low,
        high=high,
        window_chars=table.count("window_chars", 6000, least=200),
        windows=table.count("windows", 3),
        answer_tokens=table.count("answer_tokens", 300),
    )
    table.finish()
    if not 0 < rubric.opposite_weight <= 1:
        raise ConfigError(f"{where}: opposite_weight = {rubric.opposite_weight}, expected a number above 0, at most 1")
    names = [axis.name for axis in rubric.axes]
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"{where}: axes are {names}, expected at least one and no name twice")
    return rubric
