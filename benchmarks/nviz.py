# SPDX-License-Identifier: Apache-2.0
"""How long a reader of a large run waits, and what five open pages cost the trainer beside them.

    uv run python benchmarks/nviz.py rows        first chart, refreshes and payloads, in Chromium, on 10 million rows
    uv run python benchmarks/nviz.py runs        the run list with 500 runs of 2,000 metrics
    uv run python benchmarks/nviz.py trainer     20 logged steps a second on one core, five pages on the other

Prints one line a figure, with its goal: best and median of several trials, and the server's CPU time. Trainer, server
and browser are sessions of their own, as if started from terminals of their own: Linux shares a core among sessions,
so two in one session would pay for each other on a busy machine. As root these sessions are also put before all others,
so that a busy machine is measured as if idle. Needs Debian's chromium and the test groups of the workspace.
"""

import contextlib
import importlib.util
import itertools
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

import duckdb
from playwright.sync_api import Browser, Page, sync_playwright

from nmoe.commands import enter

REPOSITORY = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("nviz_write_run", REPOSITORY / "tests" / "nviz" / "write_run.py")
assert spec is not None
assert spec.loader is not None
write_run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(write_run)


def ahead() -> bool:
    """Puts the sessions of this process and its descendants before all others; whether that is permitted."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            children.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
    found = [os.getpid()]
    for pid in found:
        found += children.get(pid, [])
    try:
        for pid in found:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                Path(f"/proc/{pid}/autogroup").write_text("-20")
    except OSError:
        return False
    return True


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def summary(times: list[float], unit: str = "ms") -> str:
    """Best and median."""
    scale, form = (1000, ".0f") if unit == "ms" else (1, ".2f")
    return f"best {scale * min(times):{form}}, median {scale * statistics.median(times):{form}} {unit} of {len(times)}"


@contextmanager
def dashboard(root: Path, cores: set[int] | None = None) -> Iterator[tuple[str, int]]:
    """A served dashboard, on the given cores: its address and process."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "streamlit", "run", "nviz", "--server.port", str(port), "--", "--runs", str(root)],
        cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
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
        yield address, process.pid
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


def publish(run: Path) -> None:
    """One more step in the store, published as the trainer does it: a copy, then a rename."""
    copy = run / "copy.duckdb"
    shutil.copyfile(run / "metrics.duckdb", copy)
    with duckdb.connect(str(copy)) as store:
        store.execute(
            """
            INSERT INTO metrics SELECT * REPLACE (step + 50 AS step, time + 25 AS time) FROM metrics
            WHERE step = (SELECT max(step) FROM metrics WHERE name = 'router/load')
            """
        )
    copy.replace(run / "metrics.duckdb")


# Times at which the page began and ended to be computed.
OBSERVE = """
window.changes = [];
new MutationObserver(() => {
  const state = document.querySelector("[data-testid=stApp]")?.getAttribute("data-test-script-state");
  if (state && state !== window.changes.at(-1)?.[1]) window.changes.push([performance.now(), state]);
}).observe(document, {subtree: true, attributes: true, attributeFilter: ["data-test-script-state"]});
"""


def refresh(tab: Page, run: Path) -> float:
    """Seconds in which the page waited for the refresh that follows a publication; its parts have timers of their own."""
    publish(run)
    tab.evaluate(OBSERVE)
    tab.wait_for_timeout(6500)  # a refresh comes every 5 s
    changes = tab.evaluate("window.changes")
    first = next(at for at, state in changes if state == "running")
    pairs = itertools.pairwise([change for change in changes if first <= change[0] < first + 4000])
    return sum(later - at for (at, state), (later, _) in pairs if state != "notRunning") / 1000


