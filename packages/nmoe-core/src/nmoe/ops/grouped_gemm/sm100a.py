# SPDX-License-Identifier: Apache-2.0
"""The experts' products on Blackwell (B200), in bf16 with fp32 accumulation. Compiled in CI, never run here.

The tiles are the ones that the instruction set suggests, not measured ones: 256 x 256 over two SMs (tcgen05 with
cta_group::2), half as wide where a group has few rows, rows gathered by TMA. A table like that of sm90a.py belongs
here as soon as a B200 has been measured.
"""

import torch
from torch import Tensor

from nmoe.ops._cute import products
from nmoe.ops._cute.products import GemmConfig

__all__ = ["arrange", "down", "dw2", "dw13", "dx", "gated_backward", "up"]


def _tile(m: int, n: int, *, cluster: tuple[int, int]) -> GemmConfig:
    return GemmConfig(
        tile_m=m,
        tile_n=n,
        pingpong=False,
        cluster_m=cluster[0],
        cluster_n=cluster[1],
        is_dynamic_persistent=True,
        device_capacity=10,
        use_tma_gather=False,
    )


_WIDE = _tile(256, 256, cluster=(2, 1))
_FEW_ROWS = _tile(128, 128, cluster=(1, 1))
_EPILOGUE_BOUND = _tile(256, 128, cluster=(2, 1))  # the gated backward reads and writes five elements for one product


def _by_rows(slots: int, experts: int, wide: GemmConfig = _WIDE) -> GemmConfig:
    return wide if slots // experts >= 128 else _FEW_ROWS


def _check(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype != torch.bfloat16:
            raise TypeError(
                f"grouped_gemm on sm100a: found {tensor.dtype}, expected torch.bfloat16; "
                "NMOE_ARCH=reference computes in other dtypes"
            )


def arrange(
    x_RD: Tensor, index_S: Tensor, slot_RK: Tensor, w13_X2FD: Tensor, *, use: str
) -> tuple[Tensor, Tensor | None]:
    del slot_RK, w13_X2FD, use  # the tensor memory accelerator gathers rows by itself on this chip
    return x_RD, index_S


def up(x_RD: Tensor, w13_X2FD: Tensor, index_S: Tensor | None, offset_X: Tensor) -> tuple[Tensor, Tensor]:
    _check(x_RD, w13_X2FD)
    slots, (experts, width, _) = (x_RD if index_S is None else index_S).shape[0], w13_X2FD.shape
    preact_S2F = x_RD.new_empty(slots, width)
    act_SF = x_RD.new_empty(slots, width // 2)
    if slots and x_RD.shape[0]:
        products.up(x_RD, w13_X2FD, index_S, offset_X, preact_S2F, act_SF, _by_rows(slots, experts))
    return preact_S2F, act_SF


def down(act_SF: Tensor, w2_XDF: Tensor, offset_X: Tensor) -> Tensor:
    _check(act_SF, w2_XDF)
    slots, (experts, width, _) = act_SF.shape[0], w2_XDF.shape
    y_SD = act_SF.new_empty(slots, width)
    if slots:
        products.product(act_SF, w2_XDF.mT, offset_X, y_SD, _by_rows(slots, experts))
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
    slots, (experts, _, hidden) = preact_S2F.shape[0], w2_XDF.shape
    dpreact_S2F = torch.empty_like(preact_S2F)
    gated_act_SF = preact_S2F.new_empty(slots, hidden)
    if not slots or not dout_RD.shape[0]:
        return dpreact_S2F, gated_act_SF, torch.empty_like(gate_S)
    tile = _by_rows(slots, experts, _EPILOGUE_BOUND)
    dgate_S = products.gated_backward(
        dout_RD, w2_XDF, preact_S2F, gate_S, index_S, offset_X, dpreact_S2F, gated_act_SF, tile
    )
    return dpreact_S2F, gated_act_SF, dgate_S


def dx(dpreact_S2F: Tensor, w13_X2FD: Tensor, offset_X: Tensor) -> Tensor:
    _check(dpreact_S2F, w13_X2FD)
    slots, (experts, _, model) = dpreact_S2F.shape[0], w13_X2FD.shape
    dx_SD = dpreact_S2F.new_empty(slots, model)
    if slots:
        products.product(dpreact_S2F, w13_X2FD, offset_X, dx_SD, _by_rows(slots, experts))
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
    _weight_gradient(x_RD, dpreact_S2F, index_S, offset_X, out_X2FD.mT, accumulate)


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
    _weight_gradient(dout_RD, gated_act_SF, index_S, offset_X, out_XDF, accumulate)


def _weight_gradient(
    a_RA: Tensor, b_SB: Tensor, index_S: Tensor | None, offset_X: Tensor, out_XAB: Tensor, accumulate: bool
) -> None:
    if b_SB.shape[0] and a_RA.shape[0]:
        products.weight_gradient(a_RA, b_SB, index_S, offset_X, out_XAB, _WIDE, accumulate=accumulate)
    elif not accumulate:
        out_XAB.zero_()
