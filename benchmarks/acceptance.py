# SPDX-License-Identifier: Apache-2.0
"""The trainer's goals for speed and memory, each measured in processes of its own, with what was reached beside it.

    python benchmarks/acceptance.py step            one GPU: MFU >= 40 %, plan within 5 % of the allocator
    python benchmarks/acceptance.py transformers    one GPU: >= 2 times the token/s of transformers, at depths that fit both
    python benchmarks/acceptance.py ranks           two GPUs: EP 2 >= 1.85 times the token/s of one GPU

All take `--config` (default: configs/moonlet.toml), `--rows` a GPU (8), `--layers` (all; for transformers 4, or several) and further
`--set`. What transformers needs beside its layers, most of it the loss, is what two depths have in common. With
`--config configs/quickstart.toml --set ...` each runs on a CPU too, to try it out; figures from there mean nothing.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from nmoe.commands import enter

HERE = Path(__file__).parent


def result_of(*command: str | Path, limit_s: float) -> dict[str, Any]:
    """Runs a benchmark, shows what it prints, and reads the JSON of its last line; ends it and all its processes in time."""
    print(f"$ {' '.join(map(str, command))}", flush=True)
    started = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen([sys.executable, *map(str, command)], **started)
    assert process.stdout is not None
    alarm = threading.Timer(limit_s, os.killpg, (process.pid, signal.SIGKILL))
    alarm.start()
    last = ""
    try:
        for line in process.stdout:
            if line.strip():
                last = line
            print(f"  {line}", end="", flush=True)
        status, late = process.wait(), not alarm.is_alive()
    finally:
        alarm.cancel()
        with contextlib.suppress(ProcessLookupError):  # it is in a session of its own, where no Ctrl-C comes
            os.killpg(process.pid, signal.SIGKILL)
    if status:
        raise SystemExit(f"not done in {limit_s:g} s" if late else f"failed with status {status}")
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
        limit_s=options.limit,
    )


def compare(options: argparse.Namespace, settings: list[str]) -> None:
    """Each depth by us and by transformers, and a table of milliseconds."""
    rows = [f"--set=train.batch_size={options.rows}", f"--set=train.micro_batch_size={options.rows}"]
    lines = []
    for layers in options.layers or [4]:
        depth = [*settings, f"--set=model.num_layers={layers}"]
        one = ours(options, depth)
        lines.append(line(layers, "nmoe", one))
        for peer in options.peer:
            masters = ["--masters"] if peer == "masters" else []
            command = (HERE / "train_transformers.py", options.config, *rows, *depth, *masters)
            theirs = result_of(*command, limit_s=options.limit)
            ratio = one["tokens_per_second"] / theirs["tokens_per_second"]
            lines.append(f"{line(layers, f'transformers {peer}', theirs)}  {ratio:.2f}")
            verdict(f"nmoe over transformers ({peer}, {layers} layers), token/s", ratio, 2.0)
    print("layers  who                   step ms  forward  backward  optimizer  held GB  ratio", *lines, sep="\n")


def line(layers: int, who: str, found: dict[str, Any]) -> str:
    times = [1e3 * found[key] for key in ("seconds", "forward_seconds", "backward_seconds", "optimizer_seconds")]
    cells = (f"{spent:{width}.1f}" for spent, width in zip(times, (7, 7, 8, 9), strict=True))
    return f"{layers:6d}  {who:20}  {'  '.join(cells)}  {found['held_bytes'] / 1e9:7.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("goal", choices=["step", "transformers", "ranks"])
    parser.add_argument("--config", type=Path, default=HERE.parent / "configs" / "moonlet.toml")
    parser.add_argument("--rows", type=int, default=8, help="rows a GPU (default: 8)")
    parser.add_argument("--layers", type=int, nargs="+", default=[])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--limit", type=float, default=600, help="seconds for each process (default: 600)")
    parser.add_argument(
        "--peer",
        nargs="+",
        choices=["bf16", "masters"],
        default=["bf16", "masters"],
        help="transformers all in bf16, with fp32 masters as ours",
    )
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    options = parser.parse_args()
    settings = [f"--set={override}" for override in options.overrides]
    if options.goal == "transformers":
        compare(options, settings)
        return
    settings += [f"--set=model.num_layers={layers}" for layers in options.layers[:1]]
    one = ours(options, settings)
    if options.goal == "step":
        verdict("MFU", one["mfu"], 0.40)
        if one["held_bytes"]:
            verdict("plan off the allocator", abs(one["planned_bytes"] / one["held_bytes"] - 1), 0.05, most=True)
    elif options.goal == "ranks":
        two = ours(options, [*settings, "--set=parallel.ep=2"], ranks=2)
        verdict("two GPUs over one, token/s", two["tokens_per_second"] / one["tokens_per_second"], 1.85)


if __name__ == "__main__":
    raise SystemExit(enter("__main__", "main"))