def rows(folder: Path) -> None:
    """First chart, refreshes and payloads on 10 million rows."""
    run = write_run.make_large(folder, "large")
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"status": "running", "heartbeat_s": 1e6}))
    print(f"store: 10 million rows, {(run / 'metrics.duckdb').stat().st_size / 1e6:.0f} MB")
    with dashboard(folder) as (address, server), chromium() as browser:
        ahead()
        known = browser.new_context()
        opened: dict[str, list[float]] = {"new": [], "known": [], "click": []}
        for _ in range(5):
            for kind in opened:
                context = browser.new_context() if kind == "new" else known
                tab = context.new_page()
                if kind == "click":
                    tab.goto(f"{address}/alerts?run=large")
                    settled(tab)
                    tab.wait_for_timeout(1500)  # somebody reads a page before going on to the next
                publish(run)
                began = time.perf_counter()
                if kind == "click":
                    tab.get_by_role("link", name="Curves").click()
                else:
                    tab.goto(f"{address}/curves?run=large")
                drawn(tab)
                opened[kind].append(time.perf_counter() - began)
                settled(tab)
                tab.close()
        print(f"first chart, from another page: {summary(opened['click'], 's')} (goal 1.5 s)")
        print(f"first chart, address opened in a browser that was here before: {summary(opened['known'], 's')}")
        print(f"first chart, address opened in a new browser: {summary(opened['new'], 's')}")
        tab = known.new_page()
        received: list[int] = []
        tab.on("websocket", lambda socket: socket.on("framereceived", lambda frame: received.append(len(frame))))
        tab.goto(f"{address}/?run=large")
        for name in ("Curves", "Router", "Speed", "Spikes", "Data"):
            received.clear()
            tab.get_by_role("link", name=name).click()
            tab.wait_for_timeout(1500)
            settled(tab)
            payload, used = sum(received), cpu_seconds(server)
            times = [refresh(tab, run) for _ in range(5)]
            used = (cpu_seconds(server) - used) / len(times)
            print(
                f"refresh of {name}: {summary(times)} (goal 300 ms), {1000 * used:.0f} ms of CPU each; "
                f"first payload {payload / 1e6:.2f} MB (goal 1 MB)"
            )


def runs(folder: Path) -> None:
    """The run list with 500 runs of 2,000 metrics."""
    made = write_run.make_run(folder, "run-000", steps=200)
    with duckdb.connect(str(made / "metrics.duckdb")) as store:
        store.execute("CREATE TABLE rows AS SELECT * FROM metrics")
        store.execute(
            "INSERT INTO rows SELECT 'extra/m' || m, s, s * 0.5, random(), NULL, NULL, NULL FROM range(200) a(s), range(1974) b(m)"
        )
        store.execute("DELETE FROM metrics")
        store.execute("INSERT INTO metrics SELECT * FROM rows ORDER BY step")
        count = store.execute("SELECT count(DISTINCT name), count(*) FROM metrics").fetchall()[0]
        store.execute("DROP TABLE rows")
    for number in range(1, 500):
        (folder / f"run-{number:03d}").mkdir()
        shutil.copyfile(made / "run.json", folder / f"run-{number:03d}" / "run.json")
        os.link(made / "metrics.duckdb", folder / f"run-{number:03d}" / "metrics.duckdb")
    print("500 runs (one store under 500 names), {} metrics and {:,} rows each".format(*count))
    with dashboard(folder) as (address, server), chromium() as browser:
        ahead()
        tab = browser.new_page()
        began = time.perf_counter()
        tab.goto(address)
        tab.wait_for_selector("[data-testid=stDataFrame]", timeout=120_000)
        first = time.perf_counter() - began
        tab.wait_for_timeout(500)
        settled(tab)
        every = time.perf_counter() - began
        print(
            f"table after {first:.2f} s, all values after {every:.2f} s, {cpu_seconds(server):.1f} s of CPU with the start"
        )
        times = []
        for _ in range(5):
            began = time.perf_counter()
            tab.reload()
            tab.wait_for_selector("[data-testid=stDataFrame]", timeout=120_000)
            times.append(time.perf_counter() - began)
            settled(tab)
        print(f"table again: {summary(times, 's')}")
        began = time.perf_counter()
        tab.get_by_role("link", name="Curves").click()
        drawn(tab)
        print(f"curves of one of them, {count[0]} metrics to choose from: {time.perf_counter() - began:.2f} s")


Step = tuple[float, float]  # seconds and CPU seconds of a step's own work


