# SPDX-License-Identifier: Apache-2.0
"""Figures of devices: on a thread of their own, and no reason to stop."""

import time

import numpy as np
import pynvml
import pytest
import torch

from nmoe.formats.metrics import MetricWriter, open_store
from nmoe.train.sampler import Sampler, gpu_reader


def rows(folder) -> list[tuple]:
    with open_store(folder) as store:
        return store.execute(
            "SELECT name, step, rank, value FROM metrics WHERE name LIKE 'gpu/%' ORDER BY ALL"
        ).fetchall()


def test_samples_are_written_by_rank_and_a_driver_that_fails_is_told_once(tmp_path, caplog):
    calls = []

    def read() -> dict[str, np.ndarray]:
        calls.append(len(calls))
        if 2 <= calls[-1] < 5:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return {"gpu/power": np.array([100.0 + calls[-1], 200.0])}

    with MetricWriter(tmp_path) as metrics:
        with Sampler(read, metrics=metrics, step=lambda: 7, every_s=0.005):
            deadline = time.monotonic() + 30
            while len(calls) < 7:
                assert time.monotonic() < deadline
                time.sleep(0.005)
    found = rows(tmp_path)
    assert [row for row in found if row[3] in (100.0, 101.0, 105.0)] == [
        ("gpu/power", 7, 0, 100.0),
        ("gpu/power", 7, 0, 101.0),
        ("gpu/power", 7, 0, 105.0),
    ]
    assert {row[2] for row in found} == {0, 1}
    assert [record.message.split(";")[0] for record in caplog.records] == ["no figures of the GPUs at step 7"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the driver is there")
def test_machine_without_a_driver_has_no_reader_and_says_why(caplog):
    assert gpu_reader(1) is None
    assert "no figures of the GPUs; training goes on (NVML: " in caplog.text


@pytest.mark.gpu
def test_figures_of_a_gpu_are_plausible():
    read = gpu_reader(1)
    assert read is not None
    held = torch.zeros(1 << 28, dtype=torch.uint8, device="cuda")
    figures = {name: float(values[0]) for name, values in read().items()}
    assert 0 <= figures["gpu/utilisation"] <= 1
    assert 20 < figures["gpu/power"] < 2000
    assert 10 < figures["gpu/temperature"] < 110
    assert held.numel() < figures["gpu/memory"] <= torch.cuda.mem_get_info()[1] * 1.05
