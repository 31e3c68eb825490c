# SPDX-License-Identifier: Apache-2.0
"""The order of data is a function of a sample's number, so every property can be checked on the numbers alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmoe.formats import DataError
from nmoe.formats.order import Order, Rows, permute
from nmoe.formats.shards import ShardWriter, open_shards
from nmoe.formats.tokenizers import ByteTokenizer


@given(n=st.integers(1, 3000), key=st.integers(-(2**70), 2**70))
def test_permute_is_a_permutation(n, key):
    assert np.array_equal(np.sort(permute(np.arange(n), n, key=key)), np.arange(n))


def test_permute_depends_on_the_key_and_looks_random():
    n = 10_000
    first, second = permute(np.arange(n), n, key=1), permute(np.arange(n), n, key=2)
    assert (first == second).mean() < 0.01
    assert abs(np.corrcoef(np.arange(n), first)[0, 1]) < 0.05
    assert (np.diff(first) == 1).mean() < 0.01


def test_permute_handles_ranges_beyond_32_bits():
    n = (1 << 40) + 7
    image = permute(np.arange(1000), n, key=5)
    assert len(np.unique(image)) == 1000
    assert image.min() >= 0
    assert image.max() < n
    assert image.max() > 1 << 39


def test_order_golden_values_never_change():
    """A change here would reorder the data of every run that is resumed."""
    source, epoch, index = Order([5, 3], weights=[2, 1], seed=7).sample(np.arange(12))
    assert source.tolist() == [0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 1, 0]
    assert epoch.tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert index.tolist() == [1, 0, 4, 2, 2, 3, 0, 1, 2, 1, 0, 4]


def test_order_visits_every_sample_once_an_epoch_in_a_new_order():
    _, epoch, index = Order([17], weights=[3], seed=0).sample(np.arange(51))
    passes = [index[epoch == number].tolist() for number in range(3)]
    assert all(sorted(one) == list(range(17)) for one in passes)
    assert passes[0] != passes[1] != passes[2]


@given(weights=st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_order_mixes_sources_by_weight_and_smoothly(weights):
    total = sum(weights)
    source, _, _ = Order([10**6] * len(weights), weights=weights, seed=1).sample(np.arange(3 * total))
    for number, weight in enumerate(weights):
        seen = np.cumsum(source == number)
        assert seen[-1] == 3 * weight
        assert np.abs(seen - np.arange(1, 3 * total + 1) * weight / total).max() <= len(weights)


def test_order_of_a_slice_equals_the_slice_of_the_order():
    order = Order([1000, 77, 5], weights=[5, 2, 1], seed=3)
    whole = np.stack(order.sample(np.arange(500)))
    single = np.concatenate([np.stack(order.sample(number)) for number in range(500)], axis=1)
    assert np.array_equal(whole, single)


@pytest.mark.parametrize(
    ("sizes", "weights", "found"),
    [([0], [1], "no samples"), ([5], [0], "weight 0"), ([5], [1, 2], "2 weights"), ([1, 1], [10**6, 1], "1000001")],
)
def test_order_refuses_what_cannot_be(sizes, weights, found):
    with pytest.raises(DataError, match=found):
        Order(sizes, weights=weights, seed=0)


def test_rows_cover_every_target_exactly_once(tmp_path):
    rng = np.random.default_rng(0)
    with ShardWriter(tmp_path / "s", tokenizer=ByteTokenizer(), shard_tokens=97) as writer:
        for number in range(40):
            writer.add(rng.integers(0, 256, rng.integers(0, 30)), id=str(number), source="x", text_bytes=1)
    shards = open_shards(tmp_path / "s")
    assert len(shards.shards) > 3
    rows = Rows(shards, seq_len=16)
    seen = [np.zeros(len(shard.tokens), dtype=int) for shard in shards.shards]
    for row in range(rows.num_rows):
        shard, start, end = rows.span(row)
        assert 2 <= end - start <= 17
        seen[shard][start + 1 : end] += 1  # the targets
    assert all((counts[1:] == 1).all() for counts in seen)
    with pytest.raises(IndexError):
        rows.span(rows.num_rows)
