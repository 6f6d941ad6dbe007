"""Calling an operation from its form."""

import json
import shlex
import subprocess
import sys
from typing import Any

from playwright.sync_api import Locator, Page, expect
from tests.console.conftest import Eyes, keep
from tests.console.hub import PICTURE, STATE
from tests.limits import scaled


def call(page: Page) -> None:
    page.get_by_role("button", name="Call", exact=True).click()


def raw(page: Page) -> Locator:
    page.get_by_role("tab", name="JSON").first.click()
    return page.get_by_label("Input as JSON")


def entered(page: Page) -> Any:
    return json.loads(raw(page).input_value())


def fill_quote(page: Page) -> None:
    page.get_by_label("customer").fill("Ada")
    page.get_by_label("street").fill("Main St 1")
    page.get_by_label("city").fill("London")
    page.get_by_role("button", name="Add item").click()
    page.get_by_label("article").fill("lamp")


def test_a_nested_form_calls_a_query_and_shows_data_beside_meta(eyes: Eyes) -> None:
    page = eyes.open("#/shop.quote")

    fill_quote(page)
    page.get_by_role("radio", name="high").check(force=True)
    page.get_by_label("deliver_on", exact=True).fill("2026-12-24")
    call(page)
    result = page.get_by_role("region", name="Result")
    expect(result).to_contain_text("success")
    expect(result.locator(".status")).to_contain_text("ms")
    data, meta = result.locator(".side.data"), result.locator(".side.meta")
    expect(data).to_contain_text("number: 1042")
    expect(meta).to_contain_text("operationId: shop.quote")
    left, right = data.bounding_box(), meta.bounding_box()
    assert left is not None
    assert right is not None
    assert left["x"] + left["width"] <= right["x"]
    assert abs(left["y"] - right["y"]) < 2
    keep(page, "result")
    assert entered(page) == {
        "customer": "Ada",
        "address": {"street": "Main St 1", "city": "London"},
        "lines": [{"article": "lamp"}],
        "priority": "high",
        "deliver_on": "2026-12-24",
    }


def test_a_validation_error_is_shown_at_its_field(eyes: Eyes) -> None:
    eyes.witness.expect("/call", 422)
    page = eyes.open("#/shop.quote")

    fill_quote(page)
    quantity = page.get_by_label("quantity")
    quantity.fill("many")
    quantity.press("Control+Enter")
    expect(quantity).to_have_attribute("aria-invalid", "true")
    expect(quantity).to_be_focused()
    described = page.locator(f"#{quantity.get_attribute('aria-describedby')}")
    expect(described).to_have_text("must be an integer, not a string")
    expect(page.locator("[aria-invalid=true]")).to_have_count(1)
    keep(page, "validation-error")
    quantity.fill("2")
    expect(described).to_be_hidden()
    call(page)
    expect(page.locator(".chip.good")).to_be_visible()


def test_a_missing_part_is_reported_with_its_location(eyes: Eyes) -> None:
    eyes.witness.expect("/call", 422)
    page = eyes.open("#/shop.deliver")

    call(page)
    size = page.get_by_label("size")
    expect(size).to_have_attribute("aria-invalid", "true")
    # Within the chosen alternative.
    page.get_by_label("size").fill("1")
    page.get_by_role("combobox", name="method").select_option("Courier")
    raw(page).fill('{"size": 1, "method": {"kind": "courier", "to": {"city": 5}}}')
    call(page)
    expect(page.locator(".chip.bad")).to_have_text("VALIDATION_ERROR")
    page.get_by_role("tab", name="Form").click()
    expect(
        page.get_by_role("group", name="to", exact=True).locator(".error:visible")
    ).to_contain_text("must be a string")


def test_form_and_json_agree(eyes: Eyes) -> None:
    page = eyes.open("#/shop.deliver")
    given = {
        "size": 3,
        "method": {"kind": "courier", "to": {"city": "Rome", "street": ""}},
        "when": "2026-02-03T04:05:06+02:00",
        "days": ["mon", "fri"],
        "notes": {"__proto__": "kept", "b": "c"},
        "parts": [{"name": "a", "parts": [{"name": "b", "parts": []}]}],
        "insured": None,
        "colour": "red",
        "label": PICTURE,
    }

    raw(page).fill(json.dumps(given))
    page.get_by_role("tab", name="Form").click()
    expect(page.get_by_role("combobox", name="method")).to_have_value("1")
    expect(page.get_by_label("city")).to_have_value("Rome")
    expect(page.get_by_role("checkbox", name="fri")).to_be_checked()
    expect(page.get_by_role("combobox", name="colour")).to_have_value("0")
    keep(page, "form")
    # A change at one place leaves everything else as it was.
    page.get_by_label("city").fill("Oslo")
    given["method"]["to"]["city"] = "Oslo"  # type: ignore[index]
    assert entered(page) == given
    call(page)
    expect(page.locator(".chip.good")).to_be_visible()


def test_undeclared_values_are_kept_and_sent(eyes: Eyes) -> None:
    eyes.witness.expect("/call", 422)
    page = eyes.open("#/shop.deliver")
    odd = {"size": {"not": "a number"}, "method": 7, "days": "mon", "more": [1]}

    raw(page).fill(json.dumps(odd))
    page.get_by_role("tab", name="Form").click()
    page.get_by_label("Property name").press("End")
    assert entered(page) == odd
    call(page)
    expect(page.locator(".chip.bad")).to_have_text("VALIDATION_ERROR")


