# SPDX-License-Identifier: Apache-2.0
"""What a dashboard may look at: the folders named on its command line, and nothing else.

The same parser serves `nviz`, `streamlit run nviz -- ...` and the tests, so that a flag means one thing everywhere.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from nmoe.commands import find_empty
from nmoe.formats import NmoeError

__all__ = ["Settings", "SettingsError", "add_arguments", "from_arguments", "parse_settings"]


class SettingsError(NmoeError):
    """The dashboard was started with a flag or a file that cannot be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The folders and rules that one dashboard serves."""

    runs: tuple[Path, ...]
    """Roots whose direct subfolders are runs; absolute, symbolic links resolved."""
    data: tuple[Path, ...]
    """Folders whose token shards and scored documents may be shown; absolute, symbolic links resolved."""
    alerts: Path | None = None
    """TOML file of alert rules; None: the built-in rules."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say what may be looked at."""
    parser.add_argument(
        "--runs",
        action="append",
        type=Path,
        metavar="DIR",
        help="folder that holds run folders; may be given several times (default: runs)",
    )
    parser.add_argument(
        "--data",
        action="append",
        type=Path,
        metavar="DIR",
        help="folder whose shards and scored documents may be shown; may be given several times (default: data)",
    )
    parser.add_argument(
        "--alerts", type=Path, metavar="FILE", help="TOML file of alert rules (default: the built-in rules)"
    )


def from_arguments(arguments: argparse.Namespace) -> Settings:
    """The settings that parsed flags ask for.

    Raises:
        SettingsError: if a path is a file where a folder is expected, or the rules do not exist.
    """
    for path in [*(arguments.runs or []), *(arguments.data or [])]:
        if path.exists() and not path.is_dir():
            raise SettingsError(f"{path}: is a file, expected a folder; name the folder that holds it")
    if arguments.alerts is not None and not arguments.alerts.is_file():
        raise SettingsError(f"{arguments.alerts}: not found; expected a TOML file of alert rules (--alerts)")
    return Settings(
        runs=tuple(path.resolve() for path in arguments.runs or [Path("runs")]),
        data=tuple(path.resolve() for path in arguments.data or [Path("data")]),
        alerts=arguments.alerts.resolve() if arguments.alerts else None,
    )


class _Parser(argparse.ArgumentParser):
    """A parser that raises instead of ending the process: inside a page there is no process to end."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"nviz: {message}; after `--` give --runs DIR, --data DIR or --alerts FILE")


def parse_settings(arguments: Sequence[str]) -> Settings:
    """Settings from the words after `--`.

    Raises:
        SettingsError: on an unknown flag or an empty word, or as `from_arguments` does.
    """
    if fault := find_empty(list(arguments)):
        raise SettingsError(fault)
    parser = _Parser(prog="nviz", add_help=False)
    add_arguments(parser)
    return from_arguments(parser.parse_args(arguments))
