# SPDX-License-Identifier: Apache-2.0
"""FLOP of a token, the device's peak, and what memory the process holds: the formulas behind every speed that is shown.

Model FLOP utilisation (MFU) counts what the model needs, not what the device did: 6 FLOP a token for each active weight
of a matrix product (2 forward, 4 backward), and attention over the keys before the query (in its window, where the layer
has one). Multi-token prediction counts as what it is: further layers, and the head once more a depth. Recomputation
and padding add nothing, and document masks subtract nothing.
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from nmoe.config import Config
from nmoe.model.attention import window_of
from nmoe.model.params import count_parameters, parameter_shapes

__all__ = ["Peak", "device_peak", "flop_per_token", "gpu_peak_bytes", "host_rss_bytes"]

# Dense bf16 tensor-core peak in TFLOP/s, by a part of the device's name; first match. Source: NVIDIA's data sheets of
# the SXM modules (dense is half of the figure printed there for sparse matrices).
_DATA_SHEET = (("GB300", 2500.0), ("B300", 2500.0), ("GB200", 2500.0), ("B200", 2250.0))
_DATA_SHEET += (("H200", 989.4), ("H100", 989.4), ("GH200", 989.4))


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """What the device could do at most.

    Attributes:
        flops: FLOP/s.
        origin: where the figure is from, for the log.
    """

    flops: float
    origin: str


def flop_per_token(config: Config) -> float:
    """FLOP of a forward and backward pass, a token.

    Source: Kaplan et al. 2020, arXiv:2001.08361 section 2.1 (6 N); Chowdhery et al. 2022, arXiv:2204.02311 appendix B
        (attention).
    """
    model, attention = config.model, config.attention
    vectors = sum(math.prod(shape) for shape in parameter_shapes(config).values() if len(shape) == 1)
    table = model.vocab_size * model.hidden_size
    heads = model.mtp_depth * table - (0 if model.tie_embeddings else table)  # the embedding's rows are looked up
    products = 6.0 * (count_parameters(config)[1] - vectors + heads)
    width = attention.num_heads * (attention.qk_head_dim + attention.v_head_dim)
    keys = sum(_keys_seen(config, layer) for layer in range(model.num_layers + model.mtp_depth))
    return products + 6.0 * width * keys


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


def _measured_peak(device: torch.device, dtype: torch.dtype) -> Peak:
    size = 8192 if device.type == "cuda" else 768
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        torch.mm(a, b).sum().item()  # the sum waits for the device
        best = min(best, time.perf_counter() - began)
    return Peak(
        flops=2.0 * size**3 / best, origin=f"measured, product of {size}^3 in {str(dtype).removeprefix('torch.')}"
    )


def host_rss_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def gpu_peak_bytes(device: torch.device) -> int:
    """Most memory that PyTorch held on the device so far; 0 on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
