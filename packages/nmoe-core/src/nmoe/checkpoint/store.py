# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on disk: complete or absent.

    RUN/checkpoints/step-00000100/__0_0.distcp    tensors, written by PyTorch's distributed checkpoint (one file a rank)
    RUN/checkpoints/step-00000100/.metadata       which tensor lies where
    RUN/checkpoints/step-00000100/manifest.json   step, counters, config; name, size and SHA-256 of every file above, and
                                                  its own (taken with zeros in its place)

A checkpoint is built in a hidden folder: files, flushed to the disk, then the manifest, then one rename. A folder of the
right name without a manifest is therefore never seen, and everything hidden is what a killed process left behind.
"""

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmoe.errors import CheckpointError, DataError
from nmoe.formats.files import inside, json_text, read_header, sha256_file, sync_directory, write_json

__all__ = [
    "CheckpointInfo",
    "commit",
    "describe",
    "find_checkpoint",
    "list_checkpoints",
    "list_folders",
    "prune",
    "read_checkpoint",
    "remove_leftovers",
    "verify",
]

FORMAT, VERSION = "nmoe-checkpoint", 2
MANIFEST = "manifest.json"
_SEAL, _UNSEALED = "manifest_sha256", "0" * 64
_NAME = re.compile(r"step-(\d{8,})")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInfo:
    """A complete checkpoint.

    Attributes:
        path: its folder.
        step: optimizer steps done.
        state: counters and positions to go on from, as the trainer wrote them.
        config: the resolved config of the run, as tables.
        files: size in bytes and SHA-256 by file name.
        written_at: Unix seconds.
    """

    path: Path
    step: int
    state: dict[str, Any]
    config: dict[str, Any]
    files: dict[str, tuple[int, str]]
    written_at: float

    @property
    def run(self) -> Path:
        """Folder of the run that it was written by."""
        return self.path.absolute().parents[1]

    @property
    def num_bytes(self) -> int:
        """Size of all files, in bytes."""
        return sum(size for size, _ in self.files.values())


def describe(paths: Sequence[Path]) -> dict[str, tuple[int, str]]:
    """Flushes files to the disk; size in bytes and SHA-256 by file name."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    with ThreadPoolExecutor() as pool:
        hashes = list(pool.map(sha256_file, paths))
    return {path.name: (path.stat().st_size, digest) for path, digest in zip(paths, hashes, strict=True)}


def commit(
    building: Path,
    target: Path,
    *,
    step: int,
    state: Mapping[str, Any],
    config: Mapping[str, Any],
    described: Mapping[str, tuple[int, str]] | None = None,
) -> None:
    """Completes a checkpoint: flushes every file in `building`, writes the manifest, renames the folder to `target`.

    Args:
        building: folder with the files.
        target: name of the complete checkpoint.
        step: optimizer steps done.
        state: counters and positions.
        config: the resolved config.
        described: of files that were flushed and hashed by who wrote them.

    Raises:
        OSError: the disk is full or broken; `target` does not exist then.
        CheckpointError: a described file is not here: another rank wrote it to another disk.
    """
    described = described or {}
    files = sorted(path for path in building.iterdir() if path.name != MANIFEST)
    for name in sorted(described.keys() - {path.name for path in files}):
        raise CheckpointError(f"{building / name}: not found; run.root must be a folder that all ranks share")
    found = dict(described) | describe([path for path in files if path.name not in described])
    entries = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in sorted(found.items())}
    newest = max(path.stat().st_mtime for path in files)
    header = {"format": FORMAT, "version": VERSION, _SEAL: _UNSEALED, "step": step, "written_at": newest}
    header |= {"state": dict(state), "files": entries, "config": dict(config)}
    write_json(building / MANIFEST, {**header, _SEAL: _digest(json_text(header))})
    if target.exists():  # something incomplete of that name
        _delete(target)
    building.rename(target)
    sync_directory(target.parent)


