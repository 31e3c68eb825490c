# SPDX-License-Identifier: Apache-2.0
"""Figures that show a sick run early: the load of the experts, and losses far above the recent ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

__all__ = ["RouterHealth", "is_spike", "router_health"]

WINDOW = 64
"""Steps that a loss is compared with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterHealth:
    """How evenly the experts of each MoE layer are used; arrays have one entry a layer.

    Attributes:
        share_LE: fraction of the layer's assignments by expert.
        max_over_mean: load of the fullest expert over the mean, 1 to E.
        dead_experts: experts without a token.
        entropy: of the shares, over that of equal shares, 0 to 1.
    """

    share_LE: np.ndarray
    max_over_mean: np.ndarray
    dead_experts: np.ndarray
    entropy: np.ndarray


def router_health(load_LE: np.ndarray) -> RouterHealth:
    """Health from the assignments by layer and expert, int [L, E]."""
    experts = load_LE.shape[1]
    share_LE = load_LE / np.maximum(load_LE.sum(axis=1, keepdims=True), 1)
    logs = np.log(np.where(share_LE > 0, share_LE, 1.0))
    return RouterHealth(
        share_LE=share_LE,
        max_over_mean=share_LE.max(axis=1, initial=0.0) * experts,
        dead_experts=(load_LE == 0).sum(axis=1),
        entropy=-(share_LE * logs).sum(axis=1) / np.log(max(2, experts)),
    )


def is_spike(loss: float, recent: Sequence[float]) -> bool:
    """Whether a loss stands far above the recent ones.

    Far is 8 times the median distance from their median (some 5 standard deviations of a normal distribution), and at
    least 2 % of it; medians, because one spike must not hide the next. The first quarter of a window is never judged.
    """
    if len(recent) < WINDOW // 4:
        return False
    middle = median(recent)
    spread = median(abs(value - middle) for value in recent)
    return loss > middle + max(8.0 * spread, 0.02 * abs(middle))
