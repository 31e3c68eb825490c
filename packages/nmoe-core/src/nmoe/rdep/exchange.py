# SPDX-License-Identifier: Apache-2.0
"""The memory through which all layers exchange rows: one symmetric buffer, cut into areas.

========  ================  ==================================================================
area      at each rank      written by
========  ================  ==================================================================
flag      [P]               every rank: its epoch
epoch     [1]               itself; beside the flags, so that a second exchange over this memory goes on counting
count     [P, P, 2]         every rank: what it sends to each
rows      [P * T_max, D]    sources: rows of x, or their packets
gradients [P * T_max, D]    sources: gradients of the layer's output
records   [P * T_max, M]    sources: what to do with a row
results   [O, T_max, D]     owners: their sums for a token
values    [T_max, K]        owners: gradients of gates
========  ================  ==================================================================

One copy serves all layers and both directions, because all ranks meet between any two uses of an area (docs/rdep.md).
At P=8, T_max=8192, D=7168, K=8 in bf16 it is 2.7 GiB.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nmoe.comm.communicator import Communicator
from nmoe.comm.layout import WIRES, Wire, areas, starts
from nmoe.comm.remote import Board, Phase, Remote
from nmoe.config import Config
from nmoe.errors import ConfigError
from nmoe.ops import meet

__all__ = ["Exchange", "Rounds"]

_PATIENCE_S = 1800.0  # of the first step: some ranks still compile kernels while others wait for them
_DTYPES = {"int64": torch.int64, "int32": torch.int32, "uint8": torch.uint8}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounds:
    """How an owner that cannot hold all assignments at once takes them in turn.

    Rows always fit; what is bounded is the memory of the experts' activations. A row's round is the number of
    assignments before it, divided by ``budget``; all its assignments fall into that round.
    """

    num_slots: int
    """S: assignments that the activations have room for."""
    budget: int
    """Assignments that may start in one round: S - (K here) + 1, so that those of its last row still fit."""
    num_rounds: int
    """Rounds that the worst routing needs; the host launches all of them."""

    @classmethod
    def of(cls, *, worst: int, wanted: int, per_row: int) -> "Rounds":
        """Rounds for at most ``worst`` assignments, ``per_row`` a row, of which about ``wanted`` fit at once."""
        num_slots = min(worst, max(wanted, per_row))
        if num_slots >= worst:
            return cls(num_slots=num_slots, budget=max(worst, 1), num_rounds=1)
        budget = num_slots - per_row + 1
        return cls(num_slots=num_slots, budget=budget, num_rounds=-(-worst // budget))


class Exchange:
    """What the layers of one model share across the ranks of their experts.

    Collective: all ranks make it with the same arguments, before the first layer runs.

    Args:
        comm: The ranks.
        tokens: T_max: most tokens that a rank brings to one call of a layer; a call may bring fewer, or none.
        hidden_size: D.
        num_experts: E.
        top_k: K.
        wire: Format of x on the way, or None for rows as they are. Gradients and results always travel as they are.
        dtype: Of the rows; gates are fp32, fp64 where the rows are.
        capacity: Assignments that a rank has room for at once, as a multiple of the balanced load T_max * K. More come
            in further rounds; none is dropped.
        exact: Read the number of assignments to the host in each layer and take just that room, in one round.
        timeout_s: How long to wait for a peer before it counts as lost.

    Attributes:
        nbytes: Symmetric memory of each rank.

    Raises:
        ConfigError: The ranks do not divide the experts, or an argument is out of range.
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        tokens: int,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        dtype: torch.dtype,
        wire: Wire | None = None,
        capacity: float = 2.0,
        exact: bool = False,
        timeout_s: float = 60.0,
    ) -> None:
        if num_experts % comm.size:
            raise ConfigError(
                f"moe.num_experts = {num_experts} is not divisible by the {comm.size} expert-parallel ranks"
            )
        if capacity <= 0:
            raise ConfigError(f"rdep.capacity = {capacity} must be above 0")
        self.comm, self.tokens, self.exact, self.wire = comm, tokens, exact, wire
        self.experts_per_rank = num_experts // comm.size
        self.gate_dtype = torch.promote_types(dtype, torch.float32)
        per_row = min(top_k, self.experts_per_rank)
        worst = comm.size * tokens * per_row
        self.rounds = Rounds.of(worst=worst, wanted=math.ceil(capacity * tokens * top_k), per_row=per_row)

        parts = areas(
            ranks=comm.size,
            tokens=tokens,
            width=hidden_size,
            top_k=top_k,
            row_bytes=dtype.itemsize,
            gate_bytes=self.gate_dtype.itemsize,
            wire=wire,
        )
        offsets, self.nbytes = starts(parts)
        memory = comm.symmetric("rdep", nbytes=self.nbytes)
        dtypes = _DTYPES | {"row": dtype, "gate": self.gate_dtype}
        remote = {
            name: Remote.of(memory, rank=comm.rank, offset=offsets[name], shape=area.shape, dtype=dtypes[area.element])
            for name, area in parts.items()
        }
        self.count, self.rows, self.gradients = remote["count"], remote["rows"], remote["gradients"]
        self.records, self.results, self.values = remote["records"], remote["results"], remote["values"]
        self.timeout_s = timeout_s
        self.board = Board(flag=remote["flag"], epoch_1=remote["epoch"].local, timeout_s=timeout_s, alarm=comm.alarm)
        comm.barrier()

    @classmethod
    def of(cls, config: Config, comm: Communicator, *, dtype: torch.dtype) -> "Exchange":
        """That of a model under training, for rows of this dtype; patient until it is armed."""
        exchange = cls(
            comm,
            tokens=config.train.micro_batch_size * config.data.seq_len,
            hidden_size=config.model.hidden_size,
            num_experts=config.moe.num_experts,
            top_k=config.moe.top_k,
            dtype=dtype,
            wire=WIRES.get(config.rdep.wire),
            capacity=config.rdep.capacity,
            exact=config.rdep.sizes == "exact",
            timeout_s=config.rdep.timeout_s,
        )
        exchange.board = replace(exchange.board, timeout_s=_PATIENCE_S)
        return exchange

    def arm(self) -> None:
        """From now on a peer that does not come within the timeout is lost; called when all kernels are compiled."""
        self.board = replace(self.board, timeout_s=self.timeout_s)

    def rounds_for(self, count_PP2: Tensor) -> Rounds:
        """Rounds of one call: those of the capacity or, if so asked, one round of the size that arrived."""
        if not self.exact:
            return self.rounds
        slots = int(count_PP2[:, self.comm.rank, 1].sum())  # waits for the device
        return Rounds(num_slots=slots, budget=max(slots, 1), num_rounds=1)

    def meet(self, layer: int, phase: Phase) -> None:
        """Let all ranks come to the same point; see `nmoe.ops.meet`."""
        meet.kernels().meet(self.board, layer=layer, phase=phase)
