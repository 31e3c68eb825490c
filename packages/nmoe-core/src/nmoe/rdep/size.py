# SPDX-License-Identifier: Apache-2.0
"""How much memory a rank shares with its peers, from a config's numbers alone; `nmoe.rdep.exchange` takes just that."""

from nmoe.comm.layout import WIRES, areas, starts
from nmoe.config import Config

__all__ = ["shared_bytes"]


def shared_bytes(config: Config, *, ranks: int) -> int:
    """Bytes of symmetric memory of each of ``ranks`` expert-parallel ranks; 0 where a rank is alone."""
    if ranks == 1:
        return 0
    row_bytes = {"bf16": 2, "fp32": 4, "fp64": 8}[config.train.dtype]
    parts = areas(
        ranks=ranks,
        tokens=config.train.micro_batch_size * config.data.seq_len,
        width=config.model.hidden_size,
        top_k=config.moe.top_k,
        row_bytes=row_bytes,
        gate_bytes=max(row_bytes, 4),
        wire=WIRES.get(config.rdep.wire),
    )
    return starts(parts)[1]
