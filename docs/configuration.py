# SPDX-License-Identifier: Apache-2.0
"""Parts of the documents that are made from the code: every config key, and the help of `nmoe-train` and `nmoe-prep`.

`uv run python docs/configuration.py` rewrites them between their markers; a test fails when they are out of date. A
key's text is the string under its field in `nmoe.config.schema`, its type and range are its annotation.
"""

import argparse
import ast
import dataclasses
import inspect
import os
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nmoe import cli
from nmoe.checkpoint.cli import checkpoint_parser
from nmoe.config import Config, Source, schema
from nmoe.config.load import describe
from nmoe.config.rules import FREE_KEYS
from nmoe.config.text import format_value

DOCS = Path(__file__).parent


def field_texts() -> dict[tuple[str, str], str]:
    """(class, field) -> the string that stands under the field in `nmoe.config.schema`."""
    texts = {}
    for node in ast.parse(inspect.getsource(schema)).body:
        if isinstance(node, ast.ClassDef):
            for field, text in zip(node.body, node.body[1:], strict=False):
                if (
                    isinstance(field, ast.AnnAssign)
                    and isinstance(field.target, ast.Name)
                    and isinstance(text, ast.Expr)
                    and isinstance(text.value, ast.Constant)
                ):
                    texts[node.name, field.target.id] = " ".join(str(text.value.value).split())
    return texts


def _table(kind: Any) -> Iterator[str]:
    texts, hints = field_texts(), typing.get_type_hints(kind, include_extras=True)
    yield "| key | value | default | meaning |"
    yield "|---|---|---|---|"
    for field in dataclasses.fields(kind):
        default = "**required**" if field.default is dataclasses.MISSING else f"`{format_value(field.default)}`"
        value = describe(hints[field.name]).replace("|", "\\|")
        yield f"| `{field.name}` | {value} | {default} | {texts[kind.__name__, field.name]} |"


def keys() -> str:
    """A heading, the section's text and a table for each section, in the order of the file."""
    lines = []
    for name, kind in typing.get_type_hints(Config).items():
        lines += [f"## [{name}]", "", inspect.cleandoc(kind.__doc__ or ""), "", *_table(kind), ""]
        if name == "data":
            lines += ["An entry of `train` that is a table has these keys:", "", *_table(Source), ""]
    return "\n".join(lines)


def free() -> str:
    """Keys that an unfinished run may change."""
    return ", ".join(f"`{key}`" for key in sorted(FREE_KEYS)) + "."


def _help(make_parser: typing.Callable[[], Any]) -> str:
    os.environ["COLUMNS"] = "100"
    return "\n".join(f"    {line}".rstrip() for line in make_parser().format_help().splitlines())


def checkpoint_help() -> str:
    """Help of `nmoe-checkpoint` and of its verbs."""
    verbs = next(action for action in checkpoint_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return "\n\n".join(_help(make) for make in (checkpoint_parser, *((lambda p=p: p) for p in verbs.choices.values())))


PARTS = {
    "configuration.md": {"keys": keys, "free keys": free},
    "operations.md": {
        "nmoe-train": lambda: _help(cli.train_parser),
        "nmoe-prep": lambda: _help(cli.prep_parser),
        "nmoe-checkpoint": checkpoint_help,
    },
}


def updated(name: str, text: str) -> str:
    """The text of the document `name` with every part made anew."""
    for part, make in PARTS[name].items():
        begin, end = f"<!-- {part}: made by docs/configuration.py -->\n", "<!-- end -->"
        before, found, rest = text.partition(begin)
        assert found, f"{name} has no place for {part!r}"
        text = before + begin + make() + "\n" + end + rest.partition(end)[2]
    return text


if __name__ == "__main__":
    for document in PARTS:
        path = DOCS / document
        path.write_text(updated(document, path.read_text(encoding="utf-8")), encoding="utf-8")
        sys.stderr.write(f"{document}: up to date\n")
