# SPDX-License-Identifier: Apache-2.0
"""`nmoe-checkpoint`: what checkpoints there are, whether they are whole, and many files into one.

    nmoe-checkpoint ls runs/moonlet                          one line a checkpoint
    nmoe-checkpoint verify runs/moonlet                      reads every byte
    nmoe-checkpoint consolidate runs/moonlet one --weights   one file, without the optimizer

Exit status 0: as it should be; 1: something is damaged or incomplete; 2: something that the caller can mend. Reads only,
but for `consolidate`, and takes no lock: it may be used on a run that trains.
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import nmoe
from nmoe.checkpoint.store import MANIFEST, CheckpointInfo, find_checkpoint, list_folders, read_checkpoint, verify
from nmoe.errors import CheckpointError, EnvironmentFault
from nmoe.status import exit_status
from nmoe.words import size

__all__ = ["checkpoint_parser", "main"]


def checkpoint_parser() -> argparse.ArgumentParser:
    """Arguments of `nmoe-checkpoint`."""
    parser = argparse.ArgumentParser(
        prog="nmoe-checkpoint", description="List, verify and consolidate the checkpoints of runs."
    )
    parser.add_argument("--version", action="version", version=f"nmoe-core {nmoe.__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb, text in (
        ("ls", "one line a checkpoint: step, size, files, when it was written, where it is"),
        ("verify", "read every byte and compare it with the manifest's checksums"),
    ):
        reading = verbs.add_parser(verb, help=text, description=text)
        reading.add_argument("paths", metavar="PATH", type=Path, nargs="+", help="a run's folder, or a checkpoint")
    text = "copy a checkpoint of many files into a new run's folder, as one file"
    writing = verbs.add_parser("consolidate", help=text, description=text)
    writing.add_argument("source", metavar="PATH", type=Path, help="a run's folder (its newest), or a checkpoint")
    writing.add_argument("target", metavar="RUN", type=Path, help="folder to make")
    writing.add_argument("--weights", action="store_true", help="leave the optimizer's tensors out")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `nmoe-checkpoint`."""
    options = checkpoint_parser().parse_args(arguments)
    work = {"ls": _ls, "verify": _verify, "consolidate": _consolidate}[options.verb]
    return exit_status(work, options, place=getattr(options, "target", None))


def _folders(paths: Sequence[Path]) -> Iterator[Path | CheckpointError]:
    """Folders that are, or once were to be, checkpoints, oldest first in each run; an error for a path that is neither."""
    for path in paths:
        if not path.is_dir():
            yield CheckpointError(f"{path}: no such folder; expected a run's folder or one of its checkpoints")
            continue
        inside = path / "checkpoints"
        found = list_folders(inside if inside.is_dir() else path)
        if found:
            yield from found
        elif (path / MANIFEST).exists() or path.name.startswith("step-"):
            yield path
        else:
            yield CheckpointError(f"{path}: no checkpoint; expected a run's folder or one of its checkpoints")


def _read(path: Path) -> CheckpointInfo | str:
    """A checkpoint, or what is wrong with its manifest."""
    if path.name.startswith("."):
        return f"{path}: incomplete: being written, or left by a process that was killed; the next start removes it"
    if not (path / MANIFEST).exists():
        return f"{path}: incomplete: no {MANIFEST}, which is written last; copy it again from where it is whole"
    try:
        return read_checkpoint(path)
    except CheckpointError as error:
        return str(error)


def _say(error: CheckpointError) -> int:
    """Prints why a path is left out, and gives the status; the other paths are looked at all the same."""
    print(f"error: {error}", file=sys.stderr)
    return 2


def _ls(options: argparse.Namespace) -> int:
    status, folders = 0, list(_folders(options.paths))
    if any(isinstance(path, Path) for path in folders):
        print(f"{'step':>8}  {'size':>9}  {'files':>5}  {'written (UTC)':16}  checkpoint")
    for path in folders:
        if isinstance(path, CheckpointError):
            status = _say(path)
            continue
        info = _read(path)
        if isinstance(info, str):
            status = status if path.name.startswith(".") else max(1, status)
            print(info, file=sys.stderr)
            continue
        written = datetime.fromtimestamp(info.written_at, UTC).strftime("%Y-%m-%d %H:%M")
        print(f"{info.step:8d}  {size(info.num_bytes):>9}  {len(info.files):5d}  {written:16}  {info.path}")
    return status


def _verify(options: argparse.Namespace) -> int:
    status = 0
    for path in _folders(options.paths):
        if isinstance(path, CheckpointError):
            status = _say(path)
            continue
        info, began = _read(path), time.monotonic()
        if isinstance(info, str):
            problems = [info]
        else:
            if sys.stderr.isatty():
                print(f"{info.path}: reading {size(info.num_bytes)} ...", end="", file=sys.stderr, flush=True)
            problems = list(verify(info))
            if sys.stderr.isatty():
                print("\r\x1b[K", end="", file=sys.stderr)
            if not problems:
                seconds = time.monotonic() - began
                print(f"{info.path}: whole, {len(info.files)} files, {size(info.num_bytes)}, {seconds:.1f} s")
        for problem in problems:
            print(problem)
        if problems and not path.name.startswith("."):
            status = max(1, status)
    return status


def _consolidate(options: argparse.Namespace) -> int:
    if importlib.util.find_spec("torch") is None:
        raise EnvironmentFault("nmoe-checkpoint consolidate needs PyTorch: install nmoe-core[train]")
    from nmoe.checkpoint.consolidate import consolidate

    info = find_checkpoint(options.source)
    made = consolidate(info, options.target, weights_only=options.weights)
    print(f"{made.path}: {len(info.files)} files, {size(info.num_bytes)} -> {len(made.files)}, {size(made.num_bytes)}")
    return 0
