# SPDX-License-Identifier: Apache-2.0
"""What lasts from one micro batch to the next beside a master weight: its rounded copy, and its gradient.

Rounding the experts' fp32 weights for every product reads and writes 6 bytes a weight, up to a quarter of the layer's time
where a micro batch is small; adding a fresh gradient to the one that exists, 12 more. Where one rank holds all experts
(`nmoe.rdep.one_rank`), the gradient of a held weight is added in place by the product that makes it; with ``copies`` the
weight is rounded once after each change, into one buffer.

Both are asked for, because they have a price: the copy takes 2 bytes a weight, and a gradient that is added in place does
not pass through autograd, so that hooks on it do not run and `torch.autograd.grad` gives None. Whatever replaces the
parameter object (FSDP while it gathers, recomputation of activations) is not held and gets the plain way.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["gradient_target", "hold", "rounded"]


@dataclass(kw_only=True, slots=True)
class _Copy:
    """A rounded copy and the state of the master that it was made of."""

    value: Tensor
    version: int
    address: int


@dataclass(kw_only=True, slots=True)
class _Held:
    """What is kept for a held weight: a copy by dtype, or None where copies are not wanted."""

    copies: dict[torch.dtype, _Copy] | None


def hold(master: nn.Parameter, *, copies: bool) -> None:
    """Let the gradients of ``master`` add up in place where they can, and with ``copies`` keep it rounded."""
    master.held = _Held(copies={} if copies else None)  # type: ignore[attr-defined]


def rounded(master: Tensor, dtype: torch.dtype) -> Tensor:
    """``master`` in ``dtype``; for a held one the copy of before, unless the master has changed since."""
    held: _Held | None = getattr(master, "held", None)
    copies = held.copies if held else None
    if master.dtype == dtype or copies is None:
        return master.to(dtype)
    state = {"version": master._version, "address": master.data_ptr()}
    copy = copies.get(dtype)
    if copy is None or copy.value.shape != master.shape or copy.value.device != master.device:
        copies[dtype] = copy = _Copy(value=master.detach().to(dtype), **state)
    elif (copy.version, copy.address) != (state["version"], state["address"]):
        copy.value.copy_(master.detach())
        copies[dtype] = copy = _Copy(value=copy.value, **state)
    return copy.value


def gradient_target(master: Tensor) -> tuple[Tensor, bool]:
    """Where the gradient of ``master`` is to be written, and whether to add it to what is there.

    If so, autograd gets None for this gradient.
    """
    exists = master.grad if hasattr(master, "held") and master.is_leaf else None
    if exists is not None and exists.is_contiguous() and exists.shape == master.shape:
        return exists, True
    return torch.empty_like(master), False
