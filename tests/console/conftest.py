"""A real browser looking at a real hub.

Every test that uses `page` also proves, when it ends, that the page wrote no error, asked nobody but the hub, and was
refused nothing that the test did not announce.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from tests.console.hub import build_registry, served

PROJECT = Path(__file__).resolve().parent.parent.parent
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
DESK = (1440, 900)
PHONE = (390, 844)


@pytest.fixture(scope="session")
def hub() -> Iterator[str]:
    """The address of a hub with a little of everything."""
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
    """What a page did that it should not have."""

    address: str
    refusals: set[tuple[str, int]] = field(default_factory=set)
    """Paths and statuses of refusals that a test announced."""

    found: list[str] = field(default_factory=list)

    def expect(self, path: str, status: int) -> None:
        self.refusals.add((path, status))

    def follow(self, page: Page) -> None:
        page.on("console", lambda message: self._heard(message.type, message.text))
        page.on("pageerror", lambda error: self.found.append(f"uncaught: {error}"))
        page.on("request", lambda request: self._asked(request.url))
        page.on("response", lambda response: self._answered(response.url, response.status))

    def _heard(self, kind: str, text: str) -> None:
        # What was refused is looked at more closely below.
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
        context.set_default_timeout(10_000)
        page = context.new_page()
        self.witness.follow(page)
        page.goto(f"{self.witness.address}/{path}")
        page.locator("#main > *").first.wait_for(state="attached")
        return page


@pytest.fixture
def eyes(browser: Browser, witness: Witness) -> Iterator[Eyes]:
    yield Eyes(browser, witness)
    for context in browser.contexts:
        context.close()


def keep(page: Page, name: str) -> None:
    """Keep what a page looks like, for people to look at."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png", animations="disabled")
