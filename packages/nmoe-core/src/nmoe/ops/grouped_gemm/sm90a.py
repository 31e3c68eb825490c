# SPDX-License-Identifier: Apache-2.0
"""The experts' products on Hopper (H100, H200), in bf16 with fp32 accumulation.

Every product names the kernel and tile that was fastest where it was measured; the class of a shape is the mean number
of slots of an expert (a host number: S / X), because that is what decides how large a tile may be.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nmoe.ops._cute import products
from nmoe.ops._cute.products import GemmConfig

__all__ = ["down", "dw2", "dw13", "dx", "gated_backward", "up"]


def _tile(m: int, n: int, *, pingpong: bool, cluster: tuple[int, int]) -> GemmConfig:
    return GemmConfig(
        tile_m=m,
        tile_n=n,
        pingpong=pingpong,
        cluster_m=cluster[0],
        cluster_n=cluster[1],
        is_dynamic_persistent=False,
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


# Measured 2026-11-30 on one H200 (700 W), torch 2.11, quack 0.6.5, cutlass-dsl 4.8.1, over up to 28 tiles a product;
# docs/performance.md has the figures. Tiles within 5% of each other change places from run to run.
_FEW = _Choice(  # mean below 96 slots an expert: T=512 D=2048 F=1408 E=64 K=6
    up=_tile(64, 128, pingpong=True, cluster=(1, 1)),
    down=_tile(64, 128, pingpong=True, cluster=(1, 2)),
    gated_backward=_tile(64, 192, pingpong=True, cluster=(1, 1)),
    dx=_tile(64, 256, pingpong=True, cluster=(1, 2)),
    dw13=_tile(128, 256, pingpong=False, cluster=(1, 1)),
    dw2=_tile(256, 192, pingpong=False, cluster=(2, 1)),
)
_SOME = _Choice(  # below 1024: T=4096 D=2048 F=1408 E=64 K=6
    up=_tile(64, 256, pingpong=True, cluster=(2, 1)),
    down=_tile(128, 208, pingpong=True, cluster=(1, 2)),
    gated_backward=_tile(64, 256, pingpong=True, cluster=(2, 1)),
    dx=_tile(128, 128, pingpong=True, cluster=(1, 2)),
    dw13=_tile(256, 192, pingpong=False, cluster=(2, 1)),
    dw2=_tile(256, 160, pingpong=False, cluster=(2, 1)),
)
_MANY = _Choice(  # T=32768 D=2048 F=1408 E=64 K=6
    up=_tile(128, 256, pingpong=False, cluster=(1, 1)),
    down=_tile(192, 128, pingpong=True, cluster=(1, 2)),
    gated_backward=_tile(128, 128, pingpong=True, cluster=(2, 1)),
    dx=_tile(192, 128, pingpong=True, cluster=(1, 2)),
    dw13=_tile(128, 256, pingpong=False, cluster=(1, 1)),
    dw2=_tile(256, 160, pingpong=False, cluster=(2, 1)),
)
_NARROW = _Choice(  # many slots, F <= 512: T=32768 D=4096 F=256 E=256 K=16
    up=_tile(128, 256, pingpong=False, cluster=(1, 1)),
    down=_tile(128, 192, pingpong=True, cluster=(2, 1)),
    gated_backward=_tile(64, 256, pingpong=True, cluster=(2, 1)),
    dx=_tile(192, 128, pingpong=True, cluster=(1, 2)),
    dw13=_tile(128, 256, pingpong=False, cluster=(1, 1)),
    dw2=_tile(128, 256, pingpong=False, cluster=(2, 1)),
)


def _choose(slots: int, experts: int, hidden: int) -> _Choice:
    mean = slots // experts
    if mean < 96:
        return _FEW
    if mean < 1024:
        return _SOME
    return _NARROW if hidden <= 512 else _MANY


def _check(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype != torch.bfloat16:
            raise TypeError(
                f"grouped_gemm on sm90a: found {tensor.dtype}, expected torch.bfloat16; "
                "NMOE_ARCH=reference computes in other dtypes"
            )


def up(x_RD: Tensor, w13_X2FD: Tensor, index_S: Tensor, offset_X: Tensor) -> tuple[Tensor, Tensor]:
    _check(x_RD, w13_X2FD)
    slots, (experts, width, _) = index_S.shape[0], w13_X2FD.shape
    preact_S2F = x_RD.new_empty(slots, width)
    act_SF = x_RD.new_empty(slots, width // 2)
    if slots and x_RD.shape[0]:
        choice = _choose(slots, experts, width // 2)
        products.up(x_RD, w13_X2FD, index_S, offset_X, preact_S2F, act_SF, choice.up)
    return preact_S2F, act_SF


def down(act_SF: Tensor, w2_XDF: Tensor, offset_X: Tensor) -> Tensor:
    _check(act_SF, w2_XDF)
    slots, (experts, width, hidden) = act_SF.shape[0], w2_XDF.shape
    y_SD = act_SF.new_empty(slots, width)
    if slots:
        products.product(act_SF, w2_XDF.mT, offset_X, y_SD, _choose(slots, experts, hidden).down)
    return y_SD


def gated_backward(
    dout_RD: Tensor, w2_XDF: Tensor, preact_S2F: Tensor, gate_S: Tensor, index_S: Tensor, offset_X: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    _check(dout_RD, w2_XDF, preact_S2F)
    slots, (experts, _, hidden) = index_S.shape[0], w2_XDF.shape
    dpreact_S2F = torch.empty_like(preact_S2F)
    gated_act_SF = preact_S2F.new_empty(slots, hidden)
    if not slots or not dout_RD.shape[0]:
        return dpreact_S2F, gated_act_SF, torch.empty_like(gate_S)
    tile = _choose(slots, experts, hidden).gated_backward
    dgate_S = products.gated_backward(
        dout_RD, w2_XDF, preact_S2F, gate_S, index_S, offset_X, dpreact_S2F, gated_act_SF, tile
    )
    return dpreact_S2F, gated_act_SF, dgate_S


def dx(dpreact_S2F: Tensor, w13_X2FD: Tensor, offset_X: Tensor) -> Tensor:
    _check(dpreact_S2F, w13_X2FD)
    slots, (experts, width, model) = dpreact_S2F.shape[0], w13_X2FD.shape
    if not slots:
        return dpreact_S2F.new_empty(0, model)
    if slots // experts >= 1024 and width >= 2048:
        # torch's CUTLASS kernel: 680-723 TFLOP/s against 645-649 here (D=2048 F=1408), 655-684 against 610 (D=4096 F=1024).
        return torch._grouped_mm(dpreact_S2F, w13_X2FD, offs=offset_X[1:])
    dx_SD = dpreact_S2F.new_empty(slots, model)
    products.product(dpreact_S2F, w13_X2FD, offset_X, dx_SD, _choose(slots, experts, width // 2).dx)
    return dx_SD


def dw13(
    x_RD: Tensor,
    dpreact_S2F: Tensor,
    index_S: Tensor,
    offset_X: Tensor,
    *,
    out_X2FD: Tensor,
    accumulate: bool = False,
) -> None:
    _check(x_RD, dpreact_S2F)
    _weight_gradient(x_RD, dpreact_S2F, index_S, offset_X, out_X2FD.mT, accumulate, hidden=out_X2FD.shape[1] // 2)


def dw2(
    dout_RD: Tensor,
    gated_act_SF: Tensor,
    index_S: Tensor,
    offset_X: Tensor,
    *,
    out_XDF: Tensor,
    accumulate: bool = False,
) -> None:
    _check(dout_RD, gated_act_SF)
    _weight_gradient(dout_RD, gated_act_SF, index_S, offset_X, out_XDF, accumulate, hidden=out_XDF.shape[2])


def _weight_gradient(
    a_RA: Tensor, b_SB: Tensor, index_S: Tensor, offset_X: Tensor, out_XAB: Tensor, accumulate: bool, *, hidden: int
) -> None:
    slots, experts = index_S.shape[0], out_XAB.shape[0]
    if not slots or not a_RA.shape[0]:
        if not accumulate:
            out_XAB.zero_()
        return
    choice = _choose(slots, experts, hidden)
    tile = choice.dw13 if b_SB.shape[1] == 2 * hidden else choice.dw2
    products.weight_gradient(a_RA, b_SB, index_S, offset_X, out_XAB, tile, accumulate=accumulate)
