# SPDX-License-Identifier: Apache-2.0
"""What leaves the dashboard as a file, and the rules that need a series of their own."""

import re
from pathlib import Path
from types import ModuleType

import duckdb
import pytest
from playwright.sync_api import sync_playwright

from nviz import alerts, cli, corpus, tables
from nviz.alerts import Rule
from nviz.catalog import Entry, list_entries
from nviz.settings import Settings, SettingsError


def entries(root: Path) -> dict[str, Entry]:
    return list_entries(Settings(runs=(root,), data=()))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_download_holds_every_stored_value(fleet: Path, tmp_path: Path, kind: tables.Kind):
    known = entries(fleet)
    names = ["train/loss", "router/load"]
    path = tmp_path / f"table.{kind}"
    path.write_bytes(tables.table([known["baseline"], known["broken_values"]], names, first=10, last=20, kind=kind))
    for run in ("baseline", "broken_values"):
        wanted = (
            "SELECT name, step, time, value, layer, expert, rank FROM {} "
            "WHERE name IN ('train/loss', 'router/load') AND step BETWEEN 10 AND 20 {} ORDER BY ALL"
        )
        with duckdb.connect(str(fleet / run / "metrics.duckdb"), read_only=True) as store:
            stored = store.execute(wanted.format("metrics", "")).fetchall()
            written = store.execute(wanted.format(f"read_{kind}('{path}')", f"AND run = '{run}'")).fetchall()
        assert len(stored) == 11 + 2 * 6 * 16
        assert str(written) == str(stored)  # as text, since NaN differs from itself


@pytest.mark.browser
def test_export_is_one_file_that_a_browser_draws_without_a_network(fleet: Path, tmp_path: Path, chromium: str):
    output = tmp_path / "report.html"
    assert cli.main(["export", "spiky", "--runs", str(fleet), "--output", str(output)]) == 0
    text = output.read_text()
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", text)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page()
        faults: list[str] = []
        tab.on("pageerror", lambda error: faults.append(str(error)))
        tab.on("request", lambda request: faults.append(request.url) if request.url.startswith("http") else None)
        tab.goto(output.as_uri())
        tab.wait_for_selector(".js-plotly-plot .main-svg")
        drawn = tab.locator(".js-plotly-plot").count()
        words = tab.inner_text("body")
        browser.close()
    assert not faults
    assert drawn > 15
    assert "moe.top_k" in words
    assert "train/loss" in words


def test_export_takes_a_folder_and_names_the_runs_there_are(
    fleet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", str(fleet / "crashed")]) == 0
    assert "device lost" in (tmp_path / "crashed.html").read_text()
    for asked in ("nothing", "../runs/baseline", "truncated"):
        assert cli.main(["export", asked, "--runs", str(fleet)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1


def test_export_escapes_what_a_run_says_of_itself(write_run: ModuleType, tmp_path: Path):
    evil = "</script><script>alert(1)</script>"
    write_run.make_run(tmp_path, "mine", steps=5, status="failed", error=evil, config={"run": {"name": evil}})
    with duckdb.connect(str(tmp_path / "mine" / "metrics.duckdb")) as store:
        store.execute("INSERT INTO metrics VALUES (?, 0, 0, 1, NULL, NULL, NULL)", [evil])
    output = tmp_path / "out.html"
    assert cli.main(["export", "mine", "--runs", str(tmp_path), "--output", str(output)]) == 0
    assert evil not in output.read_text()


def test_shards_of_a_run_are_found_only_below_the_data_folders(write_run: ModuleType, tmp_path: Path):
    data = tmp_path / "data"
    write_run.make_data(data)
    (data / "other").mkdir()
    (data / "other" / "manifest.json").write_text("{}")
    (tmp_path / "outside").mkdir()
    (data / "linked").symlink_to(tmp_path / "outside")
    (tmp_path / "outside" / "manifest.json").write_text("{}")
    known = corpus.find_corpora(Settings(runs=(), data=(data,)))
    assert list(known) == ["data/demo", "data/other", "data/scored"]
    for path in ("data/demo/shard-00000.npy", f"{data}/demo/shard-00000.npy", "demo/shard-00000.npy"):
        assert corpus.owner(known, path) == (known["data/demo"], "shard-00000.npy")
    for path in (
        "/etc/passwd",
        "../demo/x.npy",
        "data/absent/shard-00000.npy",
        "shard-00000.npy",
        "/elsewhere/data/demo/x.npy",
    ):
        assert corpus.owner(known, path) is None


def test_throughput_drop_is_seen_when_it_is_larger_than_the_rule(write_run: ModuleType, tmp_path: Path):
    slow = {step: {"speed/tokens_per_second": 6000.0} for step in range(185, 200)}
    write_run.make_run(tmp_path, "slow", steps=200, extra=slow)
    found = alerts.try_rules(entries(tmp_path)["slow"], alerts.BUILT_IN)
    texts = [alert.text for alert in found if alert.rule.name == "throughput drops"]
    assert len(texts) == 1
    assert "to 6000" in texts[0]
    tolerant = Rule(name="t", kind="drop", metric="speed/tokens_per_second", by=0.6)
    assert alerts.try_rules(entries(tmp_path)["slow"], [tolerant]) == []


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ('kind = "abov"\nname = "a"', "expected one of"),
        ('kind = "above"\nname = "a"', "needs a metric"),
        ('kind = "drop"\nname = "a"\nmetric = "m"\nby = 3', "fraction"),
        ('kind = "status"\nname = "a"\nstatus = ["dead"]', "expected some of"),
        ('kind = "above"\nname = "a"\nmetric = "m"\nlimit = true', "wrong type"),
        ('name = "a"', "lacks 'kind'"),
    ],
)
def test_bad_rules_are_refused_by_name(tmp_path: Path, rule: str, words: str):
    path = tmp_path / "rules.toml"
    path.write_text(f"[[rule]]\n{rule}\n")
    with pytest.raises(SettingsError, match=re.escape(words)) as caught:
        alerts.load_rules(path)
    assert str(path) in str(caught.value)
    assert "rule 1" in str(caught.value)


def test_spikes_are_found_where_they_are_and_nowhere_else(fleet: Path):
    known = entries(fleet)
    found = known["spiky"].spikes()
    assert {(spike.name, spike.first, spike.last) for spike in found} == {
        ("train/loss", 220, 223),
        ("train/grad_norm", 220, 223),
    }
    assert known["baseline"].spikes() == []
    broken = known["broken_values"].spikes()
    assert [spike.peak for spike in broken] == [20, 30, 59]


def test_alerts_above_name_the_layer_and_the_unit_is_the_stores(fleet: Path):
    rule = Rule(name="r", kind="above", metric="router/load", limit=0.05)
    text = alerts.try_rules(entries(fleet)["baseline"], [rule])[0].text
    with duckdb.connect(str(fleet / "baseline" / "metrics.duckdb"), read_only=True) as store:
        layer, expert, value = store.execute(
            "SELECT layer, expert, value FROM metrics WHERE name = 'router/load' AND step = 290 ORDER BY value DESC LIMIT 1"
        ).fetchall()[0]
    assert f"router/load is {value:.4g} > 0.05 at step 290 (layer {layer} expert {expert}" in text
