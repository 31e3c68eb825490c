# SPDX-License-Identifier: Apache-2.0
"""Runs on disk, pages in this process, and a served dashboard for a browser."""

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import duckdb
import pytest
from streamlit.testing.v1 import AppTest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "packages" / "nviz" / "streamlit_app.py"


@pytest.fixture(scope="session")
def write_run() -> ModuleType:
    """The module beside this one that makes runs."""
    spec = importlib.util.spec_from_file_location("nviz_write_run", Path(__file__).with_name("write_run.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def fleet(write_run: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs in every state that a dashboard meets."""
    root = tmp_path_factory.mktemp("fleet") / "runs"
    make, Values = write_run.make_run, write_run.Values
    batches = write_run.make_data(root.parent / "data")
    make(root, "baseline", values=Values(seed=1), steps=300)
    top_4 = {"moe": {"num_experts": 16, "top_k": 4}}
    make(root, "spiky", values=Values(seed=2, spike=220), steps=300, batches=batches, config=top_4)
    make(root, "crashed", steps=60, status="failed", error="RuntimeError: device lost", values=Values(seed=3))
    make(root, "silent", steps=60, status="stale")
    broken = {20: {"train/loss": float("nan")}, 30: {"train/loss": float("inf")}, 59: {"train/loss": float("nan")}}
    make(root, "broken_values", steps=60, extra=broken, status="stopped")
    make(root, "no_rows", steps=0, status="running")
    (root / "no_record").mkdir()
    (root / "unreadable").mkdir()
    (root / "unreadable" / "run.json").write_text("{")
    store = make(root, "truncated", steps=60) / "metrics.duckdb"
    store.write_bytes(store.read_bytes()[:20_000])
    with duckdb.connect(str(make(root, "newer", steps=20) / "metrics.duckdb")) as connection:
        connection.execute("UPDATE store SET value = '99' WHERE key = 'version'")
    unpublished = make(root, "unpublished", steps=5, status="running")
    (unpublished / "metrics.duckdb").unlink()
    make(root, "live", steps=200, status="running", values=Values(seed=4))
    return root


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Callable[..., AppTest]:
    """Opens a page as a browser at an address would: page(root, "curves", run=["a", "b"])."""

    def open_page(root: Path, name: str = "runs", *flags: str, **query: str | list[str]) -> AppTest:
        monkeypatch.setattr(
            sys, "argv", [str(SCRIPT), "--runs", str(root), "--data", str(root.parent / "data"), *flags]
        )
        app = AppTest.from_file(str(SCRIPT), default_timeout=60)
        for key, value in query.items():
            app.query_params[key] = value
        app.run()
        if name != "runs":
            app.switch_page(f"src/nviz/pages/{name}.py").run()
        return app

    return open_page


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="session")
def serve() -> Iterator[Callable[..., str]]:
    """Starts `streamlit run nviz -- FLAGS` and returns its address; ends it after the session."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(*flags: str) -> str:
        port = free_port()
        command = [sys.executable, "-m", "streamlit", "run", "nviz", "--server.port", str(port), "--", *flags]
        processes.append(subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT))
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            assert processes[-1].poll() is None, "streamlit ended at once"
            try:
                with urllib.request.urlopen(f"{address}/_stcore/health", timeout=5) as answer:
                    if answer.status == 200:
                        return address
            except OSError:
                time.sleep(0.1)
        raise AssertionError("streamlit does not answer")

    yield start
    for process in processes:
        process.terminate()
        process.wait(timeout=20)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Path]:
    """A folder in which another process writes the run `live`, 20 steps a second, published every second.

    SIGTERM ends the run as one that was stopped on request.
    """
    root = tmp_path / "runs"
    command = [sys.executable, str(Path(__file__).with_name("write_run.py")), str(root), "live"]
    process = subprocess.Popen(command)
    (tmp_path / "pid").write_text(str(process.pid))
    deadline = time.monotonic() + 30
    while not (root / "live" / "metrics.duckdb").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield root
    process.send_signal(signal.SIGKILL)
    process.wait()
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of Debian's browser."""
    found = os.environ.get("NVIZ_CHROMIUM") or shutil.which("chromium")
    if found is None:
        pytest.skip("no chromium on this machine; install it with `apt-get install chromium`")
    return found


def spec_of(chart: object) -> dict:
    """The figure that a chart element of `AppTest` carries."""
    return json.loads(chart.proto.spec)  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def spec() -> Callable[[object], dict]:
    """`spec_of` for tests, which cannot import this file."""
    return spec_of
