# SPDX-License-Identifier: Apache-2.0
"""Writing checkpoints while training goes on.

On a CPU training pauses for a copy of the tensors. On a GPU they are copied to host memory on a stream of their own, while
the next step computes; only its update has to wait until they are there. A thread writes, hashes and completes the
checkpoint. A full or broken disk never stops training: the failure is logged and counted, and the older checkpoints stay.
Several ranks write one checkpoint: each a file of its own rows, and rank 0 completes it when it knows size and hash of every
file.
"""

import logging
import math
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from nmoe.checkpoint.store import commit, describe, prune
from nmoe.errors import CheckpointError, free_bytes, line_of
from nmoe.pieces import Piece, as_piece
from nmoe.words import size

__all__ = ["CheckpointWriter", "chunk_of", "tensor_in_file", "write_tensors"]

_log = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes the checkpoints of one run, one at a time.

    Args:
        directory: the run's `checkpoints` folder; made if missing.
        config: the resolved config, as tables.
        keep: complete checkpoints kept.
        before_commit: called on rank 0's thread when the tensors are on disk and the manifest is not: what must survive
            together with the checkpoint is flushed here.
        on_failure: called on the thread with the step of a checkpoint that could not be written, and how many could not
            so far.
        rank: of this process among those that write together.
        group: process group of these, used by nothing else; None: this process alone.
    """

    def __init__(
        self,
        directory: Path,
        *,
        config: Mapping[str, Any],
        keep: int,
        before_commit: Callable[[], None] = lambda: None,
        on_failure: Callable[[int, int], None] = lambda step, failures: None,
        rank: int = 0,
        group: dist.ProcessGroup | None = None,
    ):
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._config, self._keep = directory, config, keep
        self._before_commit, self._on_failure = before_commit, on_failure
        self._rank, self._group = rank, group
        self._staged: dict[str, Piece] = {}
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        self._thread: threading.Thread | None = None
        self._defect: Exception | None = None
        self.failures = 0
        self.last_error = ""

    def save(self, step: int, *, tensors: Mapping[str, torch.Tensor | Piece], state: Mapping[str, Any]) -> float:
        """Takes a copy of the tensors and begins to write it; on a GPU see `before_update`, too.

        Args:
            step: optimizer steps done.
            tensors: by name, on any device: this rank's rows, which together with the other ranks' are the whole. What
                every rank holds as a whole is written by rank 0.
            state: counters and positions, JSON values.

        Returns:
            Seconds that training paused: waiting for the checkpoint before, and the copy, or on a GPU its start.
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

    def before_update(self) -> None:
        """To be called before the saved tensors change: what the GPU does from here on waits for their copy, the host does not."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def _stage(self, tensors: Mapping[str, torch.Tensor | Piece]) -> None:
        """Copies to host memory, page-locked where the source is a GPU; the buffers are kept for the next time."""
        pieces = {name: as_piece(tensor) for name, tensor in tensors.items()}
        on_gpu = any(piece.tensor.is_cuda for piece in pieces.values())
        for name, piece in pieces.items():
            if name not in self._staged:
                empty = torch.empty_like(piece.tensor, device="cpu", pin_memory=piece.tensor.is_cuda)
                self._staged[name] = piece.of(empty)
        if on_gpu:
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # nothing where it is None
            for name, piece in pieces.items():
                self._staged[name].tensor.copy_(piece.tensor.detach(), non_blocking=on_gpu)
        self._copied = None
        if self._stream:
            self._copied = torch.cuda.Event()
            self._copied.record(self._stream)

    def _run(self, step: int, state: dict[str, Any]) -> None:
        try:
            if self._copied is not None:
                self._copied.synchronize()
            self._write(step, state)
        except Exception as error:  # noqa: BLE001 - a defect, not a disk: `wait` raises it on the training thread
            self._defect = error

    def _write(self, step: int, state: dict[str, Any]) -> None:
        name = f"step-{step:08d}"
        building = self._directory / f".{name}.tmp"
        began = time.perf_counter()
        mine: dict[str, tuple[int, str]] = {}
        error = self._everywhere(lambda: self._begin(building))
        if not error:
            error = self._everywhere(lambda: write_tensors(building, self._staged, group=self._group))
        if not error:  # each rank flushes and hashes its own files
            error = self._everywhere(lambda: mine.update(describe(sorted(building.glob(f"__{self._rank}_*")))))
        if not error:
            described = self._of_all(mine)
            error = self._everywhere(lambda: self._complete(building, name, step, state, described))
        if error:
            self.failures += 1
            self.last_error = f"{self._directory / name}: checkpoint not written: {error}"
        elif self._rank == 0:
            _log.info("checkpoint %s complete, written in %.1f s", self._directory / name, time.perf_counter() - began)
        # All ranks wait for a slow disk alike, so that none of them is late for the next step.
        self._everywhere(lambda: self._tidy_up(step, building, failed=bool(error)))

    def _tidy_up(self, step: int, building: Path, *, failed: bool) -> None:
        if self._rank:
            return
        if failed:
            _log.error(
                "%s; training goes on, older checkpoints stay (%d failed so far)", self.last_error, self.failures
            )
            shutil.rmtree(building, ignore_errors=True)
            self._on_failure(step, self.failures)
            return
        try:
            prune(self._directory, keep=self._keep)
        except OSError as error:
            _log.warning("%s: older checkpoints not deleted (%s)", self._directory, error)

    def _everywhere(self, work: Callable[[], None]) -> str:
        """Does `work` on all ranks and waits for all; what went wrong on the first of those where something did."""
        problem = ""
        try:
            work()
        except (OSError, CheckpointError) as error:
            problem = line_of(error, place=self._directory) or str(error) or type(error).__name__
        if self._group is None:
            return problem
        problems = [""] * dist.get_world_size(self._group)
        dist.all_gather_object(problems, problem, group=self._group)
        return next(filter(None, problems), "")

    def _begin(self, building: Path) -> None:
        if self._rank == 0:
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir()

    def _of_all(self, mine: dict[str, tuple[int, str]]) -> dict[str, tuple[int, str]]:
        """Size and SHA-256 of the files of all ranks, by name."""
        if self._group is None:
            return mine
        everyone: list[dict[str, tuple[int, str]]] = [{}] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, mine, group=self._group)
        return {name: entry for found in everyone for name, entry in found.items()}

    def _complete(self, building: Path, name: str, step: int, state: Any, described: Any) -> None:
        if self._rank == 0:
            self._before_commit()
            target = self._directory / name
            commit(building, target, step=step, state=state, config=self._config, described=described)


def write_tensors(
    directory: Path, tensors: Mapping[str, torch.Tensor | Piece], *, group: dist.ProcessGroup | None = None
) -> None:
    """Writes tensors to an empty folder in the format of PyTorch's distributed checkpoint.

    Args:
        directory: the folder, which all ranks share.
        tensors: by name, on the CPU; pieces are written as parts of the whole.
        group: ranks that write together; None: this process alone.

    Raises:
        CheckpointError: they could not be written.
    """
    writer = FileSystemWriter(directory, single_file_per_rank=True, sync_files=True)
    pieces = {name: as_piece(tensor) for name, tensor in tensors.items()}
    alone = group is None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            save(pieces, storage_writer=writer, planner=_PiecesWriter(), process_group=group, no_dist=alone)
    except CheckpointException as error:
        causes = [failure[0] for failure in error.failures.values()]
        if interrupt := next((cause for cause in causes if isinstance(cause, KeyboardInterrupt)), None):
            raise interrupt from None
        raise _not_written(directory, causes[0] if causes else error, pieces) from None
    except (OSError, RuntimeError) as error:  # PyTorch's file writer reports a failed write(2) as the latter
        raise _not_written(directory, error, pieces) from None


def _not_written(directory: Path, error: BaseException, pieces: Mapping[str, Piece]) -> CheckpointError:
    """What a failed write means: PyTorch's own words, of positions in a file, come last."""
    if isinstance(error, CheckpointError):
        return error
    free, needed = free_bytes(directory), sum(piece.tensor.nbytes for piece in pieces.values())
    why = "the disk is probably full" if free < needed else "the disk is full, broken or over a quota"
    text = (str(error).splitlines() or [type(error).__name__])[0]
    return CheckpointError(
        f"{why}: {size(free)} free at {directory.parent}, {size(needed)} to write; make room there ({text})"
    )


