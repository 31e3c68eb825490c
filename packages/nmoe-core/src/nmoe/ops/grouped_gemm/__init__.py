# SPDX-License-Identifier: Apache-2.0
"""The products of the experts, forward and backward, over assignments sorted by expert.

Expert e owns slots [offset_X[e], offset_X[e + 1]) of S; ``index_S`` says which row of R a slot reads. Gate and up
projections are one weight w13_X2FD with interleaved rows: row 2f is gate f, row 2f + 1 is up f, so that one tile of
the product holds both operands of SwiGLU and the epilogue can apply it. preact_S2F has the same order in its columns.

With g, u the even and odd columns of preact, act = silu(g) * u, y = act w2^T, out_r = sum over r's slots of gate * y:

====================  ==================================================================
up                    preact = x[index] w13^T; act
down                  y = act w2^T
gated_backward        da = dout[index] w2; dgate = <da, act>; dpreact = SwiGLU'(gate * da);
                      gated_act = gate * act
dx                    dx_S = dpreact w13
dw13                  dw13[e] = sum over e's slots of dpreact (outer) x[index]
dw2                   dw2[e] = sum over e's slots of dout[index] (outer) gated_act
====================  ==================================================================

so that neither y nor act is stored for backward. Rows x and dout are in one dtype C (bf16; fp32 and fp64 in reference
mode) with the weights; products accumulate in fp32 (fp64). FLOP of one pass: 2 * slots * 3DF forward, twice that
backward (18 * T*K*F*D in all).

Source: the gated backward follows from the chain rule; that dgate needs no y is used by SonicMoE (arXiv 2512.14080).
"""

from typing import Protocol, cast

from torch import Tensor

from nmoe.ops.registry import implementation

__all__ = ["Kernels", "kernels"]


class Kernels(Protocol):
    """What an implementation file defines.

    index_S is int32 [S], offset_X is int32 [X + 1], gate_S is fp32 (fp64 in reference mode); all are on the device.
    Results in the tail of S (from offset_X[X] on) are unspecified and never read. Where ``index_S`` may be None, None
    says that the rows lie in slot order already.
    """

    def arrange(
        self, x_RD: Tensor, index_S: Tensor, slot_RK: Tensor, w13_X2FD: Tensor, *, use: str
    ) -> tuple[Tensor, Tensor | None]:
        """Rows and index in the form in which one of the uses ``up``, ``dout`` (gated backward and dw2) and ``dw13`` is
        fastest: as they are, or copied into slot order with index None. slot_RK as in `Groups`."""
        ...

    def up(self, x_RD: Tensor, w13_X2FD: Tensor, index_S: Tensor | None, offset_X: Tensor) -> tuple[Tensor, Tensor]:
        """preact_S2F and act_SF in C. SwiGLU on the fp32 accumulator."""
        ...

    def down(self, act_SF: Tensor, w2_XDF: Tensor, offset_X: Tensor) -> Tensor:
        """y_SD in C, without the gate."""
        ...

    def gated_backward(
        self,
        dout_RD: Tensor,
        w2_XDF: Tensor,
        preact_S2F: Tensor,
        gate_S: Tensor,
        index_S: Tensor | None,
        offset_X: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dpreact_S2F in C, gated_act_SF in C, dgate_S in gate's dtype (fixed order of summation)."""
        ...

    def dx(self, dpreact_S2F: Tensor, w13_X2FD: Tensor, offset_X: Tensor) -> Tensor:
        """dx_SD in C: the gradient of each slot's copy of its row."""
        ...

    def dw13(
        self,
        x_RD: Tensor,
        dpreact_S2F: Tensor,
        index_S: Tensor | None,
        offset_X: Tensor,
        *,
        out_X2FD: Tensor,
        accumulate: bool = False,
    ) -> None:
        """Write the gradient of w13 into ``out_X2FD`` (fp32, fp64 or C), or add it; exact zeros for an empty expert."""
        ...

    def dw2(
        self,
        dout_RD: Tensor,
        gated_act_SF: Tensor,
        index_S: Tensor | None,
        offset_X: Tensor,
        *,
        out_XDF: Tensor,
        accumulate: bool = False,
    ) -> None:
        """Write the gradient of w2 into ``out_XDF`` (fp32, fp64 or C), or add it; exact zeros for an empty expert."""
        ...


def kernels() -> Kernels:
    """The implementation on this process's arch."""
    return cast(Kernels, implementation("grouped_gemm"))
