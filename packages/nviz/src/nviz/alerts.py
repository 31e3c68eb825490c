# SPDX-License-Identifier: Apache-2.0
"""Rules that say when a run needs a person, read from a TOML file and tried on each publication.

    [[rule]]
    name = "throughput drops"
    kind = "drop"                        # see `Rule.kind`
    metric = "speed/tokens_per_second"
    by = 0.3

A metric's unit is the store's: a limit on a fraction is a fraction.
"""

import dataclasses
import difflib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import duckdb

from nmoe.formats import NmoeError
from nmoe.formats.runs import RunStatus
from nviz.catalog import Entry
from nviz.queries import Measure
from nviz.settings import SettingsError
from nviz.source import UnpublishedError

__all__ = ["BUILT_IN", "Alert", "Rule", "load_rules", "try_rules"]

KINDS = ("status", "not_finite", "above", "below", "drop")
LEVELS = ("error", "warning")
Connection = duckdb.DuckDBPyConnection


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One rule."""

    name: str
    """What a person reads."""
    kind: str
    """"status": the run is in one of `status`; "not_finite": the metric was NaN or infinite at any step; "above" and
    "below": its newest value, on any layer, expert or rank, is past `limit`; "drop": the median of its newest 10 values
    is more than `by` below the median of the 100 before."""
    level: str = "warning"
    """"error" or "warning"."""
    metric: str = ""
    """Name of the metric; not for "status"."""
    limit: float = 0.0
    """For "above" and "below", in the metric's unit."""
    by: float = 0.3
    """For "drop", a fraction in (0, 1)."""
    status: tuple[str, ...] = ()
    """For "status": of running, stale, stopped, finished, failed, unreadable."""


BUILT_IN = (
    Rule(name="run died", kind="status", level="error", status=("failed", "stale", "unreadable")),
    Rule(name="loss is not finite", kind="not_finite", level="error", metric="train/loss"),
    Rule(name="gradient is not finite", kind="not_finite", metric="train/grad_norm"),
    Rule(name="throughput drops", kind="drop", metric="speed/tokens_per_second", by=0.3),
    Rule(name="experts receive nothing", kind="above", metric="router/dead_experts", limit=0.0),
    Rule(name="metrics are lost", kind="above", metric="metrics/dropped_rows", limit=0.0),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """A rule that holds for a run."""

    run: str
    rule: Rule
    text: str


def load_rules(path: Path | None) -> tuple[Rule, ...]:
    """Rules of a file; the built-in ones for None.

    Raises:
        SettingsError: if the file cannot be read, or holds an unknown key or a value that cannot be.
    """
    if path is None:
        return BUILT_IN
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path}: cannot be read as TOML ({error})") from None
    rules = table.get("rule")
    if set(table) != {"rule"} or not isinstance(rules, list):
        raise SettingsError(f"{path}: holds {sorted(table)}; expected [[rule]] tables and nothing else")
    return tuple(_rule(rule, f"{path}: rule {number}") for number, rule in enumerate(rules, start=1))


def _rule(table: dict[str, Any], where: str) -> Rule:
    fields = {field.name for field in dataclasses.fields(Rule)}
    for key in table:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            raise SettingsError(f"{where}: unknown key {key!r}{f'; did you mean {near[0]!r}?' if near else ''}")
    for key in ("name", "kind"):
        if key not in table:
            raise SettingsError(f"{where}: lacks {key!r}")
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    for key, value in values.items():
        expected = {"limit": (int, float), "by": (int, float), "status": tuple}.get(key, str)
        if not isinstance(value, expected) or isinstance(value, bool):
            raise SettingsError(f"{where}: {key} = {value!r} is of the wrong type")
    rule = Rule(**values)
    known = get_args(RunStatus)
    checks = (
        (rule.kind in KINDS, f"kind = {rule.kind!r}; expected one of {', '.join(KINDS)}"),
        (rule.level in LEVELS, f"level = {rule.level!r}; expected one of {', '.join(LEVELS)}"),
        (rule.kind == "status" or bool(rule.metric), f"kind {rule.kind!r} needs a metric"),
        (rule.kind != "status" or bool(rule.status), "kind 'status' needs a list, status"),
        (
            all(word in known for word in rule.status),
            f"status = {list(rule.status)}; expected some of {', '.join(known)}",
        ),
        (0 < rule.by < 1, f"by = {rule.by}; expected a fraction in (0, 1)"),
    )
    for holds, complaint in checks:
        if not holds:
            raise SettingsError(f"{where}: {complaint}")
    return rule


