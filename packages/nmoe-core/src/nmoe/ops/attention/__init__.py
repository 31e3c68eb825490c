# SPDX-License-Identifier: Apache-2.0
"""Causal attention inside documents, global or in a sliding window, with grouped key/value heads.

The implementation is differentiable by itself: the best kernels (cuDNN, flash attention) bring their own backward.
What depends only on the documents is prepared once per forward and shared by all layers.
"""

from typing import Any, Protocol, cast

import torch
from torch import Tensor

from nmoe.ops.registry import implementation

__all__ = ["Kernels", "kernels"]


class Kernels(Protocol):
    """What an implementation file defines."""

    def prepare(self, document_BT: Tensor, *, window: int, device: torch.device) -> Any:
        """What `attention` needs to know about the documents; opaque to the caller.

        Args:
            document_BT: int32 or int64; equal numbers are one document, and a document's tokens lie side by side. On
                the CPU nothing waits for the device; elsewhere their number is read back.
            window: How many tokens a query sees, itself included; 0 for all before it.
            device: Where the tokens are.
        """
        ...

    def attention(self, q_BTNH: Tensor, k_BTGH: Tensor, v_BTGH: Tensor, mask: Any, *, scale: float) -> Tensor:
        """out_BTNH in q's dtype, as wide as v.

        Query (b, i) sees key (b, j) iff j <= i, both are of one document and, with a window, i - j < window. Query
        head n reads key/value head n // (N / G). Softmax in fp32 (fp64 where q is). v may be narrower than q and k.
        """
        ...


def kernels() -> Kernels:
    """The implementation on this process's arch."""
    return cast(Kernels, implementation("attention"))
