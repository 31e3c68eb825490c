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
from nmoe.model.transformer import Transformer
from nmoe.rdep.experts import Experts

__all__ = ["init_model", "normal"]

_BLOCK = 1 << 22


@torch.no_grad()  # of each thread: the mode is not inherited
def _fill(block: Tensor, std: float, key: str) -> None:
    stream = np.random.Generator(np.random.Philox(key=int.from_bytes(hashlib.sha256(key.encode()).digest()[:16])))
    # fp32 whatever the master's dtype is, so that an fp64 run starts from the values of its fp32 twin.
    values = stream.standard_normal(block.numel(), dtype=np.float32)
    block.copy_(torch.from_numpy(values).mul_(std))


def _blocks(values: Tensor, *, seed: int, name: str) -> Iterator[tuple[Tensor, str]]:
    flat = values.view(-1)
    for number, start in enumerate(range(0, flat.numel(), _BLOCK)):
        yield flat[start : start + _BLOCK], f"{seed}/{name}/{number}"


def normal(values: Tensor, *, std: float, seed: int, name: str) -> None:
    """Fill a contiguous tensor with normal values that depend on seed and name only."""
    for block, key in _blocks(values, seed=seed, name=name):
        _fill(block, std, key)


def _std(config: Config, name: str, input_width: int) -> float:
    base = config.model.init_base_width
    return config.model.init_std * ((base / input_width) ** 0.5 if base and name != "embed" else 1.0)


def _tensors(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """Every matrix to be drawn, experts one by one under their global ids."""
    experts = {f"{name}.": module for name, module in model.named_modules() if isinstance(module, Experts)}
    for name, parameter in model.named_parameters():
        owner = next((module for prefix, module in experts.items() if name.startswith(prefix)), None)
        if owner is None:
            yield name, parameter
        else:
            yield from ((f"{name}/{expert}", parameter[i]) for i, expert in enumerate(owner.owned))


@torch.no_grad()
def init_model(model: Transformer, seed: int) -> None:
    """Set every parameter and buffer of a model to its start.

    Args:
        model: On any device.
        seed: `run.seed`.
    """
    for buffer in model.buffers():
        buffer.zero_()
    drawn: list[tuple[Tensor, float, str]] = []
    for name, values in _tensors(model):
        if name.endswith("norm.weight"):
            values.fill_(1.0)
        else:
            std = _std(model.config, name, values.shape[-1])
            drawn += [(block, std, key) for block, key in _blocks(values, seed=seed, name=name)]
    with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(lambda item: _fill(*item), drawn))
