# SPDX-License-Identifier: Apache-2.0
"""Batches in the global order, read ahead by a thread, exact to the token after a resume.

The order is a function of the sample's number (`nmoe.formats.order`), so the only state is the number of the next sample
that training has not taken. Batches that the thread has read ahead are not part of it: after a resume they are read
again. A rank takes its slice of each step's samples, whatever the number of ranks.
"""

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nmoe.config import Config
from nmoe.data.packing import IGNORED, PackedRows, pack_rows
from nmoe.data.sources import check_row
from nmoe.errors import CheckpointError, DataError
from nmoe.formats.order import Order, Rows
from nmoe.formats.shards import ShardSet

__all__ = ["AHEAD", "Batch", "Loader", "held_out_batches"]

AHEAD = 4
"""Steps that are read ahead."""

_PATIENCE_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One step's data on this rank.

    Attributes:
        step: number of the step, from 1.
        micro: the micro batches, in order.
        num_targets: valid targets of the whole step over all ranks, the divisor of the loss.
        spans: (shard file, first token, one past the last) of every row of the step over all ranks.
    """

    step: int
    micro: list[PackedRows]
    num_targets: int
    spans: list[tuple[str, int, int]]


class Loader:
    """Iterates over steps for ever; use as a context manager, which ends the thread.

    Args:
        sets: the sources.
        weights: share of each source.
        seq_len: T.
        vocab_size: ids that the model knows; a larger one is refused.
        batch_size: rows a step over all ranks.
        micro_batch_size: most rows of one micro batch of one rank.
        seed: of the order.
        rank: of this process.
        num_ranks: processes that share a step.
        next_sample: state to go on from.
        ahead: steps read ahead.
    """

    @classmethod
    def of(
        cls,
        config: Config,
        sets: Sequence[ShardSet],
        weights: Sequence[int],
        *,
        rank: int = 0,
        num_ranks: int = 1,
        next_sample: int = 0,
    ) -> "Loader":
        """That of a run: what `open_train` gave, dealt out as the config says."""
        return cls(
            sets,
            weights=weights,
            seq_len=config.data.seq_len,
            vocab_size=config.model.vocab_size,
            batch_size=config.train.batch_size,
            micro_batch_size=config.train.micro_batch_size,
            seed=config.run.seed,
            rank=rank,
            num_ranks=num_ranks,
            next_sample=next_sample,
        )

    def __init__(
        self,
        sets: Sequence[ShardSet],
        *,
        weights: Sequence[int],
        seq_len: int,
        vocab_size: int,
        batch_size: int,
        micro_batch_size: int,
        seed: int,
        rank: int = 0,
        num_ranks: int = 1,
        next_sample: int = 0,
        ahead: int = AHEAD,
    ):
        if next_sample % batch_size:
            raise CheckpointError(
                f"data position {next_sample} is not at the start of a step of {batch_size} rows; "
                "resume with the train.batch_size of the checkpoint"
            )
        self._sets = sets
        self._rows = [Rows(shards, seq_len=seq_len) for shards in sets]
        for shards, rows in zip(sets, self._rows, strict=True):
            if not rows.num_rows:
                raise DataError(f"{shards.directory}: holds no row of tokens; expected at least 2 tokens in a shard")
        self._order = Order([rows.num_rows for rows in self._rows], weights=weights, seed=seed)
        self._seq_len, self._vocab_size = seq_len, vocab_size
        self._batch_size, self._micro_batch_size = batch_size, micro_batch_size
        self._rank, self._num_ranks = rank, num_ranks
        self.next_sample = next_sample
        self._ready: queue.Queue[Batch | Exception] = queue.Queue(maxsize=ahead)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(next_sample,), name="loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next step's batch; waits for it where the thread has not read it yet.

        Raises:
            DataError: what the thread met: a damaged or vanished shard.
        """
        item = self._ready.get()
        if isinstance(item, Exception):
            raise item
        self.next_sample = item.step * self._batch_size
        return item

    def close(self) -> None:
        """Ends the thread; one that a disk holds is left behind."""
        self._stopping.set()
        deadline = time.monotonic() + _PATIENCE_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                self._ready.get(timeout=0.01)  # it may be waiting for room

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, sample: int) -> None:
        step = sample // self._batch_size + 1
        while not self._stopping.is_set():
            try:
                self._ready.put(self._read(step))
            except Exception as error:  # noqa: BLE001 - handed to the training thread, which raises it
                self._ready.put(error)
                return
            step += 1

    def _read(self, step: int) -> Batch:
        numbers = np.arange((step - 1) * self._batch_size, step * self._batch_size, dtype=np.int64)
        source, _, index = self._order.sample(numbers)
        places = [(int(s), *self._rows[s].span(int(i))) for s, i in zip(source, index, strict=True)]
        micro = [self._pack([places[number] for number in part]) for part in self._parts()]
        return Batch(
            step=step,
            micro=micro,
            num_targets=sum(end - start - 1 for _, _, start, end in places),
            spans=[(str(self._sets[s].shards[shard].path), start, end) for s, shard, start, end in places],
        )

    def _parts(self) -> list[range]:
        """Rows of the step in each micro batch of this rank. Ranks differ by a row at most, and not in micro batches."""
        edges = [self._batch_size * rank // self._num_ranks for rank in range(self._num_ranks + 1)]
        first, end = edges[self._rank], edges[self._rank + 1]
        most = max(after - before for before, after in itertools.pairwise(edges))
        count = -(-most // self._micro_batch_size)
        cuts = [first + (end - first) * part // count for part in range(count + 1)]
        return [range(before, after) for before, after in itertools.pairwise(cuts)]

    def _pack(self, places: list[tuple[int, int, int, int]]) -> PackedRows:
        rows = [
            check_row(self._sets[s].shards[shard], start, end, vocab_size=self._vocab_size)
            for s, shard, start, end in places
        ]
        eos_id = self._sets[0].eos_id
        if rows:
            return pack_rows(rows, seq_len=self._seq_len, eos_id=eos_id)
        filler = pack_rows([np.full(2, eos_id)], seq_len=self._seq_len, eos_id=eos_id)
        filler.targets_BT[:] = IGNORED
        return filler


def held_out_batches(
    shards: ShardSet,
    *,
    seq_len: int,
    vocab_size: int,
    micro_batch_size: int,
    num_batches: int,
    rank: int = 0,
    num_ranks: int = 1,
) -> Iterator[PackedRows]:
    """Rows of a held-out set, the same at every call.

    Args:
        shards: the set.
        seq_len: T.
        vocab_size: ids that the model knows.
        micro_batch_size: rows of a batch; the last one is filled up with rows without targets.
        num_batches: batches, their rows spread evenly over the set; 0: the whole set.
        rank: which of the batches: every `num_ranks`-th one, from this on.
        num_ranks: ranks that share the work; all get equally many batches, the last may have no targets.
    """
    rows = Rows(shards, seq_len=seq_len)
    wanted = min(rows.num_rows, num_batches * micro_batch_size) if num_batches else rows.num_rows
    if not wanted:
        raise DataError(f"{shards.directory}: holds no row of tokens; expected at least 2 tokens in a shard")
    chosen = np.arange(wanted) * rows.num_rows // wanted
    empty = np.full(2, shards.eos_id, dtype=np.int64)
    rounds = -(-wanted // (micro_batch_size * num_ranks))
    for first in range(rank * micro_batch_size, rounds * num_ranks * micro_batch_size, num_ranks * micro_batch_size):
        numbers = chosen[first : first + micro_batch_size]
        spans = [rows.span(int(number)) for number in numbers]
        cut = [check_row(shards.shards[shard], start, end, vocab_size=vocab_size) for shard, start, end in spans]
        missing = micro_batch_size - len(cut)
        packed = pack_rows(cut + [empty] * missing, seq_len=seq_len, eos_id=shards.eos_id)
        packed.targets_BT[len(cut) :] = IGNORED
        yield packed
