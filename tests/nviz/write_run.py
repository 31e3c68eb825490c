# SPDX-License-Identifier: Apache-2.0
"""Runs as a trainer leaves them, made in a second: real records and real stores, invented values.

As a script it is a trainer that only logs: `write_run.py ROOT NAME --steps N --rate R` writes R steps a second.
"""

import argparse
import json
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics

import duckdb
import numpy as np

from nmoe.formats.documents import ScoredDocument, ScoredWriter
from nmoe.formats.metrics import STORE, MetricWriter
from nmoe.formats.runs import RUN_FILE, RunRecord
from nmoe.formats.shards import ShardWriter, open_shards
from nmoe.formats.tokenizers import load_tokenizer

CONFIG = {
    "run": {"name": "demo", "seed": 0},
    "model": {"num_layers": 6, "hidden_size": 256},
    "moe": {"num_experts": 16, "top_k": 2},
    "data": {"train": ["data/demo"], "seq_len": 128},
    "train": {"steps": 400, "batch_size": 4},
}
BATCH_TOKENS = 4 * 128


class Values:
    """Invented but plausible values, a function of the seed and the step."""

    def __init__(self, *, seed: int = 0, layers: int = 6, experts: int = 16, ranks: int = 4, spike: int | None = None):
        self.random = np.random.default_rng(seed)
        self.layers, self.experts, self.ranks, self.spike = layers, experts, ranks, spike
        self.taste = self.random.normal(0, 0.35, (layers, experts))
        self.speed = 11_000 + 400 * seed

    def scalars(self, step: int) -> dict[str, float]:
        noise = self.random.normal
        hit = self.spike is not None and 0 <= step - self.spike < 4
        loss = 1.2 + 4.2 * math.exp(-step / 90) + 0.4 * math.exp(-step / 600) + noise(0, 0.03) + 2.4 * hit
        step_time = BATCH_TOKENS / self.speed * (1 + abs(noise(0, 0.06)))
        return {
            "train/loss": loss,
            "train/grad_norm": abs(0.6 + 2 * math.exp(-step / 60) + noise(0, 0.05) + 6 * hit),
            "train/learning_rate": 3e-4 * min(1.0, (step + 1) / 40),
            "train/tokens": float((step + 1) * BATCH_TOKENS),
            "speed/step_time": step_time,
            "speed/forward_time": 0.31 * step_time,
            "speed/backward_time": 0.55 * step_time,
            "speed/optimizer_time": 0.08 * step_time,
            "speed/data_wait": 0.02 * step_time,
            "speed/tokens_per_second": BATCH_TOKENS / step_time,
            "speed/mfu": 0.38 * self.speed / 12_000 + noise(0, 0.005),
            "memory/gpu_peak": 61.5e9,
            "memory/host_rss": 9.1e9 + 1e6 * step,
            "gpu/utilisation": min(1.0, 0.96 + noise(0, 0.01)),
            "gpu/power": 640 + noise(0, 15),
            "gpu/temperature": 58 + noise(0, 1),
            "router/overload": 1.15 + abs(noise(0, 0.03)),
        }

    def load(self, step: int) -> np.ndarray:
        logits = self.taste * math.exp(-step / 300) + self.random.normal(0, 0.08, self.taste.shape)
        logits[-1, 3] -= 40 * (step > 250)  # one expert dies
        shares = np.exp(logits)
        shares[shares < 1e-6] = 0
        return shares / shares.sum(axis=1, keepdims=True)

    def log(self, writer: MetricWriter, step: int, *, router_every: int = 10) -> None:
        scalars = self.scalars(step)
        writer.log(step, scalars)
        shares = self.load(step)
        received = np.stack([part.sum(axis=1) for part in np.array_split(shares, self.ranks, axis=1)], axis=1)
        uneven = received.mean(axis=0) * self.ranks
        ranks = scalars["speed/step_time"] * (0.6 + 0.4 * uneven + np.abs(self.random.normal(0, 0.005, self.ranks)))
        writer.log_array(step, "speed/rank_step_time", ranks, axes=("rank",))
        if step % 50 == 49:
            writer.log(step, {"val/loss": scalars["train/loss"] + 0.05, "val/loss_per_byte": scalars["train/loss"] / 4})
        if step % router_every == 0:
            load = shares
            writer.log_array(step, "router/received", received * 2 * BATCH_TOKENS, axes=("layer", "rank"))
            over = load * self.experts
            entropy = -(load * np.log(np.where(load > 0, load, 1))).sum(1) / math.log(self.experts)
            writer.log_array(step, "router/load", load, axes=("layer", "expert"))
            writer.log_array(step, "router/max_over_mean", over.max(1), axes=("layer",))
            writer.log_array(step, "router/dead_experts", (load == 0).sum(1).astype(float), axes=("layer",))
            writer.log_array(step, "router/entropy", entropy, axes=("layer",))
            writer.log_array(step, "router/bias_range", 0.02 + 0.001 * step * np.arange(self.layers), axes=("layer",))


