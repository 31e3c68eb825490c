# SPDX-License-Identifier: Apache-2.0
"""The dashboard in a real browser."""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

pytestmark = pytest.mark.browser
# On a page below the root Streamlit's client first asks for its server beside the page, then above it.
SEARCH_FOR_SERVER = re.compile(r"/\w+/_stcore/(health|host-config)$")


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


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
    tab.goto(f"{serve('--runs', str(trainer))}/?run=live")
    settled(tab)
    expect(tab.get_by_role("heading", name="Runs")).to_be_visible()
    tab.get_by_role("link", name="Curves").click()
    expect(tab.locator(".js-plotly-plot").first).to_be_visible(timeout=60_000)
    settled(tab)
    newest = "Math.max(...document.querySelector('.js-plotly-plot')._fullData[0].x)"
    before = tab.evaluate(newest)
    deadline = time.monotonic() + 30
    while tab.evaluate(newest) <= before:  # nobody touches the page: it follows by itself
        assert time.monotonic() < deadline
        time.sleep(0.2)
    tab.get_by_role("link", name="Router").click()
    expect(tab.get_by_text(re.compile("6 layers x 16 experts"))).to_be_visible(timeout=60_000)
    settled(tab)


def test_browser_shows_the_view_that_an_address_names(
    fleet: Path, serve: Callable[..., str], browser: Browser, tab: Page
):
    address = serve("--runs", str(fleet))
    tab.goto(f"{address}/curves?run=baseline&run=spiky")
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
