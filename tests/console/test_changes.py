"""The list follows the registry while the page is open."""

import json
from collections.abc import Iterator
from http.client import HTTPConnection

import pytest
from playwright.sync_api import Browser, expect
from tests.console.conftest import Eyes, Witness
from tests.console.hub import served

from operations import OperationRegistry


@pytest.fixture
def registry() -> OperationRegistry:
    """A registry that changes on request."""
    registry = OperationRegistry()

    @registry.operation("garden.plant")
    async def plant(name: str) -> None:
        """Let something grow."""

        @registry.operation(name)
        async def grown(size: int = 1) -> int:
            """Grown lately."""
            return size

    @registry.operation("garden.weed")
    async def weed(name: str) -> None:
        """Remove an operation."""
        registry.unregister(name)

    return registry


@pytest.fixture
def garden(registry: OperationRegistry, browser: Browser) -> Iterator[Eyes]:
    with served(registry) as address:
        witness = Witness(address)
        yield Eyes(browser, witness)
        for context in browser.contexts:
            context.close()
        assert witness.found == []


def call(eyes: Eyes, operation_id: str, name: str) -> None:
    body = json.dumps({"operation": operation_id, "input": {"name": name}})
    connection = HTTPConnection(eyes.witness.address.removeprefix("http://"), timeout=30)
    connection.request("POST", "/call", body, {"content-type": "application/json"})
    assert connection.getresponse().status == 200
    connection.close()


def test_added_and_removed_operations_change_the_list(garden: Eyes) -> None:
    page = garden.open()
    expect(page.get_by_role("status")).to_have_text("2 operations")

    call(garden, "garden.plant", "flowers.rose")
    expect(page.get_by_role("link", name="rose")).to_be_visible()
    expect(page.get_by_role("status")).to_have_text("3 operations")
    expect(page.get_by_role("button", name="flowers 1 operation", exact=True)).to_be_visible()

    call(garden, "garden.weed", "flowers.rose")
    expect(page.get_by_role("link", name="rose")).to_have_count(0)
    expect(page.get_by_role("status")).to_have_text("2 operations")


def test_search_and_typed_input_survive_changes(garden: Eyes) -> None:
    page = garden.open("#/garden.plant")
    page.get_by_label("name").first.fill("half wri")
    page.locator("#search").fill("garden")
    expect(page.locator(".row.operation")).to_have_count(2)
    page.get_by_label("name").first.focus()

    call(garden, "garden.plant", "garden.tulip")
    expect(page.locator(".row.operation")).to_have_count(3)
    expect(page.get_by_label("name").first).to_have_value("half wri")
    expect(page.get_by_label("name").first).to_be_focused()
    expect(page.locator("#search")).to_have_value("garden")


def test_a_page_that_waited_for_its_operation_opens_it(garden: Eyes) -> None:
    garden.witness.expect("/schema", 404)
    page = garden.open("#/flowers.lily")
    expect(page.get_by_role("main")).to_contain_text("OPERATION_NOT_FOUND")

    call(garden, "garden.plant", "flowers.lily")
    expect(page.get_by_role("main")).to_contain_text("Grown lately.")


def test_a_page_that_could_not_be_loaded_is_loaded_when_the_server_is_back(garden: Eyes) -> None:
    page = garden.open()
    page.context.set_offline(True)
    page.evaluate("location.hash = '#/garden.plant'")
    expect(page.get_by_role("main")).to_contain_text("UNAVAILABLE")

    page.context.set_offline(False)
    expect(page.get_by_role("main")).to_contain_text("Let something grow.")


def test_recent_calls_are_shown_again_when_the_server_is_back(garden: Eyes) -> None:
    page = garden.open("#/~calls")
    expect(page.get_by_role("main")).to_contain_text("No calls yet.")
    page.context.set_offline(True)
    expect(page.get_by_role("main")).to_contain_text("UNAVAILABLE")

    page.context.set_offline(False)
    expect(page.get_by_role("main")).to_contain_text("No calls yet.")


def test_an_unreachable_server_is_reported_until_it_is_back(garden: Eyes) -> None:
    page = garden.open("#/garden.plant")
    page.get_by_label("name").first.fill("half wri")
    page.context.set_offline(True)
    expect(page.locator("#absent")).to_have_text("The server cannot be reached. Trying again…")

    page.context.set_offline(False)
    expect(page.locator("#absent")).to_be_hidden()
    expect(page.get_by_label("name").first).to_have_value("half wri")
