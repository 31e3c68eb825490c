# SPDX-License-Identifier: Apache-2.0
"""A bad day for the judge: faults of every kind, an outage, kill -9 at random moments; the result must be a calm day's.

    python benchmarks/judge_faults.py [--documents 20000] [--kills 5] [--outage 60] [--stop SECONDS]

Prints what the server was asked, and checks: no document lost, none scored wrongly, output byte-identical to a run
without faults or kills, and no answer given twice that was on disk. What is given twice was under way at a kill (at most the
requests in flight, counted at each) or came after the judge had given up waiting, which the server learns from the kernel: the
connection was closed with the answer unread. On a machine that is busy there may be some of these; on an idle one there are none.
"""

import argparse
import json
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from judge_server import Server

from nmoe.commands import enter

ROOT = Path(__file__).parents[1]
IN_FLIGHT = 128
BIN = Path(sys.executable).parent
FAULTS = (
    "429=0.05,429_after=0.05,500=0.025,529=0.025,timeout=0.005,drop=0.01,drop_late=0.01,garbled=0.005,fenced=0.02,prose=0.02,"
    "trailing_comma=0.02,truncated=0.02,out_of_range=0.02,wrong_type=0.01,missing_axis=0.01,wrong_code=0.01,refused=0.02,"
    "declared_refusal=0.01,empty=0.02,two_objects=0.01"
)


def write_corpus(path: Path, count: int) -> dict[str, float]:
    """Documents of 200 to 2,000 characters; one in forty is refused or filtered always. Returns score by id (-1: none)."""
    rng, expected = random.Random(1), {}
    words = [
        "the",
        "of",
        "water",
        "light",
        "energy",
        "number",
        "river",
        "stone",
        "history",
        "cell",
        "plant",
        "measure",
        "theory",
        "engine",
        "music",
        "law",
    ]
    with path.open("w") as stream:
        for number in range(count):
            level = rng.randrange(6)
            mark = f"[[score={level}]]"
            kind = rng.random()
            if kind < 0.0125:
                mark, level = "[[refused]]", -1
            elif kind < 0.025:
                mark, level = "[[filtered]]", -1
            body = " ".join(rng.choice(words) for _ in range(rng.randrange(30, 300)))
            stream.write(json.dumps({"id": f"doc-{number}", "text": f"Document {number}. {mark} {body}."}) + "\n")
            expected[f"doc-{number}"] = float(level)
    return expected


def command(corpus: Path, url: str, folder: Path, name: str, *, timeout: float = 30.0) -> list[str]:
    return [
        str(BIN / "hydra-judge"), "score", str(corpus), "--rubric", "educational", "--base-url", url, "--model", "test-model",
        "--answer", "json_schema", "--concurrency", str(IN_FLIGHT), "--timeout", str(timeout), "--output", str(folder / name), "--cache",
        str(folder / f"{name}.sqlite"),
    ]  # fmt: skip


def kept(path: Path) -> int:
    """Answers in the cache."""
    if not path.exists():
        return 0
    try:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
            return connection.execute("SELECT count(*) FROM answers").fetchone()[0]
    except sqlite3.OperationalError:  # it is just being made
        return 0


class Account:
    """Answers that were given and are not on disk, run by run: all that may be asked for again.

    The server counts an answer as given when it hands it whole to the socket, the cache holds each that counts once. What
    is given beyond that was lost by a kill, or came after the judge had given up waiting, or was asked for in vain.
    """

    def __init__(self, server: Server, cache: Path):
        self.server, self.cache = server, cache
        self.given_twice = self.given_up = 0
        self._unread = self._living = 0

    def close(self, *, killed: bool) -> None:
        """Takes the account of a run that has ended."""
        while (stats := self.server.call("/stats"))["in_flight"]:
            time.sleep(0.02)
        given_up, self._unread = self._living - self._unread, stats["unread"]
        lost = stats["answered"] - kept(self.cache) - self.given_twice
        print(
            f"{'kill -9' if killed else 'end'} at {kept(self.cache)} answers on disk, {lost} more given, {given_up} never read"
        )
        assert 0 <= lost <= given_up + killed * IN_FLIGHT
        self.given_twice += lost
        self.given_up += given_up

    def before_end(self) -> None:
        """Counts answers never read while the run still lives: a kill leaves some unread as well."""
        self._living = self.server.call("/stats")["unread"]


