# SPDX-License-Identifier: Apache-2.0
"""How the memory that ranks share is laid out: numbers alone, without torch, so that a plan of memory can ask for them.

What the areas are for stands in `nmoe.rdep.exchange`, what records and packets hold in `nmoe.ops.push` and `nmoe.ops.wire`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["HEADER_WORDS", "MXFP8", "NVFP4", "WIRES", "Area", "Wire", "areas", "record_words", "starts"]

HEADER_WORDS = 4
"""Of a record: source, token, ordinal, epoch."""
_ALIGN = 256  # bytes: of an area's start, so that bulk copies and 16-byte stores are aligned


def record_words(*, top_k: int, gate_bytes: int) -> int:
    """M of a record with K choices."""
    return -(-(HEADER_WORDS + top_k * (1 + gate_bytes // 4)) // 4) * 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Wire:
    """A format of rows on the wire."""

    name: str
    block: int
    """Values that share a scale; D is a multiple of it."""
    bits: int
    """Of an element."""
    row_scale: bool

    def payload_bytes(self, width: int) -> int:
        """Bytes of the elements of a row of D values."""
        return width * self.bits // 8

    def packet_bytes(self, width: int) -> int:
        """Bytes of a row of D values with its scales, a multiple of 16."""
        used = self.payload_bytes(width) + width // self.block + 4 * self.row_scale
        return -(-used // 16) * 16


MXFP8 = Wire(name="mxfp8", block=32, bits=8, row_scale=False)
NVFP4 = Wire(name="nvfp4", block=16, bits=4, row_scale=True)
WIRES = {wire.name: wire for wire in (MXFP8, NVFP4)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Area:
    """A part of the memory."""

    shape: tuple[int, ...]
    element: Literal["int64", "int32", "uint8", "row", "gate"]
    """Its dtype; the last two are those of rows and of gates."""
    itemsize: int
    """Of an element, in bytes."""


def areas(
    *,
    ranks: int,
    tokens: int,
    width: int,
    top_k: int,
    row_bytes: int,
    gate_bytes: int,
    wire: Wire | None,
    far: int = 0,
) -> dict[str, Area]:
    """All areas of a rank, in their order.

    Args:
        ranks: P.
        tokens: T_max.
        width: D.
        top_k: K.
        row_bytes: Of an element of a row.
        gate_bytes: Of a gate.
        wire: Format of x on the way, or None.
        far: Of the ranks, those whose memory is reached by puts.
    """
    rows = ranks * tokens

    def whole(*shape: int, bits: Literal[32, 64]) -> Area:
        return Area(shape=shape, element="int32" if bits == 32 else "int64", itemsize=bits // 8)

    def of_rows(*shape: int) -> Area:
        return Area(shape=(*shape, width), element="row", itemsize=row_bytes)

    def of_gates(*shape: int) -> Area:
        return Area(shape=(*shape, top_k), element="gate", itemsize=gate_bytes)

    def of_records(*shape: int) -> Area:
        return whole(*shape, record_words(top_k=top_k, gate_bytes=gate_bytes), bits=32)

    packets = Area(shape=(rows, wire.packet_bytes(width)), element="uint8", itemsize=1) if wire else of_rows(rows)
    home = {"results": of_rows(min(top_k, ranks), tokens), "values": of_gates(tokens)}
    if far:
        home = {"results": of_rows(ranks, tokens), "values": of_gates(ranks, tokens)}
        home |= {
            "rows outbox": of_rows(far, tokens),
            "gradients outbox": of_rows(far, tokens),
            "records outbox": of_records(far, tokens),
            "values outbox": of_gates(far, tokens),
        }
    return {
        "flag": whole(ranks, bits=64),
        "epoch": whole(1, bits=64),
        "count": whole(ranks, ranks, 2, bits=32),
        "rows": packets,
        "gradients": of_rows(rows),
        "records": of_records(rows),
        **home,
    }


def starts(parts: Mapping[str, Area]) -> tuple[dict[str, int], int]:
    """Where each area starts, in bytes, and the size of all."""
    found, end = {}, 0
    for name, area in parts.items():
        found[name] = end
        end += -(-area.itemsize * math.prod(area.shape) // _ALIGN) * _ALIGN
    return found, end
