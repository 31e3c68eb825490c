# SPDX-License-Identifier: Apache-2.0
"""The order in which training sees the data: a function from a sample's global number to its place on disk.

The only state is that number. A step takes the next `batch_size` numbers, a rank its slice of them, so the order does
not depend on the number of ranks, on micro batches or on where a run was interrupted. Everything is integer
arithmetic: the same on every machine. Sources are interleaved by smooth weighted round-robin, and each pass over a
source visits its samples in a new keyed permutation, so no shuffle buffer has to be saved.
"""

from collections.abc import Sequence

import numpy as np

from nmoe.errors import DataError
from nmoe.formats.shards import ShardSet

__all__ = ["Order", "Rows", "permute"]

_ROUNDS = 6
_MAX_PERIOD = 1_000_000


def _mix(values: np.ndarray) -> np.ndarray:
    """A 64-bit finaliser whose every output bit depends on every input bit.

    Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", variant 13 of Stafford.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _key(*parts: int) -> int:
    """One 64-bit key from several integers, each of which changes it."""
    key = np.zeros(1, dtype=np.uint64)
    for part in parts:
        key = _mix(key + np.uint64(0x9E3779B97F4A7C15) + np.uint64(part & 0xFFFFFFFFFFFFFFFF))
    return int(key[0])


def permute(index: np.ndarray, n: int, *, key: int) -> np.ndarray:
    """Where a keyed permutation of range(n) puts each index.

    A Feistel network on the smallest even number of bits that holds n; a value that lands outside range(n) is sent
    through again until it lands inside ("cycle walking"), which keeps it a permutation.

    Args:
        index: int64 array, values in [0, n).
        n: size of the range, 1 <= n < 2^62.
        key: any integer; other keys give other permutations.

    Returns:
        int64 array of the shape of `index`, values in [0, n).

    Source: Luby, Rackoff 1988 (the network); Black, Rogaway 2002, "Ciphers with arbitrary finite domains" (the walk).
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    keys = [np.uint64(_key(key, round_)) for round_ in range(_ROUNDS)]
    values = np.asarray(index, dtype=np.int64).astype(np.uint64)
    outside = np.ones(values.shape, dtype=bool)
    while outside.any():
        moving = values[outside]
        left, right = moving >> shift, moving & mask
        for round_key in keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        values[outside] = (left << shift) | right
        outside = values >= np.uint64(n)
    return values.astype(np.int64)


def _round_robin(weights: Sequence[int]) -> np.ndarray:
    """One period of smooth weighted round-robin: source numbers [sum(weights)], each as often as its weight.

    Every turn each source gains its weight, the richest (lowest number on a tie) is taken and pays the total.
    """
    gains, credit = np.asarray(weights, dtype=np.int64), np.zeros(len(weights), dtype=np.int64)
    period = np.empty(int(gains.sum()), dtype=np.int64)
    for turn in range(len(period)):
        credit += gains
        period[turn] = source = int(credit.argmax())
        credit[source] -= len(period)
    return period


class Order:
    """The infinite order over one or more sources; see the module's text.

    Args:
        sizes: number of samples in each source, each at least 1.
        weights: relative sampling rate of each source, integers of at least 1 with a sum of at most 1,000,000.
        seed: seed of the run.

    Raises:
        DataError: if a source is empty or a weight is out of range.
    """

    def __init__(self, sizes: Sequence[int], *, weights: Sequence[int], seed: int):
        if not sizes or len(sizes) != len(weights):
            raise DataError(
                f"data order: {len(sizes)} sources with {len(weights)} weights; expected one weight for each source"
            )
        for source, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
            if size < 1:
                raise DataError(f"data order: source {source} has no samples; expected at least one row of tokens")
            if weight < 1:
                raise DataError(f"data order: source {source} has weight {weight}; expected an integer of 1 or more")
        if sum(weights) > _MAX_PERIOD:
            raise DataError(
                f"data order: weights add up to {sum(weights)}; expected at most {_MAX_PERIOD}; use smaller weights"
            )
        self._sizes = np.asarray(sizes, dtype=np.int64)
        self._weights = np.asarray(weights, dtype=np.int64)
        self._seed = seed
        self._source = _round_robin(weights)
        self._earlier = np.empty_like(self._source)  # turns of the same source before this one in the period
        for source in range(len(sizes)):
            turns = np.flatnonzero(self._source == source)
            self._earlier[turns] = np.arange(len(turns))

    def sample(self, number: int | np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where the samples with these global numbers lie.

        Args:
            number: global sample numbers [N], int64, 0 or more; a single int is taken as N = 1.

        Returns:
            source [N], epoch [N] (passes over that source completed before), index [N] (sample within the source).
        """
        numbers = np.atleast_1d(np.asarray(number, dtype=np.int64))
        period, turn = np.divmod(numbers, len(self._source))
        source = self._source[turn]
        taken = period * self._weights[source] + self._earlier[turn]
        epoch, place = np.divmod(taken, self._sizes[source])
        index = np.empty_like(place)
        for one_source, one_epoch in np.unique(np.stack([source, epoch]), axis=1).T:
            chosen = (source == one_source) & (epoch == one_epoch)
            key = _key(self._seed, int(one_source), int(one_epoch))
            index[chosen] = permute(place[chosen], int(self._sizes[one_source]), key=key)
        return source, epoch, index


class Rows:
    """A shard set cut into rows of one sequence length: the samples of a source.

    Row i of a shard reads tokens [i*L, i*L + L + 1): L inputs and the same tokens moved on by one as targets. A row
    never crosses a shard; the last row of a shard may be shorter, so that no token is lost.

    Args:
        shards: the shard set.
        seq_len: L, tokens of a row, at least 1.
    """

    def __init__(self, shards: ShardSet, *, seq_len: int):
        self._lengths = [len(shard.tokens) for shard in shards.shards]
        self._seq_len = seq_len
        counts = [max(0, -(-(length - 1) // seq_len)) for length in self._lengths]
        self._first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    @property
    def num_rows(self) -> int:
        """Rows of all shards together."""
        return int(self._first[-1])

    def span(self, row: int) -> tuple[int, int, int]:
        """(shard number, first token, one past the last token incl. the last target) of a row."""
        if not 0 <= row < self.num_rows:
            raise IndexError(f"row {row} of {self.num_rows}")
        shard = int(np.searchsorted(self._first, row, side="right")) - 1
        start = (row - int(self._first[shard])) * self._seq_len
        return shard, start, min(start + self._seq_len + 1, self._lengths[shard])