def make_data(root: Path, *, junk_at: int = 20) -> dict[int, list[tuple[str, int, int]]]:
    """Shards and scored documents of real English with one document of noise, and spans that see it in steps 220 to 223.

    Args:
        root: the data folder; `root/demo` holds shards, `root/scored` the judge's verdicts.
        junk_at: place of the noise among the documents.

    Returns:
        spans by step, with the paths a trainer started beside `root` would write.
    """
    random = np.random.default_rng(0)
    texts = [(f"topics/{name}", "topics.jsonl", text) for name, text in sorted(topics.items())[:40]]
    noise = "".join(random.choice(list("#@!%qzx~ "), 12_000))
    texts.insert(junk_at, ("crawl/junk", "crawl.jsonl", noise))
    tokenizer = load_tokenizer("bytes")
    with (
        ScoredWriter(root / "scored", rubric={"name": "educational value"}, model="demo") as verdicts,
        ShardWriter(root / "demo", tokenizer=tokenizer, shard_tokens=100_000) as shards,
    ):
        for line, (name, source, text) in enumerate(texts, start=1):
            score = 0.0 if name == "crawl/junk" else round(float(np.clip(random.normal(3.4, 0.9), 0, 5)), 1)
            reason = "Symbols without a word." if name == "crawl/junk" else "Explains one thing well."
            verdicts.add(
                ScoredDocument(
                    id=name, text=text, source=source, line=line, outcome="ok", score=score, axes={"clarity": score},
                    reason=reason, windows=[[0, len(text)]],
                )
            )  # fmt: skip
            ids = tokenizer.encode_batch([text])[0]
            shards.add(ids, id=name, source=source, score=score, text_bytes=len(text.encode()))
    opened = open_shards(root / "demo")
    shard, entry = next(
        (shard, entry)
        for shard in opened.shards
        for entry, lineage in enumerate(shard.lineages())
        if lineage["id"] == "crawl/junk"
    )
    start = int(shard.index[entry, 0])
    spans: dict[int, list[tuple[str, int, int]]] = {}
    for step in range(400):
        path, at = (
            (shard.name, start + 512 * (step - 220))
            if 220 <= step < 224
            else (opened.shards[0].name, 512 * (step % 50))
        )
        spans[step] = [(f"{root.name}/demo/{path}", at + 128 * row, at + 128 * (row + 1) + 1) for row in range(4)]
    return spans


