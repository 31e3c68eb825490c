# SPDX-License-Identifier: Apache-2.0
"""The memory plan against what PyTorch's allocator held at most in a step, on one GPU.

    python benchmarks/memory.py configs/moonlet.toml --layers 12 6 --rows 8 4

Two micro batches a step, so that gradients are there while activations are. The first step, which makes the optimizer's
workspaces and compiles kernels, is not counted.
"""

import argparse
import itertools
import sys
from dataclasses import replace

import torch

from nmoe.commands import enter
from nmoe.config import Config, load_config
from nmoe.model.transformer import Transformer
from nmoe.train.memory import recompute_choices
from nmoe.train.ranks import Ranks
from nmoe.train.room import planned_memory
from nmoe.train.setup import build, choose_device


def micro_batch(model: Transformer, config: Config, device: torch.device) -> None:
    """Forward and backward of rows of random words in documents of a thousand tokens."""
    rows, length = config.train.micro_batch_size, config.data.seq_len
    tokens = torch.randint(0, config.model.vocab_size, (rows, length), device=device)
    place = torch.arange(length, device=device).expand(rows, length)
    output = model(tokens, positions_BT=place % 1000, document_BT=place.cpu() // 1000, targets_BT=tokens)
    (output.loss_sum + output.aux_loss).backward()


def measured(config: Config, device: torch.device) -> int:
    parts = build(config, Ranks(rank=0, size=1, device=device))
    for step in range(2):
        if step == 1:
            torch.cuda.reset_peak_memory_stats(device)
        for _ in range(2):
            micro_batch(parts.model, config, device)
        parts.optimizer.step(learning_rate=1e-4)
        for parameter in parts.model.parameters():
            parameter.grad = None
    return torch.cuda.max_memory_allocated(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--layers", type=int, nargs="+", default=[4])
    parser.add_argument("--rows", type=int, nargs="+", default=[8])
    parser.add_argument(
        "--all-recompute", action="store_true", help="every choice of train.recompute, not only none and all"
    )
    options = parser.parse_args()
    base = load_config(options.config)
    device = choose_device(base)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    print("layers  rows  recompute                    planned GB  measured GB  error  moment of the plan")
    for layers, rows in itertools.product(options.layers, options.rows):
        config = replace(
            base,
            model=replace(base.model, num_layers=layers),
            train=replace(base.train, micro_batch_size=rows, batch_size=2 * rows),
        )
        choices = list(recompute_choices(config))
        for choice in choices if options.all_recompute else [choices[0], choices[-1]]:
            plan = planned_memory(choice, Ranks(rank=0, size=1, device=device))
            found = measured(choice, device)
            name = ",".join(choice.train.recompute) or "none"
            error = 100 * (plan.peak / found - 1)
            print(
                f"{layers:6d}  {rows:4d}  {name:27}  {plan.peak / 1e9:10.2f}  {found / 1e9:11.2f}  {error:+4.1f} %  {plan.moment}"
            )
            sys.stdout.flush()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    raise SystemExit(enter("__main__", "main"))
