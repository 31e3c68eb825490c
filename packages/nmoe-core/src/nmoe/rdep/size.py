# SPDX-License-Identifier: Apache-2.0
"""How much memory a rank shares with its peers, from a config's numbers alone; `nmoe.rdep.exchange` takes just that."""

from nmoe.comm.layout import WIRES, areas, starts
from nmoe.config import Config

__all__ = ["shared_bytes"]


def shared_bytes(config: Config, *, ranks: int, node_size: int = 0) -> int:
    """Bytes of symmetric memory of each of ``ranks`` expert-parallel ranks; 0 where a rank is alone.

    Args:
        config: The run's.
        ranks: P.
        node_size: Ranks of a node, a divisor of P; 0: P.
    """
    if ranks == 1:
        return 0
    tokens, nodes = config.train.micro_batch_size * config.data.seq_len, ranks // (node_size or ranks)
    if nodes in (1, ranks):
        return _bytes(config, ranks=ranks, tokens=tokens, far=0 if nodes == 1 else ranks - 1)
    rail = _bytes(config, ranks=nodes, tokens=tokens, far=nodes - 1)
    return rail + _bytes(config, ranks=ranks // nodes, tokens=nodes * tokens, far=0)


def _bytes(config: Config, *, ranks: int, tokens: int, far: int) -> int:
    """Of one exchange."""
    row_bytes = {"bf16": 2, "fp32": 4, "fp64": 8}[config.train.dtype]
    parts = areas(
        ranks=ranks,
        tokens=tokens,
        width=config.model.hidden_size,
        top_k=config.moe.top_k,
        row_bytes=row_bytes,
        gate_bytes=max(row_bytes, 4),
        wire=WIRES.get(config.rdep.wire),
        far=far,
    )
    return starts(parts)[1]
