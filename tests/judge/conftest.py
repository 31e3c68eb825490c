# SPDX-License-Identifier: Apache-2.0
"""What the judge's tests share: a server on a real socket, and the command in a real process."""

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

BIN = Path(sys.executable).parent
SERVER = Path(__file__).with_name("openai_server.py")
STARTER = Path(__file__).with_name("starter.py")

Ended = subprocess.CompletedProcess[str]


class Server:
    """A running `openai_server.py`."""

    def __init__(self, *arguments: str):
        self._process = subprocess.Popen(
            [sys.executable, str(SERVER), "--port", "0", *arguments], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        assert self.url.startswith("http://127.0.0.1:")

    def _call(self, path: str, values: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if values is None else json.dumps(values).encode()
        with urllib.request.urlopen(self.url.removesuffix("/v1") + path, data=data, timeout=10) as answer:
            return json.loads(answer.read())

    def stats(self) -> dict[str, Any]:
        """Counts so far."""
        return self._call("/stats")

    def control(self, **values: Any) -> None:
        """Changes options while it runs."""
        self._call("/control", values)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait(timeout=10)
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Starts servers; they end with the test."""
    running: list[Server] = []

    def start(*arguments: str) -> Server:
        running.append(Server(*arguments))
        return running[-1]

    yield start
    for server in running:
        server.stop()


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment of its own: cache and home under the test's folder, and a key that must appear nowhere."""
    return os.environ | {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HOME": str(tmp_path),
        "OPENAI_API_KEY": "sk-planted-3141592653589793",
        "NO_COLOR": "1",
    }


class Starter:
    """A running `starter.py`."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # it forks, and so should have no thread
        self._process = subprocess.Popen(
            [sys.executable, str(STARTER)], env=environment, stdin=pipe, stdout=pipe, text=True, bufsize=1
        )

    def run(self, arguments: Sequence[str], *, folder: Path, environment: dict[str, str], stdin: str) -> Ended:
        """Runs one command to its end; after four minutes it is ended."""
        streams = [folder / f".std{name}" for name in ("in", "out", "err")]
        for stream, text in zip(streams, (stdin, "", ""), strict=True):
            stream.write_text(text)
        wanted = {"arguments": arguments, "folder": folder, "environment": environment, "streams": streams}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(wanted, default=str) + "\n")
        pid = int(self._process.stdout.readline())
        clock = threading.Timer(240, os.kill, [pid, signal.SIGKILL])
        clock.start()
        status = int(self._process.stdout.readline())
        clock.cancel()
        _, out, err = (stream.read_text() for stream in streams)
        for stream in streams:
            stream.unlink()
        return Ended(arguments, status, out, err)

    def stop(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=10)
        self._process.stdout.close()


@pytest.fixture(scope="session")
def starter() -> Iterator[Starter]:
    starter = Starter()
    yield starter
    starter.stop()


@pytest.fixture
def hydra(tmp_path: Path, environment: dict[str, str], starter: Starter) -> Callable[..., Ended]:
    """Runs hydra-judge in the test's folder and checks its exit code; no run may show a traceback."""

    def run(*arguments: str, expect: int = 0, stdin: str = "") -> Ended:
        result = starter.run(arguments, folder=tmp_path, environment=environment, stdin=stdin)
        assert result.returncode == expect, f"{arguments}\n{result.stdout}\n{result.stderr}"
        assert "Traceback" not in result.stderr
        if expect == 2:
            lines = result.stderr.strip().splitlines()
            assert len(lines) == 1, result.stderr
            assert lines[0].startswith("error: ")
        return result

    return run


@pytest.fixture
def score(hydra: Callable[..., Any]) -> Callable[..., Any]:
    """Runs `hydra-judge score` against a server with the usual options."""

    def run(server: Server, *arguments: str, output: str = "scored", expect: int = 0, **more: Any) -> Any:
        usual = ("--rubric", "educational", "--base-url", server.url, "--model", "test-model", "--output", output)
        return hydra("score", *arguments, *usual, "--quiet", expect=expect, **more)

    return run


def write_jsonl(path: Path, documents: list[dict[str, Any]]) -> Path:
    """Writes a corpus."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Callable[..., Path]:
    """Writes a corpus of `count` short documents whose right score stands in their text."""

    def write(name: str = "corpus.jsonl", *, count: int = 60, start: int = 0) -> Path:
        numbers = range(start, start + count)
        documents = [{"id": f"d{n}", "text": f"Text number {n} of the corpus. [[score={n % 6}]]"} for n in numbers]
        return write_jsonl(tmp_path / name, documents)

    return write


@pytest.fixture
def scored(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Reads the scored documents of an output folder by its manifest."""

    def read(output: str = "scored") -> list[dict[str, Any]]:
        folder = tmp_path / output
        header = json.loads((folder / "scored.json").read_text())
        lines = [line for part in header["parts"] for line in (folder / part["path"]).read_text().splitlines()]
        return [json.loads(line) for line in lines]

    return read
