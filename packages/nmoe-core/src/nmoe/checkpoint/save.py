# SPDX-License-Identifier: Apache-2.0
"""Writing checkpoints while training goes on.

Training pauses only for a copy of the tensors to host memory; a thread writes, hashes and completes the checkpoint. A
full or broken disk never stops training: the failure is logged and counted, and the older checkpoints stay.
"""

import logging
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from nmoe.checkpoint.store import commit, prune
from nmoe.errors import CheckpointError

__all__ = ["CheckpointWriter", "write_tensors"]

_log = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes the checkpoints of one run, one at a time.

    Args:
        directory: the run's `checkpoints` folder; made if missing.
        config: the resolved config, as tables.
        keep: complete checkpoints kept.
        before_commit: called on the thread when the tensors are on disk and the manifest is not: what must survive
            together with the checkpoint is flushed here.
        on_failure: called on the thread with the step of a checkpoint that could not be written, and how many could not
            so far.
    """

    def __init__(
        self,
        directory: Path,
        *,
        config: Mapping[str, Any],
        keep: int,
        before_commit: Callable[[], None] = lambda: None,
        on_failure: Callable[[int, int], None] = lambda step, failures: None,
    ):
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._config, self._keep = directory, config, keep
        self._before_commit, self._on_failure = before_commit, on_failure
        self._staged: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._defect: Exception | None = None
        self.failures = 0
        self.last_error = ""

    def save(self, step: int, *, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> float:
        """Takes a copy of the tensors and begins to write it.

        Args:
            step: optimizer steps done.
            tensors: by name, on any device.
            state: counters and positions, JSON values.

        Returns:
            Seconds that training paused: waiting for the checkpoint before, and the copy.
        """
        began = time.perf_counter()
        self.wait()
        self._stage(tensors)
        self._thread = threading.Thread(target=self._run, args=(step, dict(state)), name="checkpoint", daemon=True)
        self._thread.start()
        return time.perf_counter() - began

    def wait(self) -> None:
        """Returns when the checkpoint that is being written is complete or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._defect is not None:
            raise self._defect

    def _stage(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copies to host memory, page-locked where the source is a GPU; the buffers are kept for the next time."""
        on_gpu = False
        for name, tensor in tensors.items():
            on_gpu |= tensor.is_cuda
            if name not in self._staged:
                self._staged[name] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self._staged[name].copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        if on_gpu:
            torch.cuda.synchronize()

    def _run(self, step: int, state: dict[str, Any]) -> None:
        try:
            self._write(step, state)
        except Exception as error:  # noqa: BLE001 - a defect, not a disk: `wait` raises it on the training thread
            self._defect = error

    def _write(self, step: int, state: dict[str, Any]) -> None:
        name = f"step-{step:08d}"
        building = self._directory / f".{name}.tmp"
        began = time.perf_counter()
        try:
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir()
            write_tensors(building, self._staged)
            self._before_commit()
            commit(building, self._directory / name, step=step, state=state, config=self._config)
        except (OSError, CheckpointError) as error:
            self.failures += 1
            self.last_error = f"{self._directory / name}: checkpoint not written: {error}"
            _log.error(
                "%s; training goes on, older checkpoints stay (%d failed so far)", self.last_error, self.failures
            )
            shutil.rmtree(building, ignore_errors=True)
            self._on_failure(step, self.failures)
            return
        _log.info("checkpoint %s complete, written in %.1f s", self._directory / name, time.perf_counter() - began)
        try:
            prune(self._directory, keep=self._keep)
        except OSError as error:
            _log.warning("%s: older checkpoints not deleted (%s)", self._directory, error)


def write_tensors(directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes tensors to an empty folder in the format of PyTorch's distributed checkpoint.

    Raises:
        CheckpointError: they could not be written.
    """
    writer = FileSystemWriter(directory, single_file_per_rank=True, sync_files=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            save(dict(tensors), storage_writer=writer, no_dist=True)
    except CheckpointException as error:
        causes = "; ".join(str(failure[0]) for failure in error.failures.values())
        raise CheckpointError(causes or str(error)) from None
    except RuntimeError as error:  # PyTorch's file writer reports a failed write(2) so
        raise CheckpointError(f"the disk is full or broken ({str(error).splitlines()[0]})") from None
