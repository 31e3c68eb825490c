# SPDX-License-Identifier: Apache-2.0
"""Colours that stay apart for every kind of colour vision, on a light and on a dark page.

Source: Okabe and Ito, "Color Universal Design" (2008), without black (unseen on a dark page) and yellow (unseen on a
light one). A run past the seventh repeats the colours with another dash, so colour never carries a meaning alone.
"""

__all__ = ["ACCENT", "BAD", "DASHES", "MUTED", "SEQUENTIAL", "SERIES", "line_style"]

SERIES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C8C8C")
DASHES = ("solid", "dash", "dot", "dashdot")
SEQUENTIAL = "cividis"
ACCENT, BAD, MUTED = "#0072B2", "#D55E00", "#8C8C8C"


def line_style(index: int) -> dict[str, str]:
    """Plotly `line` of the series number `index` (0, 1, ...)."""
    return {"color": SERIES[index % len(SERIES)], "dash": DASHES[index // len(SERIES) % len(DASHES)]}
