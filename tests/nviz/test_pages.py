# SPDX-License-Identifier: Apache-2.0
"""Every page on every kind of run: right figures, one line for a fault, never a traceback."""

import base64
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import duckdb
import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

Open = Callable[..., AppTest]
Spec = Callable[[object], dict]
PAGES = ("runs", "curves", "router", "speed", "data", "spikes", "alerts")
RUNS = (
    "baseline",
    "crashed",
    "silent",
    "broken_values",
    "no_rows",
    "unreadable",
    "truncated",
    "newer",
    "unpublished",
    "live",
)


def numbers(encoded: dict | list) -> np.ndarray:
    """An array as Plotly carries it."""
    if isinstance(encoded, list):
        return np.asarray(encoded)
    flat = np.frombuffer(base64.b64decode(encoded["bdata"]), dtype=np.dtype(encoded["dtype"]))
    return flat.reshape([int(part) for part in encoded["shape"].split(",")]) if "shape" in encoded else flat


def charts(app: AppTest, spec: Spec) -> dict[str, dict]:
    """Figures of a page by title; a row of panels by the title of its first."""

    def title(layout: dict) -> str:
        return (layout["title"] if "title" in layout else layout["annotations"][0])["text"]

    figures = [spec(chart) for chart in app.get("plotly_chart")]
    return {title(figure["layout"]): figure for figure in figures}


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("run", RUNS)
def test_page_shows_any_run_without_traceback(fleet: Path, page: Open, name: str, run: str):
    app = page(fleet, name, run=[run])
    assert not app.exception
    assert app.title[0].value.lower() == name


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ("truncated", "cannot be opened"),
        ("newer", "newer than this program"),
        ("unpublished", "no metrics published yet"),
    ],
)
def test_curves_say_in_one_line_why_a_store_cannot_be_shown(fleet: Path, page: Open, run: str, words: str):
    app = page(fleet, "curves", run=[run])
    lines = [element.value for element in [*app.error, *app.info]]
    assert any(words in line and run in line for line in lines), lines
    assert all("\n" not in line for line in lines)


def test_runs_lists_every_run_with_status_and_last_values(fleet: Path, page: Open):
    table = page(fleet).dataframe[0].value.set_index("run")
    assert dict(table["status"]) == {
        "baseline": "finished", "spiky": "finished", "crashed": "failed", "silent": "stale", "broken_values": "stopped",
        "no_rows": "running", "unreadable": "unreadable", "truncated": "finished", "newer": "finished",
        "unpublished": "running", "live": "running",
    }  # fmt: skip
    with duckdb.connect(str(fleet / "baseline" / "metrics.duckdb"), read_only=True) as store:
        last, best = store.execute(
            "SELECT arg_max(value, step), min(value) FROM metrics WHERE name = 'train/loss'"
        ).fetchall()[0]
    assert table.loc["baseline", "loss"] == last
    assert table.loc["baseline", "best loss"] == best
    assert table.loc["crashed", "note"] == "RuntimeError: device lost"
    assert re.fullmatch(r"6\d min ago", table.loc["silent", "last seen"])


def test_runs_can_be_found_by_a_configuration_key(fleet: Path, page: Open):
    table = page(fleet, find="moe.top_k=4").dataframe[0].value
    assert list(table["run"]) == ["spiky"]


def test_runs_shows_what_differs_between_two_configurations(fleet: Path, page: Open):
    app = page(fleet, run=["baseline", "spiky"])
    assert app.dataframe[1].value.to_dict("records") == [{"key": "moe.top_k", "baseline": "2", "spiky": "4"}]


