# SPDX-License-Identifier: Apache-2.0
"""`nviz`: the dashboard as a command, also where only its wheel is installed.

`nviz` starts Streamlit on the script inside the package, whose folder holds the same server settings as
`streamlit run nviz` uses: loopback only, no usage statistics.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from nmoe.formats import NmoeError
from nviz.settings import add_arguments, from_arguments

__all__ = ["main"]

SCRIPT = Path(__file__).parent / "serve" / "streamlit_app.py"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="nviz", description="See what the model is doing, while it does it.")
    add_arguments(parser)
    parser.add_argument("--port", type=int, default=8501, help="port on 127.0.0.1 (default: %(default)s)")
    parsed = parser.parse_args(arguments)
    try:
        chosen = from_arguments(parsed)
    except NmoeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    words = [word for root in chosen.runs for word in ("--runs", str(root))]
    words += [word for root in chosen.data for word in ("--data", str(root))]
    words += ["--alerts", str(chosen.alerts)] if chosen.alerts else []
    command = [sys.executable, "-m", "streamlit", "run", str(SCRIPT), "--server.port", str(parsed.port), "--", *words]
    try:
        return subprocess.call(command, env=os.environ)
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
