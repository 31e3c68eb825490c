# SPDX-License-Identifier: Apache-2.0
"""Entry point of `hydra-judge` and `python -m hydra_judge`: Ctrl-C while packages are imported is an end like any other."""

import sys

from nmoe.commands import enter

__all__ = ["main"]


def main() -> int | None:
    """Runs the command line."""
    return enter("hydra_judge.cli", "main", stopped="error: interrupted before anything was done", status=1)


if __name__ == "__main__":
    sys.exit(main())