def _train(
    folder: Path, phases: "multiprocessing.Queue[str]", result: "multiprocessing.Queue[dict[str, list[Step]]]"
) -> None:
    """A trainer of 20 logged steps a second on core 0; gives each step's own work, by the name of the phase."""
    from nmoe.formats.metrics import MetricWriter
    from nmoe.formats.runs import RunRecord

    os.setsid()
    os.sched_setaffinity(0, {0})
    ahead()
    run = folder / "watched"
    run.mkdir(parents=True)
    record = RunRecord(run, heartbeat_s=1.0)
    record.start(id="watched", config=write_run.CONFIG, steps=100_000)
    values = write_run.Values(layers=24, experts=64)
    spent: dict[str, list[Step]] = {"alone": []}
    phase, step = "alone", 0
    with MetricWriter(run, publish_s=1.0) as writer:
        while True:
            if not phases.empty():
                phase = phases.get()
                if phase == "end":
                    break
                spent.setdefault(phase, [])
            started, used = time.perf_counter(), time.thread_time()
            total = sum(number * number for number in range(250_000))  # a step: some 8 ms of one core
            assert total
            values.log(writer, step)
            record.heartbeat(step)
            spent[phase].append((time.perf_counter() - started, time.thread_time() - used))
            step += 1
            time.sleep(max(0.0, 0.05 - spent[phase][-1][0]))
        assert writer.dropped_rows == 0
    result.put(spent)


def _spin() -> None:
    os.setsid()
    os.sched_setaffinity(0, {1})
    ahead()
    while True:
        pass


def trainer(folder: Path) -> None:
    """One trainer; five pages come and go beside it, and for comparison a process that only spins."""
    context = multiprocessing.get_context("fork")
    phases: multiprocessing.Queue[str] = context.Queue()
    result: multiprocessing.Queue[dict[str, list[Step]]] = context.Queue()
    process = context.Process(target=_train, args=(folder, phases, result), daemon=True)
    process.start()
    os.sched_setaffinity(0, {1})  # the browser inherits it
    faults = 0
    with dashboard(folder, cores={1}) as (address, _), chromium() as browser:
        while not (folder / "watched" / "metrics.duckdb").exists():
            time.sleep(0.05)
        for _ in range(3):
            phases.put("alone")
            time.sleep(6)
            phases.put("beside five pages")
            tabs = [browser.new_page() for _ in range(5)]
            ahead()
            for tab, page in zip(tabs, ("", "curves", "router", "speed", "spikes"), strict=True):
                tab.goto(f"{address}/{page}?run=watched")
            tabs[0].wait_for_timeout(8000)
            faulty = "[data-testid=stException], [data-testid=stAlertContentError]"
            found = [text for tab in tabs for text in tab.locator(faulty).all_inner_texts()]
            faults += len(found)
            print(*found, sep="\n", end="\n" if found else "")
            for tab in tabs:
                tab.close()
            phases.put("alone")
            time.sleep(3)
            phases.put("beside a process that spins")
            spinning = context.Process(target=_spin, daemon=True)
            spinning.start()
            time.sleep(4)
            spinning.terminate()
            spinning.join()
        phases.put("end")
        spent = result.get()
    process.join()
    os.sched_setaffinity(0, set(range(os.cpu_count() or 1)))
    for name, steps in spent.items():
        clock, used = (statistics.median(step[place] for step in steps) for place in (0, 1))
        by_clock, by_cpu = (statistics.median(step[place] for step in spent["alone"]) for place in (0, 1))
        print(
            f"a step's work {name}: {1000 * clock:.2f} ms, {1000 * used:.2f} ms of CPU, median of {len(steps)}; "
            f"ratio {by_clock / clock:.3f} by the clock, {by_cpu / used:.3f} by CPU time"
        )
    print(f"goal beside five pages: 0.98; failed readers {faults} (goal 0)")


def main() -> None:
    """Runs what the command line names, or all."""
    print(f"load {os.getloadavg()[0]:.1f}; before all others: {'yes' if ahead() else 'no'}")
    for name in sys.argv[1:] or ["rows", "runs", "trainer"]:
        with tempfile.TemporaryDirectory() as folder:
            {"rows": rows, "runs": runs, "trainer": trainer}[name](Path(folder) / "runs")


if __name__ == "__main__":
    raise SystemExit(enter("__main__", "main"))
