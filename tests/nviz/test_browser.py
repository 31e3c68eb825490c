# SPDX-License-Identifier: Apache-2.0
"""The dashboard in a real browser."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from nviz import ui

pytestmark = pytest.mark.browser
# On a page below the root Streamlit's client first asks for its server beside the page, then above it.
SEARCH_FOR_SERVER = re.compile(r"/\w+/_stcore/(health|host-config)$")


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def dashboard(fleet: Path, serve: Callable[..., str]) -> str:
    return serve("--runs", str(fleet), "--data", str(fleet.parent / "data"))


def photograph(tab: Page, name: str) -> None:
    """To be looked at, if NVIZ_SCREENSHOTS names a folder."""
    if folder := os.environ.get("NVIZ_SCREENSHOTS"):
        height = tab.evaluate("document.querySelector('[data-testid=stMain]').scrollHeight")
        tab.set_viewport_size({"width": 1280, "height": min(max(900, height), 4500)})
        tab.wait_for_timeout(300)
        tab.screenshot(path=str(Path(folder) / f"{name}.png"))
        tab.set_viewport_size({"width": 1280, "height": 900})


@pytest.fixture
def tab(browser: Browser) -> Iterator[Page]:
    """A tab whose console must stay free of errors, and which may ask no other host for anything."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    tab = context.new_page()
    faults: list[str] = []

    def console(message) -> None:
        if message.type == "error" and not SEARCH_FOR_SERVER.search(message.location.get("url", "")):
            faults.append(f"{message.text} ({message.location.get('url')})")

    tab.on("console", console)
    tab.on("pageerror", lambda error: faults.append(str(error)))
    tab.on("request", lambda request: faults.append(request.url) if not _local(request.url) else None)
    yield tab
    context.close()
    assert not faults


def _local(url: str) -> bool:
    return url.startswith(("http://127.0.0.1:", "ws://127.0.0.1:", "data:", "blob:"))


def settled(tab: Page) -> None:
    """Waits until the page is drawn, and checks that it holds no traceback."""
    tab.wait_for_selector("[data-testid=stApp][data-test-script-state=notRunning]", timeout=60_000)
    assert tab.locator("[data-testid=stException]").count() == 0
    assert "Traceback" not in tab.inner_text("body")


def test_browser_shows_a_run_while_it_is_written(trainer: Path, serve: Callable[..., str], tab: Page):
    asked: list[str | bytes] = []
    tab.on("websocket", lambda socket: socket.on("framesent", lambda frame: asked.append(frame)))
    tab.goto(f"{serve('--runs', str(trainer))}/?run=live")
    settled(tab)
    expect(tab.get_by_role("heading", name="Runs")).to_be_visible()
    tab.get_by_role("link", name="Curves").click()
    expect(tab.locator(".js-plotly-plot").first).to_be_visible(timeout=60_000)
    settled(tab)
    # A chart of a running run is drawn anew by each refresh, and for a moment there is none.
    newest = "Math.max(-1, ...(document.querySelector('.js-plotly-plot')?._fullData?.[0]?.x ?? []))"
    before = tab.evaluate(newest)
    deadline = time.monotonic() + 30
    while tab.evaluate(newest) <= before:  # nobody touches the page: it follows by itself
        assert time.monotonic() < deadline
        time.sleep(0.2)
    tab.get_by_role("link", name="Router").click()
    expect(tab.get_by_text(re.compile("6 layers x 16 experts"))).to_be_visible(timeout=60_000)
    settled(tab)
    os.kill(int((trainer.parent / "pid").read_text()), signal.SIGTERM)
    expect(tab.get_by_text(re.compile("live: stopped"))).to_be_visible(timeout=30_000)
    tab.wait_for_timeout(1000)
    asked.clear()
    tab.wait_for_timeout(1000 * (ui.REFRESH_S + 2))
    assert not asked  # nobody asks for a run that has ended


PAGES = ("Runs", "Curves", "Router", "Speed", "Data", "Spikes", "Alerts")
STATES = ("no_rows", "broken_values", "crashed", "newer", "truncated")  # test_pages.py has all of them