def tensor_in_file(path: Path, *, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A new tensor whose memory is a file, so that more than the memory can be filled.

    Raises:
        OSError: the disk is full; found here, because a write to memory without room behind it ends the process.
    """
    number = math.prod(shape)
    with path.open("wb") as stream:
        if number:
            os.posix_fallocate(stream.fileno(), 0, number * dtype.itemsize)
    return torch.from_file(str(path), shared=True, size=number, dtype=dtype).view(torch.Size(shape))


def chunk_of(piece: Piece) -> ChunkStorageMetadata:
    """Where a piece lies in its tensor."""
    offsets = torch.Size((piece.start, *(0 for _ in piece.shape[1:])))
    return ChunkStorageMetadata(offsets=offsets, sizes=piece.tensor.shape)


class _PiecesWriter(DefaultSavePlanner):
    """Writes each piece as a chunk of its tensor, and what all ranks hold once."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_item(name, piece) for name, piece in self.state_dict.items() if self._writes(piece)])
        return self.plan

    def _writes(self, piece: Piece) -> bool:
        return piece.tensor.numel() > 0 and (self.is_coordinator or not piece.is_whole)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self.state_dict[write_item.index.fqn].tensor


def _item(name: str, piece: Piece) -> WriteItem:
    chunk = chunk_of(piece)
    properties = TensorProperties.create_from_tensor(piece.tensor)
    data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(piece.shape))
    return WriteItem(index=MetadataIndex(name, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)
