# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: complete or absent wherever the writer dies, damage refused by name, the last complete one never deleted."""

import errno
import json
import os
import shutil
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from nmoe.checkpoint import save
from nmoe.checkpoint.load import load_tensors
from nmoe.checkpoint.save import CheckpointWriter
from nmoe.checkpoint.store import (
    CheckpointInfo,
    find_checkpoint,
    list_checkpoints,
    prune,
    read_checkpoint,
    remove_leftovers,
    verify,
)
from nmoe.errors import CheckpointError


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {
        "model.w": torch.full((7, 5), value),
        "model.b": torch.arange(3, dtype=torch.float64) + value,
        "optim.w.first": torch.full((7, 5), value).bfloat16(),
    }


def write(directory: Path, *steps: int, keep: int = 2) -> CheckpointWriter:
    writer = CheckpointWriter(directory, config={"run": {"seed": 1}}, keep=keep)
    for step in steps:
        writer.save(step, tensors=tensors(float(step)), state={"step": step, "losses": [0.1, 1 / 3]})
    writer.wait()
    return writer


def assert_good(info: CheckpointInfo) -> None:
    """The checkpoint is whole, and holds what was saved at its step."""
    assert list(verify(info)) == []
    found = tensors(-1.0)
    load_tensors(info, found)
    for name, expected in tensors(float(info.step)).items():
        assert torch.equal(found[name], expected), name
    assert info.state == {"step": info.step, "losses": [0.1, 1 / 3]}


def test_checkpoint_comes_back_with_tensors_state_and_config(tmp_path):
    write(tmp_path, 10)
    (path,) = list_checkpoints(tmp_path)
    info = read_checkpoint(path)
    assert_good(info)
    assert (info.step, info.config) == (10, {"run": {"seed": 1}})
    assert info.num_bytes == sum(file.stat().st_size for file in path.iterdir() if file.name != "manifest.json")


def test_training_may_go_on_while_a_checkpoint_is_written(tmp_path):
    may_commit = threading.Event()
    writer = CheckpointWriter(tmp_path, config={}, keep=2, before_commit=lambda: assert_set(may_commit))
    living = tensors(10.0)
    writer.save(10, tensors=living, state={"step": 10, "losses": [0.1, 1 / 3]})
    for tensor in living.values():
        tensor.zero_()  # the next update, while the thread has not finished
    assert list_checkpoints(tmp_path) == []
    may_commit.set()
    writer.wait()
    assert_good(find_checkpoint(list_checkpoints(tmp_path)[0]))


@pytest.mark.gpu
def test_copy_off_the_gpu_is_waited_for_by_what_changes_the_values_and_by_nothing_else(tmp_path):
    values = {"model.w": torch.ones(1 << 28, device="cuda")}  # 1 GiB, some 20 ms to copy
    writer = CheckpointWriter(tmp_path, config={}, keep=2)
    for step in (1, 2):  # the first pins memory, for seconds
        pause = writer.save(step, tensors=values, state={"step": step})
        copied = writer._copied
        assert copied is not None
        if step == 2:
            assert not copied.query(), f"the host waited {pause} s for the copy"
        writer.before_update()
        values["model.w"].fill_(step + 1)
        writer.wait()
    found = {"model.w": torch.zeros(1 << 28)}
    load_tensors(read_checkpoint(list_checkpoints(tmp_path)[-1]), found)
    assert (found["model.w"] == 2).all()


def assert_set(event: threading.Event) -> None:
    assert event.wait(30)


def die_at(number: int, root: Path) -> None:
    """Ends this process, without a word, at its `number`th file operation, before it is done; of opens only those below `root`."""
    operations = 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal operations
        # Inside a folder that is deleted, names are relative to a descriptor.
        if event.startswith(("os.", "shutil.")) or (event == "open" and str(root) in str(arguments[0])):
            operations += 1
            if operations == number:
                os._exit(9)

    sys.addaudithook(hook)


def test_a_crash_at_any_file_operation_leaves_only_complete_checkpoints(tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a forked child has none of its parent's threads
    origin = tmp_path / "origin"
    write(origin, 10)
    seen, number = [], 0
    while True:
        number += 1
        directory = shutil.copytree(origin, tmp_path / f"crash-{number}")
        child = os.fork()
        if child == 0:
            die_at(number, directory)
            write(directory, 20, keep=1)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, 9)
        remove_leftovers(directory)
        assert not list(directory.glob(".*"))
        complete = [read_checkpoint(path) for path in list_checkpoints(directory)]
        for info in complete:
            assert_good(info)
        seen.append([info.step for info in complete])
        if status == 0:
            break
        write(directory, 30, keep=1)  # nothing that is left over is in the way
        assert [path.name for path in list_checkpoints(directory)] == ["step-00000030"]
        shutil.rmtree(directory)
    torch.set_num_threads(threads)
    # First the old one alone, then both, at last the new one alone: never none.
    assert [steps for i, steps in enumerate(seen) if i == 0 or steps != seen[i - 1]] == [[10], [10, 20], [20]]
    assert number > 20


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_a_damaged_file_is_refused_by_name(tmp_path, name, damage):
    write(tmp_path, 10)
    info = find_checkpoint(list_checkpoints(tmp_path)[0])
    path = info.path / name
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 1
    path.unlink()
    if damage != "missing":
        path.write_bytes(data[:-1] if damage == "truncated" else data)
    expected = {"flipped": "damaged: SHA-256", "truncated": f"{len(data) - 1} bytes", "missing": "not found"}
    with pytest.raises(CheckpointError, match=rf"{name}: {expected[damage]}.*delete .*step-00000010"):
        load_tensors(info, tensors(0.0))


