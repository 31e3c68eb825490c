# SPDX-License-Identifier: Apache-2.0
"""Attention on both chips by flash-attn-4, over documents of any length side by side, forward and backward.

All rows of a batch are one axis of tokens and the documents' offsets say who sees whom, so nothing is padded, and no
work is done between documents or outside a window. Keys and queries may be wider than values: DeepSeek's (192, 128) run
as they are. Backward adds the shares of dq (and, with grouped heads, of dk and dv) in a fixed order, so that two runs
are equal to the bit; that costs 10 to 25% of the two passes, and no faster kernel that promises it was found.

Chosen by measurement, see docs/performance.md. Compute bound: 2 (H + V) FLOP forward and 2 (3 H + 2 V) backward for
every pair of tokens and head, with H and V the widths of keys and values.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from nmoe.errors import EnvironmentFault
from nmoe.ops._cute.build import enter_context
from nmoe.ops._cute.folder import attention_folder

# Read when flash-attn-4 is imported: compiled kernels lie on disk beside this project's own, whose warm-up looks for them there.
os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "1"
os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] = str(attention_folder())

from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

__all__ = ["Documents", "attention", "backward", "forward", "prepare"]

_WIDTHS = ((64, 64), (128, 128), (192, 128), (256, 256))
"""Widths (keys, values) that are tested; others are filled up with zeros. Found on sm_90a: (48, 32) gives a wrong dq."""
_SHORTEST_BOUND = 512
"""Bounds on the documents' length below this would select kernels of their own for short documents."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """Where the documents of a batch begin and end, on the axis of all its tokens."""

    offset: Tensor
    """int32, one more than there are documents."""
    bound: int
    """No document is longer."""
    window: int
    """Tokens that a query sees, itself included; 0 for all before it."""


def prepare(document_BT: Tensor, *, window: int, device: torch.device) -> Documents:
    rows, length = document_BT.shape
    document_BT = document_BT.cpu()
    begins_BT = torch.ones_like(document_BT, dtype=torch.bool)
    begins_BT[:, 1:] = document_BT[:, 1:] != document_BT[:, :-1]
    end = document_BT.new_tensor([rows * length], dtype=torch.int64)
    offset = torch.cat((begins_BT.flatten().nonzero().squeeze(1), end)).to(torch.int32)
    longest = int(torch.diff(offset).max()) if len(offset) > 1 else 0
    return Documents(
        offset=offset.pin_memory().to(device, non_blocking=True),
        bound=max(longest, _SHORTEST_BOUND),
        window=window,
    )


def _widths(width: int, v_width: int, *, grouped: bool) -> tuple[int, int]:
    """The narrowest kernel for heads of these widths; where query heads share keys, the backward on sm_90a wants equal ones."""
    fitting = (pair for pair in _WIDTHS if pair[0] >= width and pair[1] >= v_width)
    found = next((pair for pair in fitting if pair[0] == pair[1] or not grouped), None)
    if found is None:
        raise EnvironmentFault(
            f"attention: found head widths {width} (queries, keys) and {v_width} (values), the kernels take at most "
            f"{_WIDTHS[-1][0]} and {_WIDTHS[-1][1]}; set NMOE_ARCH=reference to run plain torch"
        )
    return found


def _where(documents: Documents) -> dict[str, Any]:
    """Who sees whom, as flash-attn-4 takes it."""
    return {
        "cu_seqlens_q": documents.offset,
        "cu_seqlens_k": documents.offset,
        "max_seqlen_q": documents.bound,
        "max_seqlen_k": documents.bound,
        "causal": not documents.window,
        "window_size_left": documents.window - 1 if documents.window else None,
        "window_size_right": 0 if documents.window else None,
    }


def forward(
    q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor, documents: Documents, *, scale: float
) -> tuple[Tensor, Tensor]:
    """out_TNH, and the log of each softmax's sum, lse_NT in fp32."""
    # lse also where nobody wants it: a kernel without it would be one more to compile.
    out_TNH, lse_NT, *_ = _flash_attn_fwd(
        q_TNH, k_TGH, v_TGH, softmax_scale=scale, return_lse=True, **_where(documents)
    )
    assert lse_NT is not None
    return out_TNH, lse_NT


def backward(
    dout_TNH: Tensor,
    q_TNH: Tensor,
    k_TGH: Tensor,
    v_TGH: Tensor,
    out_TNH: Tensor,
    lse_NT: Tensor,
    documents: Documents,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq_TNH, dk_TGH, dv_TGH."""
    where, kept = _where(documents), (q_TNH, k_TGH, v_TGH, out_TNH, dout_TNH, lse_NT)
    dq_TNH, dk_TGH, dv_TGH = _flash_attn_bwd(*kept, softmax_scale=scale, deterministic=True, **where)
    return dq_TNH, dk_TGH, dv_TGH


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor, documents: Documents, scale: float) -> Tensor:
        enter_context()
        out_TNH, lse_NT = forward(q_TNH, k_TGH, v_TGH, documents, scale=scale)
        ctx.save_for_backward(q_TNH, k_TGH, v_TGH, out_TNH, lse_NT)
        ctx.documents, ctx.scale = documents, scale
        return out_TNH

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        enter_context()
        gradients = backward(grad_outputs[0].contiguous(), *ctx.saved_tensors, ctx.documents, scale=ctx.scale)
        return *gradients, None, None


def attention(q_BTNH: Tensor, k_BTGH: Tensor, v_BTGH: Tensor, mask: Documents, *, scale: float) -> Tensor:
    if q_BTNH.dtype is not torch.bfloat16:
        raise EnvironmentFault(
            f"attention: found {q_BTNH.dtype}, the kernels take bfloat16; set train.dtype=bf16, or NMOE_ARCH=reference"
        )
    width, v_width = q_BTNH.shape[3], v_BTGH.shape[3]
    wide, v_wide = _widths(width, v_width, grouped=q_BTNH.shape[2] != k_BTGH.shape[2])
    # Columns of zeros add nothing to a score, and those of the result are left out again.
    padding = (wide - width, wide - width, v_wide - v_width)
    q_TNH, k_TGH, v_TGH = (
        pad(t.flatten(0, 1), (0, more)) if more else t.flatten(0, 1)
        for t, more in zip((q_BTNH, k_BTGH, v_BTGH), padding, strict=True)
    )
    out_TNH: Tensor = _Attention.apply(q_TNH, k_TGH, v_TGH, mask, scale)  # type: ignore[assignment]
    return out_TNH[..., :v_width].unflatten(0, q_BTNH.shape[:2])
