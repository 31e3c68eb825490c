# SPDX-License-Identifier: Apache-2.0
"""Who is waited for: how far each rank has come, and what follows when nobody comes further.

All ranks run one program, so the places in it have an order. A rank that stands behind the others is the one they wait
for; as long as it moves, nothing is wrong, however long the others wait. A rank whose process does not run at all is lost
wherever it stands.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nmoe.comm.page import Page

__all__ = ["Observer", "Standing", "verdict"]

_SPEAKS_S = 1.0  # without a sign of life, after which the next rank of the machine speaks for it
_MARGIN_S = 1.0  # a wait for that rank may say more: layer, phase and epochs
_STOPPED_S = 1.5  # without a sign of life, after which a rank that stands still is said not to run


class Standing(NamedTuple):
    """What is known of a rank. It travels between machines as a list of its fields."""

    rank: int
    position: int
    """In the program; grows, and equal numbers are the same place."""
    still_s: float
    """Since it came there."""
    silent_s: float
    """Since its process gave a sign of life."""
    limit_s: float
    """How long its process may be silent."""
    patience_s: float
    """How long it may stay where it is."""
    waits: bool
    """It stands in a call that waits for other ranks."""
    doing: str
    """Its place, in words."""


class Observer:
    """How the ranks of this machine stand, seen from one of them.

    Args:
        page: what they write.
        ranks: their numbers.
        me: which of them looks.
    """

    def __init__(self, page: Page, *, ranks: Sequence[int], me: int) -> None:
        self._slots, self._ranks, self._me = page.slots, ranks, me
        self._position_P, self._pulse_P = self._slots["position"].copy(), self._slots["pulse"].copy()
        self._still_P, self._silent_P = np.zeros(len(ranks)), np.zeros(len(ranks))
        self._patience_P = self._slots["patience_s"].copy()

    def look(self, elapsed_s: float) -> None:
        """Look again, so many seconds of this process's life after the last time."""
        slots = self._slots
        slots["pulse"][self._me] += 1
        patience_P = slots["patience_s"].copy()  # before the places: a beat writes its place first
        position_P, pulse_P = slots["position"].copy(), slots["pulse"].copy()
        self._still_P = np.where(position_P != self._position_P, 0.0, self._still_P + elapsed_s)
        self._silent_P = np.where(pulse_P != self._pulse_P, 0.0, self._silent_P + elapsed_s)
        self._position_P, self._pulse_P, self._patience_P = position_P, pulse_P, patience_P

    @property
    def still_s(self) -> float:
        """For how long this rank has been where it is."""
        return float(self._still_P[self._me])

    @property
    def speaks(self) -> bool:
        """Whether this rank is the first of those that are alive."""
        return not (self._silent_P[: self._me] < _SPEAKS_S).any()

    def runs(self, index: int) -> bool:
        """Whether a rank of this machine has given a sign of life within the last second."""
        return bool(self._silent_P[index] < _SPEAKS_S)

    def standings(self) -> list[Standing]:
        """Of all that have not taken their leave."""
        return [
            Standing(
                rank=rank,
                position=int(self._position_P[index]),
                still_s=float(self._still_P[index]),
                silent_s=float(self._silent_P[index]),
                limit_s=float(slot["limit_s"]),
                patience_s=max(float(slot["limit_s"]), float(self._patience_P[index])),
                waits=bool(slot["waits"]),
                doing=slot["doing"].decode(errors="replace"),
            )
            for index, (rank, slot) in enumerate(zip(self._ranks, self._slots, strict=True))
            if not slot["leaving"]
        ]


def verdict(standings: Sequence[Standing], *, whole: bool = True) -> str:
    """Who is lost and why, one line; empty while there is still hope.

    Args:
        standings: of all ranks that have not taken their leave, or of some.
        whole: whether of all: only then it is known who is the last.
    """
    silent = [one for one in standings if one.silent_s > one.limit_s + _MARGIN_S]
    if silent:
        return _line(silent, max(one.silent_s for one in silent))
    if not whole:
        return ""
    lowest = min((one.position for one in standings), default=0)
    last = [one for one in standings if one.position == lowest]
    if not last or any(one.still_s <= one.patience_s + _MARGIN_S for one in last):
        return ""
    causes = [one for one in last if one.silent_s > _STOPPED_S] or [one for one in last if not one.waits] or last
    return _line(causes, min(one.still_s for one in last))


def _line(lost: Sequence[Standing], seconds: float) -> str:
    first = lost[0]
    others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    how = "it waits for other ranks, too" if first.waits else "its process runs, see its stacks"
    if first.silent_s > _STOPPED_S:
        how = "its process does not run"
    return f"lost rank {first.rank}{others}: no progress for {seconds:.0f} s in {first.doing}; {how}"
