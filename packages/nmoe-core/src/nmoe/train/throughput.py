# SPDX-License-Identifier: Apache-2.0
"""FLOP of a token, the device's peak, and what memory the process holds: the formulas behind every speed that is shown.

Model FLOP utilisation (MFU) counts what the model needs, not what the device did: 6 FLOP a token for each active weight
of a matrix product (2 forward, 4 backward), and attention over the keys before the query (in its window, where the layer
has one). Multi-token prediction counts as what it is: further layers, and the head once more a depth. Recomputation
and padding add nothing, and document masks subtract nothing.
"""

import contextlib
import functools
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from nmoe.config import Config
from nmoe.model.attention import window_of
from nmoe.model.params import block_shapes

__all__ = [
    "PARTS",
    "Peak",
    "device_peak",
    "flop_by_part",
    "flop_per_token",
    "gpu_peak_bytes",
    "host_memory_bytes",
    "host_rss_bytes",
    "measured_bandwidth",
]

# Dense bf16 tensor-core peak in TFLOP/s, by a part of the device's name; first match. Source: NVIDIA's data sheets of
# the SXM modules (dense is half of the figure printed there for sparse matrices).
_DATA_SHEET = (("GB300", 2500.0), ("B300", 2500.0), ("GB200", 2500.0), ("B200", 2250.0))
_DATA_SHEET += (("H200", 989.4), ("H100", 989.4), ("GH200", 989.4))
_PEAK_S = 0.3
"""How long products are timed where there is no data sheet."""


PARTS = ("attention", "router", "experts", "mlp", "loss", "further tokens")
"""Parts of the model with matrix products; mlp: dense layers and shared experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """What the device could do at most.

    Attributes:
        flops: FLOP/s.
        origin: where the figure is from, for the log.
    """

    flops: float
    origin: str


def flop_by_part(config: Config) -> dict[str, float]:
    """FLOP of a forward and backward pass, a token, by part of the model; parts without products are left out.

    Source: Kaplan et al. 2020, arXiv:2001.08361 section 2.1 (6 N); Chowdhery et al. 2022, arXiv:2204.02311 appendix B
        (attention).
    """
    model, attention, moe = config.model, config.attention, config.moe
    weights: dict[str, float] = {part: 0.0 for part in PARTS}  # noqa: C420 - the keys are texts, not these six texts
    layers = range(model.num_layers + model.mtp_depth)
    for name, shape in ((name, shape) for layer in layers for name, shape in block_shapes(config, layer)):
        if len(shape) > 1:
            share = moe.top_k / moe.num_experts if ".experts." in name else 1.0
            weights[_part_of(name)] += share * math.prod(shape)
    weights["loss"] = float((1 + model.mtp_depth) * model.vocab_size * model.hidden_size)
    weights["further tokens"] = float(model.mtp_depth * 2 * model.hidden_size**2)
    flop = {part: 6.0 * number for part, number in weights.items() if number}
    width = attention.num_heads * (attention.qk_head_dim + attention.v_head_dim)
    flop["attention"] += 6.0 * width * sum(_keys_seen(config, layer) for layer in layers)
    return flop


def _part_of(name: str) -> str:
    """Part of a layer's parameter."""
    for prefix, part in (("attn.", "attention"), ("moe.router", "router"), ("moe.experts", "experts")):
        if name.startswith(prefix):
            return part
    return "mlp"


def flop_per_token(config: Config) -> float:
    """FLOP of a forward and backward pass, a token."""
    return sum(flop_by_part(config).values())


def _keys_seen(config: Config, layer: int) -> float:
    """Keys that a query of a layer sees, mean over a sequence that is one document."""
    length = config.data.seq_len
    window = min(window_of(config, layer) or length, length)
    return window - window * window / (2 * length)


def device_peak(device: torch.device, dtype: torch.dtype) -> Peak:
    """The device's dense peak in a dtype: the data sheet's in bf16 on known GPUs, else that of a large matrix product."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for part, tflops in _DATA_SHEET:
            if part in name:
                return Peak(flops=tflops * 1e12, origin=f"{name}, data sheet, dense bf16")
    return _measured_peak(device, dtype)


@functools.cache
def _measured_peak(device: torch.device, dtype: torch.dtype) -> Peak:
    size = 8192 if device.type == "cuda" else 768
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    best, until, times = float("inf"), time.perf_counter() + _PEAK_S, 0
    while times < 5 or time.perf_counter() < until:  # other work on the machine must leave one of them alone
        times += 1
        began = time.perf_counter()
        torch.mm(a, b).sum().item()  # the sum waits for the device
        best = min(best, time.perf_counter() - began)
    return Peak(
        flops=2.0 * size**3 / best, origin=f"measured, product of {size}^3 in {str(dtype).removeprefix('torch.')}"
    )


def measured_bandwidth(device: torch.device) -> float:
    """Bytes/s that the device's memory reads and writes together, of a large copy."""
    source = torch.zeros((1 << 30) if device.type == "cuda" else (1 << 27), dtype=torch.uint8, device=device)
    target, best = torch.empty_like(source), float("inf")
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        target[-1].item()  # waits for the device
        best = min(best, time.perf_counter() - began)
    return 2.0 * source.numel() / best


def host_rss_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")  # 64 KiB beside the CPU of a GB200


def host_memory_bytes() -> int:
    """Memory that this process may use at most: that of the machine, or of its container."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit ("max")
        there = min(there, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return there


def gpu_peak_bytes(device: torch.device) -> int:
    """Most memory that PyTorch held on the device so far; 0 on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
