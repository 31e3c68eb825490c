# SPDX-License-Identifier: Apache-2.0
"""Initial values: each a function of (seed, parameter name, global expert id) and of nothing else.

Not of the rank, the world size, the device, or the order in which parameters are filled. Values are drawn in blocks of
4M, each from its own counter-based stream, so that threads share the work: about 100M values a second and core.

==================  =======================================================================================
parameter           start
==================  =======================================================================================
``*norm.weight``    1
``router.bias``     0
``embed``           normal, mean 0, `model.init_std`
every other         the same, with `model.init_base_width` times sqrt(base width / input width of the matrix)
==================  =======================================================================================

Source: DeepSeek-V3 (arXiv 2412.19437, 4.2) starts every learned matrix at standard deviation 0.006.
"""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from nmoe.config import Config
from nmoe.model.pieces import model_pieces
from nmoe.model.transformer import Transformer

__all__ = ["init_model", "normal"]

_BLOCK = 1 << 22


@torch.no_grad()  # of each thread: the mode is not inherited
def _fill(block: Tensor, skipped: int, std: float, key: str) -> None:
    stream = np.random.Generator(np.random.Philox(key=int.from_bytes(hashlib.sha256(key.encode()).digest()[:16])))
    # fp32 whatever the master's dtype is, so that an fp64 run starts from the values of its fp32 twin.
    values = stream.standard_normal(skipped + block.numel(), dtype=np.float32)[skipped:]
    block.copy_(torch.from_numpy(values).mul_(std))


def _blocks(values: Tensor, *, seed: int, name: str, offset: int = 0) -> Iterator[tuple[Tensor, int, str]]:
    """Each block of a piece that begins at an element of the whole: its values, the draws before them, its stream."""
    flat, done = values.view(-1), 0
    while done < flat.numel():
        number, skipped = divmod(offset + done, _BLOCK)
        part = flat[done : done + _BLOCK - skipped]
        yield part, skipped, f"{seed}/{name}/{number}"
        done += part.numel()


def normal(values: Tensor, *, std: float, seed: int, name: str) -> None:
    """Fill a contiguous tensor with normal values that depend on seed and name only."""
    for block, skipped, key in _blocks(values, seed=seed, name=name):
        _fill(block, skipped, std, key)


def _std(config: Config, name: str, input_width: int) -> float:
    base = config.model.init_base_width
    return config.model.init_std * ((base / input_width) ** 0.5 if base and name != "embed" else 1.0)


def _tensors(model: Transformer) -> Iterator[tuple[str, Tensor, int]]:
    """Every piece of a matrix to be drawn and its offset in the whole; experts one by one under their global ids."""
    buffers = {name for name, _ in model.named_buffers()}
    for name, piece in model_pieces(model).items():
        if name in buffers:
            continue
        if ".experts." in name:
            yield from ((f"{name}/{piece.start + i}", values, 0) for i, values in enumerate(piece.tensor))
        else:
            yield name, piece.tensor, piece.offset


@torch.no_grad()
def init_model(model: Transformer, seed: int) -> None:
    """Set every parameter and buffer of a model, or of this rank's part of it, to its start.

    Args:
        model: On any device.
        seed: `run.seed`.
    """
    for buffer in model.buffers():
        buffer.zero_()
    drawn: list[tuple[Tensor, int, float, str]] = []
    for name, values, offset in _tensors(model):
        if name.endswith("norm.weight"):
            values.fill_(1.0)
        else:
            std = _std(model.config, name, values.shape[-1])
            blocks = _blocks(values, seed=seed, name=name, offset=offset)
            drawn += [(block, skipped, std, key) for block, skipped, key in blocks]
    with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(lambda item: _fill(*item), drawn))
