# SPDX-License-Identifier: Apache-2.0
"""Figures of the devices, sampled from a thread of its own: what the driver says must never hold up a step.

NVML answers in 0.1 to 10 ms a question, and takes seconds where a driver is in trouble.
"""

import logging
import threading
from collections.abc import Callable, Mapping

import numpy as np
import pynvml
import torch

from nmoe.formats.metrics import MetricWriter

__all__ = ["Sampler", "gpu_reader"]

_log = logging.getLogger(__name__)
Reader = Callable[[], Mapping[str, np.ndarray]]


class Sampler:
    """Writes what `read` gives into the metric store every few seconds; use as a context manager.

    Args:
        read: values by metric, one a rank of this machine.
        metrics: the store.
        step: the step that the run is at.
        every_s: seconds between samples.
    """

    def __init__(self, read: Reader, *, metrics: MetricWriter, step: Callable[[], int], every_s: float = 5.0):
        self._read, self._metrics, self._step, self._every_s = read, metrics, step, every_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(timeout=10.0)  # a driver that hangs must not hang the end of the run

    def _run(self) -> None:
        complained = False
        while not self._stopping.wait(self._every_s):
            try:
                values = self._read()
            except pynvml.NVMLError as error:
                if not complained:
                    _log.warning("no figures of the GPUs at step %d; training goes on (%s)", self._step(), error)
                complained = True
                continue
            for name, by_rank in values.items():
                self._metrics.log_array(self._step(), name, by_rank, axes=("rank",))


def gpu_reader(devices: int) -> Reader | None:
    """Reads utilisation, power, temperature and memory of the first GPUs that PyTorch sees; None where NVML has no answer.

    Args:
        devices: GPUs of the ranks of this machine; of ranks that see fewer, those that are seen.
    """
    try:
        pynvml.nvmlInit()
        uuids = [torch.cuda.get_device_properties(i).uuid for i in range(min(devices, torch.cuda.device_count()))]
        handles = [pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") for uuid in uuids]
        _read(handles)
    except pynvml.NVMLError as error:
        _log.warning("no figures of the GPUs; training goes on (NVML: %s)", error)
        return None
    return lambda: _read(handles)


def _read(handles: list) -> dict[str, np.ndarray]:
    nvml = pynvml
    return {
        "gpu/utilisation": np.array([int(nvml.nvmlDeviceGetUtilizationRates(h).gpu) / 100 for h in handles]),
        "gpu/power": np.array([nvml.nvmlDeviceGetPowerUsage(h) / 1e3 for h in handles]),
        "gpu/temperature": np.array(
            [float(nvml.nvmlDeviceGetTemperature(h, nvml.NVML_TEMPERATURE_GPU)) for h in handles]
        ),
        "gpu/memory": np.array([float(nvml.nvmlDeviceGetMemoryInfo(h).used) for h in handles]),
    }
