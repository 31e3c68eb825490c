# SPDX-License-Identifier: Apache-2.0
"""`nmoe-checkpoint`: lists, reads every byte, makes one file of many; damage of any bit is named."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from nmoe.checkpoint.cli import main
from nmoe.checkpoint.load import load_tensors, stored_tensors
from nmoe.checkpoint.save import CheckpointWriter
from nmoe.checkpoint.store import find_checkpoint, read_checkpoint
from nmoe.errors import CheckpointError


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"model.w": torch.full((7, 5), value), "optim.w.first": torch.full((7, 5), value).bfloat16()}


@pytest.fixture
def run(tmp_path) -> Path:
    """A run with checkpoints at steps 10 and 20."""
    writer = CheckpointWriter(tmp_path / "run" / "checkpoints", config={"run": {"seed": 1}}, keep=9)
    for step in (10, 20):
        writer.save(step, tensors=tensors(float(step)), state={"step": step, "recent_losses": [0.1, 1e-5]})
    writer.wait()
    return tmp_path / "run"


def test_ls_has_a_line_a_checkpoint_and_names_what_is_incomplete(run, capsys):
    place = run / "checkpoints"
    (place / ".step-00000030.tmp").mkdir()
    assert main(["ls", str(run)]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["step", "10", "20"]
    assert out.splitlines()[2].endswith(f" {place}/step-00000020")
    assert ".step-00000030.tmp: incomplete: being written" in err
    (place / "step-00000010" / "manifest.json").unlink()
    assert main(["ls", str(place / "step-00000020"), str(run)]) == 1
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["step", "20", "20"]
    assert f"{place}/step-00000010: incomplete: no manifest.json" in err


def test_verify_says_whole_or_names_every_file_that_is_not(run, capsys):
    assert main(["verify", str(run)]) == 0
    assert [line.split(",")[0] for line in capsys.readouterr().out.splitlines()] == [
        f"{run}/checkpoints/step-{step:08d}: whole" for step in (10, 20)
    ]
    path = run / "checkpoints" / "step-00000010"
    for name in ("__0_0.distcp", ".metadata"):
        data = bytearray((path / name).read_bytes())
        data[len(data) // 2] ^= 4
        (path / name).write_bytes(data)
    assert main(["verify", str(run)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.split(": ")[0] for line in lines) == sorted(
        [f"{path}/.metadata", f"{path}/__0_0.distcp", f"{run}/checkpoints/step-00000020"]
    )


def test_a_bit_flipped_in_any_byte_of_the_manifest_is_refused_by_name(run):
    path = run / "checkpoints" / "step-00000010"
    whole = (path / "manifest.json").read_bytes()
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 1 << (5 * place % 8)
        (path / "manifest.json").write_bytes(data)
        with pytest.raises(CheckpointError, match=r"step-00000010/manifest\.json: "):
            read_checkpoint(path)
    (path / "manifest.json").write_bytes(whole)
    assert read_checkpoint(path).step == 10


def test_checkpoint_of_the_version_before_is_read_and_of_a_newer_one_refused(run, capsys):
    path = run / "checkpoints" / "step-00000010"
    manifest = path / "manifest.json"
    old = json.loads(manifest.read_text())
    del old["manifest_sha256"]
    manifest.write_text(json.dumps(old | {"version": 1}))
    assert main(["verify", str(path)]) == 0
    capsys.readouterr()
    manifest.write_text(json.dumps(old | {"version": 3}))
    assert main(["verify", str(path)]) == 1
    assert capsys.readouterr().out == (
        f"{manifest}: nmoe-checkpoint version 3 is newer than this program reads (2); update nmoe-core\n"
    )


def test_consolidated_checkpoint_has_the_same_values(run, tmp_path, capsys):
    assert main(["consolidate", str(run), str(tmp_path / "one")]) == 0
    assert main(["consolidate", str(run / "checkpoints/step-00000010"), str(tmp_path / "weights"), "--weights"]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        f"{tmp_path}/one/checkpoints/step-00000020",
        f"{tmp_path}/weights/checkpoints/step-00000010",
    ]
    whole, found = find_checkpoint(tmp_path / "one"), tensors(-1.0)
    load_tensors(whole, found)
    assert all(torch.equal(found[name], value) for name, value in tensors(20.0).items())
    assert (whole.state, whole.config) == ({"step": 20, "recent_losses": [0.1, 1e-5]}, {"run": {"seed": 1}})
    assert list(stored_tensors(tmp_path / "weights/checkpoints/step-00000010")) == ["model.w"]
    assert sorted(path.name for path in (tmp_path / "one/checkpoints").iterdir()) == ["step-00000020"]


def test_what_cannot_be_done_is_one_line(run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    damaged = shutil.copytree(run, tmp_path / "damaged") / "checkpoints/step-00000020/__0_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    for arguments, message in (
        (["ls", str(tmp_path / "none")], "none: no such folder; expected a run's folder or one of its checkpoints"),
        (
            ["verify", str(tmp_path / "empty")],
            "empty: no checkpoint; expected a run's folder or one of its checkpoints",
        ),
        (["consolidate", str(tmp_path / "empty"), str(tmp_path / "x")], "empty: no complete checkpoint"),
        (["consolidate", str(run), str(tmp_path / "damaged")], "damaged: exists already"),
        (["consolidate", str(tmp_path / "damaged"), str(tmp_path / "x")], "__0_0.distcp: "),
    ):
        assert main(arguments) == 2
        err = capsys.readouterr().err
        assert message in err
        assert (err.startswith("error: "), err.count("\n")) == (True, 1)
    assert not (tmp_path / "x").exists()