def test_curves_draw_the_stored_values_with_the_unit_of_the_catalogue(fleet: Path, page: Open, spec: Spec):
    figure = charts(page(fleet, "curves", run=["baseline", "spiky"]), spec)["train/loss"]
    assert [trace["name"] for trace in figure["data"]] == ["baseline", "spiky"]
    assert figure["layout"]["yaxis"]["title"]["text"] == "nat/token"
    with duckdb.connect(str(fleet / "spiky" / "metrics.duckdb"), read_only=True) as store:
        stored = store.execute("SELECT step, value FROM metrics WHERE name = 'train/loss' ORDER BY step").fetchnumpy()
    assert np.array_equal(numbers(figure["data"][1]["x"]), stored["step"])
    assert np.array_equal(numbers(figure["data"][1]["y"]), stored["value"].astype(np.float32))


def test_curves_mark_values_that_are_not_finite(fleet: Path, page: Open, spec: Spec):
    figure = charts(page(fleet, "curves", run=["broken_values"]), spec)["train/loss"]
    assert np.isfinite(numbers(figure["data"][0]["y"])).all()
    assert figure["data"][1]["name"] == "broken_values: NaN or Inf"
    assert numbers(figure["data"][1]["x"]).tolist() == [20, 30, 59]


def test_curves_take_their_whole_view_from_the_address(fleet: Path, page: Open, spec: Spec):
    view = {"metric": "train/grad_norm", "x": "tokens", "smooth": "10", "logy": "true", "from": "50", "to": "99"}
    figures = charts(page(fleet, "curves", run=["spiky", "baseline"], **view), spec)
    assert list(figures) == ["train/grad_norm"]
    figure = figures["train/grad_norm"]
    assert figure["layout"]["xaxis"]["title"]["text"] == "tokens (token)"
    assert figure["layout"]["yaxis"]["type"] == "log"
    assert [trace["name"] for trace in figure["data"]] == ["spiky", "spiky", "baseline", "baseline"]
    assert numbers(figure["data"][0]["x"]).tolist() == [(step + 1) * 512 for step in range(50, 100)]


def test_unknown_run_in_the_address_is_named_and_touches_no_file(fleet: Path, page: Open):
    for asked in ("../fleet/baseline", "/etc", "..", "nothing"):
        app = page(fleet, "runs", run=[asked])
        assert not app.exception
        assert asked in app.warning[0].value


def test_router_shows_the_stored_loads(fleet: Path, page: Open, spec: Spec):
    app = page(fleet, "router", run=["live"], relative="false")
    figure = next(iter(charts(app, spec).values()))
    assert figure["layout"]["title"]["text"] == "router/load at step 190: 6 layers x 16 experts"
    with duckdb.connect(str(fleet / "live" / "metrics.duckdb"), read_only=True) as store:
        stored = store.execute(
            "SELECT value FROM metrics WHERE name = 'router/load' AND step = 190 ORDER BY layer, expert"
        ).fetchnumpy()["value"]
    assert np.allclose(numbers(figure["data"][0]["z"]).ravel(), stored)


def test_router_shows_an_earlier_step_and_its_dead_expert(fleet: Path, page: Open, spec: Spec):
    early = charts(page(fleet, "router", run=["spiky"], newest="false", step="100"), spec)
    assert any(title.startswith("router/load at step 100") for title in early)
    app = page(fleet, "router", run=["spiky"])
    assert {metric.label: metric.value for metric in app.metric}["Experts that received nothing"] == "1 of 96"


def test_page_explains_itself_where_there_is_no_run(tmp_path: Path, page: Open):
    app = page(tmp_path / "absent")
    assert not app.exception
    assert app.title[0].value == "No run yet"
    assert "nmoe-train" in app.code[0].value


def test_bad_flag_is_one_line_on_the_page(fleet: Path, page: Open):
    app = page(fleet, "runs", "--colour", "red")
    assert not app.exception
    assert "--colour" in app.error[0].value


def test_only_running_runs_are_refreshed(fleet: Path, page: Open):
    # The browser's timer is what a fragment with `run_every` asks for.
    from nviz import ui

    known = ui._entries(ui._settings(("--runs", str(fleet))))
    assert ui.refreshed([known["live"], known["baseline"]]) == ui.REFRESH_S
    assert ui.refreshed([known["baseline"], known["crashed"], known["silent"]]) is None


