# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of a whole model on one GPU, without optimizer and loader.

    python benchmarks/model_step.py [configs/moonlet.toml] [--document 1000] [--profile]

One micro batch of the config, random tokens in documents of exponential length, random weights, so routing as it falls.
MFU counts what `nmoe.train.throughput` counts. ``--profile`` lists where a step's time goes on the GPU. Needs a CUDA GPU.
"""

import argparse
from pathlib import Path

import torch
from timing import dense_ceiling, milliseconds

from nmoe.comm.local import Local
from nmoe.commands import enter
from nmoe.config import load_config
from nmoe.model.transformer import IGNORED, Transformer
from nmoe.train.throughput import device_peak, flop_per_token

DEVICE = torch.device("cuda")


def batch(rows: int, length: int, words: int, document: int) -> dict[str, torch.Tensor]:
    """Arguments of the model."""
    generator = torch.Generator().manual_seed(1)
    number = torch.zeros(rows, length, dtype=torch.int64)
    number[:, 1:] = (torch.rand(rows, length - 1, generator=generator) < 1 / document).cumsum(1)
    place = torch.arange(length).expand(rows, length)
    begins = torch.cat((torch.ones(rows, 1, dtype=torch.bool), number[:, 1:] != number[:, :-1]), dim=1)
    start = torch.where(begins, place, 0).cummax(dim=1).values
    tokens = torch.randint(0, words, (rows, length), generator=generator)
    targets = torch.where(number[:, 1:] == number[:, :-1], tokens[:, 1:], IGNORED)
    return {
        "tokens_BT": tokens.to(DEVICE),
        "positions_BT": (place - start).to(DEVICE),
        "document_BT": number,
        "targets_BT": torch.nn.functional.pad(targets, (0, 1), value=IGNORED).to(DEVICE),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?", default=Path(__file__).parents[1] / "configs" / "moonlet.toml")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=c")
    parser.add_argument("--document", type=int, default=1000, help="mean length of a document (default: 1000)")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    config = load_config(options.config, options.overrides)
    rows, length = config.train.micro_batch_size, config.data.seq_len
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    ceiling = dense_ceiling()
    with DEVICE:
        model = Transformer(config, comm=Local(DEVICE))
    for name, parameter in model.named_parameters():
        torch.nn.init.ones_(parameter) if name.endswith("norm.weight") else torch.nn.init.normal_(parameter, std=0.02)
    for buffer in model.buffers():
        buffer.zero_()
    arguments = batch(rows, length, config.model.vocab_size, options.document)

    def forward() -> torch.Tensor:
        output = model(**arguments)
        return (output.loss_sum + output.aux_loss) / output.num_targets

    def train() -> None:
        forward().backward()
        for parameter in model.parameters():
            parameter.grad = None

    train()
    torch.cuda.reset_peak_memory_stats()
    both, ahead = milliseconds(train, runs=5), milliseconds(forward, runs=5)
    tokens, flop = rows * length, flop_per_token(config) * rows * length
    peak = device_peak(DEVICE, torch.bfloat16)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, dense bf16 8192^3: {ceiling:.0f} TFLOP/s")
    print(
        f"{options.config.stem}, {rows} rows of {length}: forward {ahead:.1f} ms, with backward {both:.1f} ms, "
        f"{tokens / both * 1e3:,.0f} token/s, {flop / both / 1e9:.0f} TFLOP/s, MFU {flop / both / peak.flops * 1e5:.1f}%, "
        f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
    )
    if options.profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            train()
            torch.cuda.synchronize()
        averages = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
        for event in averages[:28]:
            print(f"  {event.self_device_time_total / 1e3:8.2f} ms {event.count:5d} x  {event.key[:150]}")


if __name__ == "__main__":
    raise SystemExit(enter("__main__", "main"))
