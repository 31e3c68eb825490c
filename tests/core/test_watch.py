# SPDX-License-Identifier: Apache-2.0
"""Beside the run: a heartbeat that tells training from hanging, and signals that ask for an orderly end."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nmoe.formats.runs import RUN_FILE, RunRecord
from nmoe.train.watch import StopSignal, Watch


@pytest.fixture
def record(tmp_path) -> RunRecord:
    record = RunRecord(tmp_path, heartbeat_s=0.02)
    record.start(id="x", config={}, steps=100)
    return record


def facts(folder: Path) -> dict:
    return json.loads((folder / RUN_FILE).read_text())


def until(condition: Callable[[], bool], *, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def test_heartbeat_goes_on_through_a_long_step(tmp_path, record):
    with Watch(record, least_s=0.2, factor=1e6) as watch:
        watch.progress(1)
        time.sleep(0.01)
        watch.progress(2)  # from now on 0.01 s and more a step is usual: 1e4 s are no hang
        began = time.time()
        until(lambda: facts(tmp_path)["heartbeat_at"] > began + 0.3)
        assert facts(tmp_path)["step"] == 2
        assert watch.hangs == 0


def test_heartbeat_of_a_hung_run_stops_with_the_stacks_of_all_threads(tmp_path, record):
    def wait_where_the_run_hangs(event: threading.Event) -> None:
        event.wait()

    over = threading.Event()
    hung = threading.Thread(target=wait_where_the_run_hangs, args=(over,), daemon=True)
    hung.start()
    with (tmp_path / "stacks").open("w") as output, Watch(record, least_s=0.2, output=output) as watch:
        watch.progress(1)
        until(lambda: watch.hangs == 1)
        until(lambda: "wait_where_the_run_hangs" in (tmp_path / "stacks").read_text())
        last = facts(tmp_path)["heartbeat_at"]
        time.sleep(0.3)
        assert facts(tmp_path)["heartbeat_at"] == last
        assert watch.hangs == 1, "one hang is told once"
        watch.progress(2)
        until(lambda: facts(tmp_path)["heartbeat_at"] > last and facts(tmp_path)["step"] == 2)
    over.set()
    hung.join()


def test_heartbeat_outlives_a_disk_that_fails(tmp_path, record):
    with Watch(record, least_s=0.2, factor=1e6) as watch:
        watch.progress(1)
        hidden = tmp_path.with_name("hidden")
        tmp_path.rename(hidden)
        time.sleep(0.3)
        hidden.rename(tmp_path)
        watch.progress(7)
        until(lambda: facts(tmp_path)["step"] == 7)


def in_child(work: Callable[[], bool]) -> int:
    """Exit code of a forked process: 0 if `work` is true, minus the number of the signal that ended it."""
    child = os.fork()
    if child == 0:
        os._exit(0 if work() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_is_a_request_and_its_echo_nothing(number):
    def work() -> bool:
        before = signal.getsignal(number)
        with StopSignal() as stop:
            silent = stop.number == 0
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # a launcher passes on what the terminal has sent already
            heard = stop.number == number
        return silent and heard and signal.getsignal(number) is before

    assert in_child(work) == 0


def test_second_signal_ends_the_process_at_once():
    def work() -> bool:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            stop._came_at -= 2.0
            os.kill(os.getpid(), signal.SIGTERM)
        return True

    assert in_child(work) == -signal.SIGTERM
