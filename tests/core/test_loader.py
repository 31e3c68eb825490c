# SPDX-License-Identifier: Apache-2.0
"""Batches: the order depends on nothing but the sample's number, and what was read ahead is neither lost nor repeated."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nmoe.data.loader import Batch, Loader, held_out_batches
from nmoe.data.packing import IGNORED
from nmoe.errors import CheckpointError, DataError
from nmoe.formats.shards import ShardSet, ShardWriter, open_shards
from nmoe.formats.tokenizers import ByteTokenizer

SEQ_LEN, BATCH = 16, 8


def write_shards(directory: Path, documents: int, *, seed: int) -> ShardSet:
    """Documents of random bytes and lengths in several shards."""
    random = np.random.default_rng(seed)
    with ShardWriter(directory, tokenizer=ByteTokenizer(), shard_tokens=1000) as writer:
        for number in range(documents):
            tokens = random.integers(0, 256, random.integers(1, 60)).astype(np.uint32)
            writer.add(tokens, id=f"{seed}-{number}", source="random", text_bytes=len(tokens))
    return open_shards(directory)


@pytest.fixture
def sets(tmp_path) -> list[ShardSet]:
    return [write_shards(tmp_path / "a", 90, seed=1), write_shards(tmp_path / "b", 40, seed=2)]


def take(sets: list[ShardSet], steps: int, **options: Any) -> list[Batch]:
    defaults: dict[str, Any] = {
        "weights": [3, 1],
        "seq_len": SEQ_LEN,
        "vocab_size": 257,
        "batch_size": BATCH,
        "seed": 7,
    }
    defaults |= {"micro_batch_size": BATCH} | options
    with Loader(sets, **defaults) as loader:
        return [next(loader) for _ in range(steps)]


def rows_of(batch: Batch) -> np.ndarray:
    """Every array of a batch's rows, micro batches joined: [4, B, T]."""
    return np.concatenate(
        [np.stack([m.tokens_BT, m.targets_BT, m.positions_BT, m.document_BT]) for m in batch.micro], axis=1
    )


def test_rows_do_not_depend_on_micro_batches(sets):
    whole = take(sets, 30)
    for size in (1, 2, 4):
        for batch, expected in zip(take(sets, 30, micro_batch_size=size), whole, strict=True):
            assert len(batch.micro) == BATCH // size
            assert (rows_of(batch) == rows_of(expected)).all()
            assert (batch.spans, batch.num_targets) == (expected.spans, expected.num_targets)


@pytest.mark.parametrize(("num_ranks", "size"), [(2, 4), (4, 1), (8, 1), (3, 1), (3, 2), (5, 4), (16, 1)])
def test_slices_of_all_ranks_make_the_batch_of_one_rank(sets, num_ranks, size):
    ranks = [take(sets, 20, rank=rank, num_ranks=num_ranks, micro_batch_size=size) for rank in range(num_ranks)]
    for step, expected in enumerate(take(sets, 20)):
        rows = np.concatenate([rows_of(rank[step]) for rank in ranks], axis=1)
        assert (rows[:, (rows[1] != IGNORED).any(axis=1)] == rows_of(expected)).all(), "fillers have no targets"
        assert {rank[step].num_targets for rank in ranks} == {expected.num_targets}
        assert len({len(rank[step].micro) for rank in ranks}) == 1, "ranks meet in every micro batch"
        assert max(len(rows.tokens_BT) for rank in ranks for rows in rank[step].micro) <= size


@pytest.mark.parametrize("done", [1, 3, 17])
def test_resume_goes_on_at_the_next_row_whatever_was_read_ahead(sets, done):
    whole = take(sets, 25)
    with Loader(
        sets, weights=[3, 1], seq_len=SEQ_LEN, vocab_size=257, batch_size=BATCH, micro_batch_size=2, seed=7, ahead=6
    ) as loader:
        for _ in range(done):
            next(loader)
        deadline = time.monotonic() + 10
        while loader._ready.qsize() < 6 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert loader._ready.qsize() == 6, "nothing was read ahead, so this test would prove nothing"
        state = loader.next_sample
    assert state == done * BATCH
    rest = take(sets, 25 - done, next_sample=state, num_ranks=1, micro_batch_size=4)
    assert [batch.step for batch in rest] == list(range(done + 1, 26))
    for batch, expected in zip(rest, whole[done:], strict=True):
        assert (rows_of(batch) == rows_of(expected)).all()


def test_every_token_of_a_source_is_a_target_once_an_epoch(sets):
    only = sets[:1]
    rows = sum(-(-(len(shard.tokens) - 1) // SEQ_LEN) for shard in only[0].shards)
    steps = -(-rows // BATCH)
    spans = [span for batch in take(only, steps, weights=[1]) for span in batch.spans][:rows]
    for shard in only[0].shards:
        targets = sorted(
            offset for path, start, end in spans if path == str(shard.path) for offset in range(start + 1, end)
        )
        assert targets == list(range(1, len(shard.tokens)))


def test_spans_name_the_tokens_of_the_rows_and_sources_come_by_weight(sets):
    batches = take(sets, 12)
    by_path = {str(shard.path): shard.tokens for shards in sets for shard in shards.shards}
    for batch in batches:
        tokens_BT = rows_of(batch)[0]
        assert batch.num_targets == (rows_of(batch)[1] != IGNORED).sum()
        for row, (path, start, end) in zip(tokens_BT, batch.spans, strict=True):
            assert (row[: end - start - 1] == by_path[path][start : end - 1]).all()
    first = [Path(path).parent.name for batch in batches for path, _, _ in batch.spans]
    assert (first.count("a"), first.count("b")) == (72, 24)


def test_another_seed_is_another_order(sets):
    assert take(sets, 1)[0].spans != take(sets, 1, seed=8)[0].spans


def test_token_outside_the_vocabulary_is_refused_by_name(sets):
    shard = sets[0].shards[0]
    damaged = np.load(shard.path, mmap_mode="r+")
    damaged[40] = 300
    damaged.flush()
    with pytest.raises(DataError, match=r"shard-00000\.npy: damaged: token 40 is 300; expected ids below 257"):
        take(sets, 100)


def test_position_inside_a_step_is_refused(sets):
    with pytest.raises(CheckpointError, match=r"train\.batch_size"):
        take(sets, 1, next_sample=BATCH + 1)


def test_held_out_rows_are_spread_evenly_and_the_last_batch_is_filled_with_nothing(sets):
    shards = sets[1]
    some = list(held_out_batches(shards, seq_len=SEQ_LEN, vocab_size=257, micro_batch_size=3, num_batches=2))
    assert [rows.tokens_BT.shape for rows in some] == [(3, SEQ_LEN)] * 2
    whole = list(held_out_batches(shards, seq_len=SEQ_LEN, vocab_size=257, micro_batch_size=7, num_batches=0))
    targets = sum(int((rows.targets_BT != IGNORED).sum()) for rows in whole)
    assert targets == sum(len(shard.tokens) - 1 for shard in shards.shards)
    everything = np.concatenate([rows.tokens_BT for rows in whole])
    count = sum(-(-(len(shard.tokens) - 1) // SEQ_LEN) for shard in shards.shards)
    assert (np.concatenate([rows.tokens_BT for rows in some]) == everything[np.arange(6) * count // 6]).all()
    assert count % 7, "the last batch must not be full, or filling is not tested"
    assert (whole[-1].targets_BT[count % 7 :] == IGNORED).all()
