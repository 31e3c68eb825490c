# SPDX-License-Identifier: Apache-2.0
"""Puts from this rank's outboxes on GPUs, by NVSHMEM, for both chips: a grid of blocks for each far peer.

The lines for a peer lie side by side on both ends, so each block takes one piece of them and starts one put. How many blocks
feed a network is not measured: no run over a network has been made.
"""

from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64
from torch import Tensor

from nmoe.comm.remote import Board, Remote
from nmoe.ops._cute.puts import compile_with_puts, put_block, ready
from nmoe.ops._cute.remote import global_pointer

__all__ = ["ship"]

_BLOCKS, _THREADS = 16, 256


@cute.kernel
def _ship_kernel(route: Int64, lines: Int64, area: Int64, line_bytes: Int64, room: Int32):
    """`route` is [F, 3] of `Remote`, `lines` [P, 2] of the contract, `area` this rank's own; `room`: lines of an outbox."""
    bid, far, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    mRoute = cute.make_tensor(global_pointer(route + Int64(far) * 24, Int64, 8), cute.make_layout(3))
    mLines = cute.make_tensor(global_pointer(lines + mRoute[2] * 8, Int32, 8), cute.make_layout(2))
    first = mLines[0]
    number = min(mLines[1], room)
    share = (number + blocks - 1) // blocks
    start = bid * share
    here = min(share, number - start)
    if here > 0:
        target = area + Int64(first + start) * line_bytes
        put_block(target, mRoute[0] + Int64(start) * line_bytes, Int64(here) * line_bytes, Int32(mRoute[1]))


@cute.jit
def _ship_entry(route: Int64, lines: Int64, area: Int64, line_bytes: Int64, room: Int32, far: Int32, stream: Any):
    _ship_kernel(route, lines, area, line_bytes, room).launch(
        grid=[_BLOCKS, far, 1], block=[_THREADS, 1, 1], stream=stream
    )


@ready
def ship_kernel(options: str = "") -> Any:
    numbers = Int64(0), Int64(0), Int64(0), Int64(0), Int32(0), Int32(0)
    return compile_with_puts(_ship_entry, *numbers, options=options)


def ship(areas: Sequence[Remote], lines_P2: Tensor, board: Board) -> None:
    del board  # the meeting's kernel, later on this stream, completes all puts of the rank
    for area in areas:
        outbox = area.far[0].outbox
        ship_kernel()(
            area.route_F3.data_ptr(),  # type: ignore[union-attr]
            lines_P2.data_ptr(),
            area.local.data_ptr(),
            outbox[:1].nbytes,
            outbox.shape[0],
            len(area.far),
        )