def bad_day(corpus: Path, folder: Path, options: argparse.Namespace, server: Server) -> tuple[dict[str, Any], Account]:
    """Scores the corpus under faults; returns the server's counts, and the account of the kills."""
    rng, cache, documents = random.Random(time.time_ns()), folder / "bad.sqlite", options.documents
    account = Account(server, cache)
    moments = sorted(rng.sample(range(documents // 20, documents), options.kills))
    outage_at = rng.randrange(documents // 10, documents * 9 // 10)
    status, asked = None, command(corpus, server.url, folder, "bad", timeout=options.timeout)
    for moment in [*moments, None]:
        with (folder / "bad.log").open("a") as log, running(asked, log) as process:
            stop_at = kept(cache) + documents // 40 if options.stop else None
            while process.poll() is None and (moment is None or kept(cache) < moment):
                if outage_at is not None and kept(cache) >= outage_at:
                    server.call("/control", {"outage": options.outage})
                    print(f"outage of {options.outage:g} s at {kept(cache)} answers", flush=True)
                    outage_at = None
                if stop_at is not None and kept(cache) >= stop_at:
                    process.send_signal(signal.SIGSTOP)
                    time.sleep(options.stop)
                    process.send_signal(signal.SIGCONT)
                    print(f"stopped for {options.stop:g} s at {kept(cache)} answers", flush=True)
                    stop_at = None
                time.sleep(0.05)
            account.before_end()
            assert moment is None or process.poll() is None, f"ended before the kill; see {folder / 'bad.log'}"
            status = process.poll()
        account.close(killed=moment is not None)
    assert status == 0, (folder / "bad.log").read_text()[-2000:]
    return server.call("/stats"), account


@contextmanager
def running(arguments: list[str], log: TextIO) -> Iterator[subprocess.Popen[bytes]]:
    """A command that is killed where the block is left before it has ended."""
    process = subprocess.Popen(arguments, stderr=log, stdout=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def scores(folder: Path) -> dict[str, float]:
    header = json.loads((folder / "scored.json").read_text())
    lines = [line for part in header["parts"] for line in (folder / part["path"]).read_text().splitlines()]
    return {one["id"]: -1.0 if one["score"] is None else one["score"] for one in map(json.loads, lines)}


def same_files(one: Path, other: Path) -> list[str]:
    """Files that differ between two output folders, the accounts of runs aside."""
    names = {path.relative_to(folder) for folder in (one, other) for path in folder.rglob("*") if path.is_file()}
    names = {name for name in names if name.name != "runs.jsonl"}
    return [
        str(name)
        for name in sorted(names)
        if not (one / name).exists() or (one / name).read_bytes() != (other / name).read_bytes()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--outage", type=float, default=60.0)
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds that the judge waits for an answer")
    parser.add_argument(
        "--stop", type=float, default=0.0, help="also stop every run once, for so many seconds, by SIGSTOP"
    )
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="judge-faults-"))
    corpus = folder / "corpus.jsonl"
    expected = write_corpus(corpus, options.documents)
    began = time.monotonic()
    with Server("--latency", "0.05", "--jitter", "1", "--faults", FAULTS, "--retry-after", "0.3") as server:
        stats, account = bad_day(corpus, folder, options, server)
    print(f"bad day: {time.monotonic() - began:.0f} s")
    with Server() as calm:
        subprocess.run(command(corpus, calm.url, folder, "calm"), check=True, stderr=subprocess.DEVNULL)
        calm_stats = calm.call("/stats")
    found = scores(folder / "bad")
    wrong = {id for id in expected if found.get(id) != expected[id]}
    differ = same_files(folder / "bad", folder / "calm")
    faults = {name: count for name, count in sorted(stats.items()) if re.fullmatch(r"[a-z0-9_]+", name)}
    print(json.dumps({"server": faults, "calm_requests": calm_stats["requests"]}))
    print(
        f"{len(found)} of {len(expected)} documents, {len(wrong)} wrong, {len(differ)} files differ, {account.given_twice} answers given "
        f"twice in {options.kills} kills ({IN_FLIGHT} in flight at each); on {account.given_up} the judge had given up"
    )
    assert not wrong
    assert not differ
    assert len(found) == len(expected)
    shutil.rmtree(folder)


if __name__ == "__main__":
    raise SystemExit(enter("__main__", "main"))
