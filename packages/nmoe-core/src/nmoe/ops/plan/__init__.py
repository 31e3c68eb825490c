# SPDX-License-Identifier: Apache-2.0
"""What a rank sends where: one row for each (token, rank) with an expert of that token, numbered in token order.

Experts lie on ranks in blocks of X: rank p owns [p * X, (p + 1) * X).
"""

from dataclasses import dataclass
from typing import Protocol, cast

from torch import Tensor

from nmoe.comm.remote import Remote
from nmoe.ops.registry import implementation

__all__ = ["Kernels", "Sends", "kernels"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sends:
    """The rows that this rank sends."""

    row_TP: Tensor
    """int32: number of the token among the rows that go to rank p; -1 where none of its experts is there."""
    top_k: int
    """K: choices of a token."""


class Kernels(Protocol):
    """What an implementation file defines."""

    def plan(self, expert_TK: Tensor, *, experts_per_rank: int, count: Remote) -> Sends:
        """Number the rows of T tokens and announce their counts to all ranks.

        Args:
            expert_TK: int32 global expert ids, or -1 where a choice is nobody's here; a token names an expert once.
            experts_per_rank: X.
            count: int32 [P, P, 2] at each rank: entry [q, p] is what rank q sends to rank p: rows, and assignments
                (row-expert pairs). This rank writes entry [rank] everywhere it reaches.
        """
        ...


def kernels() -> Kernels:
    """The implementation on this process's arch."""
    return cast(Kernels, implementation("plan"))
