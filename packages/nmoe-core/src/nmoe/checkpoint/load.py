# SPDX-License-Identifier: Apache-2.0
"""Reading a checkpoint into tensors that exist already, or into this rank's rows of them."""

import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load

from nmoe.checkpoint.save import chunk_of
from nmoe.checkpoint.store import CheckpointInfo, verify
from nmoe.errors import CheckpointError
from nmoe.pieces import Piece, as_piece

__all__ = ["load_some", "load_tensors", "load_weights", "stored_tensors"]


def stored_tensors(path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor of a checkpoint, by name."""
    metadata = FileSystemReader(path).read_metadata()
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def load_tensors(info: CheckpointInfo, tensors: Mapping[str, Tensor | Piece], *, part: int = 0, parts: int = 1) -> None:
    """Verifies a checkpoint's checksums and fills `tensors` from it, in place.

    Args:
        info: the checkpoint.
        tensors: by name, on any device; every name must be stored with the same shape. Pieces take their rows, whatever
            pieces the checkpoint was written in.
        part: which part of the files is verified, where several ranks share that work (see `store.verify`).
        parts: how many parts there are.

    Raises:
        CheckpointError: a file is damaged, or the names or shapes differ from what is stored.
    """
    for problem in verify(info, part=part, parts=parts):
        raise CheckpointError(f"{problem}; delete {info.path} to resume from an older checkpoint")
    _check(info, tensors, stored_tensors(info.path))
    load_some(info, tensors)


def load_weights(
    info: CheckpointInfo, tensors: Mapping[str, Tensor | Piece], *, prefix: str, part: int = 0, parts: int = 1
) -> None:
    """`load_tensors` for the tensors of one prefix, whatever others the checkpoint holds.

    Raises:
        CheckpointError: see `load_tensors`.
    """
    for problem in verify(info, part=part, parts=parts):
        raise CheckpointError(problem)
    stored = {name: entry for name, entry in stored_tensors(info.path).items() if name.startswith(prefix)}
    _check(info, tensors, stored)
    load_some(info, tensors)


def _check(
    info: CheckpointInfo,
    tensors: Mapping[str, Tensor | Piece],
    stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
) -> None:
    for name in sorted(stored.keys() ^ tensors.keys()):
        where = "is not in the checkpoint" if name in tensors else "is in the checkpoint and not in the model"
        raise CheckpointError(f"{info.path}: {name} {where}; it was written by another version of the model")
    for name, tensor in tensors.items():
        piece = as_piece(tensor)
        if stored[name] != (piece.shape, piece.tensor.dtype):
            raise CheckpointError(
                f"{info.path}: {name} is stored as {stored[name]}, the model has {(piece.shape, piece.tensor.dtype)}"
            )


def load_some(info: CheckpointInfo, tensors: Mapping[str, Tensor | Piece]) -> None:
    """Fills `tensors` from a checkpoint that was verified, whatever else it holds, in place.

    Raises:
        CheckpointError: a tensor could not be read.
    """
    pieces = {name: as_piece(tensor) for name, tensor in tensors.items()}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(pieces, storage_reader=FileSystemReader(info.path), planner=_PiecesReader(), no_dist=True)
    except CheckpointException as error:
        causes = "; ".join(str(failure[0]) for failure in error.failures.values())
        raise CheckpointError(f"{info.path}: {causes or error}") from None


class _PiecesReader(LoadPlanner):
    """Asks for the rows of each piece, from whatever chunks they were stored in."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        del is_coordinator
        assert metadata is not None
        self._pieces: dict[str, Piece] = state_dict
        self._stored = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, piece in self._pieces.items():
            stored = self._stored[name]
            assert isinstance(stored, TensorStorageMetadata)
            if piece.tensor.numel():
                items += create_read_items_for_chunk_list(name, stored, [chunk_of(piece)])
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError(f"{read_item.dest_index.fqn}: no piece is made of bytes")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        tensor = self._pieces[read_item.dest_index.fqn].tensor
        for dim, (first, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, first, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass  # it was read to where it belongs
