# SPDX-License-Identifier: Apache-2.0
"""How much memory a rank shares with its peers, from a config's numbers alone; `nmoe.rdep.exchange` takes just that."""

from nmoe.config import Config

__all__ = ["shared_bytes"]

_ALIGN, _HEADER_WORDS = 256, 4


def shared_bytes(config: Config, *, ranks: int) -> int:
    """Bytes of symmetric memory of each of ``ranks`` expert-parallel ranks; 0 where a rank is alone."""
    if ranks == 1:
        return 0
    wide = {"bf16": 2, "fp32": 4, "fp64": 8}[config.train.dtype]
    gate = max(wide, 4)
    tokens = config.train.micro_batch_size * config.data.seq_len
    width, top_k = config.model.hidden_size, config.moe.top_k
    words = -(-(_HEADER_WORDS + top_k * (1 + gate // 4)) // 4) * 4
    rows = ranks * tokens
    packet = {"plain": width * wide, "mxfp8": width + width // 32, "nvfp4": width // 2 + width // 16 + 4}[
        config.rdep.wire
    ]
    packet = packet if config.rdep.wire == "plain" else -(-packet // 16) * 16
    areas = {
        "flag": 8 * ranks,
        "epoch": 8,
        "count": 4 * ranks * ranks * 2,
        "rows": rows * packet,
        "gradients": rows * width * wide,
        "records": rows * words * 4,
        "results": min(top_k, ranks) * tokens * width * wide,
        "values": tokens * top_k * gate,
    }
    return sum(-(-size // _ALIGN) * _ALIGN for size in areas.values())
