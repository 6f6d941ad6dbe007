"""A denied call works after signing in, and the key is never stored."""

from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect
from tests.console.conftest import DESK, PHONE, Eyes, Witness, keep
from tests.console.hub import KEY, build_registry, served


def sign_in(page: Page, key: str = KEY) -> None:
    page.get_by_role("banner").get_by_role("button", name="Sign in").click()
    page.get_by_label("Key or token").fill(key)
    page.keyboard.press("Enter")


def test_a_denied_call_works_after_signing_in(eyes: Eyes) -> None:
    eyes.witness.expect("/schema", 404)
    page = eyes.open("#/task.finish")

    expect(page.get_by_text("You may see it after you sign in.")).to_be_visible()
    assert page.locator(".row.operation", has_text="finish").count() == 0
    keep(page, "denied")
    sign_in(page)
    expect(page.get_by_role("heading", level=1)).to_have_text("task.finish")
    expect(page.get_by_role("banner")).to_contain_text("alice")
    page.get_by_label("id").fill("1")
    page.get_by_role("button", name="Call", exact=True).click()
    expect(page.locator(".side.data")).to_contain_text("done: true")
    keep(page, "signed-in")
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_text("You may see it after you sign in")).to_be_visible()
    sign_in(page)
    expect(page.get_by_label("id", exact=True)).to_have_value("")


def test_an_expired_session_is_reported_with_a_button_to_sign_in(eyes: Eyes) -> None:
    eyes.witness.expect("/call", 401)
    page = eyes.open("#/task.get")
    sign_in(page)
    page.get_by_role("link", name="finish").click()
    page.get_by_label("id").fill("1")
    page.context.clear_cookies()

    page.get_by_role("button", name="Call", exact=True).click()
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("ACCESS_DENIED")
    alert.get_by_role("button", name="Sign in").click()
    page.get_by_label("Key or token").fill(KEY)
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_hidden()
    expect(page.get_by_label("id")).to_have_value("1")
    page.get_by_role("button", name="Call", exact=True).click()
    expect(page.locator(".chip.good")).to_be_visible()


@pytest.mark.parametrize("value", [None, "x" * 43])
def test_the_name_of_an_expired_session_disappears(eyes: Eyes, value: str | None) -> None:
    if value is not None:
        eyes.witness.expect("/operations", 401)
    page = eyes.open()
    sign_in(page)
    expect(page.get_by_role("banner")).to_contain_text("alice")
    [cookie] = page.context.cookies()
    if value is None:
        page.context.clear_cookies()
    else:
        stale = {**cookie, "value": value}
        page.context.add_cookies([stale])  # type: ignore[list-item]

    expect(page.get_by_role("banner")).not_to_contain_text("alice", timeout=15_000)
    expect(page.get_by_role("banner").get_by_role("button", name="Sign in")).to_be_visible()


@pytest.mark.parametrize("status", [200, 429])
def test_the_caller_is_kept_and_not_drawn_again_while_nothing_changes(
    eyes: Eyes, status: int
) -> None:
    if status != 200:
        eyes.witness.expect("/session", status)
    page = eyes.open("#/task.get")
    sign_in(page)
    expect(page.get_by_role("heading", level=1)).to_be_focused()
    button = page.get_by_role("button", name="Sign out")
    button.focus()

    def changed(route: Route) -> None:
        headers = {
            name: value for name, value in route.request.headers.items() if name != "if-none-match"
        }
        route.continue_(headers=headers)

    page.route("**/operations", changed)
    if status != 200:
        page.route("**/session", lambda route: route.fulfill(status=status))
    for _ in range(2):
        with page.expect_response("**/session"):
            pass

    expect(page.get_by_role("banner")).to_contain_text("alice")
    expect(button).to_be_focused()


def test_an_expired_cookie_does_not_prevent_signing_in(eyes: Eyes) -> None:
    eyes.witness.expect("/session", 401)
    page = eyes.open()
    sign_in(page)
    expect(page.get_by_role("banner")).to_contain_text("alice")
    [cookie] = page.context.cookies()
    assert cookie["httpOnly"]
    assert cookie["sameSite"] == "Strict"
    stale = {**cookie, "value": "x" * 43}
    page.context.add_cookies([stale])  # type: ignore[list-item]

    page.reload()
    expect(page.get_by_role("link", name="quote")).to_be_visible()
    expect(page.get_by_role("banner").get_by_role("button", name="Sign in")).to_be_visible()


def test_a_wrong_key_is_rejected_in_the_dialog(eyes: Eyes) -> None:
    eyes.witness.expect("/session", 401)
    page = eyes.open()

    sign_in(page, "wrong")
    expect(page.get_by_role("alert")).to_have_text("This key or token is not valid.")
    expect(page.get_by_label("Key or token")).to_have_value("")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()


