# SPDX-License-Identifier: Apache-2.0
"""Whole training steps as the trainer does them: loader, forward, backward, clipping, optimizer, selection biases.

    python benchmarks/train_step.py configs/moonlet.toml --set train.batch_size=8
    python -m torch.distributed.run --standalone --nproc-per-node=2 benchmarks/train_step.py configs/moonlet.toml \\
        --set train.batch_size=16 --set parallel.ep=2

Reads the text that comes with Python, as bytes, whatever the config's data are; the vocabulary stays the config's. Values
are initial ones, routing is as it falls. A step's time is the clock's, the wait for data in it. MFU = FLOP of the
tokens (nmoe.train.throughput: 6 a token for each active weight of a product, and attention) over time, GPUs and the
data sheet's dense bf16 peak, both printed. Overload: rows that the fullest rank got over the mean, and the fullest expert's
share over the mean, largest over layers, mean over steps. Beside them the plan of `nmoe-train --dry-run` and what PyTorch's
allocator held at most after the first step. The last line is the same as JSON. On a CPU it runs too, to try it out.
`--kernels N`: further steps under the profiler, and the N kernels that take longest in them.
"""

import argparse
import json
import logging
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from timing import kernel_table

from nmoe import arch
from nmoe.commands import enter
from nmoe.config import Config, load_config
from nmoe.data.loader import Loader
from nmoe.data.sources import open_train
from nmoe.model.transformer import compute_dtype
from nmoe.ops import registry
from nmoe.train.health import router_health
from nmoe.train.loop import StepResult, train_step
from nmoe.train.ranks import Ranks, join_ranks
from nmoe.train.room import planned_memory
from nmoe.train.setup import Parts, build, choose_device
from nmoe.train.throughput import device_peak, flop_per_token
from nmoe.train.warm_up import warm_up_ranks

DATA = ("data.builtin=python-docs", "data.train=[]", "data.val=[]", "train.eval_every=0", "train.eval_batches=0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step: what it did, its targets, seconds on the clock, and how long it waited for data."""

    result: StepResult
    targets: int
    seconds: float
    waited: float


def run(parts: Parts, config: Config, ranks: Ranks, *, steps: int) -> list[Step]:
    """Some steps from the beginning of the data."""
    sets, weights = open_train(config, hashed=False)
    loader = Loader.of(config, sets, weights, rank=ranks.rank, num_ranks=ranks.size)
    done = []
    with loader:
        for number in range(steps):
            began = time.perf_counter()
            batch = next(loader)
            waited = time.perf_counter() - began
            result = train_step(parts, batch, config=config)
            done.append(
                Step(result=result, targets=batch.num_targets, seconds=time.perf_counter() - began, waited=waited)
            )
            if number == 0:
                if ranks.watcher:  # from here on a rank that stays in one place for longer ends all
                    ranks.watcher.limit(config.rdep.timeout_s)
                seconds = registry.compile_seconds()
                say(
                    ranks,
                    f"first step {done[0].seconds:.1f} s; compiled {len(seconds)} kernels in {sum(seconds):.1f} s",
                )
                if ranks.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(ranks.device)
    return done


def say(ranks: Ranks, line: str) -> None:
    if ranks.rank == 0:
        print(line, flush=True)


def figures(config: Config, ranks: Ranks, steps: list[Step]) -> dict[str, Any]:
    """Medians over the steps, and what memory was planned and held."""
    seconds = statistics.median(step.seconds for step in steps)
    rate = statistics.median(step.targets / step.seconds for step in steps)
    peak = device_peak(ranks.device, compute_dtype(config))
    loads = [router_health(step.result.load_LE).max_over_mean.max(initial=1.0) for step in steps]
    received = [step.result.received_LR for step in steps]
    overload = [float((rows.max(axis=1) / rows.mean(axis=1).clip(min=1e-9)).max(initial=1.0)) for rows in received]
    plan = planned_memory(config, ranks)
    held = torch.cuda.max_memory_allocated(ranks.device) if ranks.device.type == "cuda" else 0
    parts = {
        part: statistics.median(step.result.seconds.get(part, 0.0) for step in steps)
        for part in ("forward", "backward", "optimizer")
    }
    return {
        "ranks": ranks.size,
        "ep": ranks.expert_size,
        "layers": config.model.num_layers,
        "rows": config.train.batch_size,
        "seq_len": config.data.seq_len,
        "seconds": seconds,
        "tokens_per_second": rate,
        "mfu": rate * flop_per_token(config) / (peak.flops * ranks.size),
        "peak_tflops": peak.flops / 1e12,
        "peak_origin": peak.origin,
        **{f"{part}_seconds": value for part, value in parts.items()},
        "data_wait_share": sum(step.waited for step in steps) / sum(step.seconds for step in steps),
        "rank_overload": statistics.mean(overload),
        "fullest_expert": float(statistics.mean(loads)),
        "planned_bytes": plan.peak,
        "plan_moment": plan.moment,
        "held_bytes": held,
        "loss": steps[-1].result.loss,
    }


def text(found: dict[str, Any]) -> str:
    held = found["held_bytes"]
    error = f"{100 * (found['planned_bytes'] / held - 1):+.1f} % off" if held else "not measured on a CPU"
    return "\n".join(
        (
            f"{found['tokens_per_second']:,.0f} token/s, {1e3 * found['seconds']:.1f} ms a step of {found['rows']} x "
            f"{found['seq_len']} on {found['ranks']} ranks (EP {found['ep']}), {found['layers']} layers",
            f"MFU {100 * found['mfu']:.1f} % of {found['peak_tflops']:.4g} TFLOP/s a GPU ({found['peak_origin']})",
            f"forward {1e3 * found['forward_seconds']:.1f} ms, backward {1e3 * found['backward_seconds']:.1f} ms, "
            f"optimizer {1e3 * found['optimizer_seconds']:.1f} ms, waiting for data {100 * found['data_wait_share']:.2f} %",
            f"overload: ranks {found['rank_overload']:.3f}, fullest expert {found['fullest_expert']:.2f} x mean",
            f"memory: planned {found['planned_bytes'] / 2**30:.2f} GiB (in the {found['plan_moment']}), held "
            f"{held / 2**30:.2f} GiB: {error}",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--steps", type=int, default=12, help="steps that are measured (default: 12)")
    parser.add_argument("--warm-up", type=int, default=4, help="steps before them (default: 4)")
    parser.add_argument(
        "--kernels", type=int, default=0, metavar="N", help="list the N longest kernels (default: none)"
    )
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    config = load_config(options.config, [*options.overrides, *DATA])
    device = choose_device(config)
    ranks = join_ranks(config, device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    say(ranks, f"{name}, PyTorch {torch.__version__}, arch {arch.current().name}, {options.steps} steps")
    began = time.perf_counter()
    ranks.agree(lambda: bool(open_train(config, hashed=False)))  # rank 0 makes the data
    warm_up_ranks(config, ranks)
    parts = build(config, ranks)
    say(ranks, f"kernels compiled and model built in {time.perf_counter() - began:.1f} s")
    steps = run(parts, config, ranks, steps=options.warm_up + options.steps)[options.warm_up :]
    found = figures(config, ranks, steps)
    say(ranks, text(found))
    if options.kernels:
        table = kernel_table(lambda: run(parts, config, ranks, steps=3), steps=3, most=options.kernels)
        say(ranks, table)
    say(ranks, json.dumps(found))
    parts.comm.close()
    ranks.part()


if __name__ == "__main__":
    raise SystemExit(enter("__main__", "main"))
