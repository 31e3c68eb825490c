# SPDX-License-Identifier: Apache-2.0
"""The experts' products on Hopper (H100, H200), in bf16 with fp32 accumulation.

Every product names the tile that was fastest where it was measured, in the sequence of the layer and on a chip as hot as
in training (at its power limit the order of tiles is another than on a cool one). The class of a shape is the mean number
of slots of an expert (a host number: S / X), D and F.

Rows are either gathered in the load, or copied into slot order before. Gathering costs a product 5 to 14% (the
tensor memory accelerator of this chip cannot gather, four warps do, and a cluster cannot share what they load); copying
costs S x D elements written at 3.7 TB/s. So copying pays where K is small against F.
"""

import functools
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nmoe.ops._cute import products
from nmoe.ops._cute.products import GemmConfig
from nmoe.ops.combine.cuda import spread

__all__ = ["arrange", "down", "dw2", "dw13", "dx", "gated_backward", "up"]


def _tile(m: int, n: int, *, cluster: tuple[int, int], pingpong: bool = True, dealt: bool = False) -> GemmConfig:
    return GemmConfig(
        tile_m=m,
        tile_n=n,
        pingpong=pingpong,
        cluster_m=cluster[0],
        cluster_n=cluster[1],
        is_dynamic_persistent=dealt,
        device_capacity=9,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    """The tile of each product for one class of shapes."""

    up: GemmConfig
    down: GemmConfig
    gated_backward: GemmConfig
    dx: GemmConfig
    dw13: GemmConfig
    dw2: GemmConfig
    copied: frozenset[str] = field(default=frozenset())
    """Uses (see `arrange`) whose rows are copied into slot order; the tiles of their products are for that form."""


# Measured 2026-11-30 on one H200 (700 W; dense 8192^3 723 TFLOP/s), torch 2.11, quack 0.6.5, cutlass-dsl 4.8.1: 14 to 36
# tiles a product and form; docs/performance.md has the figures. torch._grouped_mm was slower than the best tile throughout.
_FEW = _Choice(  # mean below 96 slots an expert: T=512 D=2048 F=1408 E=64 K=6
    up=_tile(64, 128, cluster=(1, 1)),
    down=_tile(64, 128, cluster=(1, 2)),
    gated_backward=_tile(64, 192, cluster=(1, 1)),
    dx=_tile(64, 256, cluster=(1, 2)),
    dw13=_tile(256, 160, cluster=(1, 1), pingpong=False),
    dw2=_tile(256, 160, cluster=(1, 1), pingpong=False),
)
_SOME = _Choice(  # below 1024: T=4096 D=2048 F=1408 E=64 K=6
    up=_tile(128, 128, cluster=(1, 2)),
    down=_tile(128, 128, cluster=(1, 2)),
    gated_backward=_tile(128, 128, cluster=(1, 2)),
    dx=_tile(128, 128, cluster=(1, 2)),
    dw13=_tile(128, 192, cluster=(2, 1)),
    dw2=_tile(128, 160, cluster=(2, 1)),
    copied=frozenset({"up", "dout", "dw13"}),
)
_SOME_THIN = _Choice(  # the same shape with gathered rows, for F <= 512
    up=_tile(64, 256, cluster=(2, 1)),
    down=_tile(128, 128, cluster=(1, 2)),
    gated_backward=_tile(64, 256, cluster=(2, 1)),
    dx=_tile(128, 128, cluster=(1, 2)),
    dw13=_tile(128, 192, cluster=(2, 1)),
    dw2=_tile(256, 128, cluster=(1, 1), pingpong=False),
)
_MANY = _Choice(  # T=32768 D=2048 F=1408 E=64 K=6
    up=_tile(192, 128, cluster=(1, 2)),
    down=_tile(192, 128, cluster=(1, 2)),
    gated_backward=_tile(128, 128, cluster=(2, 1)),
    dx=_tile(192, 128, cluster=(1, 2)),
    dw13=_tile(128, 128, cluster=(2, 1), dealt=True),
    dw2=_tile(128, 128, cluster=(2, 1), dealt=True),
    copied=frozenset({"up", "dout", "dw13"}),
)
_MANY_WIDE = _Choice(  # D >= 3072: T=32768 D=4096 F=1024 E=64 K=4; D=7168 F=2048 E=8 K=1
    up=_tile(128, 256, cluster=(1, 1), pingpong=False),  # a long sum hides the gather
    down=_tile(192, 128, cluster=(1, 2)),
    gated_backward=_tile(128, 128, cluster=(1, 2)),
    dx=_tile(192, 128, cluster=(1, 2)),
    dw13=_tile(128, 128, cluster=(2, 1)),
    dw2=_tile(128, 128, cluster=(2, 1)),
    copied=frozenset({"dout", "dw13"}),
)
_MANY_THIN = _Choice(  # F <= 512: T=32768 D=4096 F=256 E=256 K=16
    up=_tile(128, 256, cluster=(1, 1), pingpong=False),
    down=_tile(128, 192, cluster=(1, 2)),
    gated_backward=_tile(64, 256, cluster=(2, 1)),
    dx=_tile(128, 192, cluster=(1, 2)),
    dw13=_tile(128, 256, cluster=(1, 1), pingpong=False),
    dw2=_tile(128, 256, cluster=(1, 1), pingpong=False),
)


def _choose(slots: int, w13_X2FD: Tensor | None = None, w2_XDF: Tensor | None = None) -> _Choice:
    """The class of a shape, from either weight (or its gradient)."""
    if w13_X2FD is not None:
        experts, hidden, width = w13_X2FD.shape[0], w13_X2FD.shape[1] // 2, w13_X2FD.shape[2]
    else:
        assert w2_XDF is not None
        experts, width, hidden = w2_XDF.shape
    mean = slots // experts
    if mean < 96:
        return _FEW
    if mean < 1024:
        return _SOME_THIN if hidden <= 512 else _SOME
    if hidden <= 512:
        return _MANY_THIN
    return _MANY_WIDE if width >= 3072 else _MANY


@functools.cache
def _gathering(tile: GemmConfig) -> GemmConfig:
    """The tile for rows that `arrange` would have copied but a caller did not: no cluster can share gathered rows, and
    quack deals no tiles whose rows are gathered."""
    return replace(tile, cluster_n=1, is_dynamic_persistent=False)


def _check(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype != torch.bfloat16:
            raise TypeError(
                f"grouped_gemm on sm90a: found {tensor.dtype}, expected torch.bfloat16; "
                "NMOE_ARCH=reference computes in other dtypes"
            )


def arrange(
    x_RD: Tensor, index_S: Tensor, slot_RK: Tensor, w13_X2FD: Tensor, *, use: str
) -> tuple[Tensor, Tensor | None]:
    slots = index_S.shape[0]
    if use in _choose(slots, w13_X2FD).copied:
        return spread(x_RD, slot_RK, num_slots=slots), None
    return x_RD, index_S


def up(x_RD: Tensor, w13_X2FD: Tensor, index_S: Tensor | None, offset_X: Tensor) -> tuple[Tensor, Tensor]:
    _check(x_RD, w13_X2FD)
    slots, width = (x_RD if index_S is None else index_S).shape[0], w13_X2FD.shape[1]
    preact_S2F = x_RD.new_empty(slots, width)
    act_SF = x_RD.new_empty(slots, width // 2)
    if slots and x_RD.shape[0]:
        tile = _choose(slots, w13_X2FD).up
        tile = tile if index_S is None else _gathering(tile)
        products.up(x_RD, w13_X2FD, index_S, offset_X, preact_S2F, act_SF, tile)
    return preact_S2F, act_SF


def down(act_SF: Tensor, w2_XDF: Tensor, offset_X: Tensor) -> Tensor:
    _check(act_SF, w2_XDF)
    slots = act_SF.shape[0]
    y_SD = act_SF.new_empty(slots, w2_XDF.shape[1])
    if slots:
        products.product(act_SF, w2_XDF.mT, offset_X, y_SD, _choose(slots, w2_XDF=w2_XDF).down)
    return y_SD


def gated_backward(
    dout_RD: Tensor,
    w2_XDF: Tensor,
    preact_S2F: Tensor,
    gate_S: Tensor,
    index_S: Tensor | None,
    offset_X: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(dout_RD, w2_XDF, preact_S2F)
    slots, hidden = preact_S2F.shape[0], w2_XDF.shape[2]
    dpreact_S2F = torch.empty_like(preact_S2F)
    gated_act_SF = preact_S2F.new_empty(slots, hidden)
    if not slots or not dout_RD.shape[0]:
        return dpreact_S2F, gated_act_SF, torch.empty_like(gate_S)
    tile = _choose(slots, w2_XDF=w2_XDF).gated_backward
    tile = tile if index_S is None else _gathering(tile)
    dgate_S = products.gated_backward(
        dout_RD, w2_XDF, preact_S2F, gate_S, index_S, offset_X, dpreact_S2F, gated_act_SF, tile
    )
    return dpreact_S2F, gated_act_SF, dgate_S


def dx(dpreact_S2F: Tensor, w13_X2FD: Tensor, offset_X: Tensor) -> Tensor:
    _check(dpreact_S2F, w13_X2FD)
    slots = dpreact_S2F.shape[0]
    dx_SD = dpreact_S2F.new_empty(slots, w13_X2FD.shape[2])
    if slots:
        products.product(dpreact_S2F, w13_X2FD, offset_X, dx_SD, _choose(slots, w13_X2FD).dx)
    return dx_SD


def dw13(
    x_RD: Tensor,
    dpreact_S2F: Tensor,
    index_S: Tensor | None,
    offset_X: Tensor,
    *,
    out_X2FD: Tensor,
    accumulate: bool = False,
) -> None:
    _check(x_RD, dpreact_S2F)
    tile = _choose(dpreact_S2F.shape[0], out_X2FD).dw13
    if index_S is None:
        _weight_gradient(dpreact_S2F, x_RD, None, offset_X, out_X2FD, tile, accumulate)
    else:  # what is gathered comes first, so the product is transposed
        _weight_gradient(x_RD, dpreact_S2F, index_S, offset_X, out_X2FD.mT, tile, accumulate)


def dw2(
    dout_RD: Tensor,
    gated_act_SF: Tensor,
    index_S: Tensor | None,
    offset_X: Tensor,
    *,
    out_XDF: Tensor,
    accumulate: bool = False,
) -> None:
    _check(dout_RD, gated_act_SF)
    tile = _choose(gated_act_SF.shape[0], w2_XDF=out_XDF).dw2
    _weight_gradient(dout_RD, gated_act_SF, index_S, offset_X, out_XDF, tile, accumulate)


def _weight_gradient(
    a_RA: Tensor,
    b_SB: Tensor,
    index_S: Tensor | None,
    offset_X: Tensor,
    out_XAB: Tensor,
    tile: GemmConfig,
    accumulate: bool,
) -> None:
    if b_SB.shape[0] and a_RA.shape[0]:
        tile = tile if index_S is None else _gathering(tile)
        products.weight_gradient(a_RA, b_SB, index_S, offset_X, out_XAB, tile, accumulate=accumulate)
    elif not accumulate:
        out_XAB.zero_()
