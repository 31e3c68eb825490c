# SPDX-License-Identifier: Apache-2.0
"""Rows, and the records that say what to do with them, written straight into the memory of the experts' owners.

A row from rank q lies at base(q) plus its number in q's plan; base(q) is the sum of what the ranks below q announced, so
every place is known before anything is sent, and receive order is (source rank, token).

A record has M words of 32 bits, a multiple of 4: source rank, token, ordinal (how many owners of the token stand below
this one), epoch (low 31 bits), K local expert ids (-1: another rank's), K gates (fp32: one word each; fp64: two).
"""

from typing import Protocol, cast

from torch import Tensor

from nmoe.comm.layout import HEADER_WORDS, record_words
from nmoe.comm.remote import Board, Remote
from nmoe.ops.plan import Sends
from nmoe.ops.registry import implementation

__all__ = ["HEADER_WORDS", "Kernels", "kernels", "record_words"]


class Kernels(Protocol):
    """What an implementation file defines. count_PP2 is the table of `nmoe.ops.plan` with the entries of all ranks."""

    def push(self, x_TD: Tensor, sends: Sends, count_PP2: Tensor, *, rows: Remote) -> None:
        """Store each token's row at each of its owners; ``rows`` is [P * T_max, D] in x's dtype at each rank."""
        ...

    def push_records(
        self,
        expert_TK: Tensor,
        gate_TK: Tensor,
        sends: Sends,
        count_PP2: Tensor,
        board: Board,
        *,
        experts_per_rank: int,
        records: Remote,
    ) -> None:
        """Store the record of each row beside it; ``records`` is int32 [P * T_max, M] at each rank."""
        ...


def kernels() -> Kernels:
    """The implementation on this process's arch."""
    return cast(Kernels, implementation("push"))