def test_page_follows_a_run_that_is_being_written(trainer: Path, page: Open, spec: Spec):
    app = page(trainer, "curves", run=["live"])
    deadline = time.monotonic() + 20
    while not (figures := charts(app, spec)) or len(numbers(figures["train/loss"]["data"][0]["x"])) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.5)
        app.run()
    before = numbers(figures["train/loss"]["data"][0]["x"]).max()
    time.sleep(2.5)
    app.run()
    assert numbers(charts(app, spec)["train/loss"]["data"][0]["x"]).max() > before
    assert not app.exception


def test_run_folders_that_are_links_out_of_the_root_are_not_runs(write_run: ModuleType, tmp_path: Path, page: Open):
    write_run.make_run(tmp_path / "elsewhere", "secret", steps=5)
    write_run.make_run(tmp_path / "runs", "mine", steps=5)
    (tmp_path / "runs" / "linked").symlink_to(tmp_path / "elsewhere" / "secret")
    assert list(page(tmp_path / "runs").dataframe[0].value["run"]) == ["mine"]
    store = tmp_path / "runs" / "mine" / "metrics.duckdb"
    store.unlink()
    store.symlink_to(tmp_path / "elsewhere" / "secret" / "metrics.duckdb")
    app = page(tmp_path / "runs", "curves", run=["mine"])
    assert not app.exception
    assert not app.get("plotly_chart")
    assert any("outside" in error.value for error in app.error)


def test_speed_stacks_the_parts_up_to_the_whole_step(fleet: Path, page: Open, spec: Spec):
    figure = charts(page(fleet, "speed", run=["baseline"]), spec)["Parts of a step, mean of each bucket"]
    whole = sum(numbers(trace["y"]) for trace in figure["data"])
    with duckdb.connect(str(fleet / "baseline" / "metrics.duckdb"), read_only=True) as store:
        stored = store.execute("SELECT value FROM metrics WHERE name = 'speed/step_time' ORDER BY step").fetchnumpy()[
            "value"
        ]
    assert np.allclose(whole, stored, rtol=1e-5)
    assert figure["data"][-1]["name"] == "rest of the step"


def test_speed_shows_each_metric_in_its_own_panel(fleet: Path, page: Open, spec: Spec):
    row = charts(page(fleet, "speed", run=["baseline"]), spec)["speed/tokens_per_second"]
    with duckdb.connect(str(fleet / "baseline" / "metrics.duckdb"), read_only=True) as store:
        for number, name in enumerate(("speed/tokens_per_second", "speed/mfu", "router/overload"), start=1):
            (trace,) = (trace for trace in row["data"] if trace["yaxis"] == f"y{number}".removesuffix("1"))
            stored = store.execute("SELECT value FROM metrics WHERE name = ? ORDER BY step", [name]).fetchnumpy()
            assert row["layout"]["annotations"][number - 1]["text"] == name
            assert np.allclose(numbers(trace["y"]), stored["value"], rtol=1e-5), name


def test_router_history_shows_the_layer_that_was_asked_for(fleet: Path, page: Open, spec: Spec):
    figures = charts(page(fleet, "router", run=["baseline"], layer="2"), spec)
    picture = numbers(figures["router/load of layer 2, by expert"]["data"][0]["z"])
    with duckdb.connect(str(fleet / "baseline" / "metrics.duckdb"), read_only=True) as store:
        stored = store.execute(
            "SELECT value FROM metrics WHERE name = 'router/load' AND layer = 2 ORDER BY expert, step"
        ).fetchnumpy()["value"]
    assert np.allclose(picture.ravel(), stored, rtol=1e-6)


