"""A real Chromium, and the page served to it: by Playwright, without anything from elsewhere."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from spark_bridge.ui.app import create_ui
from spark_bridge.ui.requests import SESSION_COOKIE, System
from tests.patience import PATIENCE
from tests.spark_bridge.ui.systems import ACT, Tokens

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 380, "height": 800}
WHY_NOT = next(
    (
        why
        for why, missing in (
            ("There is no Chromium: apt-get install chromium, or run .ci/run as root.", CHROMIUM is None),
            ("Playwright is not installed: make venv.", importlib.util.find_spec("playwright") is None),
            ("axe is not installed: make venv.", importlib.util.find_spec("axe_playwright_python") is None),
        )
        if missing
    ),
    "",
)
"""Why tests with a browser are skipped; "" if they are not."""


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """The address of an application that is served from a thread."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1))
    begun = threading.Event()

    def run() -> None:
        begun.set()
        server.run(sockets=[listening])

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    begun.wait(PATIENCE)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        listening.close()


@contextmanager
def served_page(system: System, tokens: Tokens | None = None) -> Iterator[str]:
    """The address of the page of a system."""
    with serving(create_ui(system, tokens or Tokens())) as address:
        yield address


@contextmanager
def chromium() -> Iterator[Any]:
    """Start a browser with a fresh profile."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """A page of the browser that remembers what went wrong in it, but for messages that contain an ``expected`` text.

    The browser may log a message long after the event: a test says what it expects, and need not wait for it.
    """

    def __init__(self, browser: Any, base: str, token: str | None = ACT, viewport: Any = None, scheme: str = "light"):
        self.base = base
        self.context = browser.new_context(
            viewport=viewport or WIDE, color_scheme=scheme, accept_downloads=True, reduced_motion="reduce"
        )
        self.context.set_default_timeout(PATIENCE * 1000)
        if token is not None:
            cookie = {"name": SESSION_COOKIE, "value": token, "url": base, "httpOnly": True, "sameSite": "Strict"}
            self.context.add_cookies([cookie])
        self.page = self.context.new_page()
        self.expected: list[str] = []
        self._messages: list[str] = []
        self.page.on("console", lambda m: self._messages.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self._messages.append(str(error)))
        self.page.on("request", lambda r: None if r.url.startswith(base) else self._messages.append(f"asks {r.url}"))

    @property
    def problems(self) -> list[str]:
        return [text for text in self._messages if not any(known in text for known in self.expected)]

    def open(self, path: str) -> Tab:
        self.page.goto(self.base + path, wait_until="load")
        return self

    def violations(self) -> list[str]:
        """What axe finds. The script is put in by the debugger: the page's policy would not load another's."""
        if not self.page.evaluate("() => typeof window.axe === 'object'"):
            self.page.evaluate(axe_script())
        found = self.page.evaluate("() => axe.run({resultTypes: ['violations']})")
        return [f"{v['id']}: {n['html'][:200]} {n['failureSummary']}" for v in found["violations"] for n in v["nodes"]]

    def overflows(self) -> bool:
        """Whether the page is wider than its window."""
        wide: bool = self.page.evaluate("() => document.documentElement.scrollWidth > window.innerWidth")
        return wide

    def close(self) -> None:
        self.context.close()


def axe_script() -> str:
    import axe_playwright_python

    (script,) = Path(axe_playwright_python.__file__).parent.rglob("axe.min.js")
    return script.read_text()
