"""axe-core finds no violation in any view, in light and dark, on a desktop and on a phone."""

import pytest
from playwright.sync_api import expect
from tests.console.conftest import PHONE, Eyes, faults
from tests.console.hub import KEY


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dark", "rules"),
    # In the dark only the colours are different.
    [(False, None), (True, ["color-contrast"])],
    ids=["light", "dark"],
)
def test_every_view_is_accessible(
    eyes: Eyes, axe: str, dark: bool, rules: list[str] | None
) -> None:
    eyes.witness.expect("/call", 422)
    # The script of the test is not a file of the console, and may run only here.
    page = eyes.open(dark=dark, csp=False)
    found = faults(page, axe, rules, "welcome")

    page.keyboard.press("/")
    page.keyboard.type("task")
    found += faults(page, axe, rules, "search")
    page.goto(f"{eyes.witness.address}/#/shop.deliver")
    expect(page.get_by_role("heading", level=1)).to_have_text("shop.deliver")
    for name in ("days", "notes", "parts"):
        page.get_by_role("button", name=f"Add {name}").click()
    page.get_by_role("button", name="Add item").click()
    page.get_by_role("button", name="Add property").click()
    page.get_by_text("Copy as curl, Python or MCP").click()
    page.get_by_text("Input schema").click()
    page.get_by_role("button", name="Call", exact=True).click()
    expect(page.locator(".chip.bad")).to_be_visible()
    found += faults(page, axe, rules, "form with errors")
    page.get_by_role("tab", name="JSON").click()
    found += faults(page, axe, rules, "JSON")
    page.goto(f"{eyes.witness.address}/#/clock.count")
    page.get_by_label("to", exact=True).fill("3")
    page.get_by_role("button", name="Subscribe").click()
    expect(page.locator(".chip")).to_have_text("complete")
    found += faults(page, axe, rules, "stream")
    page.get_by_role("button", name="Sign in").click()
    found += faults(page, axe, rules, "sign in")
    page.get_by_label("Key or token").fill(KEY)
    page.keyboard.press("Enter")
    page.goto(f"{eyes.witness.address}/#/weather.forecast")
    page.get_by_role("button", name="Call", exact=True).click()
    expect(page.locator(".chip.good")).to_be_visible()
    found += faults(page, axe, rules, "result")
    page.get_by_role("link", name="Recent calls").click()
    expect(page.locator(".call-tree").first).to_be_visible()
    found += faults(page, axe, rules, "recent calls")
    page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
    found += faults(page, axe, rules, "phone")

    assert found == []
