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

Where a peer's memory is not mapped, what goes there is stored in an **outbox** and put from there (`nmoe.ops.ship`). A put
moves lines that lie side by side, so results then come home as one block for each owner, in the order in which it got the
rows: results is [P, T_max, D] and values [P, T_max, K], and the source finds its own by its plan.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nmoe.comm.communicator import Communicator, Symmetric
from nmoe.comm.layout import Area, Wire, areas, starts
from nmoe.comm.remote import Board, Phase, Remote, area_of
from nmoe.comm.watcher import PATIENCE_S
from nmoe.errors import ConfigError
from nmoe.ops import meet, ship

__all__ = ["Exchange", "Rounds", "owned_experts"]

_DTYPES = {"int64": torch.int64, "int32": torch.int32, "uint8": torch.uint8}
_OUTBOXES = {
    "rows": "rows outbox",
    "gradients": "gradients outbox",
    "records": "records outbox",
    "results": "rows outbox",  # rows leave before the meeting of dispatch, results after it
    "values": "values outbox",
}
_SLABS = {"results", "values"}


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


def owned_experts(num_experts: int, comm: Communicator) -> range:
    """Global ids of the experts of this rank.

    Raises:
        ConfigError: The ranks do not divide the experts.
    """
    if num_experts % comm.size:
        raise ConfigError(f"moe.num_experts = {num_experts} is not divisible by the {comm.size} expert-parallel ranks")
    share = num_experts // comm.size
    return range(comm.rank * share, (comm.rank + 1) * share)


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
        capacity: Assignments that a rank has room for at once, as a multiple of the balanced load. More come in further
            rounds; none is dropped.
        exact: Read the number of assignments to the host in each layer and take just that room, in one round.
        timeout_s: How long to wait for a peer before it counts as lost.
        load: The balanced load: assignments of a rank where routing is even; 0: T_max * K.
        name: Of its memory: exchanges of one communicator that work side by side have different ones.

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
        load: int = 0,
        name: str = "rdep",
    ) -> None:
        self.experts_per_rank = len(owned_experts(num_experts, comm))
        if capacity <= 0:
            raise ConfigError(f"rdep.capacity = {capacity} must be above 0")
        self.comm, self.tokens, self.exact, self.wire = comm, tokens, exact, wire
        self.gate_dtype = torch.promote_types(dtype, torch.float32)
        per_row = min(top_k, self.experts_per_rank)
        worst = comm.size * tokens * per_row
        self.rounds = Rounds.of(worst=worst, wanted=math.ceil(capacity * (load or tokens * top_k)), per_row=per_row)

        parts = areas(
            ranks=comm.size,
            tokens=tokens,
            width=hidden_size,
            top_k=top_k,
            row_bytes=dtype.itemsize,
            gate_bytes=self.gate_dtype.itemsize,
            wire=wire,
            far=comm.size - comm.node_size,
        )
        self.nbytes = starts(parts)[1]
        memory = comm.symmetric(name, nbytes=self.nbytes)
        remote, boxes = _cut(memory, parts, comm, _DTYPES | {"row": dtype, "gate": self.gate_dtype})
        self.count, self.rows, self.gradients = remote["count"], remote["rows"], remote["gradients"]
        self.records, self.results, self.values = remote["records"], remote["results"], remote["values"]
        self.outboxes = tuple(boxes.values())
        self.timeout_s = timeout_s
        self.board = Board(
            flag=remote["flag"],
            epoch_1=remote["epoch"].local,
            timeout_s=timeout_s,
            ranks=comm.ranks,
            alarm=comm.alarm,
        )
        far = {far.peer for far in self.count.far}
        self._near_P1, self._own_line_P2 = (
            torch.tensor(numbers, dtype=torch.int32, device=comm.device)
            for numbers in ([[peer not in far] for peer in range(comm.size)], [[comm.rank, 1]] * comm.size)
        )
        comm.barrier()

    def be_patient(self) -> None:
        """Until it is armed, wait for half an hour: some ranks still compile kernels while others wait for them."""
        self.board = replace(self.board, timeout_s=PATIENCE_S)

    def arm(self) -> None:
        """From now on a peer that does not come within the timeout is lost; called when all kernels are compiled."""
        self.board = replace(self.board, timeout_s=self.timeout_s)

    @property
    def has_far(self) -> bool:
        """Whether some peers are reached by puts."""
        return bool(self.count.far)

    def rounds_for(self, count_PP2: Tensor) -> Rounds:
        """Rounds of one call: those of the capacity or, if so asked, one round of the size that arrived."""
        if not self.exact:
            return self.rounds
        slots = int(count_PP2[:, self.comm.rank, 1].sum())  # waits for the device
        return Rounds(num_slots=slots, budget=max(slots, 1), num_rounds=1)

    def places(self, count_PP2: Tensor) -> Tensor:
        """The table by which rows are stored: at the far peers' outboxes no rank's rows come before this one's."""
        return count_PP2 * self._near_P1 if self.has_far else count_PP2

    def announce(self) -> None:
        """Ship the counts that this rank has written into its own table."""
        if self.has_far:
            ship.kernels().ship([self.count], self._own_line_P2, self.board)

    def ship_out(self, count_PP2: Tensor, *parts: Remote) -> None:
        """Ship what this rank has for the owners: to each, behind what the ranks below send it."""
        if self.has_far:
            before_P, own_P = count_PP2[: self.comm.rank, :, 0].sum(dim=0), count_PP2[self.comm.rank, :, 0]
            ship.kernels().ship(parts, torch.stack([before_P, own_P], dim=1).to(torch.int32), self.board)

    def ship_home(self, count_PP2: Tensor, *parts: Remote) -> None:
        """Ship what this rank has for the sources: to each, one line for each row that came from there."""
        if self.has_far:
            came_P = count_PP2[:, self.comm.rank, 0].to(torch.int32)
            first_P = torch.full_like(came_P, self.comm.rank * self.tokens)
            ship.kernels().ship(parts, torch.stack([first_P, came_P], dim=1), self.board)

    def meet(self, layer: int, phase: Phase) -> None:
        """Let all ranks come to the same point; see `nmoe.ops.meet`."""
        meet.kernels().meet(self.board, layer=layer, phase=phase)


