# SPDX-License-Identifier: Apache-2.0
"""The same training step in the package transformers: grouped experts, torch.compile, fused AdamW, on one GPU.

    python benchmarks/train_transformers.py configs/moonlet.toml --set model.num_layers=4 --set train.batch_size=8

The model is the one that `nmoe-convert to-hf` would export, with random values and random tokens, rows that are one
document (their fastest: no mask but the causal one). Values, gradients and moments are bf16, which is their fastest and a lesser
training than ours; `--masters` keeps fp32 copies of the values beside them, as we do, and updates those. (fp32 values under autocast
would not do: compiled, their experts then run one by one.) A batch that does not fit into memory whole is tried in 2, 4
and 8 micro batches; the first that fits is measured. The last line is JSON.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers

from nmoe.commands import enter
from nmoe.config import Config, load_config
from nmoe.model.hf import config_to_hf
from nmoe.train.stopwatch import Stopwatch
from nmoe.train.throughput import device_peak, flop_per_token

PARTS = ("forward", "backward", "optimizer")


def model_of(config: Config, *, device: torch.device) -> torch.nn.Module:
    keys = config_to_hf(config)
    (kind,) = keys["architectures"]
    hf = getattr(transformers, kind.replace("ForCausalLM", "Config")).from_dict(keys)
    with device:
        return transformers.AutoModelForCausalLM.from_config(
            hf, dtype=torch.bfloat16, attn_implementation="sdpa", experts_implementation="grouped_mm"
        ).train()


def step_of(
    config: Config, options: argparse.Namespace, micro: int, device: torch.device
) -> Callable[[], tuple[float, dict[str, float]]]:
    """A function that trains one step of `train.batch_size` rows, `micro` at a time: the loss, and seconds by part."""
    model = model_of(config, device=device)
    values = list(model.parameters())
    trained = [value.detach().float().requires_grad_() for value in values] if options.masters else values
    optimizer = torch.optim.AdamW(trained, lr=1e-4, betas=config.optim.betas, fused=True)
    called = torch.compile(model) if options.compile else model
    rows, length = config.train.batch_size, config.data.seq_len
    generator = torch.Generator(device).manual_seed(1)

    def batches() -> Iterator[torch.Tensor]:
        for _ in range(rows // micro):
            yield torch.randint(config.model.vocab_size, (micro, length), generator=generator, device=device)

    def step() -> tuple[float, dict[str, float]]:
        watch, total = Stopwatch(device), torch.zeros((), device=device)
        watch.lap("")
        for tokens in batches():
            loss = called(input_ids=tokens, labels=tokens, use_cache=False).loss * (micro / rows)
            watch.lap("forward")
            loss.backward()
            watch.lap("backward")
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(values, 1.0)
        if options.masters:
            for master, value in zip(trained, values, strict=True):
                master.grad = None if value.grad is None else value.grad.float()
                value.grad = None
        optimizer.step()
        if options.masters:
            with torch.no_grad():
                for value, master in zip(values, trained, strict=True):
                    value.copy_(master)
        optimizer.zero_grad(set_to_none=True)
        watch.lap("optimizer")
        return float(total), watch.take()

    return step


def measure(config: Config, options: argparse.Namespace, micro: int, device: torch.device) -> dict[str, Any]:
    step = step_of(config, options, micro, device)
    seconds, parts, loss = [], [], 0.0
    for number in range(options.warm_up + options.steps):
        began = time.perf_counter()
        loss, spent = step()
        parts.append(spent)
        seconds.append(time.perf_counter() - began)
        if number == 0:
            print(f"{micro} rows a micro batch: first step {seconds[0]:.1f} s", flush=True)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
    median = statistics.median(seconds[options.warm_up :])
    tokens = config.train.batch_size * config.data.seq_len
    peak = device_peak(device, torch.bfloat16)
    return {
        "peer": "transformers, fp32 masters" if options.masters else "transformers, all bf16",
        "layers": config.model.num_layers,
        "micro_rows": micro,
        "seconds": median,
        **{f"{part}_seconds": statistics.median(each[part] for each in parts[options.warm_up :]) for part in parts[0]},
        "tokens_per_second": tokens / median,
        "mfu": tokens / median * flop_per_token(config) / peak.flops,
        "held_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
        "loss": loss,
        "version": transformers.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--masters", action="store_true", help="fp32 copies of the values, which are updated")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    options = parser.parse_args()
    config = load_config(options.config, options.overrides)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    for parts in (1, 2, 4, 8):
        micro = config.train.batch_size // parts
        try:
            found = measure(config, options, micro, device)
        except torch.OutOfMemoryError:
            print(f"{micro} rows a micro batch do not fit", flush=True)
        else:
            rate, spent, mfu = found["tokens_per_second"], found["seconds"], found["mfu"]
            pieces = ", ".join(f"{part} {1e3 * found[f'{part}_seconds']:.1f}" for part in PARTS)
            print(f"{rate:,.0f} token/s, {1e3 * spent:.1f} ms a step ({pieces}), MFU {100 * mfu:.1f} %")
            print(json.dumps(found))
            return
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    raise SystemExit("not even the smallest micro batch fits")


if __name__ == "__main__":
    raise SystemExit(enter("__main__", "main"))
