# SPDX-License-Identifier: Apache-2.0
"""What each rank received, layer by layer, joined with the time that the rank took: what an uneven router costs."""

from dataclasses import dataclass

import numpy as np

from nviz.points import Connection, columns_of

__all__ = ["RECEIVED", "TIME", "Joined", "joined", "over_mean", "seconds_at"]

RECEIVED = "router/received"
TIME = "speed/rank_step_time"
REACH = 1000  # steps within which a rank's time is looked for
VALUES = 300_000  # of `RECEIVED` that one answer is made of


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """The newest steps at which ranks were written; NaN where a value is missing.

    Attributes:
        steps: int64 [S].
        received_SLR: what a rank received in a layer over the mean of the ranks; 1 is an even share.
        seconds_SR: time of the rank's step; of the step before, where that one was not written.
    """

    steps: np.ndarray
    received_SLR: np.ndarray
    seconds_SR: np.ndarray

    @property
    def relative(self) -> np.ndarray:
        """Time of a rank over the median of the ranks in the same step: float64 [S, R]."""
        known = np.isfinite(self.seconds_SR).any(axis=1)
        relative = np.full_like(self.seconds_SR, np.nan)
        relative[known] = self.seconds_SR[known] / np.nanmedian(self.seconds_SR[known], axis=1, keepdims=True)
        return relative

    def correlation(self) -> np.ndarray:
        """Correlation, over steps and ranks, of what a rank received in a layer with its relative time: float64 [L].

        NaN where either is constant.
        """
        found = np.full(self.received_SLR.shape[1], np.nan)
        time = self.relative.ravel()
        for layer in range(len(found)):
            share = self.received_SLR[:, layer].ravel()
            both = np.isfinite(share) & np.isfinite(time)
            if both.sum() > 2 and share[both].std() > 1e-9 and time[both].std() > 1e-9:
                found[layer] = np.corrcoef(share[both], time[both])[0, 1]
        return found


def over_mean(values: np.ndarray) -> np.ndarray:
    """Values over the mean of those that are known along the last axis; NaN where one is missing or the mean is 0."""
    known = np.ma.masked_invalid(values)
    return np.ma.filled(known / known.mean(axis=-1, keepdims=True), np.nan)


def joined(connection: Connection, steps: np.ndarray, *, layers: int, ranks: int) -> Joined:
    """The newest steps of `RECEIVED` with the ranks' times.

    Args:
        connection: an open store.
        steps: int64 [N], every step at which `RECEIVED` was written, at least one.
        layers, ranks: largest index plus one.
    """
    newest = steps[-max(1, VALUES // (layers * ranks)) :]
    since = int(newest[0])
    table = columns_of(
        connection,
        """
        SELECT step, layer, rank, value FROM metrics
        WHERE name = ? AND step >= ? AND layer IS NOT NULL AND rank IS NOT NULL
        """,
        [RECEIVED, since],
    )
    known = np.isin(table["step"], newest)  # the store may have grown since `steps` was asked
    received = np.full((len(newest), layers, ranks), np.nan)
    places = np.searchsorted(newest, table["step"][known])
    received[places, table["layer"][known], table["rank"][known]] = table["value"][known]
    # A rank's time is known a step later, so for the first step it may be the one before.
    times = columns_of(
        connection,
        """
        SELECT step, rank, value FROM metrics
        WHERE name = ? AND rank IS NOT NULL AND rank < ? AND step >=
            (SELECT coalesce(max(step), 0) FROM metrics WHERE name = ? AND step <= ? AND step > ?)
        """,
        [TIME, ranks, TIME, since, since - REACH],
    )
    seconds = np.full((len(newest), ranks), np.nan)
    if len(times["step"]):
        written, row = np.unique(times["step"], return_inverse=True)
        by_step = np.full((len(written), ranks), np.nan)
        by_step[row, times["rank"]] = times["value"]
        nearest = np.searchsorted(written, newest, side="right") - 1
        seconds[nearest >= 0] = by_step[nearest[nearest >= 0]]
    return Joined(steps=newest, received_SLR=over_mean(received), seconds_SR=seconds)


def seconds_at(connection: Connection, step: int, *, ranks: int) -> np.ndarray:
    """Time of each rank's step, or of the last one before that was written: float64 [ranks], NaN where there is none."""
    table = columns_of(
        connection,
        """
        SELECT rank, value FROM metrics
        WHERE name = ? AND rank < ? AND step = (SELECT max(step) FROM metrics WHERE name = ? AND step <= ? AND step > ?)
        """,
        [TIME, ranks, TIME, step, step - REACH],
    )
    seconds = np.full(ranks, np.nan)
    seconds[table["rank"]] = table["value"]
    return seconds
