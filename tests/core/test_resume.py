# SPDX-License-Identifier: Apache-2.0
"""Runs as processes that are killed, stopped, started again and read from outside while they train."""

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from nmoe.checkpoint.store import list_checkpoints
from nmoe.formats.metrics import open_store
from nmoe.formats.runs import read_run

STEPS = 60
BIN = Path(sys.executable).parent


def rows(run: Path) -> list[tuple]:
    """Every value that the arithmetic decides, bit for bit, in order; times and speeds left out."""
    with open_store(run) as store:
        return store.execute(
            "SELECT name, step, layer, expert, value FROM metrics WHERE name NOT LIKE 'speed/%'"
            " AND name NOT LIKE 'memory/%' AND name NOT LIKE 'metrics/%' AND name NOT LIKE 'gpu/%' ORDER BY ALL"
        ).fetchall()


def spans(run: Path) -> list[tuple]:
    with open_store(run) as store:
        return store.execute('SELECT step, shard, "start", "end" FROM batches ORDER BY ALL').fetchall()


def wait_for_step(run: Path, step: int, process) -> None:
    """Returns once the run's log has the line of a step that is `step` or later."""
    log, until = run / "log.txt", time.monotonic() + 120
    while time.monotonic() < until:
        done = [int(n) for n in re.findall(r"step +(\d+)/", log.read_text(errors="replace"))] if log.exists() else []
        if done and max(done) >= step:
            return
        assert process.poll() is None, process.said
        time.sleep(0.005)
    raise AssertionError(f"{run} did not reach step {step}")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, start_train):
    """A run that nothing disturbs, read by another process all the while: its folder, and what went wrong in reading."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    process = start_train(folder)
    run, failures, reads, done = folder / "runs" / "tiny", [], [0], threading.Event()

    def read() -> None:
        while not done.wait(0.1):
            log = (run / "log.txt").read_text(errors="replace") if (run / "log.txt").exists() else ""
            if (run / "metrics.duckdb").exists() or re.search(r" step +1/", log):  # there before the first step
                try:
                    with open_store(run) as store:
                        store.execute("SELECT count(*) FROM metrics").fetchall()
                    reads[0] += 1
                except Exception as error:  # noqa: BLE001 - any failure is the finding
                    failures.append((time.monotonic(), repr(error)))

    reader = threading.Thread(target=read)
    reader.start()
    out, _ = process.finish()
    done.set()
    reader.join()
    return run, out, failures, reads[0]


def test_run_ends_with_a_summary_a_status_and_every_step_in_the_store(uninterrupted):
    run, out, _, _ = uninterrupted
    info = read_run(run)
    assert (info.status, info.step, info.steps) == ("finished", STEPS, STEPS)
    assert "held-out loss" in out
    assert "byte-unigram entropy of the same text" in out
    assert "uv run streamlit run nviz" in out
    with open_store(run) as store:
        steps = store.execute("SELECT step FROM metrics WHERE name = 'train/loss' ORDER BY step").fetchall()
        assert steps == [(step,) for step in range(1, STEPS + 1)]
        assert store.execute("SELECT step FROM metrics WHERE name = 'val/loss' ORDER BY step").fetchall() == [
            (20,),
            (40,),
            (60,),
        ]
        first, last = (
            store.execute(
                "SELECT avg(value) FROM metrics WHERE name = 'train/loss' AND step BETWEEN ? AND ?", span
            ).fetchall()
            for span in ([1, 5], [56, 60])
        )
    assert last[0][0] < first[0][0] - 1.0


def test_store_of_a_running_run_opens_at_every_attempt(uninterrupted):
    _, _, failures, reads = uninterrupted
    assert failures == []
    assert reads >= 5


def test_log_has_one_line_a_step_with_the_same_fields(uninterrupted):
    run, _, _, _ = uninterrupted
    lines = [line for line in (run / "log.txt").read_text().splitlines() if re.search(r" step +\d+/", line)]
    assert len(lines) == STEPS
    shape = re.compile(
        r"^\S+Z INFO step +\d+/60  loss \S+ nat/token  grad_norm \S+  lr \S+  [\d,]+ token/s  \S+ s/step  mfu \S+ %"
        r"  rank overload \S+  fullest expert \S+ x mean  mem \S+ GB  eta \S+$"
    )
    assert [line for line in lines if not shape.match(line)] == []


def test_killed_and_stopped_run_goes_on_bit_for_bit_and_the_store_has_every_step_once(
    uninterrupted, tmp_path, start_train
):
    reference = uninterrupted[0]
    run = tmp_path / "runs" / "tiny"
    # Apart, so that a process never finds the log of an earlier one beyond its own moment.
    moments = [random.randint(first, first + 8) for first in (8, 24, 40)]
    ids = set()
    for number, moment in zip((signal.SIGKILL, signal.SIGTERM, signal.SIGINT), moments, strict=True):
        process = start_train(tmp_path)
        wait_for_step(run, moment, process)
        time.sleep(random.random() * 0.02)
        process.send_signal(number)
        out, _ = process.finish(expect=-number if number == signal.SIGKILL else 128 + number)
        ids.add(read_run(run).id)
        if number == signal.SIGKILL:
            continue
        stopped = read_run(run)
        assert stopped.status == "stopped"
        assert list_checkpoints(run / "checkpoints")[-1].name == f"step-{stopped.step:08d}"
        assert "the same command again" in out
    stopped = read_run(run)
    _, err = start_train(tmp_path).finish()
    assert f"going on with runs/tiny at step {stopped.step + 1} of" in err, moments
    assert rows(run) == rows(reference), moments
    assert [row[0::2] for row in spans(run)] == [row[0::2] for row in spans(reference)], moments
    assert read_run(run).status == "finished"
    assert {*ids, read_run(run).id} == {read_run(run).id}
    assert not list((run / "checkpoints").glob(".step-*"))


def test_full_disk_stops_no_training_and_the_older_checkpoint_stays(uninterrupted, tmp_path, start_train):
    """A file system of its own for the checkpoints, with room for one; then the same command where there is room."""
    options = ("train.steps=20", "checkpoint.every=5", "schedule.decay_steps=0")
    start_train(tmp_path, *options, "train.steps=5").finish()
    run = tmp_path / "runs" / "tiny"
    command = [BIN / "nmoe-train", "tiny.toml", *(word for option in options for word in ("--set", option))]
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"status": "stopped"}))
    size = sum(path.stat().st_size for path in (run / "checkpoints").rglob("*.*"))
    script = (
        f"cp -r runs/tiny/checkpoints kept && mount -t tmpfs -o size={size * 3 // 2} tmpfs runs/tiny/checkpoints"
        " && cp -r kept/. runs/tiny/checkpoints && {train}; echo status $?; nmoe-checkpoint verify runs/tiny"
    ).replace("{train}", shlex.join(map(str, command)))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
    full = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    if "unshare: " in full.stderr or "mount: " in full.stderr:
        pytest.skip(f"no file system can be mounted here: {full.stderr.strip()}")
    assert "status 1\n" in full.stdout, full.stderr
    assert "checkpoints/step-00000005: whole" in full.stdout
    assert "step-00000010" not in full.stdout.partition("status 1")[2]
    assert "step-00000015: checkpoint not written: " in full.stderr
    assert "training goes on, older checkpoints stay (2 failed so far)" in full.stderr
    failures = "SELECT step, value FROM metrics WHERE name = 'checkpoint/failures' ORDER BY step"
    with open_store(run) as store:
        assert store.execute(failures).fetchall() == [(10, 1), (15, 2), (20, 3)]
        assert store.execute("SELECT max(step) FROM metrics WHERE name = 'train/loss'").fetchall() == [(20,)]
    assert read_run(run).status == "failed"
    _, err = start_train(tmp_path, *options).finish()
    assert "at step 6 of 20" in err
    losses = "SELECT step, value FROM metrics WHERE name = 'train/loss' AND step <= 20 ORDER BY step"
    with open_store(run) as store, open_store(uninterrupted[0]) as reference:
        assert store.execute(losses).fetchall() == reference.execute(losses).fetchall()
        assert store.execute(failures).fetchall() == []
