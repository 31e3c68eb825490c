# SPDX-License-Identifier: Apache-2.0
"""Spikes of loss and gradient norm, and the tokens that a step saw.

A value is a spike if it stands far above what came before: more than `THRESHOLD` robust deviations over the median of
the `WINDOW` values before it. The deviation is 1.4826 times the median absolute deviation, which a few earlier spikes
do not inflate, and never less than 1% of the median, so that a smooth curve has no spikes of nothing. Whatever was
judged once stays judged: a refresh looks at new values only.

Source: Iglewicz and Hoaglin, "How to Detect and Handle Outliers" (1993), for the scaled median absolute deviation.
"""

from dataclasses import dataclass

import numpy as np

from nviz.points import Connection, columns_of

__all__ = ["METRICS", "WINDOW", "Found", "Spike", "find", "spans"]

METRICS = ("train/loss", "train/grad_norm")
WINDOW = 50
THRESHOLD = 8.0
LIMIT = 200
CHUNK = 50_000  # values judged at once: 20 MB


@dataclass(frozen=True, kw_only=True, slots=True)
class Spike:
    """A run of steps whose values stand out.

    Attributes:
        name: the metric.
        first, last: its first and last step.
        peak: step of the highest value, or of the first that is not finite.
        value: value there; NaN or infinite if the metric broke.
        usual: median of the values before.
        severity: robust deviations above the median; infinite for a value that is not finite.
    """

    name: str
    first: int
    last: int
    peak: int
    value: float
    usual: float
    severity: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Trail:
    """What is known of one metric so far.

    Attributes:
        last: its newest step.
        count: values so far.
        tail: float64 [<= WINDOW], the newest values, with which the next ones are compared.
        high: float64 [N, 5], for each value that stands out: its number, step, value, median before, severity.
    """

    last: int
    count: int
    tail: np.ndarray
    high: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Spikes of a run, the most severe first, and what a later answer is built upon."""

    spikes: list[Spike]
    trails: dict[str, Trail]


_START = Trail(last=-1, count=0, tail=np.empty(0), high=np.empty((0, 5)))


def find(connection: Connection, earlier: Found | None = None) -> Found:
    """Spikes of a run.

    Args:
        connection: an open store.
        earlier: the answer on an earlier publication of the same run; only values after it are asked for.
    """
    known = {} if earlier is None else earlier.trails
    trails = {name: _follow(connection, name, known.get(name, _START)) for name in METRICS}
    found = [spike for name, trail in trails.items() for spike in _spikes(name, trail.high)]
    found.sort(key=lambda spike: (-spike.severity, spike.first))
    return Found(spikes=found[:LIMIT], trails=trails)


def _follow(connection: Connection, name: str, trail: Trail) -> Trail:
    """The trail with the values that came since."""
    table = columns_of(
        connection,
        """
        SELECT step, value FROM metrics
        WHERE name = ? AND step > ? AND layer IS NULL AND expert IS NULL AND rank IS NULL ORDER BY step
        """,
        [name, trail.last],
    )
    steps, values = np.asarray(table["step"], np.int64), np.asarray(table["value"], np.float64)
    high = [trail.high]
    for begin in range(0, len(values), CHUNK):
        before = np.concatenate([trail.tail, values[:begin]])[-WINDOW:]
        part = slice(begin, begin + CHUNK)
        usual, severity = _judge(before, values[part])
        places = np.flatnonzero(severity >= THRESHOLD)
        numbers = trail.count + begin + places
        high.append(
            np.stack([numbers, steps[part][places], values[part][places], usual[places], severity[places]], axis=1)
        )
    return Trail(
        last=int(steps[-1]) if len(steps) else trail.last,
        count=trail.count + len(values),
        tail=np.concatenate([trail.tail, values])[-WINDOW:],
        high=np.concatenate(high),
    )


def _judge(before: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Median of the finite values in the window before each value, and how far above it the value stands.

    Args:
        before: float64 [<= WINDOW], what came before the first value.
        values: float64 [N].

    Returns:
        float64 [N] each; the severity is infinite for a value that is not finite, 0 where too little is known.
    """
    line = np.concatenate([np.full(WINDOW - len(before), np.nan), before, values])
    windows = np.lib.stride_tricks.sliding_window_view(np.where(np.isfinite(line), line, np.nan), WINDOW)[:-1]
    usual, spread = np.full(len(values), np.nan), np.full(len(values), np.nan)
    full = np.isfinite(windows).all(axis=1)
    judged = np.isfinite(windows).sum(axis=1) >= WINDOW // 5
    for rows, median in ((judged & full, np.median), (judged & ~full, np.nanmedian)):  # nanmedian is far slower
        usual[rows] = median(windows[rows], axis=1)
        spread[rows] = median(np.abs(windows[rows] - usual[rows, None]), axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        floor = np.maximum(np.maximum(1.4826 * spread, 0.01 * np.abs(usual)), 1e-12)
        severity = np.where(judged, (values - usual) / floor, 0.0)
    return usual, np.where(np.isfinite(values), severity, np.inf)


def _spikes(name: str, high: np.ndarray) -> list[Spike]:
    """Values that stand out one after the other are one spike; its peak is the most severe, the first among equals."""
    if not len(high):
        return []
    groups = np.split(high, np.flatnonzero(np.diff(high[:, 0]) > 1) + 1)
    found = []
    for group in groups:
        _, step, value, usual, severity = group[np.argmax(group[:, 4])]
        found.append(
            Spike(
                name=name, first=int(group[0, 1]), last=int(group[-1, 1]), peak=int(step), value=float(value),
                usual=float(usual), severity=float(severity),
            )
        )  # fmt: skip
    return found


def spans(connection: Connection, step: int) -> list[tuple[str, int, int]]:
    """(shard, start, end) of every row of tokens that a step saw."""
    return connection.execute(
        'SELECT shard, "start", "end" FROM batches WHERE step = ? ORDER BY shard, "start"', [step]
    ).fetchall()
