# SPDX-License-Identifier: Apache-2.0
"""The judge with a real model and no network: how well SmolLM2-135M tells 64 good and worthless documents apart.

    python benchmarks/judge_local.py [--half 1] [--threads N] [--base-url URL]

Starts `hydra-judge serve-local`, scores the documents by P(yes) and prints the area under the curve (1: every good document
above every worthless one; 0.5: chance) with a 95% interval. Half 1 is reported; the rubric was written by looking at half 0.
Ends with 1 below 0.95.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from judge_local_documents import documents

from nmoe.commands import enter

BIN = Path(sys.executable).parent
WANTED = 0.95


def area(good: np.ndarray, junk: np.ndarray) -> float:
    """Probability that a good document scores above a worthless one, ties counted half."""
    above = good[:, None] - junk[None, :]
    return float(((above > 0) + 0.5 * (above == 0)).mean())


def error(area: float, good: int, junk: int) -> float:
    """Standard error of an area under the curve. Source: Hanley & McNeil 1982, equation 1."""
    one, two = area / (2 - area), 2 * area**2 / (1 + area)
    return math.sqrt((area * (1 - area) + (good - 1) * (one - area**2) + (junk - 1) * (two - area**2)) / (good * junk))


def score(folder: Path, url: str, half: int) -> dict[str, float]:
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"id": id, "text": text}) + "\n" for id, text, _ in documents(half)))
    command = [
        BIN / "hydra-judge", "score", corpus, "--rubric", "small", "--answer", "p_yes", "--base-url", url, "--model", "local",
        "--concurrency", "2", "--timeout", "600", "--deadline", "3600", "--output", folder / "scored", "--cache", folder / "c.sqlite",
    ]  # fmt: skip
    subprocess.run(command, check=True, env=os.environ | {"OPENAI_API_KEY": ""})
    header = json.loads((folder / "scored/scored.json").read_text())
    lines = [line for part in header["parts"] for line in (folder / "scored" / part["path"]).read_text().splitlines()]
    found = {one["id"]: one["score"] for one in map(json.loads, lines)}
    assert None not in found.values(), header["outcomes"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", type=int, choices=(0, 1), default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--base-url", default=None, help="a server that runs already")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="judge-local-"))
    server = None
    url = options.base_url
    if url is None:
        command = [BIN / "hydra-judge", "serve-local", "--port", "0", "--threads", str(options.threads)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        url = server.stdout.readline().strip()
    began = time.monotonic()
    try:
        found = score(folder, url, options.half)
    finally:
        if server is not None:
            server.kill()
    seconds = time.monotonic() - began
    kinds: dict[str, list[float]] = defaultdict(list)
    for id, _, good in documents(options.half):
        kinds[f"{'good' if good else 'junk'}: {id.partition('-')[0]}"].append(found[id])
    for kind, values in sorted(kinds.items()):
        print(
            f"{kind:16} {len(values)} documents, mean score {np.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"
        )
    labels = {id: good for id, _, good in documents(options.half)}
    good = np.array([value for id, value in found.items() if labels[id]])
    junk = np.array([value for id, value in found.items() if not labels[id]])
    reached = area(good, junk)
    wide = 1.96 * error(reached, len(good), len(junk))
    print(
        f"AUC {reached:.3f} ({max(reached - wide, 0):.3f} to {min(reached + wide, 1):.3f}) over {len(good)} good and {len(junk)} worthless documents, {seconds / len(found):.1f} s a document"
    )
    shutil.rmtree(folder)
    sys.exit(reached < WANTED)


if __name__ == "__main__":
    raise SystemExit(enter("__main__", "main"))
