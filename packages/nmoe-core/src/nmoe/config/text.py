# SPDX-License-Identifier: Apache-2.0
"""Python values of a config as TOML text.

The standard library reads TOML and cannot write it; the few forms that a config needs fit here, so no dependency is.
"""

import dataclasses
import json
from typing import Any

__all__ = ["format_value", "to_toml"]


def format_value(value: Any) -> str:
    """`value` (bool, int, float, str, tuple, list or flat dataclass) as a TOML value that reads back as the same."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple | list):
        return "[" + ", ".join(format_value(item) for item in value) + "]"
    pairs = (f"{field.name} = {format_value(getattr(value, field.name))}" for field in dataclasses.fields(value))
    return "{ " + ", ".join(pairs) + " }"


def to_toml(config: Any) -> str:
    """A dataclass of dataclasses as TOML: one table per field, every key written out, in the order of declaration."""
    tables = []
    for section in dataclasses.fields(config):
        table = getattr(config, section.name)
        lines = [f"{field.name} = {format_value(getattr(table, field.name))}" for field in dataclasses.fields(table)]
        tables.append("\n".join([f"[{section.name}]", *lines]) + "\n")
    return "\n".join(tables)
