# SPDX-License-Identifier: Apache-2.0
"""Which rates and which rule a parameter is trained with: a function of its name and shape, nowhere else decided.

=========  ==================================  =================  ======================
group      parameters                          rule under muon    keys of [optim]
=========  ==================================  =================  ======================
embedding  ``embed``, ``head``                 AdamW              ``embedding_*``
router     ``*.router.weight``                 AdamW              ``router_*``
expert     ``*.experts.w13``, ``*.experts.w2`` Muon               ``expert_*``
dense      every other                         Muon if a matrix   the rate and decay
           vectors among them (norms)          AdamW              ``norm_decay``
=========  ==================================  =================  ======================

Rows of an embedding are looked up one by one and a router's are one an expert: neither is a map between features whose
spectrum means something, so both stay with AdamW. (Moonlight, arXiv:2502.16982, trained its routers with Muon, too.)
"""

from dataclasses import dataclass

from nmoe.config import Optim

__all__ = ["Pace", "group_of", "is_matrix_rule", "pace_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How fast a parameter moves; hashable, so that parameters of one pace are updated together.

    Attributes:
        rate: factor on the step's learning rate.
        decay: decoupled weight decay, times that rate.
    """

    rate: float
    decay: float


def group_of(name: str) -> str:
    """`embedding`, `router`, `expert` or `dense`."""
    if name in ("embed", "head"):
        return "embedding"
    if name.endswith("router.weight"):
        return "router"
    return "expert" if ".experts." in name else "dense"


def is_matrix_rule(name: str, ndim: int) -> bool:
    """Whether Muon, where it is chosen, trains this parameter."""
    return ndim >= 2 and group_of(name) in ("dense", "expert")


def pace_of(name: str, ndim: int, *, config: Optim) -> Pace:
    """Rate and decay of a parameter; vectors have the dense rate and a decay of their own."""
    group = group_of(name)
    rate = 1.0 if group == "dense" else getattr(config, f"{group}_rate")
    decay = 1.0 if group == "dense" else getattr(config, f"{group}_decay")
    return Pace(rate=rate, decay=config.weight_decay * (decay if ndim >= 2 else config.norm_decay))
