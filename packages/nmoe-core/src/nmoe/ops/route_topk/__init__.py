# SPDX-License-Identifier: Apache-2.0
"""Router logits, and the choice of K experts per token with their gates.

Scoring, selection bias, group limit, top-k, normalisation and scale in the order of DeepSeek-V2 and -V3:

1. score = sigmoid(logit) or softmax over all experts;
2. choice = score + bias (the bias selects, it never weighs);
3. experts of a group compete as one: a group's score is the sum of its two best choices (V3) or its best (V2); only the
   best ``top_k_groups`` groups stay;
4. the K best choices, in falling order; equal ones in rising order of expert id;
5. gate = score, divided by the K scores' sum if ``normalize``, times ``scale`` (never inside the scoring).

Source: DeepSeek-V2 (arXiv 2405.04434, 2.2.2), DeepSeek-V3 (arXiv 2412.19437, 2.1.2).
"""

from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from nmoe.ops.registry import implementation

__all__ = ["Kernels", "Routing", "kernels", "project", "route"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """What decides the choice, beside logits and bias. Hashable, so that a kernel can be compiled for it."""

    top_k: int
    scoring: str
    """``sigmoid`` or ``softmax``."""
    num_groups: int = 1
    top_k_groups: int = 1
    group_score: str = "top2_sum"
    """``top2_sum`` or ``max``; without meaning for one group."""
    normalize: bool = True
    scale: float = 1.0


class Kernels(Protocol):
    """What an implementation file defines. A is fp32, or fp64 where x is fp64."""

    def project(self, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        """logits_TE (A) = x weight^T, with both operands widened to A before the product."""
        ...

    def project_backward(
        self, dlogits_TE: Tensor, x_TD: Tensor, weight_ED: Tensor, dx_TD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """dx_TD, the gradient of x's other uses, plus this one's, in x's dtype, to which this one may be rounded before; dweight_ED
        in weight's dtype; products in A. It may write into what it is given."""
        ...

    def route(self, logits_TE: Tensor, bias_E: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
        """expert_TK (int32), gate_TK (A, as logits), load_E (int32: tokens that chose each expert)."""
        ...

    def route_backward(self, dgate_TK: Tensor, logits_TE: Tensor, expert_TK: Tensor, routing: Routing) -> Tensor:
        """dlogits_TE (A); the choice itself is not differentiated."""
        ...


def kernels() -> Kernels:
    """The implementation on this process's arch."""
    return cast(Kernels, implementation("route_topk"))


class _Project(torch.autograd.Function):
    # Saves the row as it is, not its fp32 copy, which would be twice as large.
    @staticmethod
    def forward(ctx, x_TD: Tensor, weight_ED: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x_TD, weight_ED)
        return kernels().project(x_TD, weight_ED), x_TD

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        dlogits_TE, dx_TD = grad_outputs
        x_TD, weight_ED = ctx.saved_tensors
        return kernels().project_backward(dlogits_TE.contiguous(), x_TD, weight_ED, dx_TD.contiguous())


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_TE: Tensor, bias_E: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
        expert_TK, gate_TK, load_E = kernels().route(logits_TE, bias_E, routing)
        ctx.save_for_backward(logits_TE, expert_TK)
        ctx.mark_non_differentiable(expert_TK, load_E)
        ctx.routing = routing
        return expert_TK, gate_TK, load_E

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        logits_TE, expert_TK = ctx.saved_tensors
        dgate_TK = grad_outputs[1].contiguous()  # the other two are integers
        return kernels().route_backward(dgate_TK, logits_TE, expert_TK, ctx.routing), None, None


def project(x_TD: Tensor, weight_ED: Tensor) -> tuple[Tensor, Tensor]:
    """Router logits in full precision, differentiable in both arguments.

    Args:
        x_TD: Rows, any float dtype.
        weight_ED: Router weight, any float dtype.

    Returns:
        logits_TE in fp32 (fp64 where x is fp64); and the rows, for their other uses: the gradient of these is then added
        by the product that makes this one's, which saves a pass over them. It must be nobody else's.
    """
    return cast(tuple[Tensor, Tensor], _Project.apply(x_TD, weight_ED))


def route(logits_TE: Tensor, bias_E: Tensor | None, *, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
    """Choose experts; differentiable from the gates to the logits.

    Args:
        logits_TE: fp32 or fp64.
        bias_E: Selection bias in the dtype of the logits, or None.
        routing: How to choose.

    Returns:
        expert_TK (int32), gate_TK (dtype of the logits), load_E (int32).
    """
    return cast(tuple[Tensor, Tensor, Tensor], _Route.apply(logits_TE, bias_E, routing))