def test_router_joins_what_a_rank_received_with_the_time_it_took(
    write_run: ModuleType, tmp_path: Path, page: Open, spec: Spec
):
    with write_run.recorded(tmp_path / "runs", "ranks", steps=40) as writer:
        for step in range(40):
            received = np.full((3, 4), 100.0)
            received[0] = np.nan  # a dense layer
            received[1, 2] += 10 * (step // 2 % 5)  # layer 1 makes rank 2 slow, layer 2 is uneven without effect
            received[2] = [50.0, 150.0, 100.0, 100.0]
            seconds = 1.0 + 0.01 * (received[1] - 100)
            writer.log(step, {"train/loss": 1.0})
            writer.log_array(step, "router/load", np.full((3, 8), 0.125), axes=("layer", "expert"))
            writer.log_array(step, "router/received", received[1:], axes=("layer", "rank"), layers=[1, 2])
            if step % 2 == 0:
                writer.log_array(step, "speed/rank_step_time", seconds, axes=("rank",))
    app = page(tmp_path / "runs", "router", run=["ranks"], newest="false", step="34")
    assert not app.exception
    figure = next(f for title, f in charts(app, spec).items() if title.startswith("What each rank received at step 34"))
    shares, bars = (numbers(trace[axis]) for trace, axis in zip(figure["data"], ("z", "y"), strict=True))
    assert np.isnan(shares[0]).all()
    assert np.allclose(shares[1], np.array([100, 100, 120, 100]) / 105)
    assert np.allclose(shares[2], [0.5, 1.5, 1.0, 1.0])
    assert np.allclose(bars, [0, 0, 20, 0])  # percent off the median
    table = app.dataframe[0].value.set_index("layer")
    assert list(table.index) == [1, 2]  # the layer that slow ranks are slow for stands first
    assert table.loc[2, "overload now"] == pytest.approx(1.5)
    assert table.loc[1, "fullest rank now"] == 2
    assert table.loc[1, "correlation with step time"] > 0.9 > 0.2 > abs(table.loc[2, "correlation with step time"])


def test_data_shows_the_judges_scores_beside_the_loss_of_each_source(
    write_run: ModuleType, tmp_path: Path, page: Open, spec: Spec
):
    """As the trainer writes it: by the folder of the held-out documents, beside that of the documents trained on."""
    batches = write_run.make_data(tmp_path / "data")
    (tmp_path / "data" / "demo").rename(tmp_path / "data" / "train")
    (tmp_path / "data" / "demo").mkdir()
    (tmp_path / "data" / "train").rename(tmp_path / "data" / "demo" / "train")
    batches = {step: [(p.replace("/demo/", "/demo/train/"), *at) for p, *at in batches[step]] for step in batches}
    apart = {"val/source_loss[data/demo/val]": 2.5, "val/source_loss[data/other/val]": 9.0}
    for name, losses in (("whole", {}), ("apart", apart)):
        with write_run.recorded(tmp_path / "runs", name, steps=3) as writer:
            for step in range(3):
                writer.log(step, {"train/loss": 4.0 - step, "val/loss": 5.0 - step, **losses})
                writer.log_batches(step, batches[step])
    found = charts(page(tmp_path / "runs", "data", run=["apart"]), spec)
    scores = found["data/demo/train, 100% of the tokens: judge scores"]["data"]
    assert {trace["name"]: int(numbers(trace["y"]).sum()) for trace in scores} == {"crawl.jsonl": 1, "topics.jsonl": 40}
    loss = found["data/demo/train: held-out loss"]
    assert loss["layout"]["yaxis"]["title"]["text"] == "nat/token"
    assert [(trace["name"], numbers(trace["y"]).tolist()) for trace in loss["data"]] == [("data/demo/val", [2.5] * 3)]
    app = page(tmp_path / "runs", "data", run=["whole"])
    mixture = charts(app, spec)["Loss of the whole mixture"]["data"]
    assert [(trace["name"], numbers(trace["y"]).tolist()) for trace in mixture] == [
        ("val/loss", [5.0, 4.0, 3.0]), ("train/loss", [4.0, 3.0, 2.0]),
    ]  # fmt: skip
    assert any("of all sources together" in caption.value for caption in app.caption)


def test_spike_is_traced_to_its_document_and_what_the_judge_said(fleet: Path, page: Open):
    app = page(fleet, "spikes", run=["spiky"])
    assert not app.exception
    assert "at step 22" in str(app.selectbox[0].value)
    table = app.dataframe[0].value
    assert set(table["document"]) == {"crawl/junk"}
    assert sorted(set(table["step"])) == [220, 221, 222, 223]
    assert table["tokens"].tolist() == [129] * 16
    assert any("Symbols without a word." in text.value for text in app.text)
    assert any("Judge's score: **0**" in text.value for text in app.markdown)


def test_spikes_name_the_shards_that_may_not_be_shown(write_run: ModuleType, tmp_path: Path, page: Open):
    batches = write_run.make_data(tmp_path / "private" / "data")
    write_run.make_run(tmp_path / "runs", "spiky", values=write_run.Values(spike=220), steps=240, batches=batches)
    app = page(tmp_path / "runs", "spikes", run=["spiky"])
    assert not app.exception
    assert any("--data DIR" in warning.value for warning in app.warning)
    assert not app.dataframe


def test_data_shows_manifest_share_seen_and_a_decoded_document(fleet: Path, page: Open):
    app = page(fleet, "data", run=["spiky"], corpus="data/demo", shard="shard-00000.npy", entry="0")
    assert not app.exception
    seen = app.dataframe[0].value
    assert seen["data"].tolist() == ["data/demo"]
    assert seen["tokens seen"].tolist() == [300 * 4 * 129]
    figures = {metric.label: metric.value for metric in app.metric}
    assert figures["Documents"] == "41"
    html = "".join(block.proto.body for block in app.get("html"))
    assert "statement" in "".join(re.findall(r">([^<]*)</span>", html))


def test_data_shows_the_judges_words(fleet: Path, page: Open):
    app = page(fleet, "data", run=["spiky"], corpus="data/scored")
    table = app.dataframe[-1].value
    assert table.set_index("document").loc["crawl/junk", "reason"] == "Symbols without a word."
    assert len(table) == 41


def test_data_verification_finds_a_changed_byte(write_run: ModuleType, tmp_path: Path, page: Open):
    write_run.make_data(tmp_path / "data")
    write_run.make_run(tmp_path / "runs", "mine", steps=5)
    app = page(tmp_path / "runs", "data", run=["mine"], corpus="data/demo")
    next(button for button in app.button if "Verify" in button.label).click().run()
    assert app.success
    shard = tmp_path / "data" / "demo" / "shard-00000.npy"
    data = bytearray(shard.read_bytes())
    data[500] ^= 1
    shard.write_bytes(data)
    next(button for button in app.button if "Verify" in button.label).click().run()
    assert any("SHA-256" in error.value for error in app.error)


def test_alerts_stand_on_every_page_and_name_what_holds(fleet: Path, page: Open):
    for name in PAGES:
        lines = "\n".join(caption.value for caption in page(fleet, name, run=["broken_values"]).caption)
        assert "broken_values: loss is not finite.** train/loss was NaN or infinite 3 times, steps 20 to 59" in lines
    table = page(fleet, "alerts").dataframe[0].value
    held = set(zip(table["run"], table["rule"], strict=True))
    assert {("crashed", "run died"), ("silent", "run died"), ("truncated", "metrics cannot be read")} <= held
    assert ("baseline", "run died") not in held
    assert ("baseline", "loss is not finite") not in held


def test_alert_rules_come_from_a_file(fleet: Path, page: Open, tmp_path: Path):
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nname = "hot"\nkind = "above"\nmetric = "gpu/temperature"\nlimit = 40\n')
    table = page(fleet, "alerts", "--alerts", str(rules)).dataframe[0].value
    assert "hot" in set(table[table["run"] == "baseline"]["rule"])
    rules.write_text('[[rule]]\nname = "hot"\nkind = "above"\nmetrik = "gpu/temperature"\n')
    app = page(fleet, "alerts", "--alerts", str(rules))
    assert not app.exception
    assert any("unknown key 'metrik'; did you mean 'metric'?" in error.value for error in app.error)
