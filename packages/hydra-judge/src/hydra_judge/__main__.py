# SPDX-License-Identifier: Apache-2.0
"""Entry point of `hydra-judge` and `python -m hydra_judge`: Ctrl-C while packages are imported is an end like any other."""

import sys

__all__ = ["main"]


def main() -> None:
    """Runs the command line."""
    try:
        from hydra_judge.cli import main as run
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted before anything was done\n")
        sys.exit(1)
    run()


if __name__ == "__main__":
    main()