@pytest.mark.requirement("R16")
def test_the_key_is_kept_nowhere(eyes: Eyes) -> None:
    urls: list[str] = []
    page = eyes.open()
    page.on("request", lambda request: urls.append(request.url))

    sign_in(page)
    expect(page.get_by_role("banner")).to_contain_text("alice")
    page.get_by_role("link", name="finish").click()
    page.get_by_label("id").fill("1")
    page.get_by_text("Copy as curl, Python or MCP").click()
    assert "$OPERATIONS_KEY" in page.get_by_label("curl", exact=True).last.inner_text()
    kept = page.evaluate(
        "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href,"
        " document.documentElement.outerHTML, document.getElementById('key').value])"
    )
    assert KEY not in kept
    assert not any(KEY in url for url in urls)


def test_recent_calls_are_a_tree_of_the_callers_own_calls(eyes: Eyes) -> None:
    page = eyes.open("#/task.summary")
    page.get_by_role("button", name="Call", exact=True).click()
    expect(page.locator(".chip.good")).to_be_visible()
    page.get_by_role("link", name="Recent calls").click()
    expect(page.get_by_text("No calls yet.")).to_be_visible()

    sign_in(page)
    expect(page.get_by_role("banner")).to_contain_text("alice")
    page.get_by_role("link", name="summary").click()
    page.get_by_role("button", name="Call", exact=True).click()
    expect(page.locator(".chip.good")).to_be_visible()
    page.get_by_role("link", name="Recent calls").click()
    tree = page.locator(".call-tree").first
    expect(tree.locator(".name")).to_have_text(["task.summary", "task.get", "task.get"])
    expect(tree.locator(".took").first).to_contain_text("ms")
    keep(page, "recent-calls")


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_the_first_visit_of_a_protected_console_is_a_page_to_sign_in(
    browser: Browser, size: tuple[int, int]
) -> None:
    with served(build_registry(), is_protected=True) as address:
        witness = Witness(address)
        witness.expect("/operations", 401)
        witness.expect("/session", 401)
        page = Eyes(browser, witness).open(size=size)
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
        expect(page.locator(".result.failed")).to_have_count(0)
        keep(page, f"protected-{size[0]}")
        page.locator("#page-key").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_have_text("This key or token is not valid.")
        page.locator("#page-key").fill(KEY)
        page.keyboard.press("Enter")
        expect(page.get_by_role("banner")).to_contain_text("alice")
        expect(page.get_by_role("heading", name="Sign in")).to_have_count(0)
        expect(page.get_by_role("link", name="finish")).to_be_visible()
        assert witness.found == []
        page.context.close()


def test_bars_of_calls_have_one_scale(eyes: Eyes) -> None:
    page = eyes.open()
    sign_in(page)
    expect(page.get_by_role("banner")).to_contain_text("alice")
    calls = [
        {
            "requestId": str(n),
            "operationId": "task.get",
            "startedAt": n,
            "duration": s,
            "outcome": "success",
        }
        for n, s in enumerate((1.0, 0.25, 0.5))
    ]
    page.route("**/calls", lambda route: route.fulfill(json={"calls": calls}))
    page.get_by_role("link", name="Recent calls").click()
    expect(page.locator(".call-tree")).to_have_count(3)
    track = page.locator(".track").first.bounding_box()
    widths = [bar.bounding_box() for bar in page.locator(".track .bar").all()]
    assert track is not None
    parts = [round(each["width"] / track["width"], 2) for each in widths if each is not None]
    assert parts == [0.5, 0.25, 1.0], "the latest call is first"


def test_a_phone_shows_time_and_duration_of_a_call_below_its_name(eyes: Eyes) -> None:
    page = eyes.open(size=PHONE)
    made = {"requestId": "1", "operationId": "task.get", "startedAt": 1, "outcome": "success"}
    page.route("**/calls", lambda route: route.fulfill(json={"calls": [{**made, "duration": 1}]}))
    page.get_by_role("link", name="Recent calls").click()
    call = page.locator(".call-tree").first
    expect(call.locator(".took").first).to_be_visible()
    places: list[Any] = [
        call.locator(f".{name}").first.bounding_box()
        for name in ("name", "outcome-word", "when", "took")
    ]
    assert None not in places, "all are visible"
    name, outcome, when, took = places
    assert when["x"] == name["x"]
    assert when["y"] == took["y"] > outcome["y"]
    assert took["x"] + took["width"] == outcome["x"] + outcome["width"]
    keep(page, "recent-calls-phone")