def read_checkpoint(path: Path) -> CheckpointInfo:
    """Reads a checkpoint's manifest.

    Raises:
        CheckpointError: there is none, or it is damaged or of a newer version.
    """
    try:
        header = read_header(path / MANIFEST, format_name=FORMAT, version=VERSION, what="a checkpoint")
        _check_seal(path / MANIFEST, header)
        return CheckpointInfo(
            path=path,
            step=int(header["step"]),
            state=dict(header["state"]),
            config=dict(header["config"]),
            files={name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in header["files"].items()},
            written_at=float(header["written_at"]),
        )
    except DataError as error:
        raise CheckpointError(str(error)) from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path / MANIFEST}: incomplete ({type(error).__name__}: {error})") from None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _check_seal(path: Path, header: Mapping[str, Any]) -> None:
    """Refuses a manifest that is not, byte for byte, what was written; version 1 had no checksum of its own."""
    if header["version"] == 1:
        return
    seal = header[_SEAL]
    found = _digest(path.read_bytes().decode("utf-8").replace(seal, _UNSEALED, 1))
    if found != seal:
        raise CheckpointError(f"{path}: damaged: SHA-256 is {found[:12]}..., the manifest says {seal[:12]}...")


def list_checkpoints(directory: Path) -> list[Path]:
    """Folders of the complete checkpoints in `directory`, oldest first; empty where the folder does not exist."""
    if not directory.is_dir():
        return []
    found = [(int(match[1]), path) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found) if (path / MANIFEST).is_file()]


def list_folders(directory: Path) -> list[Path]:
    """Folders named as checkpoints, complete or not, oldest first, hidden ones (half-written) last."""
    named = re.compile(r"(\.?)step-(\d{8,})(?:\.tmp|\.old)?")
    found = [(match[1], int(match[2]), path) for path in directory.iterdir() if (match := named.fullmatch(path.name))]
    return [path for _, _, path in sorted(found) if path.is_dir()]


def find_checkpoint(path: Path) -> CheckpointInfo:
    """The newest complete checkpoint of a run, or the checkpoint that the path is.

    Raises:
        CheckpointError: there is none, or its manifest is damaged.
    """
    if (path / MANIFEST).is_file():
        return read_checkpoint(path)
    found = list_checkpoints(path / "checkpoints")
    if not found:
        raise CheckpointError(f"{path}: no complete checkpoint; expected a run's folder or one of its checkpoints")
    return read_checkpoint(found[-1])


def verify(info: CheckpointInfo, *, part: int = 0, parts: int = 1) -> Iterator[str]:
    """Re-reads every byte of a checkpoint and yields one line for each file that is not what the manifest says.

    Args:
        info: the checkpoint.
        part: which of equal parts of the files, from 0, where several readers share the work.
        parts: how many there are.
    """
    intact = []
    for name, (size, digest) in sorted(info.files.items())[part::parts]:
        try:
            path = inside(info.path, name)
        except DataError as error:
            yield str(error)
            continue
        if not path.is_file():
            yield f"{path}: not found; the manifest names it"
        elif path.stat().st_size != size:
            yield f"{path}: {path.stat().st_size} bytes, the manifest says {size}"
        else:
            intact.append((path, digest))
    with ThreadPoolExecutor() as pool:
        for (path, digest), found in zip(intact, pool.map(sha256_file, [path for path, _ in intact]), strict=True):
            if found != digest:
                yield f"{path}: damaged: SHA-256 is {found[:12]}..., the manifest says {digest[:12]}..."


def prune(directory: Path, *, keep: int) -> None:
    """Deletes complete checkpoints but the newest `keep` (at least 1). Called after a newer one is complete."""
    for path in list_checkpoints(directory)[: -max(1, keep)]:
        _delete(path)
        _log.info("%s: deleted, newer checkpoints are complete", path)


def _delete(path: Path) -> None:
    doomed = path.with_name(f".{path.name}.old")
    path.rename(doomed)  # at once: a half-deleted folder must not look like a checkpoint
    shutil.rmtree(doomed)


def remove_leftovers(directory: Path) -> None:
    """Deletes what killed processes left half-written; the caller holds the run's lock."""
    for path in directory.glob(".step-*"):
        shutil.rmtree(path)
