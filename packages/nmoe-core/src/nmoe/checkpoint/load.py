# SPDX-License-Identifier: Apache-2.0
"""Reading a checkpoint into tensors that exist already."""

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from nmoe.checkpoint.store import CheckpointInfo, verify
from nmoe.errors import CheckpointError

__all__ = ["load_some", "load_tensors", "load_weights", "stored_tensors"]


def stored_tensors(path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor of a checkpoint, by name."""
    metadata = FileSystemReader(path).read_metadata()
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def load_tensors(info: CheckpointInfo, tensors: Mapping[str, torch.Tensor]) -> None:
    """Verifies a checkpoint's checksums and fills `tensors` from it, in place.

    Args:
        info: the checkpoint.
        tensors: by name, on any device; every name must be stored with the same shape.

    Raises:
        CheckpointError: a file is damaged, or the names or shapes differ from what is stored.
    """
    for problem in verify(info):
        raise CheckpointError(f"{problem}; delete {info.path} to resume from an older checkpoint")
    _check(info, tensors, stored_tensors(info.path))
    load_some(info, tensors)


def load_weights(info: CheckpointInfo, tensors: Mapping[str, torch.Tensor], *, prefix: str) -> None:
    """`load_tensors` for the tensors of one prefix, whatever others the checkpoint holds.

    Raises:
        CheckpointError: see `load_tensors`.
    """
    for problem in verify(info):
        raise CheckpointError(problem)
    stored = {name: entry for name, entry in stored_tensors(info.path).items() if name.startswith(prefix)}
    _check(info, tensors, stored)
    load_some(info, tensors)


def _check(
    info: CheckpointInfo,
    tensors: Mapping[str, torch.Tensor],
    stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
) -> None:
    for name in sorted(stored.keys() ^ tensors.keys()):
        where = "is not in the checkpoint" if name in tensors else "is in the checkpoint and not in the model"
        raise CheckpointError(f"{info.path}: {name} {where}; it was written by another version of the model")
    for name, tensor in tensors.items():
        if stored[name] != (tuple(tensor.shape), tensor.dtype):
            raise CheckpointError(
                f"{info.path}: {name} is stored as {stored[name]}, the model has {(tuple(tensor.shape), tensor.dtype)}"
            )


def load_some(info: CheckpointInfo, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fills `tensors` from a checkpoint that was verified, whatever else it holds, in place.

    Raises:
        CheckpointError: a tensor could not be read.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(dict(tensors), storage_reader=FileSystemReader(info.path), no_dist=True)
    except CheckpointException as error:
        causes = "; ".join(str(failure[0]) for failure in error.failures.values())
        raise CheckpointError(f"{info.path}: {causes or error}") from None
