# SPDX-License-Identifier: Apache-2.0
"""The metric store: always readable from another process, and nothing that was acknowledged is lost."""

import gzip
import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import duckdb
import numpy as np
import pytest

from nmoe.formats import DataError, FormatError
from nmoe.formats.metrics import CATALOGUE, MetricWriter, open_store


@pytest.fixture
def golden(tmp_path):
    """A store written by version 1, as a file to open or to spoil."""
    path = tmp_path / "golden.duckdb"
    path.write_bytes(gzip.decompress((Path(__file__).parent / "golden" / "metrics.duckdb.gz").read_bytes()))
    return path


def rows(path: Path, query: str) -> list[tuple]:
    with open_store(path) as store:
        return store.execute(query).fetchall()


def test_store_is_published_before_anything_is_logged(tmp_path):
    with MetricWriter(tmp_path):
        assert rows(tmp_path, "SELECT count(*) FROM metrics") == [(0,)]
        assert dict(rows(tmp_path, "SELECT name, unit FROM catalogue")) == {
            metric.name: metric.unit for metric in CATALOGUE.values()
        }


def test_values_arrays_and_batches_come_back(tmp_path):
    load = np.arange(6, dtype=np.float32).reshape(2, 3)
    with MetricWriter(tmp_path) as writer:
        writer.log(1, {"train/loss": 2.5, "train/grad_norm": float("nan"), "val/loss": float("inf")})
        writer.log_array(1, "router/load", load, axes=("layer", "expert"))
        writer.log_array(1, "speed/rank_step_time", np.array([0.5]), axes=("rank",))
        writer.log_batches(1, [("shard-00000.npy", 0, 17), ("shard-00001.npy", 5, 9)])
    assert rows(tmp_path, "SELECT step, value, layer, expert, rank FROM metrics WHERE name = 'train/loss'") == [
        (1, 2.5, None, None, None)
    ]
    assert rows(tmp_path, "SELECT isnan(value) FROM metrics WHERE name = 'train/grad_norm'") == [(True,)]
    assert rows(tmp_path, "SELECT isinf(value) FROM metrics WHERE name = 'val/loss'") == [(True,)]
    found = rows(tmp_path, "SELECT layer, expert, value FROM metrics WHERE name = 'router/load' ORDER BY ALL")
    assert found == [(layer, expert, float(load[layer, expert])) for layer in range(2) for expert in range(3)]
    assert rows(tmp_path, "SELECT layer, rank FROM metrics WHERE name = 'speed/rank_step_time'") == [(None, 0)]
    assert rows(tmp_path, "SELECT * FROM batches ORDER BY shard") == [
        (1, "shard-00000.npy", 0, 17),
        (1, "shard-00001.npy", 5, 9),
    ]
    assert abs(rows(tmp_path, "SELECT max(time) FROM metrics")[0][0] - time.time()) < 60


def test_entries_keep_the_numbers_of_their_layers(tmp_path):
    with MetricWriter(tmp_path) as writer:
        writer.log_array(
            1, "router/load", np.array([[0.25, 0.75], [1.0, 0.0]]), axes=("layer", "expert"), layers=[1, 4]
        )
        writer.log_array(1, "router/entropy", np.array([0.5, 0.75]), axes=("layer",), layers=[1, 4])
    found = rows(tmp_path, "SELECT layer, expert, value FROM metrics WHERE name = 'router/load' ORDER BY ALL")
    assert found == [(1, 0, 0.25), (1, 1, 0.75), (4, 0, 1.0), (4, 1, 0.0)]
    assert rows(tmp_path, "SELECT layer, value FROM metrics WHERE name = 'router/entropy' ORDER BY ALL") == [
        (1, 0.5),
        (4, 0.75),
    ]


def test_unlisted_name_raises(tmp_path):
    with MetricWriter(tmp_path) as writer:
        with pytest.raises(KeyError, match="train/typo"):
            writer.log(0, {"train/typo": 1.0})
        with pytest.raises(KeyError, match="router/typo"):
            writer.log_array(0, "router/typo", np.zeros(1), axes=("layer",))


def test_catalogue_names_and_units_are_well_formed():
    for name, metric in CATALOGUE.items():
        area, _, rest = name.partition("/")
        assert name == metric.name
        assert f"{area}{rest}".replace("_", "").isalnum()
        assert name == name.lower()
        assert metric.unit
        assert metric.meaning.endswith(".")


def test_publication_follows_the_interval_and_leaves_no_debris(tmp_path):
    with MetricWriter(tmp_path, publish_s=0.05) as writer:
        writer.log(0, {"train/loss": 1.0})
        deadline = time.monotonic() + 20
        while not rows(tmp_path, "SELECT 1 FROM metrics WHERE name = 'train/loss'"):
            assert time.monotonic() < deadline, "never published"
            time.sleep(0.02)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".metrics.working.duckdb", "metrics.duckdb"]


