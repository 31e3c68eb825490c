# SPDX-License-Identifier: Apache-2.0
"""Runs below the roots, by the key that stands in a URL.

A key is looked up among the folders that were listed and never joined to a path, so no URL reaches another file:
`..`, absolute paths and symbolic links that leave a root name no run.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import duckdb
import numpy as np

from nmoe.formats.files import inside
from nmoe.formats.metrics import STORE
from nmoe.formats.runs import RunInfo, list_runs
from nviz import queries
from nviz.pictures import Axis, Picture
from nviz.pictures import grid as grid_of
from nviz.pictures import picture as picture_of
from nviz.points import Line, Points
from nviz.points import points as points_of
from nviz.queries import Measure
from nviz.settings import Settings
from nviz.source import Store, store_at
from nviz.spikes import Spike
from nviz.spikes import find as find_spikes

__all__ = ["Entry", "list_entries"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A run that may be shown."""

    key: str
    """What a URL calls it: the folder's name, with the root's name before it if there are several roots."""
    root: Path
    info: RunInfo

    @property
    def live(self) -> bool:
        """Whether somebody is writing it, as far as its heartbeat says."""
        return self.info.status == "running"

    def brief(self, fault: str) -> str:
        """A fault without the run's folder, for where the run's name stands beside it."""
        return fault.replace(f"{self.info.path}/", "")

    def store(self) -> Store:
        """The run's published metrics.

        Raises:
            DataError: if the store is a link that leaves the root.
        """
        return store_at(inside(self.root, f"{self.info.path.name}/{STORE}"))

    def measures(self) -> dict[str, Measure]:
        """Every metric of the run that has values, by name. Raises as `Store.read` does."""
        return self.grown("inventory", queries.inventory).measures

    def points(self, line: Line, *, first: int | None = None, last: int | None = None) -> Points:
        """A series of the run with its extremes. Raises as `Store.read` does."""
        return self.grown(
            ("points", line, first, last),
            lambda connection, earlier: points_of(connection, line, first=first, last=last, earlier=earlier),
        )

    def picture(
        self, name: str, *, rows: Axis, layer: int | None = None, fullest: Axis | None = None, columns: int = 200
    ) -> Picture:
        """A metric of the run along the steps, as `pictures.picture` gives it."""
        return self.grown(
            ("picture", name, rows, layer, fullest, columns),
            lambda connection, earlier: picture_of(
                connection, name, rows=rows, layer=layer, fullest=fullest, columns=columns, earlier=earlier
            ),
        )

    def grid(self, name: str, step: int, *, columns: Axis = "expert") -> np.ndarray:
        """A metric of layers and experts (or ranks) at one step: float64 [layers, columns]."""
        return self.store().read(
            ("grid", name, step), lambda connection: grid_of(connection, name, step, columns=columns)
        )

    def steps(self, name: str) -> np.ndarray:
        """Steps at which a metric was written: int64 [N], ascending."""
        return self.grown(("steps", name), lambda connection, earlier: queries.steps_of(connection, name, earlier))

    def spikes(self) -> list[Spike]:
        """Spikes of loss and gradient norm, the most severe first."""
        return self.grown("spikes", find_spikes).spikes

    def grown(self, key: Hashable, query: Callable[[duckdb.DuckDBPyConnection, T | None], T]) -> T:
        """`Store.grow` for the process that writes this run."""
        return self.store().grow(key, query, epoch=self.epoch)

    @property
    def epoch(self) -> tuple[str, str, int]:
        """Identity of the process that writes the run; another one after a resume."""
        return self.info.id, self.info.host, self.info.pid


def list_entries(settings: Settings) -> dict[str, Entry]:
    """Every run of every root by its key, newest first."""
    names = _root_names(settings.runs)
    entries = [
        Entry(key=f"{name}/{info.name}" if name else info.name, root=root, info=info)
        for root, name in zip(settings.runs, names, strict=True)
        for info in list_runs(root)
    ]
    entries.sort(key=lambda entry: (entry.info.started_at or 0.0, entry.key), reverse=True)
    return {entry.key: entry for entry in entries}


def _root_names(roots: tuple[Path, ...]) -> list[str]:
    """A short name for each root: nothing for a single one, else its last part, numbered where two are equal."""
    if len(roots) == 1:
        return [""]
    names = [root.name or "root" for root in roots]
    return [
        name if names.count(name) == 1 else f"{name}.{names[: place + 1].count(name)}"
        for place, name in enumerate(names)
    ]
