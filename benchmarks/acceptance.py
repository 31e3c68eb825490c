# SPDX-License-Identifier: Apache-2.0
"""The trainer's goals for speed and memory, each measured in processes of its own, with what was reached beside it.

    python benchmarks/acceptance.py step            one GPU: MFU >= 40 %, plan within 5 % of the allocator
    python benchmarks/acceptance.py transformers    one GPU: >= 2 times the token/s of transformers, at a depth that fits both
    python benchmarks/acceptance.py ranks           two GPUs: EP 2 >= 1.85 times the token/s of one GPU

All take `--config` (default: configs/moonlet.toml), `--rows` a GPU (8), `--layers` (all; for transformers 4) and further `--set`. With
`--config configs/quickstart.toml --set ...` each runs on a CPU too, to try it out; figures from there mean nothing.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def result_of(*command: str | Path) -> dict[str, Any]:
    """Runs a benchmark, shows what it prints, and reads the JSON of its last line."""
    print(f"$ {' '.join(map(str, command))}", flush=True)
    process = subprocess.Popen([sys.executable, *map(str, command)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    last = ""
    for line in process.stdout:
        if line.strip():
            last = line
        print(f"  {line}", end="", flush=True)
    if process.wait():
        raise SystemExit(f"failed with status {process.returncode}")
    return json.loads(last)


def verdict(what: str, found: float, goal: float, *, most: bool = False) -> None:
    reached = found <= goal if most else found >= goal
    print(
        f"{'reached' if reached else 'MISSED '}  {what}: {found:.3g}, goal {'<=' if most else '>='} {goal:g}",
        flush=True,
    )


def ours(options: argparse.Namespace, settings: list[str], *, ranks: int = 1) -> dict[str, Any]:
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    rows = [f"--set=train.batch_size={ranks * options.rows}", f"--set=train.micro_batch_size={options.rows}"]
    return result_of(
        *start,
        HERE / "train_step.py",
        options.config,
        *rows,
        *settings,
        f"--steps={options.steps}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("goal", choices=["step", "transformers", "ranks"])
    parser.add_argument("--config", type=Path, default=HERE.parent / "configs" / "moonlet.toml")
    parser.add_argument("--rows", type=int, default=8, help="rows a GPU (default: 8)")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--masters", action="store_true", help="transformers keeps fp32 masters, as we do")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    options = parser.parse_args()
    layers = options.layers or (4 if options.goal == "transformers" else 0)
    settings = [f"--set={override}" for override in options.overrides]
    settings += [f"--set=model.num_layers={layers}"] if layers else []
    one = ours(options, settings)
    if options.goal == "step":
        verdict("MFU", one["mfu"], 0.40)
        if one["held_bytes"]:
            verdict("plan off the allocator", abs(one["planned_bytes"] / one["held_bytes"] - 1), 0.05, most=True)
    elif options.goal == "ranks":
        two = ours(options, [*settings, "--set=parallel.ep=2"], ranks=2)
        verdict("two GPUs over one, token/s", two["tokens_per_second"] / one["tokens_per_second"], 1.85)
    else:
        rows = [f"--set=train.batch_size={options.rows}", f"--set=train.micro_batch_size={options.rows}"]
        masters = ["--masters"] if options.masters else []
        theirs = result_of(HERE / "train_transformers.py", options.config, *rows, *settings, *masters)
        verdict("nmoe over transformers, token/s", one["tokens_per_second"] / theirs["tokens_per_second"], 2.0)


if __name__ == "__main__":
    main()
