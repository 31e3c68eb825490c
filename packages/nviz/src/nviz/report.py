# SPDX-License-Identifier: Apache-2.0
"""`nviz export RUN`: one HTML file that needs nothing else: no server, no network, no folder beside it."""

import html
import json
import time
from collections.abc import Iterator

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from nmoe.formats import NmoeError
from nviz import alerts, charts, queries, series
from nviz.catalog import Entry
from nviz.heatmaps import heatmap
from nviz.points import Line
from nviz.summary import flatten

__all__ = ["report"]

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1200px; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
td, th { border-bottom: 1px solid #8C8C8C; padding: 0.2rem 0.8rem; text-align: left; vertical-align: top; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(480px, 1fr)); gap: 1rem; }
.chart { background: #fff; border-radius: 6px; }
"""


def report(entry: Entry) -> str:
    """The report of a run: facts, alerts, every scalar metric, the newest loads, spikes, configuration.

    Raises:
        DataError: if the run has no readable store.
    """
    store = entry.store()
    with store.session():
        measures = entry.measures()
        figures = list(_figures(entry, measures))
        found = entry.spikes()
    info = entry.info
    facts = {
        "status": info.status,
        "step": f"{info.step:,} of {info.steps:,}",
        "started": _clock(info.started_at),
        "last sign of life": _clock(info.heartbeat_at),
        "error": info.error or "",
        "commit": f"{info.git.get('commit', '')}{' with changes' if info.git.get('dirty') else ''}",
        "host": info.host,
        "exported": _clock(time.time()),
    }
    warnings = [[alert.rule.level, alert.rule.name, alert.text] for alert in alerts.try_rules(entry, alerts.BUILT_IN)]
    spiked = [[s.name, f"{s.peak:,}", f"{s.value:.5g}", f"{s.usual:.5g}"] for s in found[:50]]
    plots = "".join(f'<div class="chart" id="chart-{number}"></div>' for number in range(len(figures)))
    # "</script" ends a script early and "<!--<script" hides its end, whatever name a run or a metric has.
    data = json.dumps([json.loads(str(figure.to_json())) for figure in figures]).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{html.escape(entry.key)}</title><style>{_STYLE}</style><script>{get_plotlyjs()}</script></head><body>
<h1>{html.escape(entry.key)}</h1>
{_table(["", ""], [[key, value] for key, value in facts.items() if value])}
{"<h2>Alerts</h2>" + _table(["level", "rule", "what"], warnings) if warnings else ""}
<h2>Metrics</h2><div class="charts">{plots}</div>
{"<h2>Spikes</h2>" + _table(["metric", "step", "value", "median before"], spiked) if spiked else ""}
<h2>Configuration</h2>{_table(["key", "value"], [[key, value] for key, value in flatten(info.config).items()])}
<script>const figures = {data};
figures.forEach((figure, number) => Plotly.newPlot("chart-" + number, figure.data, figure.layout, {{responsive: true, displaylogo: false}}));
</script></body></html>
"""


def _clock(seconds: float | None) -> str:
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(seconds))


def _table(head: list[str], rows: list[list[str]]) -> str:
    cells = "".join(f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    title = f"<tr>{''.join(f'<th>{html.escape(cell)}</th>' for cell in head)}</tr>" if any(head) else ""
    return f"<table>{title}{cells}</table>"


def _figures(entry: Entry, measures: dict[str, queries.Measure]) -> Iterator[go.Figure]:
    for measure in measures.values():
        try:
            if measure.scalar:
                line = series.curve(entry, Line(name=measure.name), series.View(), number=0, label=entry.key)
                unit = measure.unit if measure.unit != "1" else ""
                yield charts.curves([line], title=measure.name, x_title="step", y_title=unit)
            elif measure.layers and measure.experts:
                yield _grid(entry, measure)
        except NmoeError as error:
            yield go.Figure().update_layout(title=f"{measure.name}: {error}")


def _grid(entry: Entry, measure: queries.Measure) -> go.Figure:
    picture = entry.grid(measure.name, measure.last_step)
    return heatmap(
        picture,
        title=f"{measure.name} at step {measure.last_step:,}",
        x_title="expert",
        y_title="layer",
        value_title=measure.unit,
        mark_zero=True,
        height=340,
    )
