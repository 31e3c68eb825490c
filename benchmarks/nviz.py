# SPDX-License-Identifier: Apache-2.0
"""How long a reader of a 10-million-row run waits, and what five open pages cost the trainer beside them.

    uv run python benchmarks/nviz.py rows        first chart and refresh, in Chromium, on 10 million rows
    uv run python benchmarks/nviz.py runs        the run list with 500 runs
    uv run python benchmarks/nviz.py trainer     20 logged steps a second on one core, five pages on the other

Prints one line a figure, with its goal. Needs Debian's chromium and the test groups of the workspace.
"""

import importlib.util
import json
import multiprocessing
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

REPOSITORY = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("nviz_write_run", REPOSITORY / "tests" / "nviz" / "write_run.py")
assert spec is not None
assert spec.loader is not None
write_run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(write_run)


@contextmanager
def dashboard(root: Path, cores: set[int] | None = None) -> Iterator[str]:
    """A served dashboard, on the given cores."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "streamlit", "run", "nviz", "--server.port", str(port), "--", "--runs", str(root)],
        cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
    )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                with urllib.request.urlopen(f"{address}/_stcore/health", timeout=5):
                    break
            except OSError:
                time.sleep(0.05)
        yield address
    finally:
        process.terminate()
        process.wait()


@contextmanager
def chromium() -> Iterator[Browser]:
    path = shutil.which("chromium")
    assert path is not None, "install it with `apt-get install chromium`"
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def settled(tab: Page) -> None:
    tab.wait_for_selector("[data-testid=stApp][data-test-script-state=notRunning]", timeout=120_000)


def drawn(tab: Page) -> None:
    tab.wait_for_selector(".js-plotly-plot .main-svg", timeout=120_000)


def rows(folder: Path) -> None:
    """First chart and refresh on 10 million rows."""
    run = write_run.make_large(folder, "large")
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"status": "running", "heartbeat_s": 1e6}))
    size = (run / "metrics.duckdb").stat().st_size / 1e6
    print(f"store: 10 million rows, {size:.0f} MB")
    with dashboard(folder) as address, chromium() as browser:
        warm = browser.new_page()
        warm.goto(f"{address}/?run=large")
        settled(warm)
        warm.close()
        (run / "metrics.duckdb").touch()  # another publication: nothing that was answered before counts
        tab = browser.new_page()
        tab.goto(f"{address}/alerts?run=large")
        settled(tab)
        (run / "metrics.duckdb").touch()
        began = time.perf_counter()
        tab.get_by_role("link", name="Curves").click()
        drawn(tab)
        print(f"first chart: {time.perf_counter() - began:.2f} s (goal 1.5 s)")
        settled(tab)
        for name in ("Curves", "Router", "Speed"):
            tab.get_by_role("link", name=name).click()
            drawn(tab)
            settled(tab)
            times = []
            for _ in range(4):
                (run / "metrics.duckdb").touch()
                tab.wait_for_selector("[data-testid=stApp][data-test-script-state=running]", timeout=30_000)
                began = time.perf_counter()
                settled(tab)
                times.append(time.perf_counter() - began)
            print(f"refresh of {name}: {1000 * sorted(times)[len(times) // 2]:.0f} ms (goal 300 ms)")


def runs(folder: Path) -> None:
    """The run list with 500 runs."""
    made = write_run.make_run(folder, "run-000", steps=100)
    for number in range(1, 500):
        shutil.copytree(made, folder / f"run-{number:03d}")
    with dashboard(folder) as address, chromium() as browser:
        tab = browser.new_page()
        began = time.perf_counter()
        tab.goto(address)
        tab.wait_for_selector("[data-testid=stDataFrame]", timeout=120_000)
        first = time.perf_counter() - began
        tab.wait_for_timeout(500)
        settled(tab)
        print(f"500 runs: table after {first:.2f} s, all summaries after {time.perf_counter() - began:.2f} s")
        began = time.perf_counter()
        tab.reload()
        tab.wait_for_selector("[data-testid=stDataFrame]", timeout=120_000)
        print(f"500 runs, again: {time.perf_counter() - began:.2f} s")


def _train(
    folder: Path, phases: "multiprocessing.Queue[int]", result: "multiprocessing.Queue[list[list[float]]]"
) -> None:
    """A trainer of 20 logged steps a second on core 0; gives each step's own work in seconds, for each phase."""
    from nmoe.formats.metrics import MetricWriter
    from nmoe.formats.runs import RunRecord

    os.sched_setaffinity(0, {0})
    run = folder / "watched"
    run.mkdir(parents=True)
    record = RunRecord(run, heartbeat_s=1.0)
    record.start(id="watched", config=write_run.CONFIG, steps=100_000)
    values = write_run.Values(layers=24, experts=64)
    spent: list[list[float]] = [[]]
    step = 0
    with MetricWriter(run, publish_s=1.0) as writer:
        while True:
            if not phases.empty():
                if phases.get() < 0:
                    break
                spent.append([])
            started = time.perf_counter()
            total = sum(number * number for number in range(250_000))  # a step: some 15 ms of one core
            assert total
            values.log(writer, step)
            record.heartbeat(step)
            spent[-1].append(time.perf_counter() - started)
            step += 1
            time.sleep(max(0.0, 0.05 - spent[-1][-1]))
        assert writer.dropped_rows == 0
    result.put(spent)


def trainer(folder: Path) -> None:
    """One trainer; five pages come and go beside it, so that what else the machine does meets both alike."""
    context = multiprocessing.get_context("fork")
    phases: multiprocessing.Queue[int] = context.Queue()
    result: multiprocessing.Queue[list[list[float]]] = context.Queue()
    process = context.Process(target=_train, args=(folder, phases, result))
    process.start()
    os.sched_setaffinity(0, {1})
    faults = 0
    with dashboard(folder, cores={1}) as address, chromium() as browser:
        while not (folder / "watched" / "metrics.duckdb").exists():
            time.sleep(0.05)
        for _ in range(3):
            time.sleep(6)
            phases.put(1)
            tabs = [browser.new_page() for _ in range(5)]
            for tab, page in zip(tabs, ("", "curves", "router", "speed", "spikes"), strict=True):
                tab.goto(f"{address}/{page}?run=watched")
            time.sleep(8)
            faulty = "[data-testid=stException], [data-testid=stAlertContentError]"
            faults += sum(tab.locator(faulty).count() for tab in tabs)
            for tab in tabs:
                tab.close()
            phases.put(1)
        phases.put(-1)
        spent = result.get()
    process.join()
    os.sched_setaffinity(0, set(range(os.cpu_count() or 1)))
    alone = statistics.median(step for phase in spent[0::2] for step in phase)
    watched = statistics.median(step for phase in spent[1::2] for step in phase)
    print(f"work of a step, median: alone {1000 * alone:.2f} ms, beside five pages {1000 * watched:.2f} ms")
    print(f"ratio {alone / watched:.3f} (goal 0.98), failed readers {faults} (goal 0)")


def main() -> None:
    """Runs what the command line names, or all."""
    for name in sys.argv[1:] or ["rows", "runs", "trainer"]:
        with tempfile.TemporaryDirectory() as folder:
            {"rows": rows, "runs": runs, "trainer": trainer}[name](Path(folder) / "runs")


if __name__ == "__main__":
    main()
