# SPDX-License-Identifier: Apache-2.0
"""Plain torch meaning of SwiGLU over interleaved columns."""

import torch
from torch import Tensor

__all__ = ["backward", "forward"]


def _halves(preact_T2F: Tensor) -> tuple[Tensor, Tensor]:
    wide = preact_T2F.to(torch.promote_types(preact_T2F.dtype, torch.float32))
    return wide[:, 0::2], wide[:, 1::2]


def forward(preact_T2F: Tensor) -> Tensor:
    gate_TF, up_TF = _halves(preact_T2F)
    return (torch.nn.functional.silu(gate_TF) * up_TF).to(preact_T2F.dtype)


def backward(dact_TF: Tensor, preact_T2F: Tensor) -> Tensor:
    gate_TF, up_TF = _halves(preact_T2F)
    sigmoid_TF = torch.sigmoid(gate_TF)
    silu_TF = gate_TF * sigmoid_TF
    dgate_TF = dact_TF * up_TF * (sigmoid_TF + silu_TF * (1 - sigmoid_TF))
    dup_TF = dact_TF * silu_TF
    return torch.stack((dgate_TF, dup_TF), dim=-1).view(preact_T2F.shape).to(preact_T2F.dtype)