def try_rules(entry: Entry, rules: Sequence[Rule]) -> list[Alert]:
    """The rules that hold for a run now. A store that cannot be read is an alert too."""
    found = [
        Alert(run=entry.key, rule=rule, text=_state(entry))
        for rule in rules
        if rule.kind == "status" and entry.info.status in rule.status
    ]
    try:
        store = entry.store()
        with store.session():
            known = entry.measures()
            for rule in rules:
                if rule.kind != "status" and rule.metric in known:
                    measure = known[rule.metric]
                    text = store.read(
                        rule, lambda connection, rule=rule, measure=measure: _ask(connection, rule, measure)
                    )
                    found += [Alert(run=entry.key, rule=rule, text=text)] if text else []
    except UnpublishedError:
        pass  # nothing is written yet, which is no fault
    except NmoeError as error:
        unreadable = Rule(name="metrics cannot be read", kind="status", level="error", status=("unreadable",))
        found.append(Alert(run=entry.key, rule=unreadable, text=entry.brief(str(error))))
    return found


def _state(entry: Entry) -> str:
    if entry.info.status == "unreadable":
        return entry.brief(entry.info.error or "")
    return f"{entry.info.status} at step {entry.info.step:,}{f': {entry.info.error}' if entry.info.error else ''}"


def _ask(connection: Connection, rule: Rule, measure: Measure) -> str:
    """What there is to say about a rule that holds; empty if it does not."""
    match rule.kind:
        case "not_finite":
            if not measure.broken:
                return ""
            return (
                f"{measure.name} was NaN or infinite {measure.broken:,} times, "
                f"steps {measure.first_broken:,} to {measure.last_broken:,}"
            )
        case "above" | "below":
            return _past_limit(connection, rule, measure)
        case _:
            return _dropped(connection, rule, measure)


def _past_limit(connection: Connection, rule: Rule, measure: Measure) -> str:
    sign = ">" if rule.kind == "above" else "<"
    rows = connection.execute(
        f"""
        SELECT step, layer, expert, rank, value FROM metrics WHERE name = ? AND step = ? AND value {sign} ?
        ORDER BY value {"DESC" if rule.kind == "above" else "ASC"}
        """,  # noqa: S608 - a sign chosen above
        [rule.metric, measure.last_step, rule.limit],
    ).fetchall()
    if not rows:
        return ""
    step, *places, value = rows[0]
    where = " ".join(
        f"{axis} {place}" for axis, place in zip(("layer", "expert", "rank"), places, strict=True) if place is not None
    )
    more = f", and {len(rows) - 1} more" if len(rows) > 1 else ""
    return f"{rule.metric} is {value:.4g} {sign} {rule.limit:g} at step {step:,}{f' ({where}{more})' if where else ''}"


def _dropped(connection: Connection, rule: Rule, measure: Measure) -> str:
    # Twice the steps that 110 values take at the run's pace: the rest of the store need not be read.
    reach = 220 * -(-(measure.last_step - measure.first_step + 1) // measure.rows)
    now, before, count = connection.execute(
        """
        SELECT median(value) FILTER (place <= 10), median(value) FILTER (place > 10), count(*) FROM (
            SELECT value, row_number() OVER (ORDER BY step DESC) AS place FROM metrics
            WHERE name = ? AND step > ? AND layer IS NULL AND expert IS NULL AND rank IS NULL AND isfinite(value)
        ) WHERE place <= 110
        """,
        [rule.metric, measure.last_step - reach],
    ).fetchall()[0]
    if count < 30 or before <= 0 or now >= before * (1 - rule.by):
        return ""
    return f"{rule.metric} fell by {1 - now / before:.0%}, from {before:.4g} to {now:.4g}"