def make_run(
    root: Path,
    name: str,
    *,
    steps: int = 400,
    status: str = "finished",
    error: str | None = None,
    values: Values | None = None,
    extra: dict[int, dict[str, float]] | None = None,
    batches: dict[int, list[tuple[str, int, int]]] | None = None,
    config: dict | None = None,
    seconds_a_step: float = 0.5,
    silent_for: float = 0.0,
) -> Path:
    """A whole run.

    Args:
        root: folder of runs.
        name: the run's folder.
        steps: steps written; 0: a store without rows.
        status: "running", "stale", or as `RunRecord.finish` takes it.
        error: last error of a failed run.
        values: source of the values.
        extra: scalars by step that replace the invented ones.
        batches: spans by step.
        config: sections that replace those of `CONFIG`.
        seconds_a_step: pace that the times pretend.
        silent_for: seconds since the last heartbeat.
    """
    run = root / name
    run.mkdir(parents=True)
    values = values or Values()
    record = RunRecord(run)
    record.start(id=name, config={**CONFIG, **(config or {})}, steps=max(steps, 400))
    with MetricWriter(run, publish_s=3600) as writer:
        for step in range(steps):
            values.log(writer, step)
            if extra and step in extra:
                writer.log(step, extra[step])
            if batches and step in batches:
                writer.log_batches(step, batches[step])
    end = time.time() - silent_for
    began = end - steps * seconds_a_step
    with duckdb.connect(str(run / STORE)) as store:
        for step, replaced in (extra or {}).items():
            for metric, value in replaced.items():
                store.execute(
                    "DELETE FROM metrics WHERE step = ? AND name = ? AND value IS DISTINCT FROM ?",
                    [step, metric, value],
                )
        store.execute("UPDATE metrics SET time = ? + step * ?", [began, seconds_a_step])
    if status not in ("running", "stale"):
        record.finish(status, step=steps, error=error)  # type: ignore[arg-type]
    else:
        record.heartbeat(steps)
    _backdate(run / RUN_FILE, began, end - (3600 if status == "stale" else 0), steps)
    return run


@contextmanager
def recorded(root: Path, name: str, *, steps: int) -> Iterator[MetricWriter]:
    """A finished run whose values the block writes."""
    run = root / name
    run.mkdir(parents=True)
    record = RunRecord(run)
    record.start(id=name, config=CONFIG, steps=steps)
    with MetricWriter(run, publish_s=3600) as writer:
        yield writer
    record.finish("finished", step=steps)


def make_large(root: Path, name: str, *, layers: int = 61, experts: int = 256, steps: int = 30_000) -> Path:
    """A run of some 10 million rows: loads of every expert every 50 steps, and 20 scalars a step."""
    run = make_run(root, name, steps=3, values=Values(layers=layers, experts=experts))
    with duckdb.connect(str(run / STORE)) as store:
        store.execute("CREATE TABLE rows AS SELECT * FROM metrics LIMIT 0")
        store.execute(
            """
            INSERT INTO rows SELECT 'router/load', s * 50, s * 25.0, (0.5 + random()) / ?, l, e, NULL
            FROM range(?) AS a(s), range(?) AS b(l), range(?) AS c(e)
            """,
            [experts, steps // 50, layers, experts],
        )
        for place, (metric, value) in enumerate(Values().scalars(100).items()):
            store.execute(
                "INSERT INTO rows SELECT ?, s, s * 0.5, ? * (1 + 0.1 * random() + 3 * (s = ?)::INTEGER), NULL, NULL, NULL FROM range(?) AS a(s)",
                [metric, value, 12_345 + place, steps],
            )
        store.execute("DELETE FROM metrics")
        store.execute(
            "INSERT INTO metrics SELECT * REPLACE (? + time AS time) FROM rows ORDER BY step",
            [time.time() - steps * 0.5],
        )
        store.execute("DROP TABLE rows")
    return run


def _backdate(path: Path, began: float, end: float, steps: int) -> None:
    facts = json.loads(path.read_text())
    facts |= {"started_at": began, "heartbeat_at": end, "step": steps, "git": {"commit": "0" * 40, "dirty": False}}
    if facts["finished_at"] is not None:
        facts["finished_at"] = end
    if facts["status"] == "running" and time.time() - end < 60:
        facts["heartbeat_s"] = 1e6  # stays running for as long as the tests take
    path.write_text(json.dumps(facts))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("name")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--publish-s", type=float, default=1.0)
    arguments = parser.parse_args()
    run = arguments.root / arguments.name
    run.mkdir(parents=True)
    record = RunRecord(run, heartbeat_s=1.0)
    record.start(id=arguments.name, config=CONFIG, steps=arguments.steps)
    values, step, asked = Values(), 0, threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    with MetricWriter(run, publish_s=arguments.publish_s) as writer:
        while step < arguments.steps and not asked.wait(1 / arguments.rate):
            values.log(writer, step)
            record.heartbeat(step)
            step += 1
    record.finish("stopped" if asked.is_set() else "finished", step=step)


if __name__ == "__main__":
    main()
