# SPDX-License-Identifier: Apache-2.0
"""The way home: an owner sums what a row has on it and stores one row at the source, which sums its owners' rows.

Both sums have a fixed order (k on the owner, rank at the source) and are in fp32 (fp64 in reference mode). The places at
the source are fixed as well, (ordinal of the owner, token), so nothing has to be announced.
"""

from typing import Protocol, cast

from torch import Tensor

from nmoe.comm.remote import Remote
from nmoe.ops.plan import Sends
from nmoe.ops.registry import implementation

__all__ = ["Kernels", "kernels"]


class Kernels(Protocol):
    """What an implementation file defines.

    slot_RK is int32: where assignment (row, k) lies in S, or -1; home_R3 is that of `nmoe.ops.receive`. A row without a
    slot sends nothing, and slots that no row names are never read.
    """

    def reduce_push(
        self, y_SD: Tensor, slot_RK: Tensor, gate_RK: Tensor | None, home_R3: Tensor, *, results: Remote
    ) -> None:
        """Store each row's sum over k of gate * y[slot] (without gates: of y[slot]) at its source.

        ``results`` is [O, T_max, D] in y's dtype at each rank; of slabs (`Remote.of`), a view has one.
        """
        ...

    def push_values(self, value_S: Tensor, slot_RK: Tensor, home_R3: Tensor, *, values: Remote) -> None:
        """Store the value of each assignment at its source; ``values`` is [T_max, K] in value's dtype at each rank."""
        ...

    def partial_sum(self, result_OTD: Tensor, sends: Sends) -> Tensor:
        """out_TD: the sum of each token's rows in the order of its owners; T is that of ``sends``."""
        ...


def kernels() -> Kernels:
    """The implementation on this process's arch."""
    return cast(Kernels, implementation("give_back"))
