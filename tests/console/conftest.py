"""A real browser that uses a real hub.

Every test that opens pages also proves, when it ends, that they logged no error, sent requests to the hub only, got no
error status that the test did not announce, and stored nothing but the choice of colours.
"""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from tests.console.hub import build_registry, served
from tests.limits import scaled
from tests.servers import installer_environment

PROJECT = Path(__file__).resolve().parent.parent.parent
AXE = PROJECT / "build" / "axe"
AXE_VERSION = "4.10.3"
SCREENSHOTS = PROJECT / "build" / "screenshots"
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
STORED = """async () => [
  ...Object.keys(localStorage).filter((name) => name !== "operations-theme").map((name) => `stored ${name}`),
  ...Object.keys(sessionStorage).map((name) => `stored ${name}`),
  ...(await indexedDB.databases()).map(({ name }) => `stored ${name}`),
  ...document.cookie.split(";").filter(Boolean).map((cookie) => `stored a cookie: ${cookie}`),
]"""
DESK = (1440, 900)
PHONE = (390, 844)
PATIENCE = scaled(30_000)
"""Milliseconds that a page may take on a busy machine."""

expect.set_options(timeout=PATIENCE)


@pytest.fixture(scope="session")
def hub() -> Iterator[str]:
    """The address of a hub with operations of every kind."""
    with served(build_registry()) as address:
        yield address


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: scripts/browser installs one")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@dataclass
class Witness:
    """The unexpected errors and requests of a page."""

    address: str
    refusals: set[tuple[str, int]] = field(default_factory=set)
    """Paths and error statuses that a test expects."""

    found: list[str] = field(default_factory=list)

    def expect(self, path: str, status: int) -> None:
        self.refusals.add((path, status))

    def follow(self, page: Page) -> None:
        page.on("console", lambda message: self._heard(message.type, message.text))
        page.on("pageerror", lambda error: self.found.append(f"uncaught: {error}"))
        page.on("request", lambda request: self._asked(request.url))
        page.on("response", lambda response: self._answered(response.url, response.status))

    def _heard(self, kind: str, text: str) -> None:
        # Rejected requests are checked below.
        if kind in {"error", "warning"} and not text.startswith("Failed to load resource"):
            self.found.append(f"{kind}: {text}")

    def _asked(self, url: str) -> None:
        if not url.startswith((self.address, "data:")):
            self.found.append(f"asked {url}")

    def _answered(self, url: str, status: int) -> None:
        if status >= 400 and (urlsplit(url).path, status) not in self.refusals:
            self.found.append(f"refused with {status}: {url}")


@pytest.fixture
def witness(hub: str) -> Iterator[Witness]:
    witness = Witness(hub)
    yield witness
    assert witness.found == []


@dataclass
class Eyes:
    """Opens pages for one test."""

    browser: Browser
    witness: Witness

    def open(
        self, path: str = "", *, size: tuple[int, int] = DESK, dark: bool = False, csp: bool = True
    ) -> Page:
        context = self.browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme="dark" if dark else "light",
            bypass_csp=not csp,
            locale="en-GB",
        )
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        self.witness.follow(page)
        page.goto(f"{self.witness.address}/{path}")
        page.locator("#main > *").first.wait_for(state="attached")
        return page


@pytest.fixture
def eyes(browser: Browser, witness: Witness) -> Iterator[Eyes]:
    yield Eyes(browser, witness)
    for context in browser.contexts:
        for page in context.pages:
            if page.url.startswith(witness.address):
                witness.found += page.evaluate(STORED)
        context.close()


def keep(page: Page, name: str) -> None:
    """Save a picture of a page for people to inspect."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png", animations="disabled")


@pytest.fixture(scope="session")
def axe() -> str:
    script = AXE / "node_modules" / "axe-core" / "axe.min.js"
    if not script.exists():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("axe-core needs npm: scripts/browser installs it")
        AXE.parent.mkdir(exist_ok=True)
        made = Path(mkdtemp(dir=AXE.parent))
        command = [npm, "install", "--prefix", str(made), "--no-save", f"axe-core@{AXE_VERSION}"]
        got = subprocess.run(
            command, env=installer_environment(), capture_output=True, text=True, timeout=scaled(100), check=False
        )  # fmt: skip
        if got.returncode != 0:
            pytest.skip(f"axe-core cannot be installed: {got.stderr.strip()[-300:]}")
        # Another worker may have been quicker; then its folder stays.
        with suppress(OSError):
            made.rename(AXE)
    return script.read_text(encoding="utf-8")


def faults(page: Page, axe: str, rules: list[str] | None, where: str) -> list[str]:
    page.evaluate(axe)
    options = {"resultTypes": ["violations"]} | ({"runOnly": rules} if rules else {})
    found: dict[str, Any] = page.evaluate("(options) => axe.run(document, options)", options)
    return [
        f"{where}: {fault['id']} ({fault['impact']}): {node['target']} {node['failureSummary']}"
        for fault in found["violations"]
        for node in fault["nodes"]
    ]
