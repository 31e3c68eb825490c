# SPDX-License-Identifier: Apache-2.0
"""What leaves the database is small and hides nothing."""

import statistics
from pathlib import Path

import duckdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from nmoe.formats import FormatError
from nmoe.formats.metrics import STORE, MetricWriter
from nviz import charts, pictures, queries, spikes
from nviz.points import MAX_POINTS, Line, bucket_width, values_at
from nviz.points import points as points_of
from nviz.source import Store, UnpublishedError

ANY = st.floats(allow_nan=True, allow_infinity=True, width=64)


def store_of(values: np.ndarray, *, stride: int = 1) -> duckdb.DuckDBPyConnection:
    """A store in memory with one series."""
    connection = duckdb.connect()
    connection.execute(
        "CREATE TABLE metrics(name VARCHAR, step BIGINT, time DOUBLE, value DOUBLE, layer INTEGER, expert INTEGER, rank INTEGER)"
    )
    connection.execute("CREATE TABLE catalogue(name VARCHAR, unit VARCHAR, kind VARCHAR, meaning VARCHAR)")
    step = np.arange(len(values)) * stride
    connection.register("incoming", {"step": step, "value": values, "bad": np.isnan(values)})
    connection.execute(
        "INSERT INTO metrics SELECT 'm', step, step * 0.5, CASE WHEN bad THEN 'nan'::DOUBLE ELSE value END, NULL, NULL, NULL FROM incoming"
    )
    return connection


