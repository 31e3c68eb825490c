# SPDX-License-Identifier: Apache-2.0
"""`run.json`: a reader always knows whether a run is alive."""

import json
import subprocess
import sys
import time

import pytest

from nmoe.formats import DataError, FormatError
from nmoe.formats.files import in_turn
from nmoe.formats.runs import RunLock, RunRecord, list_runs, read_run


def edit(path, **changes):
    facts = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(facts | changes))


def test_record_goes_from_running_to_finished(tmp_path):
    record = RunRecord(tmp_path, heartbeat_s=0.0)
    record.start(id="abc", config={"train": {"steps": 5}}, steps=5)
    run = read_run(tmp_path)
    assert (run.id, run.status, run.step, run.steps, run.config) == ("abc", "running", 0, 5, {"train": {"steps": 5}})
    record.heartbeat(3)
    assert read_run(tmp_path).step == 3
    record.finish("finished", step=5)
    run = read_run(tmp_path)
    assert (run.status, run.step, run.error) == ("finished", 5, None)
    assert run.finished_at is not None


def test_heartbeat_writes_no_more_often_than_asked(tmp_path):
    record = RunRecord(tmp_path, heartbeat_s=1000.0)
    record.start(id="abc", config={}, steps=5)
    record.heartbeat(3)
    assert read_run(tmp_path).step == 0


def test_heartbeat_goes_on_where_the_clock_of_the_day_is_set_back(tmp_path, monkeypatch):
    record, real = RunRecord(tmp_path, heartbeat_s=0.0), time.time
    record.start(id="abc", config={}, steps=5)
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    record.heartbeat(3)
    assert read_run(tmp_path).step == 3


def test_running_without_heartbeat_reads_as_stale(tmp_path):
    RunRecord(tmp_path).start(id="abc", config={}, steps=5)
    edit(tmp_path, heartbeat_at=time.time() - 59)
    assert read_run(tmp_path).status == "running"
    edit(tmp_path, heartbeat_at=time.time() - 61)
    assert read_run(tmp_path).status == "stale"
    edit(tmp_path, heartbeat_at=time.time() - 61, heartbeat_s=100.0)
    assert read_run(tmp_path).status == "running"
    edit(tmp_path, heartbeat_at=0, status="failed", error="out of memory")
    assert (read_run(tmp_path).status, read_run(tmp_path).error) == ("failed", "out of memory")


def test_resumed_run_keeps_its_start(tmp_path):
    record = RunRecord(tmp_path)
    record.start(id="abc", config={}, steps=5)
    edit(tmp_path, started_at=123.0)
    RunRecord(tmp_path).start(id="abc", config={}, steps=5, step=2)
    assert (read_run(tmp_path).started_at, read_run(tmp_path).step) == (123.0, 2)
    RunRecord(tmp_path).start(id="other", config={}, steps=5)
    assert read_run(tmp_path).started_at != 123.0


def test_git_state_names_the_commit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    RunRecord(tmp_path / "run").start(id="abc", config={}, steps=5)
    assert read_run(tmp_path / "run").git == {}
    for command in ("init -q", "config user.email a@b.c", "config user.name n", "commit -q --allow-empty -m x"):
        subprocess.run(["git", *command.split()], check=True)
    RunRecord(tmp_path / "run").start(id="abc", config={}, steps=5)
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert read_run(tmp_path / "run").git == {"commit": head, "dirty": False}


def test_list_survives_broken_records_and_leaves_the_root_to_nobody(tmp_path):
    root, outside = tmp_path / "runs", tmp_path / "outside"
    for name in ("a", "b", "c", "d", "empty"):
        (root / name).mkdir(parents=True)
    outside.mkdir()
    RunRecord(root / "a").start(id="1", config={}, steps=1)
    RunRecord(outside).start(id="2", config={}, steps=1)
    (root / "link").symlink_to(outside)
    (root / "b" / "run.json").write_text("{")
    (root / "c" / "run.json").write_text('{"format": "nmoe-run", "version": 9}')
    (root / "d" / "run.json").write_text('{"format": "nmoe-run", "version": 1, "status": "odd"}')
    found = {run.name: run for run in list_runs(root)}
    assert sorted(found) == ["a", "b", "c", "d"]
    assert found["a"].status == "running"
    assert {found[name].status for name in "bcd"} == {"unreadable"}
    assert "version 9 is newer" in str(found["c"].error)
    assert list_runs(tmp_path / "nowhere") == []


def test_read_names_what_is_missing(tmp_path):
    with pytest.raises(DataError, match="not found"):
        read_run(tmp_path)
    RunRecord(tmp_path).start(id="1", config={}, steps=1)
    edit(tmp_path, heartbeat_at="yesterday")
    with pytest.raises(FormatError, match="incomplete"):
        read_run(tmp_path)


def test_lock_keeps_a_second_process_out(tmp_path):
    attempt = [
        sys.executable,
        "-c",
        "import sys; from nmoe.formats.runs import RunLock; RunLock(sys.argv[1])",
        str(tmp_path),
    ]
    lock = RunLock(tmp_path)
    refused = subprocess.run(attempt, capture_output=True, text=True)
    assert refused.returncode != 0
    assert "another process is training there" in refused.stderr
    lock.release()
    assert subprocess.run(attempt, capture_output=True).returncode == 0


def test_start_that_another_one_holds_up_says_so(tmp_path):
    with (
        in_turn(tmp_path / "turn"),
        pytest.raises(DataError, match=r"turn: held for 0\.1 s by another process"),
        in_turn(tmp_path / "turn", patience_s=0.1),
    ):
        pass
    with in_turn(tmp_path / "turn", patience_s=0.0):
        pass
