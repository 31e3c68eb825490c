# SPDX-License-Identifier: Apache-2.0
"""Spikes of loss and gradient norm, found inside the database, and the tokens that a step saw.

A value is a spike if it stands far above what came before: more than `threshold` robust deviations over the median of
the `WINDOW` values before it. The deviation is 1.4826 times the median absolute deviation, which a few earlier spikes
do not inflate, and never less than 1% of the median, so that a smooth curve has no spikes of nothing.

Source: Iglewicz and Hoaglin, "How to Detect and Handle Outliers" (1993), for the scaled median absolute deviation.
"""

from dataclasses import dataclass

import duckdb

__all__ = ["METRICS", "Spike", "find", "spans"]

METRICS = ("train/loss", "train/grad_norm")
WINDOW = 50
THRESHOLD = 8.0
Connection = duckdb.DuckDBPyConnection


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


def find(connection: Connection, *, threshold: float = THRESHOLD, limit: int = 200) -> list[Spike]:
    """Spikes of a run, the most severe first.

    Args:
        connection: an open store.
        threshold: robust deviations above the median from which a value is a spike.
        limit: largest number of spikes.
    """
    rows = connection.execute(
        f"""
        WITH line AS (
            SELECT name, step, value, isfinite(value) AS fine FROM metrics
            WHERE name IN ('train/loss', 'train/grad_norm') AND layer IS NULL AND expert IS NULL AND rank IS NULL
        ), before AS (
            SELECT *, median(value) FILTER (fine) OVER w AS usual, mad(value) FILTER (fine) OVER w AS spread,
                count(*) FILTER (fine) OVER w AS known
            FROM line WINDOW w AS (PARTITION BY name ORDER BY step ROWS BETWEEN {WINDOW} PRECEDING AND 1 PRECEDING)
        ), judged AS (
            SELECT *, CASE WHEN NOT fine THEN 'inf'::DOUBLE WHEN known >= {WINDOW // 5}
                THEN (value - usual) / greatest(1.4826 * spread, 0.01 * abs(usual), 1e-12) ELSE 0 END AS severity
            FROM before
        ), marked AS (
            SELECT *, severity >= ? AS high,
                lag(severity >= ?, 1, FALSE) OVER (PARTITION BY name ORDER BY step) AS went_on FROM judged
        ), numbered AS (
            SELECT *, sum((high AND NOT went_on)::INTEGER) OVER (PARTITION BY name ORDER BY step) AS number FROM marked
        )
        SELECT name, min(step), max(step), arg_max(step, (severity, -step)), arg_max(value, (severity, -step)),
            coalesce(arg_max(usual, (severity, -step)), 'nan'::DOUBLE), max(severity)
        FROM numbered WHERE high GROUP BY name, number ORDER BY max(severity) DESC, min(step) LIMIT ?
        """,  # noqa: S608 - constants of this file
        [threshold, threshold, limit],
    ).fetchall()
    return [
        Spike(name=name, first=first, last=last, peak=peak, value=value, usual=usual, severity=severity)
        for name, first, last, peak, value, usual, severity in rows
    ]


def spans(connection: Connection, step: int) -> list[tuple[str, int, int]]:
    """(shard, start, end) of every row of tokens that a step saw."""
    return connection.execute(
        'SELECT shard, "start", "end" FROM batches WHERE step = ? ORDER BY shard, "start"', [step]
    ).fetchall()
