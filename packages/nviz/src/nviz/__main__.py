# SPDX-License-Identifier: Apache-2.0
"""Entry point of `nviz` and `python -m nviz`: Ctrl-C while packages are imported is one line."""

import sys

from nmoe.commands import enter

__all__ = ["main"]


def main() -> int | None:
    """Runs the command line."""
    return enter("nviz.cli", "main")


if __name__ == "__main__":
    sys.exit(main())
