# SPDX-License-Identifier: Apache-2.0
"""What the engine makes of a server, against arithmetic and against the bare client, and the memory of a large corpus.

    python benchmarks/judge_throughput.py [latency] [saturation] [memory]

latency: a server that takes 2 s, 256 requests in flight; at best 128 documents/s. The start is included.
saturation: a server that answers at once; documents/s of the judge beside requests/s of the bare `openai` client that
sends the same bodies, with both of its transports, in the same run. On a machine that does other work the processor time
of the client is the fairer figure; it is printed with each.
memory: peak resident memory above the imports for a corpus of 2 GB.
"""

import asyncio
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx2
import openai
from judge_server import Server

from hydra_judge.judge import Judge
from hydra_judge.prompt import excerpts, messages
from hydra_judge.rubric import load_rubric
from nmoe.commands import enter

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
MEASURE = (
    "import resource, sys; from hydra_judge import cli, tables, backends; import hydra_judge.backends.openai, pyarrow.parquet; "
    "base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; sys.argv[0] = 'hydra-judge'; import time; cpu = time.process_time()\n"
    "try: cli.main()\n"
    "finally: print('MEMORY', base, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 'CPU', time.process_time() - cpu)"
)


def text(number: int, *, size: int = 1500) -> str:
    return f"Document {number} of the corpus. [[score={number % 6}]] " + "A sentence of plain English words. " * (
        size // 35
    )


def write_corpus(path: Path, count: int, *, size: int = 1500) -> None:
    with path.open("w") as stream:
        for number in range(count):
            stream.write(json.dumps({"id": f"d{number}", "text": text(number, size=size)}) + "\n")


def judge(corpus: Path, url: str, folder: Path, concurrency: int) -> tuple[float, float, float]:
    """Seconds that a run takes as it accounts for them (imports excluded), of these its processor time, MiB above the imports."""
    arguments = [
        "score", str(corpus), "--rubric", "educational", "--base-url", url, "--model", "m", "--answer", "json_schema",
        "--concurrency", str(concurrency), "--output", str(folder / "out"), "--cache", str(folder / "cache.sqlite"), "--quiet",
    ]  # fmt: skip
    done = subprocess.run([sys.executable, "-c", MEASURE, *arguments], check=True, capture_output=True, text=True)
    found = re.search(r"MEMORY (\d+) (\d+) CPU ([\d.]+)", done.stdout)
    assert found
    seconds = json.loads((folder / "out" / "runs.jsonl").read_text())["seconds"]
    return seconds, float(found[3]), (int(found[2]) - int(found[1])) / 1024


def latency(folder: Path) -> None:
    count = 256 * 30
    write_corpus(folder / "corpus.jsonl", count)
    with Server("--latency", "2") as server:
        seconds, cpu, _ = judge(folder / "corpus.jsonl", server.url, folder, 256)
    print(
        f"latency: {count / seconds:.1f} documents/s of 128 ({count / seconds / 128:.1%}), {count} documents, 2 s, 256 in flight; "
        f"{cpu / count * 1e3:.2f} ms of processor a document"
    )


async def bare(url: str, bodies: list[dict], concurrency: int, client: httpx2.AsyncClient) -> tuple[float, float]:
    """Requests per second of the client alone, and seconds of processor a request."""
    api = openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0, http_client=client)
    left = iter(bodies)

    async def work() -> None:
        for body in left:
            await api.chat.completions.create(**body)

    began, cpu = time.monotonic(), time.process_time()
    await asyncio.gather(*[work() for _ in range(concurrency)])
    seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    await api.close()
    return len(bodies) / seconds, cpu / len(bodies)


def saturation(folder: Path) -> None:
    rubric = load_rubric("educational")
    asked = Judge(rubric=rubric, model="m", form="json_schema")
    count, concurrency = 4000, 64
    bodies = []
    for number in range(count):
        (part,) = excerpts(text(number), rubric=rubric)
        chat = messages(part, rubric=rubric, form="json_schema")
        bodies.append(asked.request(part, chat, vote=0, attempt=0, order=0).body)
    write_corpus(folder / "corpus.jsonl", count)
    limits = httpx2.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    clients = {"aiohttp": openai.DefaultAioHttpClient, "default": openai.DefaultAsyncHttpxClient}
    with Server() as server:
        rates = {
            name: asyncio.run(bare(server.url, bodies, concurrency, client(limits=limits, trust_env=False)))
            for name, client in clients.items()
        }
        seconds, cpu, _ = judge(folder / "corpus.jsonl", server.url, folder, concurrency)
    for name, (rate, each) in rates.items():
        print(
            f"saturation: bare client, {name} transport: {rate:.0f} requests/s, {each * 1e3:.2f} ms of processor each"
        )
    rate, each = count / seconds, cpu / count
    best, least = max(rate for rate, _ in rates.values()), min(each for _, each in rates.values())
    print(
        f"saturation: hydra-judge: {rate:.0f} documents/s, {each * 1e3:.2f} ms of processor each: "
        f"{rate / best:.1%} of the best bare client, {least / each:.1%} by processor time"
    )


def memory(folder: Path) -> None:
    write_corpus(folder / "corpus.jsonl", 2000, size=1 << 20)
    size = (folder / "corpus.jsonl").stat().st_size
    with Server() as server:
        _, cpu, above = judge(folder / "corpus.jsonl", server.url, folder, 64)
    print(f"memory: {above:.0f} MiB above the imports, for {size / 1e9:.2f} GB ({cpu:.0f} s of processor)")


def main() -> None:
    parts = {"latency": latency, "saturation": saturation, "memory": memory}
    for name in sys.argv[1:] or parts:
        folder = Path(tempfile.mkdtemp(prefix="judge-throughput-"))
        parts[name](folder)
        shutil.rmtree(folder)


if __name__ == "__main__":
    raise SystemExit(enter("__main__", "main"))
