"""Finding an operation."""

import pytest
from playwright.sync_api import expect
from tests.console.conftest import PHONE, Eyes, keep


def test_operations_are_grouped_by_namespace_with_type_and_source(eyes: Eyes) -> None:
    page = eyes.open()
    listed = page.get_by_role("navigation", name="Operations")

    expect(listed.get_by_role("button", name="shop 3")).to_have_attribute("aria-expanded", "true")
    row = listed.get_by_role("link", name="getPet")
    expect(row).to_contain_text("Find a pet by its id")
    expect(row).to_contain_text("openapi")
    expect(row.get_by_role("img", name="query")).to_be_visible()
    for name, source in (("forecast", "mcp"), ("stock", "remote"), ("quote", "local")):
        expect(listed.get_by_role("link", name=name)).to_contain_text(source)
    keep(page, "browse")


def test_a_namespace_can_be_folded(eyes: Eyes) -> None:
    page = eyes.open()
    group = page.get_by_role("button", name="shop 3", exact=True)

    group.click()
    expect(group).to_have_attribute("aria-expanded", "false")
    expect(page.get_by_role("link", name="quote")).to_have_count(0)


def test_search_ranks_names_first_and_enter_opens_the_best(eyes: Eyes) -> None:
    page = eyes.open()

    page.keyboard.press("/")
    page.keyboard.type("deliv")
    expect(page.locator(".row.operation .name").first).to_have_text("shop.deliver")
    expect(page.get_by_role("status")).to_contain_text("of 12")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("shop.deliver")


def test_every_view_can_be_reached_by_keyboard(eyes: Eyes) -> None:
    page = eyes.open()

    page.keyboard.press("/")
    page.keyboard.type("task")
    for key in ("ArrowDown", "ArrowDown", "ArrowUp", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    heading = page.get_by_role("heading", level=1)
    expect(heading).to_be_focused()
    assert heading.inner_text().startswith("task.")
    page.keyboard.press("Escape")
    expect(heading).to_have_text("Everything you can call")
    page.keyboard.press("/")
    page.keyboard.press("Escape")
    expect(page.locator("#search")).to_have_value("")


def test_filters_narrow_the_list(eyes: Eyes) -> None:
    page = eyes.open()

    page.get_by_role("combobox", name="All types").select_option("subscription")
    expect(page.locator(".row.operation")).to_have_count(2)
    page.get_by_role("combobox", name="All types").select_option("")
    page.get_by_role("combobox", name="All sources").select_option("mcp")
    expect(page.locator(".row.operation")).to_have_count(2)


def test_an_address_leads_to_an_operation_and_back_leads_back(eyes: Eyes) -> None:
    page = eyes.open("#/task.get")

    expect(page.get_by_role("heading", level=1)).to_have_text("task.get")
    page.get_by_role("link", name="quote").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("shop.quote")
    page.go_back()
    expect(page.get_by_role("heading", level=1)).to_have_text("task.get")


def test_an_unknown_address_shows_a_message(eyes: Eyes) -> None:
    eyes.witness.expect("/schema", 404)
    page = eyes.open("#/task.nothing")

    expect(page.locator(".chip")).to_have_text("OPERATION_NOT_FOUND")


def test_a_phone_shows_the_list_and_then_one_operation(eyes: Eyes) -> None:
    page = eyes.open(size=PHONE)

    expect(page.get_by_role("link", name="quote")).to_be_visible()
    keep(page, "phone-list")
    page.get_by_role("link", name="quote").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("shop.quote")
    expect(page.get_by_role("navigation")).to_be_hidden()
    width = page.evaluate("document.scrollingElement.scrollWidth")
    assert width <= PHONE[0], "nothing may stick out at the side"
    keep(page, "phone-operation")
    page.get_by_role("link", name="Back to the list").click()
    expect(page.get_by_role("link", name="quote")).to_be_visible()


def test_colours_follow_the_system_and_the_switch(eyes: Eyes) -> None:
    def background() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    page = eyes.open(dark=True)
    dark = background()
    keep(page, "dark")
    switch = page.get_by_role("button", name="Colours")
    switch.click()
    expect(switch).to_have_attribute("aria-label", "Colours: light")
    light = background()
    assert light != dark
    page.reload()
    page.locator(".row.operation").first.wait_for()
    assert background() == light, "the choice is kept"
    switch.click()
    assert background() == dark


@pytest.mark.requirement("R47")
def test_third_party_text_is_shown_as_text(eyes: Eyes) -> None:
    page = eyes.open("#/weather.broken")

    words = page.locator(".description")
    expect(words).to_contain_text('<img src=x onerror="document.title=')
    for hidden in ("U+202E", "U+202C", "U+200B"):
        expect(words.locator(".unseen", has_text=hidden)).to_be_visible()
    assert page.locator("img").count() == 0
    assert page.title() == "weather.broken · operations"
