# SPDX-License-Identifier: Apache-2.0
"""The commands: where they listen, what they refuse."""

import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from nviz import cli

REPOSITORY = Path(__file__).resolve().parents[2]


def listening(port: int) -> set[str]:
    """Local addresses of sockets that listen on a port, as Linux lists them."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            if state == "0A" and int(local.split(":")[1], 16) == port:
                found.add(local.split(":")[0])
    return found


def test_streamlit_run_nviz_listens_on_loopback_only(serve: Callable[..., str], tmp_path: Path):
    port = int(serve("--runs", str(tmp_path)).rpartition(":")[2])
    assert listening(port) == {"0100007F"}


def test_command_serves_the_same_as_streamlit_run(tmp_path: Path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "nviz", "--runs", str(tmp_path), "--port", str(port)],
        cwd=tmp_path, stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=5) as answer:
                    assert answer.status == 200
                    break
            except OSError:
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.1)
        assert listening(port) == {"0100007F"}
    finally:
        process.terminate()
        process.wait(timeout=20)
    assert not listening(port)  # a signal to the command ends the server


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--runs", "pyproject.toml"], "expected a folder"),
        (["--alerts", "no.toml"], "not found"),
        (["--alerts", "pyproject.toml"], "expected [[rule]] tables"),
        (["--port", "99999"], "--port 99999: expected 1 to 65535"),
        (["--port", "0"], "--port 0: expected 1 to 65535"),
    ],
)
def test_command_refuses_bad_paths_in_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(REPOSITORY)
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert words in error
    assert error.count("\n") == 1


def test_command_names_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert cli.main(["--port", str(port)]) == 2
    assert capsys.readouterr().err.startswith(f"error: --port {port}: cannot be had (Address already in use)")


def test_server_settings_are_one_file_for_both_ways_to_start():
    package = REPOSITORY / "packages" / "nviz"
    assert (package / ".streamlit").resolve() == (cli.SCRIPT.parent / ".streamlit").resolve()
    found = tomllib.loads((package / ".streamlit" / "config.toml").read_text())
    assert found["server"]["address"] == "127.0.0.1"
    assert found["browser"]["gatherUsageStats"] is False
    assert found["client"]["showErrorDetails"] == "none"


def test_nothing_beside_the_script_can_hide_a_package():
    for folder in (REPOSITORY / "packages" / "nviz", cli.SCRIPT.parent):
        assert [path.name for path in folder.glob("*.py")] == ["streamlit_app.py"]
