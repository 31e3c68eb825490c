# SPDX-License-Identifier: Apache-2.0
"""The dashboard's frame: navigation, the choice of runs, and an explanation where there is no run yet."""

from pathlib import Path

import streamlit as st

from nmoe.formats import NmoeError
from nviz import alerts, ui

__all__ = ["PAGES", "main"]

PAGES = {
    "runs": ("Runs", ":material/list:"),
    "curves": ("Curves", ":material/show_chart:"),
    "router": ("Router", ":material/grid_on:"),
    "speed": ("Speed", ":material/speed:"),
    "data": ("Data", ":material/database:"),
    "spikes": ("Spikes", ":material/bolt:"),
    "alerts": ("Alerts", ":material/notifications:"),
}
SHOWN_ALERTS = 4
_PLOTLY = sorted((Path(st.__file__).parent / "static" / "static" / "js").glob("PlotlyChart.*.js"))
# Streamlit's code for charts is 4.7 MB and takes a browser 0.8 s to load; it comes while the first page is read.
_PRELOAD = """<script>
(window.requestIdleCallback || setTimeout)(() => {
  const loaded = document.querySelector("script[type=module][src*='/static/js/']");
  if (loaded) import(new URL("NAME", loaded.src).href);
});
</script>"""
_SIGNS = {"error": ":red[:material/error:]", "warning": ":orange[:material/warning:]"}
_PAGES_DIR = Path(__file__).parent / "pages"
_ICON = Path(__file__).parent / "icon.svg"  # an icon by name would be fetched from the network
# Streamlit leaves a fifth of a 1280 px window empty; a dashboard needs it.
_STYLE = "<style>.stMainBlockContainer {padding: 3rem 2rem 3rem;}</style>"


def main() -> None:
    """Draws the page that the address names."""
    st.set_page_config(page_title="nviz", page_icon=str(_ICON), layout="wide", initial_sidebar_state=240)
    st.html(_STYLE)
    page = st.navigation(
        [
            st.Page(_PAGES_DIR / f"{name}.py", title=title, icon=icon, url_path=name, default=name == "runs")
            for name, (title, icon) in PAGES.items()
        ]
    )
    try:
        known = ui.entries()
    except NmoeError as error:
        st.error(str(error), icon=":material/error:")
        return
    if not known:
        _explain()
        return
    chosen = ui.choose_runs(known)
    watched = [*chosen, *(entry for entry in known.values() if entry.live and entry not in chosen)]
    ui.live(_alerts, watched, what="Alerts")([entry.key for entry in watched])
    with ui.guard(page.title):
        page.run()
    if _PLOTLY:
        st.html(_PRELOAD.replace("NAME", _PLOTLY[0].name), unsafe_allow_javascript=True)


def _alerts(keys: list[str]) -> None:
    """The rules that hold for the runs in view and for every running one: on every page, errors first."""
    with ui.guard("Alerts"):
        rules = alerts.load_rules(ui.settings().alerts)
        known = ui.entries()
        found = [alert for key in keys if key in known for alert in alerts.try_rules(known[key], rules)]
        found.sort(key=lambda alert: alerts.LEVELS.index(alert.rule.level))
        lines = [
            f"{_SIGNS[alert.rule.level]} **{alert.run}: {alert.rule.name}.** {alert.text}"
            for alert in found[:SHOWN_ALERTS]
        ]
        if len(found) > SHOWN_ALERTS:
            lines.append(f"{len(found) - SHOWN_ALERTS} more on the page Alerts.")
        if lines:
            st.caption("  \n".join(lines))


@st.fragment(run_every=ui.REFRESH_S)
def _explain() -> None:
    """What to do where there is no run; goes away by itself when one appears."""
    if ui.entries():
        st.rerun()
    roots = ui.settings().runs
    st.title("No run yet")
    st.markdown(
        "This dashboard shows the runs in "
        + ", ".join(f"`{root}`" for root in roots)
        + ", and there is none so far. Start one, and it appears here before its first step:"
    )
    st.code("uv run nmoe-train configs/quickstart.toml", language="bash")
    st.markdown("If your runs lie elsewhere, name their folder:")
    st.code("uv run streamlit run nviz -- --runs DIR", language="bash")
