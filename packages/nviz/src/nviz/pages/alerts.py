# SPDX-License-Identifier: Apache-2.0
"""Every rule that holds, over all runs, and the rules themselves."""

import time

import streamlit as st

from nmoe.formats import NmoeError
from nviz import alerts, ui
from nviz.catalog import Entry

BUDGET_S = 1.0  # after which the stores that are left wait for the next look


def _table(listed: list[Entry], rules: tuple[alerts.Rule, ...]) -> None:
    deadline = time.monotonic() + BUDGET_S
    found: list[alerts.Alert] = []
    left = 0
    for entry in listed:
        if time.monotonic() > deadline and not _known(entry):
            left += 1
            continue
        found += alerts.try_rules(entry, rules)
    if not found and not left:
        st.success("No rule holds for any run.", icon=":material/check:")
        return
    found.sort(key=lambda alert: alerts.LEVELS.index(alert.rule.level))
    st.dataframe(
        [{"level": alert.rule.level, "run": alert.run, "rule": alert.rule.name, "what": alert.text} for alert in found],
        column_config={
            "level": st.column_config.TextColumn(width=70),
            "run": st.column_config.TextColumn(width=150),
            "rule": st.column_config.TextColumn(width=190),
            "what": st.column_config.TextColumn(width="large"),
        },
        hide_index=True,
        alt="Rules that hold, by run",
    )
    if left:
        st.caption(f"{left} runs are still to be looked at.")
        st.rerun()


def _known(entry: Entry) -> bool:
    """Whether the rules were tried on this publication; a store that cannot be looked at costs nothing either."""
    try:
        return entry.store().knows("inventory")
    except NmoeError:
        return True


def main() -> None:
    """The page."""
    st.title("Alerts")
    rules = alerts.load_rules(ui.settings().alerts)
    listed = list(ui.entries().values())
    ui.live(lambda: _table(list(ui.entries().values()), rules), listed, what="Alerts")()
    st.subheader("Rules")
    path = ui.settings().alerts
    st.caption(f"From `{path}`." if path else "The built-in rules; others by `--alerts FILE` (docs/dashboard.md).")
    st.dataframe(
        [
            {
                "rule": rule.name,
                "kind": rule.kind,
                "level": rule.level,
                "metric": rule.metric,
                "limit": rule.limit if rule.kind in ("above", "below") else None,
                "by": rule.by if rule.kind == "drop" else None,
                "status": ", ".join(rule.status),
            }
            for rule in rules
        ],
        column_config={
            "kind": st.column_config.TextColumn(width=80),
            "level": st.column_config.TextColumn(width=70),
            "limit": st.column_config.NumberColumn(width=50),
            "by": st.column_config.NumberColumn(width=50),
            "status": st.column_config.TextColumn(width=170),
        },
        hide_index=True,
        placeholder="-",
        alt="The rules",
    )


if __name__ == "__main__":
    main()