def test_resume_keeps_the_history_and_replaces_overlapping_steps(tmp_path):
    with MetricWriter(tmp_path) as writer:
        for step in range(10):
            writer.log(step, {"train/loss": 1.0})
            writer.log_batches(step, [("a", step, step + 1)])
    with MetricWriter(tmp_path, resume_step=6) as writer:
        assert rows(tmp_path, "SELECT max(step) FROM metrics") == [(5,)]
        for step in range(6, 12):
            writer.log(step, {"train/loss": 2.0})
    found = rows(tmp_path, "SELECT step, value FROM metrics WHERE name = 'train/loss' ORDER BY step")
    assert found == [(step, 1.0 if step < 6 else 2.0) for step in range(12)]
    assert rows(tmp_path, "SELECT max(step) FROM batches") == [(5,)]
    (tmp_path / ".metrics.working.duckdb").unlink()
    with MetricWriter(tmp_path, resume_step=3):
        assert rows(tmp_path, "SELECT count(*) FROM metrics WHERE name = 'train/loss'") == [(3,)]
    with MetricWriter(tmp_path):
        assert rows(tmp_path, "SELECT count(*) FROM metrics") == [(0,)]


def test_resume_from_a_damaged_store_is_one_clear_error(tmp_path):
    (tmp_path / ".metrics.working.duckdb").write_bytes(b"not a database" * 1000)
    with pytest.raises(DataError, match=r"\.metrics\.working\.duckdb: cannot be written .*damaged remove"):
        MetricWriter(tmp_path, resume_step=1)
    for path in tmp_path.glob(".metrics.working.duckdb*"):
        path.unlink()
    MetricWriter(tmp_path, resume_step=1).close()  # as it was told


WRITER = """
    import sys, time
    from nmoe.formats.metrics import MetricWriter
    writer = MetricWriter(sys.argv[1], publish_s=0.01)
    for step in range(100_000):
        writer.log(step, {"train/loss": float(step)})
        if step % 50 == 49:
            writer.flush()
            print(step, flush=True)
"""


def test_reader_in_another_process_never_fails_and_kill_9_loses_nothing(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    acknowledged = int(process.stdout.readline())
    for _ in range(40):
        assert rows(tmp_path, "SELECT max(step) FROM metrics")[0][0] >= 49
        acknowledged = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert rows(tmp_path, "SELECT count(*) FROM metrics WHERE name = 'train/loss'")[0][0] > acknowledged
    with MetricWriter(tmp_path, resume_step=1 << 40):
        count, last = rows(tmp_path, "SELECT count(*), max(step) FROM metrics WHERE name = 'train/loss'")[0]
    assert last >= acknowledged
    assert count == last + 1


def test_a_disk_that_fails_never_stops_training(tmp_path, monkeypatch, caplog):
    writer = MetricWriter(tmp_path, publish_s=1e9)
    writer.log(0, {"train/loss": 1.0})
    writer.flush()
    connection = writer._connection
    writer._connection = duckdb.connect()  # no tables: each insert fails as on a full disk
    monkeypatch.setattr(shutil, "copyfile", _no_space)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            writer.log(1, {"train/loss": 1.0, "train/grad_norm": 1.0})
            writer.flush()
    assert writer.dropped_rows >= 6
    assert caplog.text.count("rows lost") == 1, "one line a minute, not one a step"
    assert "not published" in caplog.text
    monkeypatch.undo()
    writer._connection = connection
    writer.log(2, {"train/loss": 1.0})
    writer.close()
    assert rows(tmp_path, "SELECT step FROM metrics WHERE name = 'train/loss' ORDER BY step") == [(0,), (2,)]
    assert rows(tmp_path, "SELECT max(value) >= 6 FROM metrics WHERE name = 'metrics/dropped_rows'") == [(True,)]


def _no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_store_golden_file_is_read(golden):
    assert rows(
        golden, "SELECT name, step, value, layer, expert FROM metrics WHERE name <> 'metrics/publish_time' ORDER BY ALL"
    ) == [
        ("router/load", 1, 0.25, 0, 0),
        ("router/load", 1, 0.75, 0, 1),
        ("train/loss", 1, 3.5, None, None),
    ]
    assert rows(golden, "SELECT * FROM batches") == [(1, "shard-00000.npy", 0, 65)]


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda path, data: None, "not found"),
        (lambda path, data: path.write_bytes(b""), "not a metric store|cannot be opened"),
        (lambda path, data: path.write_bytes(data[:5000]), "cannot be opened"),
        (lambda path, data: duckdb.connect(str(path)).close(), "not a metric store"),
    ],
)
def test_open_names_what_is_wrong(tmp_path, golden, make, found):
    make(tmp_path / "metrics.duckdb", golden.read_bytes())
    with pytest.raises(DataError, match=found), open_store(tmp_path):
        pass


def test_open_refuses_a_newer_version(golden):
    with duckdb.connect(str(golden)) as store:
        store.execute("UPDATE store SET value = '2' WHERE key = 'version'")
    with pytest.raises(FormatError, match="version 2 is newer"), open_store(golden):
        pass
