# SPDX-License-Identifier: Apache-2.0
"""`.ci/gpu`: who may run beside whom, and what is left when a part is ended. The parts themselves need GPUs."""

import shlex
import subprocess
import sys
import time
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "gpu"
NOTE = "import os, time; b = time.time(); time.sleep(0.3); print(os.environ['CUDA_VISIBLE_DEVICES'], b, time.time())"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = SourceFileLoader("gpu_script", str(SCRIPT))
    spec = spec_from_loader("gpu_script", loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules["gpu_script"] = module  # dataclasses look there
    loader.exec_module(module)
    return module


def part(script: ModuleType, name: str, code: str = NOTE, **more: Any) -> Any:
    return script.Part(name=name, command=f"-c {shlex.quote(code)}", **more)


def test_figures_have_their_gpus_to_themselves(script, tmp_path):
    parts = [part(script, f"test-{n}", test=True) for n in range(3)] + [part(script, "both-test", gpus=2, test=True)]
    parts += [part(script, f"figure-{n}") for n in range(3)] + [part(script, "both", gpus=2)]
    assert script.run_all(parts, ["4", "7"], tmp_path, limit_s=60.0)
    spans = []
    for one in parts:
        names, begin, end = (tmp_path / f"{one.name}.log").read_text().split()[-3:]
        assert len(names.split(",")) == one.gpus
        spans.append((one, set(names.split(",")), float(begin), float(end)))
    for one, names, begin, end in spans:
        for other, others, first, last in spans:
            if one is not other and names & others and not (one.test and other.test):
                assert end <= first or last <= begin, f"{one.name} beside {other.name}"


def test_a_part_that_takes_too_long_leaves_nothing_behind(script, tmp_path, capsys):
    child = tmp_path / "child"
    code = f"import subprocess, sys, time; p = subprocess.Popen(['sleep', '77']); open({str(child)!r}, 'w').write(str(p.pid)); time.sleep(60)"
    slow = part(script, "slow", code, seconds=2)
    assert not script.run_all([slow, part(script, "bad", "raise SystemExit(3)")], ["0"], tmp_path, limit_s=60.0)
    said = capsys.readouterr().out
    assert "ENDED  slow" in said
    assert "FAILED bad" in said
    time.sleep(0.1)
    stat = Path(f"/proc/{child.read_text()}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_every_part_names_files_that_exist(script):
    for one in script.PARTS:
        files = [word for word in shlex.split(one.command) if word.endswith(".py")]
        assert files, one.name
        for file in files:
            assert (SCRIPT.parents[1] / file).is_file(), f"{one.name}: {file}"


def test_without_a_gpu_it_says_so(tmp_path):
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env={"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin"})
    assert done.returncode == 2
    assert done.stderr.startswith("error: no CUDA GPU is visible")
    assert done.stderr.count("\n") == 1
