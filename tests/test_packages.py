# SPDX-License-Identifier: Apache-2.0
"""Each package can be installed alone: a trainer carries no dashboard, a dashboard no torch."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.story,
    pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv on the PATH: pip install uv"),
]


def run(
    *command: str | Path, cwd: Path = ROOT, check: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "UV_NO_SYNC", "PYTHONPATH")}
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=kept | environment, capture_output=True, text=True, timeout=500
    )
    assert not check or result.returncode == 0, result.stdout + result.stderr
    return result


def installed(environment: Path) -> set[str]:
    listed = run("uv", "pip", "list", "--python", environment, "--format", "json").stdout
    return {entry["name"] for entry in json.loads(listed)}


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The tracked files as they are, elsewhere: `uv sync` must not touch the environment that runs this test."""
    target = tmp_path_factory.mktemp("clone")
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")[:-1]
    for name in names:
        if name.split("/")[0] in ("packages", "pyproject.toml", "uv.lock", "nviz"):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


def sync(clone: Path, environment: Path, *options: str) -> Path:
    run("uv", "sync", "--locked", "--no-default-groups", *options, cwd=clone, UV_PROJECT_ENVIRONMENT=str(environment))
    return environment


def test_dashboard_alone_has_no_torch(clone, tmp_path):
    found = installed(sync(clone, tmp_path / "env", "--package", "nviz", "--no-editable"))
    assert {"nviz", "streamlit", "plotly", "duckdb", "nmoe-core"} <= found
    assert not {"torch", "openai", "datasets", "hydra-judge"} & found
    assert "--runs" in run(tmp_path / "env/bin/nviz", "--help").stdout


def test_judge_alone_has_no_torch(clone, tmp_path):
    found = installed(sync(clone, tmp_path / "env", "--package", "hydra-judge", "--no-editable"))
    assert {"hydra-judge", "openai", "datasets", "nmoe-core"} <= found
    assert not {"torch", "streamlit", "nviz"} & found
    assert "score" in run(tmp_path / "env/bin/hydra-judge", "--help").stdout


def test_core_without_the_extra_says_in_one_line_what_to_install(clone, tmp_path):
    found = installed(sync(clone, tmp_path / "env", "--package", "nmoe-core"))
    assert not {"torch", "streamlit", "openai"} & found
    for arguments in (["--help"], [str(ROOT / "configs/moonlet.toml"), "--dry-run"]):
        assert run(tmp_path / "env/bin/nmoe-train", *arguments).stdout
    refused = run(tmp_path / "env/bin/nmoe-train", ROOT / "configs/quickstart.toml", check=False, cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "nmoe-core[train]" in refused.stderr
    (tmp_path / "text.txt").write_text("Some text to cut into tokens.\n" * 50)
    run(tmp_path / "env/bin/nmoe-prep", tmp_path / "text.txt", "--tokenizer", "bytes", "--output", tmp_path / "shards")


def test_trainer_alone_has_neither_dashboard_nor_judge(clone, tmp_path):
    """Asked of the lock rather than installed: it is the same resolution, and torch alone is three gigabytes."""
    options = ["--locked", "--no-default-groups", "--package", "nmoe-core", "--extra", "train"]
    planned = run(
        "uv", "export", *options, "--no-hashes", "--no-header", "--no-annotate", "--no-emit-workspace", cwd=clone
    ).stdout
    found = {line.split("==")[0].split("[")[0] for line in planned.splitlines() if "==" in line}
    assert {"torch", "nvidia-cutlass-dsl", "quack-kernels", "nvshmem4py-cu13"} <= found
    assert not {"streamlit", "openai", "plotly", "datasets"} & found


@pytest.mark.parametrize(
    ("package", "command"), [("nmoe-core", "nmoe-prep"), ("hydra-judge", "hydra-judge"), ("nviz", "nviz")]
)
def test_wheel_installed_alone_starts_its_command(clone, tmp_path, package, command):
    for name in {"nmoe-core", package}:
        run("uv", "build", "--wheel", "--package", name, "--out-dir", tmp_path / "dist", cwd=clone)
    run("uv", "venv", "-q", "--python", sys.executable, tmp_path / "env")
    run("uv", "pip", "install", "-q", "--python", tmp_path / "env", *(tmp_path / "dist").glob("*.whl"))
    assert "usage" in run(tmp_path / "env/bin" / command, "--help", cwd=tmp_path).stdout.lower()
    if package == "nmoe-core":
        assert (
            "nmoe-core[train]"
            in run(tmp_path / "env/bin/nmoe-train", ROOT / "configs/quickstart.toml", check=False, cwd=tmp_path).stderr
        )


def test_store_is_readable_by_duckdb_1(tmp_path):
    write = "import sys; from nmoe.formats.metrics import MetricWriter\nwith MetricWriter(sys.argv[1]) as w: w.log(1, {'train/loss': 2.5})"
    run(sys.executable, "-c", write, tmp_path)
    read = "import duckdb as d, sys; print(d.__version__, d.connect(sys.argv[1], read_only=True).execute('select value from metrics').fetchone()[0])"
    printed = run(
        "uv",
        "run",
        "--no-project",
        "--with",
        "duckdb<2",
        "python",
        "-c",
        read,
        tmp_path / "metrics.duckdb",
        cwd=tmp_path,
    ).stdout.split()
    assert printed[0].startswith("1.")
    assert float(printed[1]) == 2.5
