# SPDX-License-Identifier: Apache-2.0
"""The tests' server, for the judge's benchmarks: it ends with them, however they end."""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

__all__ = ["Server"]

_PATIENCE_S = 120.0  # longer than any outage that is asked for
SCRIPT = Path(__file__).parents[1] / "tests" / "judge" / "openai_server.py"


class Server:
    """A running test server; use as a context manager."""

    def __init__(self, *arguments: str):
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "--port", "0", *arguments], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def call(self, path: str, values: dict[str, Any] | None = None) -> dict[str, Any]:
        """What it says of itself, or is told; in an outage, when it hangs up on everybody, it is asked until that is over."""
        data = None if values is None else json.dumps(values).encode()
        until = time.monotonic() + _PATIENCE_S
        while True:
            try:
                with urllib.request.urlopen(self.url.removesuffix("/v1") + path, data=data, timeout=30) as answer:
                    return json.loads(answer.read())
            except (ConnectionError, urllib.error.URLError):
                if self._process.poll() is not None or time.monotonic() > until:
                    raise
                time.sleep(0.05)
