# SPDX-License-Identifier: Apache-2.0
"""Many files of many ranks into a checkpoint of one file, with all tensors or with the weights alone."""

import tempfile
from pathlib import Path

from nmoe.checkpoint.load import load_some, stored_tensors
from nmoe.checkpoint.save import tensor_in_file, write_tensors
from nmoe.checkpoint.store import CheckpointInfo, commit, read_checkpoint, verify
from nmoe.errors import CheckpointError
from nmoe.formats.files import new_folder

__all__ = ["consolidate"]

_WEIGHTS = "model."


def consolidate(info: CheckpointInfo, run: Path, *, weights_only: bool) -> CheckpointInfo:
    """Makes the folder of a run that holds this one checkpoint, in one file.

    The tensors go through files beside the target, so that the whole never has to be in memory; the target needs twice
    their size on its disk while it is written.

    Args:
        info: what to copy; verified first.
        run: folder to make.
        weights_only: leave the optimizer's tensors out. Such a checkpoint is one to start from (`run.start_from`) or to
            convert, not one to go on from.

    Raises:
        CheckpointError: a file is damaged.
        DataError: `run` exists.
        OSError: the disk is full or broken; nothing that looks complete is left.
    """
    for problem in verify(info):
        raise CheckpointError(problem)
    stored = {
        name: entry
        for name, entry in stored_tensors(info.path).items()
        if name.startswith(_WEIGHTS) or not weights_only
    }
    target = run / "checkpoints" / info.path.name
    building = target.with_name(f".{target.name}.tmp")
    state = {**info.state, "weights_only": True} if weights_only else info.state
    with new_folder(run):
        building.mkdir(parents=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".staging-") as staging:
            tensors = {}
            for number, (name, (shape, dtype)) in enumerate(stored.items()):
                tensors[name] = tensor_in_file(Path(staging, str(number)), shape=shape, dtype=dtype)
                load_some(info, {name: tensors[name]})
            write_tensors(building, tensors)
        commit(building, target, step=info.step, state=state, config=info.config)
    return read_checkpoint(target)
