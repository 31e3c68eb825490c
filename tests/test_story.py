# SPDX-License-Identifier: Apache-2.0
"""The whole story, over real processes: raw corpus, judge, shards, training, metric store, dashboard.

It ends where it began: from the loss of a step back to the documents that the step saw and what the judge thought of them.
"""

import json
import os
import pydoc_data.topics
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import duckdb
import pytest

from nmoe.formats.metrics import open_store
from nmoe.formats.runs import read_run
from nmoe.formats.shards import open_shards

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
pytestmark = pytest.mark.story

CONFIG = """
[model]
vocab_size = 257
hidden_size = 32
num_layers = 2
num_dense_layers = 1
ffn_size = 64

[attention]
num_heads = 2
kv_lora_rank = 16
qk_nope_head_dim = 16
qk_rope_head_dim = 8
v_head_dim = 16

[moe]
num_experts = 4
num_shared_experts = 1
top_k = 2
expert_size = 32

[data]
train = ["shards"]
val = "shards"
seq_len = 64

[train]
steps = 30
batch_size = 4
micro_batch_size = 2
dtype = "fp32"
eval_every = 15
eval_batches = 2

[optim]
learning_rate = 3e-3

[schedule]
kind = "wsd"
warmup_steps = 3
decay_steps = 10

[checkpoint]
every = 10

[metrics]
publish_s = 0.2
router_every = 5
"""


def command(*arguments: str, cwd: Path, expect: int = 0) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "OPENAI_API_KEY": "sk-story", "NO_COLOR": "1"}
    result = subprocess.run(arguments, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == expect, f"{arguments}\n{result.stdout}\n{result.stderr}"
    return result


@pytest.fixture
def judge_url():
    """A server that speaks the OpenAI protocol over a real socket; it likes long words and dislikes junk."""
    server = subprocess.Popen(
        [sys.executable, str(ROOT / "tests/judge/openai_server.py"), "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    found = re.search(r"http://127\.0\.0\.1:\d+\S*", server.stdout.readline())
    assert found
    yield found[0]
    server.terminate()
    server.wait(timeout=10)
    server.stdout.close()


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_corpus(path: Path) -> dict[str, str]:
    """Python's documentation, one topic a line, between lines of every kind of dirt; returns text by id."""
    topics = {name: text for name, text in list(pydoc_data.topics.topics.items())[:40] if text.strip()}
    with path.open("w", encoding="utf-8") as stream:
        for name, text in topics.items():
            stream.write(json.dumps({"id": name, "text": text[:4000]}) + "\n")
        stream.write('{"id": "broken", "text": \n{"id": "empty", "text": ""}\n{"id": "null", "text": null}\n')
    return {name: text[:4000] for name, text in topics.items()}


def listening_addresses(port: int) -> set[str]:
    """Local addresses of the sockets that listen on a port, from the kernel's tables."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:] + Path("/proc/net/tcp6").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    return {field[1].split(":")[0] for field in fields if field[3] == "0A" and int(field[1].split(":")[1], 16) == port}


def test_from_raw_text_to_a_loss_and_back_to_the_text(tmp_path, judge_url, free_port):
    texts = write_corpus(tmp_path / "corpus.jsonl")

    # The judge reads the corpus; dirt is set aside with line and reason.
    score = (
        "hydra-judge",
        "score",
        "corpus.jsonl",
        "--rubric",
        "educational",
        "--base-url",
        judge_url,
        "--model",
        "judge",
        "--output",
        "scored",
    )
    command(*score, cwd=tmp_path)
    rejects = [json.loads(line) for line in (tmp_path / "scored" / "quarantine.jsonl").read_text().splitlines()]
    assert [(reject["line"], reject["reason"]) for reject in rejects] == [
        (len(texts) + 1, "bad_json"),
        (len(texts) + 2, "empty_text"),
        (len(texts) + 3, "not_text"),
    ]

    # Good documents become token shards with their lineage.
    command(
        "hydra-judge", "pack", "scored", "--tokenizer", "bytes", "--min-score", "0", "--output", "shards", cwd=tmp_path
    )
    command("hydra-judge", "verify", "shards", cwd=tmp_path)
    assert open_shards(tmp_path / "shards").num_documents == len(texts)

    # Training reads them.
    (tmp_path / "story.toml").write_text(CONFIG)
    command("nmoe-train", "story.toml", cwd=tmp_path)
    run_dir = tmp_path / "runs" / "story"
    run = read_run(run_dir)
    assert (run.status, run.step) == ("finished", 30)

    # The store tells what happened, to any DuckDB.
    with open_store(run_dir) as store:
        losses = [
            row[0]
            for row in store.execute("SELECT value FROM metrics WHERE name = 'train/loss' ORDER BY step").fetchall()
        ]
        load = store.execute(
            "SELECT sum(value) FROM metrics WHERE name = 'router/load' GROUP BY step, layer"
        ).fetchall()
        seen = store.execute('SELECT step, shard, "start", "end" FROM batches ORDER BY step').fetchall()
    assert len(losses) == 30
    assert losses[-1] < losses[0] - 1
    assert load
    assert all(abs(total - 1) < 1e-5 for (total,) in load)
    assert len(seen) == 30 * 4
    with duckdb.connect(str(run_dir / "metrics.duckdb"), read_only=True) as plain:
        assert plain.execute("SELECT unit FROM catalogue WHERE name = 'train/loss'").fetchone() == ("nat/token",)

    # From a step back to the text that it saw and the judge's opinion of it.
    shards = open_shards(tmp_path / "shards")
    for _, shard_name, start, _ in seen[:20]:
        number = next(i for i, shard in enumerate(shards.shards) if shard.name == Path(shard_name).name)
        place = shards.locate(sum(len(shard.tokens) for shard in shards.shards[:number]) + start)
        body = bytes(shards.shards[number].tokens[place.start : place.end - 1].astype("uint8")).decode()
        assert body == texts[place.lineage["id"]]
        assert place.lineage["source"].endswith("corpus.jsonl")
        assert place.lineage["score"] is not None

    # The dashboard serves it, on loopback alone.
    dashboard = subprocess.Popen(
        [
            str(BIN / "streamlit"),
            "run",
            "nviz",
            "--server.headless=true",
            f"--server.port={free_port}",
            "--",
            "--runs",
            str(tmp_path / "runs"),
        ],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert wait_for(f"http://127.0.0.1:{free_port}/_stcore/health") == b"ok"
        assert b"<html" in urllib.request.urlopen(f"http://127.0.0.1:{free_port}/", timeout=10).read().lower()
        assert listening_addresses(free_port) == {"0100007F"}
    finally:
        dashboard.terminate()
        dashboard.communicate(timeout=20)


def wait_for(url: str, *, seconds: float = 60.0) -> bytes:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return urllib.request.urlopen(url, timeout=5).read()
        except OSError:
            assert time.monotonic() < deadline, f"{url} does not answer"
            time.sleep(0.2)