def test_a_damaged_manifest_is_refused_by_name(tmp_path):
    write(tmp_path, 10)
    (path,) = list_checkpoints(tmp_path)
    manifest = path / "manifest.json"
    whole = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(whole | {"step": 11}))
    with pytest.raises(CheckpointError, match=r"manifest\.json: damaged: SHA-256"):
        read_checkpoint(path)
    whole["version"] = 1  # without a checksum of its own
    for spoiled, message in (
        ("{", "manifest.json: cannot be read as JSON"),
        (json.dumps(whole | {"version": 99}), "version 99 is newer"),
        (json.dumps({key: value for key, value in whole.items() if key != "state"}), "incomplete.*state"),
        (json.dumps(whole | {"files": [1]}), "incomplete"),
    ):
        manifest.write_text(spoiled)
        with pytest.raises(CheckpointError, match=message):
            read_checkpoint(path)
    manifest.write_text(json.dumps(whole | {"files": {"../../passwd": {"bytes": 1, "sha256": "0"}}}))
    assert "points outside" in next(verify(read_checkpoint(path)))


def test_another_models_checkpoint_is_refused_by_the_name_that_differs(tmp_path):
    write(tmp_path, 10)
    info = find_checkpoint(list_checkpoints(tmp_path)[0])
    for change, message in (
        ({"model.extra": torch.zeros(1)}, r"model\.extra is not in the checkpoint"),
        ({"model.w": torch.zeros(7, 6)}, r"model\.w is stored as .*\(7, 5\).*\(7, 6\)"),
        ({"model.w": torch.zeros(7, 5).double()}, r"model\.w is stored as .*float32.*float64"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_tensors(info, tensors(0.0) | change)
    fewer = tensors(0.0)
    del fewer["model.b"]
    with pytest.raises(CheckpointError, match=r"model\.b is in the checkpoint and not in the model"):
        load_tensors(info, fewer)


def test_retention_keeps_the_newest_complete_ones(tmp_path):
    write(tmp_path, 10, 20, 30, 40, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000030", "step-00000040"]
    # An incomplete folder is no checkpoint: it neither counts nor is counted upon.
    (tmp_path / "step-00000050").mkdir()
    prune(tmp_path, keep=0)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000040"]
    assert_good(find_checkpoint(tmp_path / "step-00000040"))
    write(tmp_path, 50, keep=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000050"]
    assert_good(find_checkpoint(tmp_path / "step-00000050"))


def test_a_folder_that_cannot_be_written_costs_a_checkpoint_and_not_the_run(tmp_path):
    writer = write(tmp_path, 10)
    (tmp_path / ".step-00000030.tmp").write_text("a file where the checkpoint is to be built")
    writer.save(30, tensors=tensors(30.0), state={})
    writer.wait()
    assert writer.failures == 1
    assert "step-00000030: checkpoint not written" in writer.last_error
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000010"]
    writer.save(40, tensors=tensors(40.0), state={"step": 40, "losses": [0.1, 1 / 3]})
    writer.wait()
    assert writer.failures == 1
    assert_good(find_checkpoint(tmp_path / "step-00000040"))


def test_a_disk_that_fails_when_files_are_read_back_costs_a_checkpoint_and_not_the_run(tmp_path, monkeypatch):
    writer = write(tmp_path, 10)

    def fail(paths: Sequence[Path]) -> dict:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(paths[0]))

    monkeypatch.setattr(save, "describe", fail)
    writer.save(20, tensors=tensors(20.0), state={})
    writer.wait()
    assert writer.failures == 1
    assert "__0_0.distcp: cannot write: Input/output error" in writer.last_error
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def test_a_defect_of_the_writer_reaches_the_training_thread(tmp_path):
    def fail() -> None:
        raise ZeroDivisionError("defect")

    writer = CheckpointWriter(tmp_path, config={}, keep=1, before_commit=fail)
    writer.save(10, tensors=tensors(1.0), state={})
    with pytest.raises(ZeroDivisionError):
        writer.wait()
    assert list_checkpoints(tmp_path) == []


def test_a_run_without_a_complete_checkpoint_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        find_checkpoint(tmp_path)