def _cut(
    memory: Symmetric, parts: Mapping[str, Area], comm: Communicator, dtypes: Mapping[str, torch.dtype]
) -> tuple[dict[str, Remote], dict[str, Tensor]]:
    """The areas of a buffer, and apart from them the outboxes, which are this rank's alone."""
    offsets, _ = starts(parts)
    boxes = {
        name: area_of(memory.local, offsets[name], part.shape, dtypes[part.element])
        for name, part in parts.items()
        if name in _OUTBOXES.values()
    }
    found: dict[str, Remote] = {}
    for name in parts.keys() - boxes.keys():
        part, dtype, box = parts[name], dtypes[parts[name].element], boxes.get(_OUTBOXES.get(name, ""))
        found[name] = Remote.of(
            memory,
            ranks=comm.ranks,
            rank=comm.rank,
            offset=offsets[name],
            shape=part.shape,
            dtype=dtype,
            outboxes=None if box is None else _lines_of(box, part.shape[-1], dtype),
            slabs=box is not None and name in _SLABS,
        )
    return found, boxes


def _lines_of(box: Tensor, width: int, dtype: torch.dtype) -> list[Tensor]:
    """The outbox [far, T_max, ...] as T_max lines for each far peer, which may be shorter than its own."""
    lines = box.shape[1]
    parts = (own.reshape(-1).view(torch.uint8)[: lines * width * dtype.itemsize] for own in box)
    return [part.view(dtype).view(lines, width) for part in parts]
