# SPDX-License-Identifier: Apache-2.0
"""One row a run: how far it is and how well it does."""

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nmoe.formats import NmoeError
from nviz import queries
from nviz.catalog import Entry
from nviz.source import UnpublishedError

__all__ = ["Summary", "config_difference", "flatten", "summarize"]

NAMES = ("train/loss", "val/loss", "train/tokens", "speed/tokens_per_second", "speed/mfu", "router/overload")


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The newest and best values of a run; None where there is none."""

    loss: float | None = None
    best_loss: float | None = None
    val_loss: float | None = None
    best_val_loss: float | None = None
    tokens: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    overload: float | None = None
    error: str | None = None
    """Why the store cannot be read."""
    pending: bool = False
    """Not looked at yet."""


def summarize(listed: Iterable[Entry], *, budget_s: float) -> dict[str, Summary]:
    """A summary of each run; what the time does not suffice for is pending, and answered by a later call.

    Args:
        listed: the runs, the most wanted first.
        budget_s: seconds after which no further store is opened; stores that did not change cost next to nothing.
    """
    deadline = time.monotonic() + budget_s
    return {entry.key: _summary(entry, wait=time.monotonic() < deadline) for entry in listed}


def _summary(entry: Entry, *, wait: bool) -> Summary:
    try:
        store = entry.store()
        if not wait and not store.knows(NAMES):
            return Summary(pending=True)
        found = entry.grown(NAMES, lambda connection, earlier: queries.latest(connection, NAMES, earlier))
    except UnpublishedError:
        return Summary()
    except NmoeError as error:
        return Summary(error=str(error))

    def newest(name: str) -> float | None:
        return found[name].value if name in found else None

    def best(name: str) -> float | None:
        return found[name].lowest if name in found and math.isfinite(found[name].lowest) else None

    return Summary(
        loss=newest("train/loss"),
        best_loss=best("train/loss"),
        val_loss=newest("val/loss"),
        best_val_loss=best("val/loss"),
        tokens=newest("train/tokens"),
        tokens_per_second=newest("speed/tokens_per_second"),
        mfu=newest("speed/mfu"),
        overload=newest("router/overload"),
    )


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested tables as `section.key` -> text."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = str(value)
    return flat


def config_difference(chosen: Iterable[Entry]) -> list[dict[str, str]]:
    """Rows of what differs between the configurations of runs: `key`, then one column a run, "-" where it has no such key."""
    flat = {entry.key: flatten(entry.info.config) for entry in chosen}
    keys = sorted({key for config in flat.values() for key in config})
    rows = [{"key": key} | {run: config.get(key, "-") for run, config in flat.items()} for key in keys]
    return [row for row in rows if len({row[run] for run in flat}) > 1]