@settings(max_examples=60, deadline=None)
@given(
    values=arrays.arrays(np.float64, st.integers(1, 400), elements=ANY),
    stride=st.sampled_from([1, 3, 50]),
    limit=st.sampled_from([8, 30, 100]),
)
def test_downsampling_keeps_every_extreme(values: np.ndarray, stride: int, limit: int):
    found = points_of(store_of(values, stride=stride), Line(name="m"), max_points=limit)
    fine = values[np.isfinite(values)]
    assert len(found.step) <= limit
    assert (np.diff(found.step) >= 0).all()
    assert np.isfinite(found.value).all()
    # Every point is one of the series, so nothing is invented.
    assert np.array_equal(found.value, values[found.step // stride])
    assert np.array_equal(found.time, found.step * 0.5)
    if len(fine):
        assert found.value.min() == fine.min()
        assert found.value.max() == fine.max()
        steps = np.flatnonzero(np.isfinite(values)) * stride
        assert (found.step[0], found.step[-1]) == (steps[0], steps[-1])
        # The extremes of every bucket, not only of the whole.
        for bucket in np.unique(steps // found.width):
            inside = values[steps // stride][steps // found.width == bucket]
            drawn = found.value[found.step // found.width == bucket]
            assert (drawn.min(), drawn.max()) == (inside.min(), inside.max())
    assert bool(len(found.broken_step)) == bool(len(fine) < len(values))


def test_downsampling_keeps_one_spike_among_a_million_values():
    values = np.sin(np.arange(1_000_000) / 1e5)
    values[654_321] = 40.0
    values[654_322] = -40.0
    found = points_of(store_of(values), Line(name="m"))
    assert len(found.step) <= MAX_POINTS
    assert found.step[found.value.argmax()] == 654_321
    assert found.step[found.value.argmin()] == 654_322


def test_downsampling_keeps_the_same_points_while_a_run_grows():
    values = np.random.default_rng(0).normal(size=30_000)
    short = points_of(store_of(values[:29_000]), Line(name="m"))
    whole = points_of(store_of(values), Line(name="m"))
    assert short.width == whole.width
    settled = 28_000  # the last point is always drawn, so the newest bucket may change
    assert set(short.step[short.step < settled]) == set(whole.step[whole.step < settled])


@settings(max_examples=30, deadline=None)
@given(
    values=arrays.arrays(np.float64, st.integers(2, 400), elements=ANY),
    cuts=st.lists(st.floats(0, 1), min_size=1, max_size=4),
    limit=st.sampled_from([8, 30, 100]),
)
def test_answers_that_grow_equal_those_asked_anew(values: np.ndarray, cuts: list[float], limit: int):
    points, inventory, latest, at = None, None, None, None
    for length in [*sorted(int(cut * len(values)) for cut in cuts), len(values)]:
        store = store_of(values[:length], stride=3)
        steps = np.flatnonzero(np.arange(3 * length - 2) % (2 + length % 3))
        at = values_at(store, "m", steps, at)
        assert np.array_equal(at.at(steps), values[steps // 3], equal_nan=True)
        points = points_of(store, Line(name="m"), max_points=limit, earlier=points)
        inventory = queries.inventory(store, inventory)
        anew = points_of(store, Line(name="m"), max_points=limit)
        assert queries.inventory(store).measures == inventory.measures
        latest = queries.latest(store, ("m",), latest)
        assert str(latest) == str(queries.latest(store, ("m",)))  # as text, since NaN differs from itself
        assert (points.total, points.width) == (anew.total, anew.width) or points.width != anew.width
        if points.width == anew.width:
            for name in ("step", "time", "value", "mean_step", "weight", "broken_step"):
                assert np.array_equal(getattr(points, name), getattr(anew, name)), name
        fine = values[:length][np.isfinite(values[:length])]
        assert len(points.step) <= limit
        if len(fine):
            assert (points.value.min(), points.value.max()) == (fine.min(), fine.max())


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), cuts=st.lists(st.integers(0, 400), max_size=4), columns=st.sampled_from([4, 9, 60])
)
def test_spikes_and_pictures_that_grow_equal_those_asked_anew(seed: int, cuts: list[int], columns: int):
    random = np.random.default_rng(seed)
    values = random.normal(3, 0.1, 400)
    values[random.integers(0, 400, 12)] += random.choice([1.0, 5.0, np.nan, np.inf], 12)
    spiked, drawn = None, None
    for length in [*sorted(cuts), 400]:
        store = store_of(values[:length])
        store.execute(
            "INSERT INTO metrics SELECT 'p', step, time, value * l, l, NULL, NULL FROM metrics, range(3) AS t(l)"
        )
        store.execute("UPDATE metrics SET name = 'train/loss' WHERE name = 'm'")
        spiked = spikes.find(store, spiked)
        assert str(spiked.spikes) == str(spikes.find(store).spikes)  # as text, since NaN differs from itself
        assert {(spike.first, spike.last, spike.peak) for spike in spiked.spikes} == spikes_of(values[:length])
        drawn = pictures.picture(store, "p", rows="layer", columns=columns, earlier=drawn)
        anew = pictures.picture(store, "p", rows="layer", columns=columns)
        assert drawn.width == anew.width
        assert len(drawn.first) <= columns
        assert np.array_equal(drawn.first, anew.first)
        assert np.allclose(drawn.means, anew.means)
        assert np.allclose(drawn.values, anew.values, equal_nan=True)


def spikes_of(values: np.ndarray) -> set[tuple[int, int, int]]:
    """(first, last, peak) of every spike, by the definition, one value after the other."""
    severity = []
    for place, value in enumerate(values):
        window = [known for known in values[max(0, place - spikes.WINDOW) : place] if np.isfinite(known)]
        if not np.isfinite(value):
            severity.append(np.inf)
        elif len(window) < 10:
            severity.append(0.0)
        else:
            middle = statistics.median(window)
            spread = statistics.median(abs(known - middle) for known in window)
            severity.append((value - middle) / max(1.4826 * spread, 0.01 * abs(middle), 1e-12))
    found, first = set(), None
    for place, height in enumerate([*severity, 0.0]):
        if height >= 8 and first is None:
            first = place
        if height < 8 and first is not None:
            found.add((first, place - 1, first + int(np.argmax(severity[first:place]))))
            first = None
    return found


def test_growing_asks_only_what_is_new_until_another_process_writes(tmp_path: Path):
    store = Store(tmp_path / STORE)
    given_: list[int | None] = []

    def last(connection: duckdb.DuckDBPyConnection, earlier: int | None) -> int:
        given_.append(earlier)
        return connection.execute("SELECT max(step) FROM metrics").fetchall()[0][0]

    with MetricWriter(tmp_path, publish_s=3600) as writer:
        for step, epoch in ((1, "a"), (2, "a"), (3, "b")):
            writer.log(step, {"train/loss": 1.0})
            writer.flush()
            assert store.grow("last", last, epoch=epoch) == step
            assert store.grow("last", last, epoch=epoch) == step
    assert given_ == [None, 1, None]


def test_a_narrow_range_shows_every_value():
    values = np.random.default_rng(0).normal(size=100_000)
    found = points_of(store_of(values), Line(name="m"), first=50_000, last=51_500)
    assert np.array_equal(found.step, np.arange(50_000, 51_501))
    assert np.array_equal(found.value, values[50_000:51_501])


@given(span=st.integers(1, 10**9), buckets=st.integers(2, 2000))
def test_bucket_width_is_round_and_suffices_for_any_alignment(span: int, buckets: int):
    width = bucket_width(span, buckets)
    assert str(width).rstrip("0") in ("1", "2", "5")
    for first in (0, 1, width - 1):
        assert (first + span - 1) // width - first // width + 1 <= buckets


def test_values_at_takes_the_last_value_before_a_step():
    connection = store_of(np.array([10.0, 20.0, 30.0]), stride=10)
    steps = np.array([25, 0, 10, 19, 1000])
    assert values_at(connection, "m", steps).at(steps).tolist() == [30.0, 10.0, 20.0, 20.0, 30.0]
    assert np.isnan(values_at(connection, "unknown", np.array([1])).values).all()


def test_picture_shows_what_stands_out_not_the_mean(tmp_path: Path):
    with MetricWriter(tmp_path, publish_s=3600) as writer:
        for step in range(1000):
            load = np.full((2, 4), 0.25)
            if step == 777:
                load[1] = [0.0, 0.75, 0.125, 0.125]
            writer.log_array(step, "router/load", load, axes=("layer", "expert"))
    found = Store(tmp_path / STORE).read(
        "x", lambda connection: pictures.picture(connection, "router/load", rows="expert", layer=1, columns=20)
    )
    assert found.values.shape == (4, len(found.first))
    column = int(np.searchsorted(found.first, 777, side="right")) - 1
    assert found.values[:, column].tolist() == [0.0, 0.75, 0.125, 0.125]
    assert (np.delete(found.values, column, axis=1) == 0.25).all()
    fullest = Store(tmp_path / STORE).read(
        "y", lambda connection: pictures.picture(connection, "router/load", rows="layer", fullest="expert", columns=20)
    )
    assert fullest.values[:, column].tolist() == [1.0, 3.0]


def test_measures_show_a_metric_that_the_catalogue_does_not_know():
    found = queries.inventory(store_of(np.array([1.0, 2.0]))).measures["m"]
    assert (found.unit, found.rows, found.last_step, found.scalar) == ("", 2, 1, True)


def test_store_answers_from_the_newest_publication_and_asks_each_only_once(tmp_path: Path):
    asked = []

    def count(connection: duckdb.DuckDBPyConnection) -> int:
        asked.append(1)
        return connection.execute("SELECT count(*) FROM metrics").fetchall()[0][0]

    store = Store(tmp_path / STORE)
    with pytest.raises(UnpublishedError):
        store.read("n", count)
    with MetricWriter(tmp_path, publish_s=3600) as writer:
        writer.log(0, {"train/loss": 1.0})
        writer.flush()
        assert [store.read("n", count) for _ in range(3)] == [1, 1, 1]
        assert len(asked) == 1
        writer.log(1, {"train/loss": 1.0, "train/grad_norm": 2.0})
        writer.flush()
        assert store.read("n", count) > 2
        assert len(asked) == 2


def test_store_reads_a_damaged_file_once_and_says_so_every_time(tmp_path: Path):
    with MetricWriter(tmp_path, publish_s=3600) as writer:
        for step in range(20_000):
            writer.log(step, {"train/loss": float(step)})
    path = tmp_path / STORE
    data = bytearray(path.read_bytes())
    data[12_288:] = bytes(len(data) - 12_288)  # the three headers of a DuckDB file stay
    path.write_bytes(data)
    store = Store(path)
    for _ in range(2):
        with pytest.raises(FormatError, match=r"metrics\.duckdb"):
            store.read("all", lambda connection: points_of(connection, Line(name="train/loss")))


@given(
    values=arrays.arrays(np.float64, st.integers(1, 50), elements=st.floats(-1e6, 1e6)),
    half_width=st.integers(1, 10),
)
def test_smoothing_is_the_weighted_mean_of_the_window(values: np.ndarray, half_width: int):
    weights = np.arange(1.0, len(values) + 1)
    found = charts.smooth(values, weights, half_width=half_width)
    for place in range(len(values)):
        window = slice(max(0, place - half_width), place + half_width + 1)
        assert found[place] == pytest.approx(np.average(values[window], weights=weights[window]), rel=1e-6, abs=1e-6)


def test_compact_arrays_are_small_and_stay_finite():
    assert charts.compact(np.arange(3)).dtype == np.int32
    assert charts.compact(np.array([2**40])).dtype == np.float64
    assert charts.compact(np.array([1.5])).dtype == np.float32
    assert np.isfinite(charts.compact(np.array([1e300]))).all()
