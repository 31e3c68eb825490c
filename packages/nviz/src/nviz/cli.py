# SPDX-License-Identifier: Apache-2.0
"""`nviz`: the dashboard as a command, also where only its wheel is installed, and `nviz export RUN`.

`nviz` starts Streamlit on the script inside the package, whose folder holds the same server settings as
`streamlit run nviz` uses: loopback only, no usage statistics.
"""

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from nmoe.formats import DataError, NmoeError
from nmoe.formats.files import write_text
from nviz.alerts import load_rules
from nviz.catalog import list_entries
from nviz.settings import Settings, SettingsError, add_arguments, from_arguments
from nviz.source import UnpublishedError

__all__ = ["main"]

SCRIPT = Path(__file__).parent / "serve" / "streamlit_app.py"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _export(words[1:]) if words[:1] == ["export"] else _serve(words)
    except NmoeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _serve(words: list[str]) -> NoReturn:
    parser = argparse.ArgumentParser(
        prog="nviz",
        description="See what the model is doing, while it does it.",
        epilog="`nviz export RUN` writes one run as a single HTML file; see `nviz export --help`.",
    )
    add_arguments(parser)
    parser.add_argument("--port", type=int, default=8501, help="port on 127.0.0.1 (default: %(default)s)")
    parsed = parser.parse_args(words)
    chosen = from_arguments(parsed)
    if not 1 <= parsed.port <= 65535:
        raise SettingsError(f"--port {parsed.port}: expected 1 to 65535")
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", parsed.port))
        except OSError as error:
            raise SettingsError(
                f"--port {parsed.port}: cannot be had ({error.strerror}), another dashboard may be there; "
                "open that one, or give another port"
            ) from None
    load_rules(chosen.alerts)  # refused here, not first on a page
    for root in parsed.runs or []:
        if not root.exists():
            print(f"{root}: does not exist yet; its runs are shown once it does", file=sys.stderr)
    flags = [word for root in chosen.runs for word in ("--runs", str(root))]
    flags += [word for root in chosen.data for word in ("--data", str(root))]
    flags += ["--alerts", str(chosen.alerts)] if chosen.alerts else []
    command = [sys.executable, "-m", "nviz.server", "run", str(SCRIPT), "--server.port", str(parsed.port), "--", *flags]
    os.execv(command[0], command)  # noqa: S606 - no process between, so that a signal to the command ends the server


def _export(words: list[str]) -> int:
    from nviz.report import report  # Plotly is loaded only where it is used

    parser = argparse.ArgumentParser(
        prog="nviz export", description="Write a run as one HTML file that needs nothing else."
    )
    parser.add_argument("run", metavar="RUN", help="the run's name below --runs, or its folder")
    parser.add_argument("--output", type=Path, metavar="FILE", help="file to write (default: RUN.html; - for stdout)")
    add_arguments(parser)
    parsed = parser.parse_args(words)
    chosen, key = from_arguments(parsed), parsed.run
    if Path(key).is_dir() and (Path(key) / "run.json").is_file():
        chosen = Settings(runs=(Path(key).resolve().parent,), data=chosen.data)
        key = Path(key).resolve().name
    entries = list_entries(chosen)
    if key not in entries:
        names = ", ".join(list(entries)[:8]) or "none"
        raise DataError(f"{parsed.run}: no such run below {', '.join(map(str, chosen.runs))}; expected one of: {names}")
    try:
        text = report(entries[key])
    except UnpublishedError as error:
        raise DataError(f"{parsed.run}: {error}; give the same command once the run has") from None
    if str(parsed.output) == "-":
        sys.stdout.write(text)
        return 0
    output = parsed.output or Path(f"{key.replace('/', '-')}.html")
    try:
        write_text(output, text)
    except OSError as error:
        raise SettingsError(f"{output}: cannot be written ({error.strerror})") from None
    print(output)
    return 0
