"""A phone opens the address of the QR code that `operations dev --lan` shows."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect
from tests.cli.test_dev import APP, read_until, started
from tests.cli.test_lan import LAN, NETWORK
from tests.console.conftest import keep

from operations import OperationRegistry


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[str]:
    """What the terminal shows."""
    (tmp_path / "app.py").write_text(APP)
    with OperationRegistry().sync as blocking:
        process = blocking.enter(started(tmp_path, *LAN))
        yield blocking.run(read_until(process, "Ctrl-C"))


def test_a_phone_signs_in_with_the_address_of_the_qr_code(shown: str, browser: Browser) -> None:
    [network] = re.findall(rf"http://{NETWORK}:\d+", shown)
    [code] = re.findall(r"sign in with (\S+) ", shown)
    asked: list[str] = []
    phone = {"width": 360, "height": 740}

    page = browser.new_page(viewport=phone)  # type: ignore[arg-type]
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{network}/#code={code}")
    expect(page.get_by_role("banner")).to_contain_text("guest")
    assert page.url == f"{network}/"
    assert not any(code in url for url in asked)
    keep(page, "another-device")

    other = browser.new_page(viewport=phone)  # type: ignore[arg-type]
    other.goto(f"{network}/#code={code}")
    expect(other.get_by_role("heading", name="Sign in")).to_be_visible()
    keep(other, "used-code")
    expect(other.locator("#main").get_by_role("alert")).to_contain_text("a new one")
    for each in (page, other):
        each.context.close()
