"""Operators see the sources of a hub and control them in the console; other callers see which are not connected."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from tests.console.conftest import Eyes, Witness, faults, keep
from tests.limits import scaled
from tests.servers import free_port

from operations.hub import open_hub
from operations.server import hash_key
from operations.server.http11.running import running

OPERATOR, READER = "the-key-of-the-operator", "the-key-of-a-reader"
DOCUMENT = {
    "openapi": "3.1.0",
    "info": {"title": "shop", "version": "1"},
    "servers": [{"url": "http://127.0.0.1:9"}],
    "paths": {
        "/items": {"get": {"operationId": "items", "responses": {"200": {"description": "ok"}}}}
    },
}


class Document(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps(DOCUMENT).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def documents(port: int) -> Iterator[None]:
    """Serve an API document."""
    with ThreadingHTTPServer(("127.0.0.1", port), Document) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        server.shutdown()


@contextmanager
def served(path: Path, **options: Any) -> Iterator[str]:
    """Run a hub in a thread; yield its address."""
    started = threading.Event()
    found: dict[str, Any] = {}

    async def serve() -> None:
        stop = asyncio.Event()
        async with open_hub(path, **options) as hub, running(hub.app) as address:
            found.update(address=address, stop=stop, loop=asyncio.get_running_loop())
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert started.wait(scaled(20)), "the hub did not start"
    try:
        yield found["address"]
    finally:
        found["loop"].call_soon_threadsafe(found["stop"].set)
        thread.join(scaled(15))


@pytest.fixture
def late() -> int:
    """The port of an API that is not there yet."""
    return free_port()


@pytest.fixture
def eyes(browser: Browser, tmp_path: Path, late: int) -> Iterator[Eyes]:
    (tmp_path / "shop.json").write_text(json.dumps(DOCUMENT))
    (tmp_path / "operations.toml").write_text(
        f"""
[openapi.shop]
document = "shop.json"
[openapi.late]
document = "http://127.0.0.1:{late}/openapi.json"
[access.keys.operator]
sha256 = "{hash_key(OPERATOR)}"
scopes = ["hub:operate"]
[access.keys.reader]
sha256 = "{hash_key(READER)}"
[record.trace]
enabled = false
[limits]
streams_per_caller = 1
"""
    )
    with served(tmp_path / "operations.toml") as address:
        witness = Witness(address)
        yield Eyes(browser, witness)
        for context in browser.contexts:
            context.close()
        assert witness.found == []


def sign_in(page: Page, key: str) -> None:
    page.locator("#session").get_by_role("button", name="Sign in").click()
    page.get_by_label("Key or token").fill(key)
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Sign out")).to_be_visible()


def test_an_operator_sees_the_sources_live_and_controls_them(eyes: Eyes, late: int) -> None:
    page = eyes.open()
    expect(page.locator("#absent")).to_have_text("Not connected: late")
    expect(page.get_by_role("link", name="Sources", exact=True)).to_be_hidden()
    sign_in(page, OPERATOR)
    page.get_by_role("link", name="Sources", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Sources")
    row = page.get_by_role("row", name="openapi:late")
    expect(row).to_contain_text("retrying")
    expect(row).to_contain_text(f"127.0.0.1:{late}")
    # While an attempt is made, no next one is planned.
    expect(row.get_by_text("Next attempt at")).to_be_visible()
    keep(page, "sources")

    with documents(late):
        row.get_by_role("button", name="Retry openapi:late").focus()
        page.keyboard.press("Enter")
        expect(row.locator(".chip")).to_have_text("connected")
    expect(page.get_by_text("late is connected.")).to_be_visible()
    expect(page.locator("#absent")).to_be_hidden()

    shop = page.get_by_role("row", name="openapi:shop")
    shop.get_by_role("button", name="Disable openapi:shop").focus()
    page.keyboard.press("Enter")
    expect(shop.locator(".chip")).to_have_text("disabled")
    # The keyboard focus stays in the row.
    expect(shop.get_by_role("button", name="Enable openapi:shop")).to_be_focused()
    expect(shop.get_by_role("button", name="Retry openapi:shop")).to_be_hidden()
    page.keyboard.press("Enter")
    expect(shop.locator(".chip")).to_have_text("connected")
    expect(shop.get_by_role("button", name="Disable openapi:shop")).to_be_focused()

    # The document is gone, but the source works.
    row.get_by_role("button", name="Retry openapi:late").click()
    expect(row).to_contain_text("the previous connection is in use")
    expect(row.locator(".chip")).to_have_text("connected")

    page.get_by_role("button", name="Reload the file").click()
    expect(page.get_by_text("The file was read again.")).to_be_visible()


def test_a_page_whose_stream_is_rejected_is_not_built_again(eyes: Eyes) -> None:
    eyes.witness.expect("/subscribe", 429)
    first = eyes.open()
    sign_in(first, OPERATOR)
    first.get_by_role("link", name="Sources", exact=True).click()
    expect(first.get_by_role("row", name="openapi:shop")).to_be_visible()

    second = eyes.open()
    sign_in(second, OPERATOR)
    second.get_by_role("link", name="Sources", exact=True).click()
    expect(second.get_by_text("This may be out of date")).to_be_visible()
    button = second.get_by_role("button", name="Reload the file")
    button.focus()
    for _ in range(2):
        second.wait_for_event("response", lambda response: response.url.endswith("/operations"))
    expect(button).to_be_focused()


def test_a_page_asks_to_sign_in_when_the_session_has_ended(eyes: Eyes) -> None:
    page = eyes.open("#/~sources")
    sign_in(page, OPERATOR)
    expect(page.get_by_role("row", name="openapi:shop")).to_be_visible()

    page.context.clear_cookies()
    expect(page.get_by_role("main")).to_contain_text("You may see it after you sign in.")
    page.get_by_role("main").get_by_role("button", name="Sign in").click()
    page.get_by_label("Key or token").fill(OPERATOR)
    page.keyboard.press("Enter")
    expect(page.get_by_role("row", name="openapi:shop")).to_be_visible()


@pytest.mark.requirement("R15")
def test_other_callers_see_only_the_names_of_disconnected_sources(eyes: Eyes, axe: str) -> None:
    page = eyes.open("#/~sources", csp=False)
    expect(page.get_by_role("main")).to_contain_text("You may see it after you sign in.")
    sign_in(page, READER)
    expect(page.locator("#absent")).to_have_text("Not connected: late")
    expect(page.get_by_role("link", name="Sources", exact=True)).to_be_hidden()
    expect(page.get_by_role("heading", level=1)).to_have_text("Sources")
    expect(page.get_by_role("main")).to_contain_text("You may not see this page.")
    expect(page.get_by_role("main").get_by_role("button")).to_have_count(0)

    page.get_by_role("button", name="Sign out").click()
    sign_in(page, OPERATOR)
    expect(page.get_by_role("row", name="openapi:late")).to_contain_text("retrying")
    assert faults(page, axe, None, "sources") == []
