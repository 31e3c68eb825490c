# SPDX-License-Identifier: Apache-2.0
"""The grouped and the symmetric products of quack behind this project's contracts; tiles are the caller's choice.

quack's kernels are CuTe DSL: persistent, warp-specialised, groups given by offsets on the device, rows gathered in the
load (cp.async on sm90a, TMA on sm100a), SwiGLU or its gradient in the epilogue. Only documented entry points and the
ones below them that take a fixed configuration are used, so that nothing is tuned, and nothing allocated, at run time
by surprise. The package is pinned exactly.
"""

from typing import Any

from quack import gemm_interface
from quack.gemm_config import GemmConfig
from quack.gemm_symmetric import gemm_symmetric
from torch import Tensor

from nmoe.ops._cute.build import enter_context

__all__ = ["GemmConfig", "gated_backward", "product", "symmetric", "up", "weight_gradient"]


def product(a_SA: Tensor, w_XAB: Tensor, offset_X: Tensor, out_SB: Tensor, config: GemmConfig) -> None:
    """out = a w per group of rows. w is [X, A, B] with either axis contiguous."""
    _execute(a_SA, w_XAB, out_SB, config, cu_seqlens_m=offset_X)


def weight_gradient(
    a_RA: Tensor,
    b_SB: Tensor,
    index_S: Tensor | None,
    offset_X: Tensor,
    out_XAB: Tensor,
    config: GemmConfig,
    *,
    accumulate: bool,
) -> None:
    """out[x] = (or +=) sum over the group's slots of a[index] (outer) b; exact zeros for an empty group.

    Without an index the rows of a are in slot order.
    """
    _execute(a_RA.t(), b_SB, out_XAB, config, cu_seqlens_k=offset_X, A_idx=index_S, add_to_output=accumulate)


def _execute(
    a: Tensor, b: Tensor, out: Tensor, config: GemmConfig, *, add_to_output: bool = False, **varlen: Any
) -> None:
    enter_context()
    gemm_interface._gemm_execute(
        a,
        b,
        out,
        None,
        bias=None,
        alpha=1.0,
        beta=1.0,
        cu_seqlens_m=varlen.get("cu_seqlens_m"),
        cu_seqlens_k=varlen.get("cu_seqlens_k"),
        A_idx=varlen.get("A_idx"),
        batch_idx_permute=None,
        add_to_output=add_to_output,
        dynamic_scheduler=config.is_dynamic_persistent,
        config=config,
        rounding_mode=0,
        sr_seed=0,
        concat_layout=None,
        SFA=None,
        SFB=None,
        split_k=1,
        split_k_mode=0,
    )


def up(
    x_RD: Tensor,
    w13_X2FD: Tensor,
    index_S: Tensor | None,
    offset_X: Tensor,
    preact_S2F: Tensor,
    act_SF: Tensor,
    config: GemmConfig,
) -> None:
    """preact = x[index] w13^T and act = SwiGLU(preact) in one kernel."""
    enter_context()
    gemm_interface._gemm_act_call(
        x_RD,
        w13_X2FD.mT,
        preact_S2F,
        act_SF,
        None,
        None,
        activation="swiglu",
        cu_seqlens_m=offset_X,
        A_idx=index_S,
        dynamic_scheduler=config.is_dynamic_persistent,
        tuned=False,
        config=config,
    )


def gated_backward(
    dout_RD: Tensor,
    w2_XDF: Tensor,
    preact_S2F: Tensor,
    gate_S: Tensor,
    index_S: Tensor | None,
    offset_X: Tensor,
    dpreact_S2F: Tensor,
    gated_act_SF: Tensor,
    config: GemmConfig,
) -> Tensor:
    """da = dout[index] w2; dpreact, gated_act and dgate in its epilogue. Returns dgate_S."""
    enter_context()
    dgate_S = gemm_interface._gemm_dact_call(
        dout_RD,
        w2_XDF,
        preact_S2F,
        dpreact_S2F,
        gated_act_SF,
        activation="swiglu",
        colvec_scale=gate_S,
        colvec_reduce=True,
        cu_seqlens_m=offset_X,
        A_idx=index_S,
        dynamic_scheduler=config.is_dynamic_persistent,
        tuned=False,
        config=config,
    )
    assert dgate_S is not None  # colvec_reduce was asked for
    return dgate_S


def symmetric(a: Tensor, plus: Tensor | None, config: GemmConfig, *, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """alpha a a^T + beta plus of each of [n, rows, columns]: tiles on one side of the diagonal, each stored twice.

    Two tiles side by side (a cluster) have to be a square; rows of every argument have to be whole 16 bytes.
    """
    enter_context()
    out = a.new_empty(a.shape[0], a.shape[1], a.shape[1])
    gemm_symmetric(
        a,
        a,  # this entry point takes the second factor as it takes the first, not transposed
        out,
        plus,
        None,
        tile_M=config.tile_m,
        tile_N=config.tile_n,
        cluster_M=config.cluster_m,
        cluster_N=config.cluster_n,
        pingpong=config.pingpong,
        is_dynamic_persistent=config.is_dynamic_persistent,
        alpha=alpha,
        beta=beta,
    )
    return out
