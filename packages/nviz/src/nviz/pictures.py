# SPDX-License-Identifier: Apache-2.0
"""Metrics with axes as pictures: layer by expert at one step, or one row a layer, expert or rank along the steps.

A picture along the steps is made of buckets that hold lowest, highest, sum and count of each row, so a later
publication adds its newest buckets to those that are known: what is new of a 10-million-row store takes 2 ms.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from nviz.points import Connection, bucket_width, columns_of

__all__ = ["Axis", "Picture", "grid", "picture"]

Axis = Literal["layer", "expert", "rank"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A metric along the steps.

    Attributes:
        values: float64 [rows, N]; each the value of the bucket that is farthest from the mean of its row, so what stands
            out is not averaged away; NaN where there is none.
        first: int64 [N], first step of each column.
        means: float64 [rows], mean of each row over the run.
        low, high: first and last step with a value.
        width: steps in a column.
        table: a row for each place and bucket, what the rest was made of; a later answer is built upon it.
    """

    values: np.ndarray
    first: np.ndarray
    means: np.ndarray
    low: int
    high: int
    width: int
    table: dict[str, np.ndarray]


def picture(
    connection: Connection,
    name: str,
    *,
    rows: Axis,
    layer: int | None = None,
    fullest: Axis | None = None,
    columns: int = 200,
    earlier: Picture | None = None,
) -> Picture:
    """A metric along the steps.

    Args:
        connection: an open store.
        name: the metric.
        rows: the axis that has a row for each of its indices.
        layer: the layer that is shown, if the metric has layers and they are not the rows.
        fullest: another axis; shown is its largest value over its mean at each step.
        columns: largest number of columns; at least 3.
        earlier: the answer on an earlier publication of the same run; only its last column and what follows are asked.
    """
    present = {rows, *(["layer"] if layer is not None else []), *([fullest] if fullest else [])}
    terms = ["name = ?", "isfinite(value)"]
    terms += [f"{axis} IS {'NOT ' if axis in present else ''}NULL" for axis in ("layer", "expert", "rank")]
    parameters: list[Any] = [name]
    if layer is not None:
        terms.append("layer = ?")
        parameters.append(layer)
    value, end = ("max(value) / nullif(avg(value), 0)", f"GROUP BY {rows}, step") if fullest else ("value", "")

    def choose(since: int) -> tuple[int | None, int | None]:
        """Puts the rows aside as `chosen`; their first and last step."""
        connection.execute(
            f"""
            CREATE OR REPLACE TEMP TABLE chosen AS SELECT {rows} AS place, step, {value} AS value FROM metrics
            WHERE {" AND ".join(terms)} AND step >= ? {end}
            """,  # noqa: S608 - made of constants
            [*parameters, since],
        )
        return connection.execute("SELECT min(step), max(step) FROM chosen").fetchall()[0]

    if earlier is not None and len(earlier.first):
        newest = int(earlier.table["bucket"].max())
        low, high = choose(newest * earlier.width)
        if high is not None and bucket_width(high - earlier.low + 1, columns) == earlier.width:
            settled = earlier.table["bucket"] < newest
            fresh = _cells(connection, earlier.width)
            table = {key: np.concatenate([earlier.table[key][settled], fresh[key]]) for key in fresh}
            return _picture(table, low=earlier.low, high=high, width=earlier.width)
    low, high = choose(0)
    if low is None or high is None:
        nothing = np.empty(0)
        return Picture(
            values=np.empty((0, 0)), first=np.empty(0, np.int64), means=nothing, low=0, high=0, width=1, table={}
        )
    width = bucket_width(high - low + 1, columns)
    return _picture(_cells(connection, width), low=low, high=high, width=width)


def _cells(connection: Connection, width: int) -> dict[str, np.ndarray]:
    return columns_of(
        connection,
        f"""
        SELECT place, step // {width} AS bucket, min(value) AS lowest, max(value) AS highest, sum(value) AS total,
            count(*) AS rows
        FROM chosen WHERE value IS NOT NULL GROUP BY place, bucket
        """,  # noqa: S608 - an integer computed above
    )


def _picture(table: dict[str, np.ndarray], *, low: int, high: int, width: int) -> Picture:
    place = table["place"]
    sums, counts = np.bincount(place, weights=table["total"]), np.bincount(place, weights=table["rows"])
    means = np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)
    above, below = table["highest"] - means[place], means[place] - table["lowest"]
    buckets, column = np.unique(table["bucket"], return_inverse=True)
    return Picture(
        values=_fill(place, column, np.where(above >= below, table["highest"], table["lowest"])),
        first=np.asarray(buckets, np.int64) * width,
        means=means,
        low=low,
        high=high,
        width=width,
        table=table,
    )


def grid(connection: Connection, name: str, step: int, *, columns: Axis = "expert") -> np.ndarray:
    """A metric of layers and experts (or ranks) at one step: float64 [layers, columns], NaN where nothing was written."""
    table = columns_of(
        connection,
        f"""
        SELECT layer, {columns} AS place, value FROM metrics
        WHERE name = ? AND step = ? AND layer IS NOT NULL AND {columns} IS NOT NULL
        """,  # noqa: S608 - one of three words
        [name, step],
    )
    return _fill(table["layer"], table["place"], table["value"])


def _fill(row: np.ndarray, column: np.ndarray, value: np.ndarray) -> np.ndarray:
    if not len(row):
        return np.empty((0, 0))
    filled = np.full((int(row.max()) + 1, int(column.max()) + 1), np.nan)
    filled[row, column] = value
    return filled