def visit(tab: Page, name: str) -> None:
    """Goes to a page by its link and waits until it is drawn."""
    tab.get_by_role("link", name=name, exact=True).click()
    expect(tab.locator("[data-testid=stMain] h1").first).to_have_text(name, timeout=60_000)
    settled(tab)


@pytest.mark.parametrize("run", STATES)
def test_browser_shows_every_page_of_a_run_in_any_state(run: str, fleet: Path, dashboard: str, tab: Page):
    tab.goto(f"{dashboard}/?run={run}")
    for name in PAGES:
        visit(tab, name)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_browser_shows_every_page_in_both_themes(
    theme: Literal["light", "dark"], fleet: Path, dashboard: str, tab: Page
):
    tab.emulate_media(color_scheme=theme)
    tab.goto(f"{dashboard}/?run=spiky&run=live")
    for name in PAGES:
        visit(tab, name)
        if name not in ("Runs", "Alerts"):
            expect(tab.locator(".js-plotly-plot .main-svg").first).to_be_visible(timeout=60_000)
        tab.wait_for_timeout(300)  # charts fade in
        photograph(tab, f"{name.lower()}-{theme}")
        wide = tab.evaluate("document.querySelector('[data-testid=stMain]').scrollWidth")
        assert wide <= tab.evaluate("document.querySelector('[data-testid=stMain]').clientWidth")


def test_browser_gets_little_of_ten_million_rows(
    write_run: ModuleType, tmp_path: Path, serve: Callable[..., str], tab: Page
):
    write_run.make_large(tmp_path, "large")
    received: list[int] = []
    tab.on("websocket", lambda socket: socket.on("framereceived", lambda frame: received.append(len(frame))))
    tab.goto(f"{serve('--runs', str(tmp_path))}/?run=large")
    settled(tab)
    for name in PAGES:
        received.clear()
        visit(tab, name)
        if name == "Router":
            expect(tab.get_by_text("61 layers x 256 experts").first).to_be_visible(timeout=60_000)
        assert sum(received) <= 1_000_000, (name, sum(received))


def test_browser_explains_where_there_is_no_run_and_goes_on_when_there_is(
    write_run: ModuleType, tmp_path: Path, serve: Callable[..., str], tab: Page
):
    tab.goto(serve("--runs", str(tmp_path / "runs")))
    expect(tab.get_by_role("heading", name="No run yet")).to_be_visible(timeout=60_000)
    write_run.make_run(tmp_path / "runs", "first", steps=5)
    expect(tab.get_by_role("heading", name="Runs")).to_be_visible(timeout=30_000)
    settled(tab)


def test_browser_zooms_into_a_range_at_full_detail(fleet: Path, dashboard: str, tab: Page):
    tab.goto(f"{dashboard}/curves?run=baseline&metric=train%2Floss")
    settled(tab)
    plot = tab.locator(".js-plotly-plot .nsewdrag").first
    expect(plot).to_be_visible(timeout=60_000)
    box = plot.bounding_box()
    assert box is not None
    tab.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 50)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 80, steps=8)
    tab.mouse.up()
    expect(tab).to_have_url(re.compile(r"from=\d+.*to=\d+|to=\d+.*from=\d+"), timeout=30_000)
    settled(tab)
    low, high = (int(re.findall(rf"{name}=(\d+)", tab.url)[0]) for name in ("from", "to"))
    assert 60 < low < 120 < high < 220
    tab.get_by_role("button", name="Whole range").click()
    expect(tab).not_to_have_url(re.compile("from="))


def test_browser_shows_the_view_that_an_address_names(dashboard: str, browser: Browser, tab: Page):
    tab.goto(f"{dashboard}/curves?run=baseline&run=spiky")
    settled(tab)
    tab.locator("label").filter(has_text="log y").click()
    expect(tab).to_have_url(re.compile("logy=true"))
    copied = tab.url
    with browser.new_context() as other:
        elsewhere = other.new_page()
        elsewhere.goto(copied)
        settled(elsewhere)
        expect(elsewhere.locator(".js-plotly-plot").first).to_be_visible(timeout=60_000)
        shown = "(({data, layout}) => [data.map(trace => trace.name), layout.yaxis.type])(document.querySelector('.js-plotly-plot'))"
        assert elsewhere.evaluate(shown) == [["baseline", "spiky"], "log"]
