"""A real browser for tests of pages: Chromium, driven through its DevTools protocol over a pipe, without the network.

```python
@needs_browser
def test_page(tmp_path):
    with browser() as tab:
        tab.open(page, width=400, dark=True)
        tab.click("#filter")
        tab.press("j")
        assert tab.ask("document.title") == "..."
        assert not tab.errors and not tab.requests
        tab.screenshot(tmp_path / "page.png")
```
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import RawIOBase
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")

_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]
#: The virtual key codes of keys whose name is not their character.
_CODES = {"Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Tab": 9}


class Tab:
    """A page of the browser. Every call waits until it took effect, and a failed one raises RuntimeError."""

    def __init__(self, commands: BinaryIO, replies: RawIOBase) -> None:
        self._commands, self._replies, self._unread = commands, replies, b""
        self._ids = count(1)
        self._session: str | None = None
        #: Uncaught exceptions and messages of console.error since the page was opened.
        self.errors: list[str] = []
        #: Addresses that the page asked for, besides files and data within it.
        self.requests: list[str] = []
        self._events: set[str] = set()
        target = self._do("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self._do(f"{domain}.enable")

    def open(self, page: Path, fragment: str = "", *, width: int = 1400, height: int = 900, dark: bool = False) -> None:
        """Load a file, `fragment` after its #, in a window of this size (pixels), and wait until it is loaded."""
        self.resize(width, height)
        self.colours(dark)
        self._go("about:blank")  # another fragment of the same file alone would not load it again
        self.errors, self.requests = [], []
        self._go(page.resolve().as_uri() + (f"#{fragment}" if fragment else ""))
        self.settle()

    def resize(self, width: int, height: int = 900) -> None:
        """Give the window a size in pixels; below 500, also that of a phone."""
        self._do(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )

    def colours(self, dark: bool) -> None:
        """Prefer a dark or a light page."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._do("Emulation.setEmulatedMedia", features=[scheme])

    def ask(self, script: str) -> Any:
        """The value of a JavaScript expression, which may be a promise."""
        reply = self._do("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in reply:
            raise RuntimeError(f"{script}: {reply['exceptionDetails']['exception'].get('description')}")
        return reply["result"].get("value")

    def text(self, selector: str = "body") -> str:
        """The visible text of the first element that matches."""
        return self.ask(f"document.querySelector({json.dumps(selector)}).innerText")

    def click(self, selector: str) -> None:
        """Click with the mouse on the middle of the first element that matches, which must be what is seen there."""
        found = f"document.querySelector({json.dumps(selector)})"
        place = self.ask(
            f"(() => {{ const e = {found}; if (!e) return null; e.scrollIntoView({{block: 'center'}});"
            "const b = e.getBoundingClientRect(), x = b.x + b.width / 2, y = b.y + b.height / 2;"
            "const top = document.elementFromPoint(x, y);"
            "return [x, y, e.contains(top) || (top !== null && top.contains(e))] })()"
        )
        if place is None or not place[2]:
            raise RuntimeError(f"nothing to click at {selector}" + (": something covers it" if place else ""))
        for kind in ("mousePressed", "mouseReleased"):
            self._do("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)
        self.settle()

    def press(self, key: str) -> None:
        """Press and release a key, named as in KeyboardEvent.key."""
        code = _CODES.get(key, ord(key.upper()[0]))
        text = {} if key in _CODES else {"text": key}
        self._do("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        self._do("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)
        self.settle()

    def write(self, text: str) -> None:
        """Type text into the element that has the focus."""
        self._do("Input.insertText", text=text)
        self.settle()

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a select element, as a user does."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.ask(f"{found}.value = {json.dumps(value)}; {found}.dispatchEvent(new Event('change', {{bubbles: true}}))")
        self.settle()

    def wait_for(self, condition: str) -> None:
        """Wait until a JavaScript expression is true; the test's time limit ends a wait in vain."""
        look = f"const look = () => ({condition}) ? done(0) : requestAnimationFrame(look); look()"
        self.ask(f"new Promise(done => {{ {look} }})")

    def settle(self) -> None:
        """Wait until two frames are drawn, and with them whatever the page had to do."""
        self.ask("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def overflow(self) -> int:
        """By how many pixels the page is wider than its window."""
        return self.ask("document.documentElement.scrollWidth - document.documentElement.clientWidth")

    def screenshot(self, target: Path, *, whole: bool = False) -> None:
        """Save what the window shows, or the whole page, as PNG."""
        shot = self._do("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))
        target.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self, target: Path) -> None:
        """Save the page as it is printed."""
        target.write_bytes(base64.b64decode(self._do("Page.printToPDF", printBackground=True)["data"]))

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self._do("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def _go(self, address: str) -> None:
        self._events.clear()
        self._do("Page.navigate", url=address)
        while "Page.loadEventFired" not in self._events:
            self._read()

    # --- the protocol: JSON objects that end with a zero byte ---

    def _do(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while (reply := self._read()).get("id") != number:
            pass
        if "error" in reply:
            raise RuntimeError(f"{method}: {reply['error']['message']}")
        return reply["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            more = self._replies.read(1 << 16)
            if not more:
                raise RuntimeError("the browser ended")
            self._unread += more
        data, _, self._unread = self._unread.partition(b"\0")
        message = json.loads(data)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, about: dict[str, Any]) -> None:
        self._events.add(event)
        if event == "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif event == "Runtime.consoleAPICalled" and about["type"] == "error":
            self.errors.append(" ".join(str(value.get("value")) for value in about["args"]))
        elif event == "Network.requestWillBeSent":
            address = about["request"]["url"]
            self.requests += [] if address.startswith(("file:", "data:", "about:", "blob:")) else [address]


@contextmanager
def browser() -> Iterator[Tab]:
    """A browser with one tab, which ends with the block."""
    assert CHROMIUM, "mark the test with needs_browser"
    to_browser, from_browser = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # Chromium reads commands from descriptor 3 and replies on 4; the shell puts the pipes there.
        redirected = f'exec "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}'
        process = subprocess.Popen(
            ["bash", "-c", redirected, "chromium", CHROMIUM, *_FLAGS, f"--user-data-dir={folder}", "about:blank"],
            pass_fds=(to_browser[0], from_browser[1]),
            stderr=subprocess.DEVNULL,
            env=os.environ | {"HOME": folder},
        )
        os.close(to_browser[0])
        os.close(from_browser[1])
        with os.fdopen(to_browser[1], "wb") as commands, os.fdopen(from_browser[0], "rb", 0) as replies:
            try:
                yield Tab(commands, replies)
            finally:
                commands.close()  # Chromium ends with its pipe, and its helpers with it
                process.wait(10)
