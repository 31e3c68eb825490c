# SPDX-License-Identifier: Apache-2.0
"""Rows in 8 or 4 bits on their way to the experts' owners, quantised while they are sent.

========  =====================  ==========================  ===================  ================
format    elements               scale of a block            scale of a row       bytes per value
========  =====================  ==========================  ===================  ================
mxfp8     E4M3                   E8M0, of 32 values          none                 1.031
nvfp4     E2M1, two in a byte    E4M3, of 16 values          fp32                 0.5625 (+ 4 B)
========  =====================  ==========================  ===================  ================

A row's packet is its elements, then the scales of its blocks, then the scale of the row, filled up to 16 bytes. mxfp8:
the scale is the least power of two that keeps the block within E4M3's 448, so nothing saturates. nvfp4: g = max |row| *
(1 / 2688); a block's scale is max |block| / (6 g) in E4M3; elements are x * (1 / (scale * g)). All roundings are to nearest,
ties to even. g is a product, because a quotient by a constant has no one meaning: on a GPU torch multiplies by the
constant's rounded reciprocal, on a CPU it divides. A value that is not finite makes its block (nvfp4: its row) NaN, so that it is seen.

Sources: OCP Microscaling Formats 1.0 (E8M0, E4M3, E2M1, blocks of 32); rounding the scale up: arXiv 2506.08027; NVFP4's
two levels of scales: NVIDIA, "Introducing NVFP4". The scale per row, in place of one per tensor, is ours: the rows of
one product come from several ranks.
"""

from typing import Protocol, cast

from torch import Tensor

from nmoe.comm.layout import MXFP8, NVFP4, WIRES, Wire
from nmoe.comm.remote import Remote
from nmoe.ops.plan import Sends
from nmoe.ops.registry import implementation

__all__ = ["MXFP8", "NVFP4", "NVFP4_RANGE", "WIRES", "Kernels", "Wire", "kernels"]

NVFP4_RANGE = 6.0 * 448.0
"""Largest element times largest scale of a block."""


class Kernels(Protocol):
    """What an implementation file defines. A packet is uint8 [packet_bytes(D)]; D is a multiple of 32; of 64
    for nvfp4 on a GPU, where the scale of a row has to be aligned."""

    def push_packed(self, x_TD: Tensor, sends: Sends, count_PP2: Tensor, *, packets: Remote, wire: Wire) -> None:
        """Store each token's packet at each of its owners, in the places of `nmoe.ops.push`; quantised once a token."""
        ...

    def unpack(self, packets: Tensor, count_PP2: Tensor, *, rank: int, wire: Wire, like_RD: Tensor) -> Tensor:
        """x_RD in the dtype and width of ``like_RD``, from packets [R, bytes]; rows past the last one that
        ``count_PP2`` announces for ``rank`` are unspecified."""
        ...


def kernels() -> Kernels:
    """The implementation on this process's arch."""
    return cast(Kernels, implementation("wire"))
