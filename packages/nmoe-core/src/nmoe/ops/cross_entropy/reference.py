# SPDX-License-Identifier: Apache-2.0
"""Plain torch meaning of the linear cross entropy, a chunk of tokens at a time."""

import torch
from torch import Tensor

__all__ = ["forward"]

_CHUNK_LOGITS = 1 << 27
"""Logits held at once: 512 MiB in fp32, so 667 tokens of a vocabulary of 201088. A chunk reads the head three times and
its gradient once, so fewer tokens would wait for memory; more would need it."""


def _chunk_tokens(vocabulary: int) -> int:
    return max(16, _CHUNK_LOGITS // vocabulary)


def forward(
    x_TD: Tensor, weight_VD: Tensor, target_T: Tensor, *, z_loss: float, gradients: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    head_VD = weight_VD.to(x_TD.dtype)
    nll_sum = torch.zeros((), dtype=wide, device=x_TD.device)
    z_sum = torch.zeros_like(nll_sum)
    dx_TD = torch.zeros_like(x_TD) if gradients else None
    dweight_VD = torch.zeros(weight_VD.shape, dtype=wide, device=x_TD.device) if gradients else None

    size = _chunk_tokens(weight_VD.shape[0])
    for start in range(0, x_TD.shape[0], size):
        rows = slice(start, start + size)
        x, target = x_TD[rows], target_T[rows]
        valid = target >= 0
        target = target.clamp(min=0).unsqueeze(1)
        logits = (x @ head_VD.t()).to(wide)
        lse = torch.logsumexp(logits, dim=1)
        nll_sum += ((lse - logits.gather(1, target).squeeze(1)) * valid).sum()
        z_sum += (lse.square() * valid).sum() * z_loss
        if dx_TD is None or dweight_VD is None:
            continue
        # d nll = softmax - onehot; d z = 2 z_loss lse softmax
        dlogits = logits.sub_(lse.unsqueeze(1)).exp_().mul_((1 + 2 * z_loss * lse).unsqueeze(1))
        dlogits.scatter_add_(1, target, -torch.ones_like(target, dtype=wide))
        dlogits = dlogits.mul_(valid.unsqueeze(1)).to(x.dtype)
        del logits
        dx_TD[rows] = dlogits @ head_VD
        dweight_VD += dlogits.t() @ x
    return nll_sum, z_sum, dx_TD, dweight_VD if dweight_VD is None else dweight_VD.to(weight_VD.dtype)
