"""A real browser for tests of pages: the machine's Chromium, driven by Playwright, without the network.

```python
@needs_browser
def test_page():
    with browser() as tab:
        tab.open(page)
        tab.click("#filter")
        assert tab.ask("document.title") == "..."
        assert not tab.errors and not tab.requests
```
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or importlib.util.find_spec("playwright") is None,
    reason="no Chromium or no Playwright on this machine: apt-get install chromium; pip install playwright",
)

#: True once two frames are drawn. A function of this form is asked again if the page navigates meanwhile.
_DRAWN = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"


class Tab:
    """A page of the browser. Every call waits until it took effect, and a failed one raises Playwright's `Error`."""

    def __init__(self, chromium: Browser) -> None:
        self._chromium = chromium
        self._page: Page | None = None
        #: Uncaught exceptions and messages of console.error since the page was opened.
        self.errors: list[str] = []
        #: Addresses that the page asked for, besides files and data within it.
        self.requests: list[str] = []

    @property
    def page(self) -> Page:
        """Playwright's page, once one is open."""
        assert self._page, "open a page first"
        return self._page

    def open(self, page: Path, fragment: str = "") -> None:
        """Load a file, `fragment` after its #, in a window of 1400 by 900 pixels."""
        if self._page:
            self._page.close()
        self.errors, self.requests = [], []
        self._page = self._chromium.new_page(viewport={"width": 1400, "height": 900})
        self._page.on("pageerror", lambda error: self.errors.append(str(error)))
        self._page.on("console", self._note_message)
        self._page.on("request", self._note_request)
        self._page.goto(page.resolve().as_uri() + (f"#{fragment}" if fragment else ""))
        self.settle()

    def ask(self, script: str) -> Any:
        """The value of a JavaScript expression, which may be a promise."""
        return self.page.evaluate(script)

    def text(self, selector: str = "body") -> str:
        """The visible text of the first element that matches."""
        return self.page.locator(selector).first.inner_text()

    def click(self, selector: str) -> None:
        """Click with the mouse on the first element that matches, once nothing covers it."""
        self.page.locator(selector).first.click()
        self.settle()

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a select element."""
        self.page.select_option(selector, value)
        self.settle()

    def wait_for(self, condition: str) -> None:
        """Wait until a JavaScript expression is true, also across a navigation."""
        self.page.wait_for_function(f"() => {condition}")

    def settle(self) -> None:
        """Wait until two frames are drawn, and with them whatever the page had to do."""
        self.page.wait_for_function(_DRAWN)

    def overflow(self) -> int:
        """By how many pixels the page is wider than its window."""
        return self.ask("document.documentElement.scrollWidth - document.documentElement.clientWidth")

    def _note_message(self, message: ConsoleMessage) -> None:
        self.errors += [message.text] if message.type == "error" else []

    def _note_request(self, request: Request) -> None:
        self.requests += [] if request.url.startswith(("file:", "data:", "about:", "blob:")) else [request.url]


@contextmanager
def browser() -> Iterator[Tab]:
    """A browser with one tab, which ends with the block."""
    assert CHROMIUM, "mark the test with needs_browser"
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=CHROMIUM) as chromium:
        yield Tab(chromium)
