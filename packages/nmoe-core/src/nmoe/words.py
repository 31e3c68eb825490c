# SPDX-License-Identifier: Apache-2.0
"""Numbers as a person reads them: four significant digits and a unit."""

__all__ = ["MOST_INT", "count", "size"]

MOST_INT = (1 << 63) - 1
"""Largest integer that a key or an option takes: what TOML promises, and NumPy holds."""


def count(number: float) -> str:
    """A number of things: 7.34 B."""
    return _scaled(number, (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0)))


def size(number: float) -> str:
    """A number of bytes: 7.34 GB."""
    return _scaled(number, (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1.0)))


def _scaled(number: float, units: tuple[tuple[str, float], ...]) -> str:
    unit, scale = next((pair for pair in units if number >= pair[1]), units[-1])
    value = number / scale
    return f"{value:,.0f} {unit}".rstrip() if value >= 1e4 else f"{value:.4g} {unit}".rstrip()