def test_large_numbers_stay_exact(eyes: Eyes) -> None:
    page = eyes.open("#/shop.deliver")
    exact = "12345678901234567890"

    method = '"method": {"kind": "pickup", "shop": "x"}'
    raw(page).fill(f'{{"size": 1, {method}, "exact": {exact}}}')
    page.get_by_role("tab", name="Form").click()
    expect(page.get_by_label("exact")).to_have_value(exact)
    page.get_by_label("size").fill("2")
    assert exact in raw(page).input_value()
    call(page)
    expect(page.locator(".side.data")).to_contain_text(f"exact: {exact}")


def test_text_that_is_not_json_is_not_sent(eyes: Eyes) -> None:
    page = eyes.open("#/task.get")

    raw(page).fill('{"id": ')
    expect(page.get_by_text("This is not valid JSON")).to_be_visible()
    call(page)
    expect(page.get_by_text("Call it to see the result here.")).to_be_visible()


def test_a_file_is_sent_as_base64(eyes: Eyes) -> None:
    page = eyes.open("#/shop.deliver")

    page.get_by_label("label").set_input_files(
        {"name": "label.png", "mimeType": "image/png", "buffer": b"\x89PNG bytes"}
    )
    expect(page.get_by_text("label.png, 10 bytes")).to_be_visible()
    assert entered(page)["label"] == "iVBORyBieXRlcw=="


def test_null_defaults_and_alternatives(eyes: Eyes) -> None:
    page = eyes.open("#/shop.deliver")

    assert entered(page) == {"method": {"kind": "pickup"}}, "what is not set is not sent"
    page.get_by_role("tab", name="Form").click()
    page.get_by_role("button", name="Set null insured").click()
    page.get_by_role("combobox", name="method").select_option("Courier")
    assert entered(page) == {
        "method": {"kind": "courier", "to": {}},
        "insured": None,
    }
    page.get_by_role("button", name="Reset").click()
    assert "insured" not in entered(page)


def test_lists_grow_and_shrink(eyes: Eyes) -> None:
    page = eyes.open("#/shop.quote")

    for article in ("lamp", "desk", "chair"):
        page.get_by_role("button", name="Add item").click()
        page.get_by_label("article").last.fill(article)
    page.get_by_role("button", name="Remove this item").nth(1).click()
    assert entered(page)["lines"] == [{"article": "lamp"}, {"article": "chair"}]


def test_declared_errors_show_code_status_and_details(eyes: Eyes) -> None:
    eyes.witness.expect("/call", 409)
    page = eyes.open("#/shop.quote")

    fill_quote(page)
    page.get_by_label("article").fill("moon")
    page.get_by_label("article").press("Enter")
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("SOLD_OUT")
    expect(alert).to_contain_text("HTTP 409")
    expect(alert).to_contain_text("article: moon")


def test_a_tool_error_is_shown_as_an_error(eyes: Eyes) -> None:
    page = eyes.open("#/weather.broken")

    call(page)
    expect(page.locator(".chip.bad")).to_have_text("tool error")
    expect(page.locator(".side.meta")).to_contain_text("isError: true")


def test_pictures_in_results_are_shown(eyes: Eyes) -> None:
    page = eyes.open("#/weather.forecast")

    call(page)
    expect(page.get_by_role("img", name="A picture in the result")).to_be_attached()
    page.goto(page.url.split("#")[0] + "#/shop.receipt")
    expect(page.get_by_role("heading", level=1)).to_have_text("shop.receipt")
    call(page)
    expect(page.get_by_role("button", name="Save")).to_be_visible()
    expect(page.get_by_role("img", name="A picture in the result")).to_be_attached()


def test_cancelling_stops_the_handler(eyes: Eyes) -> None:
    page = eyes.open("#/task.slow")

    call(page)
    until(page, lambda: STATE["open"] == 1)
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_text("Cancelled.")).to_be_visible()
    until(page, lambda: STATE["open"] == 0)


def test_input_is_kept_when_returning_to_a_page(eyes: Eyes) -> None:
    page = eyes.open("#/task.get")

    page.get_by_label("id").fill("2")
    page.get_by_role("link", name="quote").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("shop.quote")
    page.go_back()
    expect(page.get_by_label("id")).to_have_value("2")


def snippet(page: Page, name: str) -> str:
    page.get_by_role("tab", name=name).click()
    return page.get_by_label(name, exact=True).last.inner_text()


def test_a_call_can_be_copied_as_curl_python_and_mcp(eyes: Eyes) -> None:
    page = eyes.open("#/shop.quote")
    fill_quote(page)
    page.get_by_label("customer").fill("O'Hara \u201cAda\u201d $HOME")
    page.get_by_role("radio", name="true").check(force=True)
    given = entered(page)

    page.get_by_text("Copy as curl, Python or MCP").click()
    python = snippet(page, "Python")
    printed = subprocess.run(
        [sys.executable, "-c", python], capture_output=True, check=True, timeout=scaled(100)
    )
    assert given["customer"] in printed.stdout.decode()
    words = shlex.split(snippet(page, "curl").replace("\\\n", ""))
    assert words[0] == "curl"
    assert json.loads(words[words.index("-d") + 1]) == given
    request = json.loads(snippet(page, "MCP"))
    assert request["method"] == "tools/call"
    assert request["params"] == {"name": "shop.quote", "arguments": given}
    keep(page, "snippets")


def until(page: Page, condition: Any) -> None:
    """Wait for something that happens in the hub."""
    for _ in range(200):
        if condition():
            return
        page.wait_for_timeout(25)
    raise AssertionError("it did not happen")
