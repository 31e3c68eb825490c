# SPDX-License-Identifier: Apache-2.0
"""Questions to a metric store, answered inside DuckDB: what it holds, and its newest values.

What leaves the database is already as small as a chart. An answer that can be built upon takes the one given on an
earlier publication and asks only for what came since; lines are in `points.py`, pictures in `pictures.py`.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np

from nviz.points import Connection, columns_of

__all__ = ["Inventory", "Latest", "Measure", "inventory", "latest", "steps_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """A metric of a store: what its catalogue says, and which axes its values have."""

    name: str
    unit: str
    kind: str
    meaning: str
    rows: int
    first_step: int
    last_step: int
    layers: int
    experts: int
    ranks: int
    """Largest index plus one on each axis; 0 where the metric has no such axis."""
    broken: int
    first_broken: int | None
    last_broken: int | None
    """Values that are NaN or infinite, and the first and last step that has one."""

    @property
    def scalar(self) -> bool:
        """One value a step."""
        return not (self.layers or self.experts or self.ranks)

    @property
    def label(self) -> str:
        """Name with its unit, as an axis title."""
        return self.name if self.unit in ("", "1") else f"{self.name} ({self.unit})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """Every metric that has values.

    Attributes:
        measures: by name; one that the catalogue does not know has no unit.
        settled: the same without the newest step, whose rows may still be coming.
        until: the newest step.
    """

    measures: dict[str, Measure]
    settled: dict[str, Measure]
    until: int


def inventory(connection: Connection, earlier: Inventory | None = None) -> Inventory:
    """What a store holds.

    Args:
        connection: an open store.
        earlier: the answer on an earlier publication; only rows from its newest step on are asked for.
    """
    settled = {} if earlier is None else dict(earlier.settled)
    since = 0 if earlier is None else earlier.until
    until = connection.execute("SELECT coalesce(max(step), 0) FROM metrics WHERE step >= ?", [since]).fetchall()[0][0]
    rows = connection.execute(
        """
        SELECT open, found.name, coalesce(unit, ''), coalesce(kind, ''), coalesce(meaning, ''), rows, first, last, layers,
            experts, ranks, broken, first_broken, last_broken
        FROM (
            SELECT step >= ? AS open, name, count(*) AS rows, min(step) AS first, max(step) AS last,
                coalesce(max(layer) + 1, 0) AS layers, coalesce(max(expert) + 1, 0) AS experts,
                coalesce(max(rank) + 1, 0) AS ranks, count(*) FILTER (NOT isfinite(value)) AS broken,
                min(step) FILTER (NOT isfinite(value)) AS first_broken,
                max(step) FILTER (NOT isfinite(value)) AS last_broken
            FROM metrics WHERE step >= ? GROUP BY ALL
        ) AS found LEFT JOIN (SELECT DISTINCT ON (name) * FROM catalogue) AS known ON known.name = split_part(found.name, '[', 1)
        ORDER BY open, found.name
        """,
        [until, since],
    ).fetchall()
    whole = settled
    for is_open, *row in rows:
        if is_open and whole is settled:
            whole = dict(settled)
        fresh = Measure(**dict(zip(_MEASURE_FIELDS, row, strict=True)))
        whole[fresh.name] = _joined(whole[fresh.name], fresh) if fresh.name in whole else fresh
    return Inventory(measures=dict(sorted(whole.items())), settled=settled, until=until)


_MEASURE_FIELDS = tuple(field.name for field in dataclasses.fields(Measure))


def _joined(old: Measure, new: Measure) -> Measure:
    return dataclasses.replace(
        new,
        rows=old.rows + new.rows,
        first_step=old.first_step,
        layers=max(old.layers, new.layers),
        experts=max(old.experts, new.experts),
        ranks=max(old.ranks, new.ranks),
        broken=old.broken + new.broken,
        first_broken=new.first_broken if old.first_broken is None else old.first_broken,
        last_broken=old.last_broken if new.last_broken is None else new.last_broken,
    )


def steps_of(connection: Connection, name: str, earlier: np.ndarray | None = None) -> np.ndarray:
    """Steps at which a metric was written: int64 [N], ascending; only those after `earlier` are asked for."""
    known = np.empty(0, np.int64) if earlier is None else earlier
    table = columns_of(
        connection,
        "SELECT DISTINCT step FROM metrics WHERE name = ? AND step > ? ORDER BY step",
        [name, int(known[-1]) if len(known) else -1],
    )
    return np.concatenate([known, np.asarray(table["step"], np.int64)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Latest:
    """Newest and smallest finite value of a scalar metric."""

    step: int
    time: float
    value: float
    lowest: float


def latest(
    connection: Connection, names: tuple[str, ...], earlier: dict[str, Latest] | None = None
) -> dict[str, Latest]:
    """Newest value of scalar metrics, NaN included, and their lowest finite one; a metric without values is left out.

    Args:
        connection: an open store.
        names: the metrics.
        earlier: the answer on an earlier publication; only rows from its newest steps on are asked for.
    """
    known = earlier or {}
    since = min((answer.step for answer in known.values()), default=0)
    rows = connection.execute(
        """
        SELECT name, max(step), arg_max(time, step), arg_max(value, step),
            coalesce(min(value) FILTER (isfinite(value)), 'nan'::DOUBLE)
        FROM metrics WHERE step >= ? AND name IN (SELECT unnest(?::VARCHAR[]))
            AND layer IS NULL AND expert IS NULL AND rank IS NULL
        GROUP BY name
        """,
        [since, list(names)],
    ).fetchall()
    found = dict(known)
    for name, step, time, value, lowest in rows:
        # fmin: a NaN means that there is no finite value
        best = float(np.fmin(lowest, known[name].lowest)) if name in known else lowest
        found[name] = Latest(step=step, time=time, value=value, lowest=best)
    return found
