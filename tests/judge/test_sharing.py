# SPDX-License-Identifier: Apache-2.0
"""One corpus, many processes: workers of a job array, and a Ray cluster that loses one in the middle."""

import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SBATCH = Path(__file__).parents[2] / "docs/judge.sbatch"


def same(one: Path, other: Path, *, least: int) -> bool:
    """Whether two folders hold the same files, the accounts of runs aside."""
    held = [
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (one, other)
    ]
    for files in held:
        files.pop(Path("runs.jsonl"), None)
    return held[0] == held[1] and len(held[0]) >= least


def children(pid: int) -> Iterator[tuple[int, str]]:
    """(pid, title) of all processes below one."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(path.joinpath("stat").read_text().rpartition(")")[2].split()[1])
            title = path.joinpath("cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if parent == pid:
            yield int(path.name), title
            yield from children(int(path.name))


@pytest.fixture
def ray_cluster(environment: dict[str, str]) -> Iterator[tuple[str, int, Path]]:
    """Address, pid and folder of a Ray cluster with three CPUs."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # pytest's folders are too long for a socket's path
    # Its ports listen on every address: nobody without the token may use them.
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    command = ["ray", "start", "--head", "--block", "--num-cpus=3", "--port=0"]
    options = ["--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={folder}"]
    head = subprocess.Popen([*command, *options], env=environment, stdout=subprocess.PIPE, text=True)
    assert head.stdout is not None
    found = next(match[1] for line in head.stdout if (match := re.search(r"--address='([\d.:]+)'", line)))
    yield found, head.pid, folder
    for pid in [*(pid for pid, _ in children(head.pid)), head.pid]:  # its own way to end takes half a minute
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    head.wait(timeout=30)
    shutil.rmtree(folder, ignore_errors=True)


def test_a_ray_cluster_that_loses_a_worker_leaves_what_one_process_leaves(
    tmp_path, serve, score, hydra, corpus, environment, ray_cluster
):
    address, head, session = ray_cluster
    server = serve("--latency", "0.2")
    corpus(count=120)
    asked = ("corpus.jsonl", "--rubric", "educational", "--base-url", server.url, "--model", "test-model")
    options = ("--answer", "json_schema", "--block-bytes", "800", "--concurrency", "2")
    command = ["hydra-judge", "score", *asked, *options, "--output", "shared", "--ray", address]
    run = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    busy: list[int] = []
    while server.stats().get("answered", 0) < 30 or len(busy) < 2:  # Ray starts its processes one after another
        assert run.poll() is None
        time.sleep(0.02)
        busy = [pid for pid, title in children(head) if title.startswith("ray::Map(")]
    os.kill(busy[1], signal.SIGKILL)
    said = run.communicate(timeout=120)[1]
    assert run.returncode == 0, said
    assert re.search(r"(\d+) of \1 blocks", said)
    # Nothing was asked again but what the killed process had in flight: the rest of its block was in the cache.
    assert 120 <= server.stats()["requests"] <= 122
    score(server, "corpus.jsonl", *options, output="alone")
    assert same(tmp_path / "alone", tmp_path / "shared", least=30)

    packing = ("--tokenizer", "bytes", "--min-score", "3", "--shard-tokens", "900")
    hydra("pack", "alone", *packing, "--output", "shards")
    hydra("pack", "shared", *packing, "--output", "by-ray", "--ray", address)
    assert same(tmp_path / "shards", tmp_path / "by-ray", least=8)
    logs = [path for path in session.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(logs) > 5
    assert not [path for path in logs if b"planted" in path.read_bytes()]


def test_a_job_array_packs_what_one_process_packs(tmp_path, serve, score, hydra, corpus, environment):
    """The batch file as it stands, a task of it started twice, one left half done by an earlier run."""
    corpus(count=90)
    score(serve(), "corpus.jsonl", "--block-bytes", "800")
    packing = ("pack", "scored", "--tokenizer", "bytes", "--min-score", "2", "--shard-tokens", "700")
    hydra(*packing, "--output", "alone")
    half = tmp_path / "shards/parts/00000"
    half.mkdir(parents=True)
    (half / "tokens.bin").write_bytes(b"half")
    array = {"SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_STEP": "2", "SLURM_ARRAY_TASK_COUNT": "3"}
    told = []
    for task in (5, 1, 1, 3):
        place = environment | array | {"SLURM_ARRAY_TASK_ID": str(task)}
        done = subprocess.run(
            ["bash", SBATCH, *packing, "--output", "shards"], cwd=tmp_path, env=place, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        told.append(done.stdout)
    assert "worker 2/3" in told[0]
    assert "60 documents" in told[3]
    assert same(tmp_path / "alone", tmp_path / "shards", least=6)
    assert "slurm: SLURM_ARRAY_TASK_ID is ''" in hydra(*packing, "--output", "x", "--worker", "slurm", expect=2).stderr
    environment |= array | {"SLURM_ARRAY_TASK_ID": "2"}
    assert "no place" in hydra(*packing, "--output", "x", "--worker", "slurm", expect=2).stderr


def test_workers_divide_what_may_be_spent(tmp_path, serve, score, corpus):
    server = serve()
    corpus(count=60)
    options = ("corpus.jsonl", "--answer", "json_schema", "--block-bytes", "600", "--max-requests", "11")
    for number in range(3):
        score(server, *options, "--worker", f"{number}/3", expect=1)
    assert server.stats()["requests"] == 11
    refused = score(server, *options, "--ray", "local", expect=2)
    assert "--max-requests" in refused.stderr
