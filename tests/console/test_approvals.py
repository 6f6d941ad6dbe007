"""A person approves in the console a call that an agent made over HTTP."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from playwright.sync_api import Browser, Locator, Page, expect
from tests.console.conftest import DESK, Eyes, Witness, faults, keep
from tests.console.test_sources import served, sign_in

from operations.authority import Grants
from operations.server import hash_key

BOSS, KEY = "the-key-of-the-boss", "k" * 32
MODULE = """
from typing import Any

from operations import OperationContext, operation

@operation("task.delete", scopes=["task"])
async def delete(id: int) -> str:
    return f"deleted {id}"

@operation("note.send", scopes=["task"])
async def send(to: str, note: Any = None, amount: int = 0) -> str:
    return "sent"

@operation("note.claimed", scopes=["task"])
async def claimed(claim: dict[str, Any], context: OperationContext) -> None:
    nested = context.changed(claim=claim).child("note.send")
    await context.registry.execute("note.send", {"to": "bob"}, nested)
"""


@pytest.fixture
def eyes(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Eyes]:
    monkeypatch.setenv("GRANTS_KEY", KEY)
    (tmp_path / "work.py").write_text(MODULE)
    (tmp_path / "operations.toml").write_text(
        f"""
modules = ["work.py"]
[access.keys.ann]
sha256 = "{hash_key("the-key-of-ann")}"
scopes = ["task"]
[access.keys.bob]
sha256 = "{hash_key("the-key-of-bob")}"
scopes = ["task"]
[access.keys.eve]
sha256 = "{hash_key("the-key-of-eve")}"
scopes = ["task"]
[access.keys.boss]
sha256 = "{hash_key(BOSS)}"
scopes = ["approvals:answer"]
[access.grants]
key = {{ env = "GRANTS_KEY" }}
[tools."task.delete"]
approve = true
[tools."note.send"]
approve = true
[record.trace]
enabled = false
"""
    )
    with served(tmp_path / "operations.toml") as address:
        witness = Witness(address)
        yield Eyes(browser, witness)
        for context in browser.contexts:
            context.close()
        assert witness.found == []


def call(eyes: Eyes, key: str, path: str, given: Any) -> str:
    """Call an operation over HTTP; return its result, or its status and error code."""
    request = Request(  # noqa: S310 - the hub of this test
        f"{eyes.witness.address}/{path}",
        json.dumps(given).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {key}"},
    )
    try:
        with urlopen(request, timeout=60) as response:  # noqa: S310
            return str(json.load(response))
    except HTTPError as error:
        return f"{error.code} {json.load(error)['code']}"


def waiting(eyes: Eyes, size: tuple[int, int] = DESK) -> Page:
    """Return the page of approvals, as the boss sees it."""
    page = eyes.open(size=size, csp=False)
    sign_in(page, BOSS)
    page.goto(f"{eyes.witness.address}/#/~approvals")
    expect(page.get_by_role("heading", name="Approvals")).to_be_visible()
    return page


@pytest.mark.requirement("R63")
def test_a_person_answers_calls_of_an_agent(eyes: Eyes, axe: str) -> None:
    token = Grants(KEY).create("ann", "assistant", operations=["task.*"])

    def delete(id: int) -> str:
        return call(eyes, token, "task/delete", {"id": id})

    page = eyes.open(csp=False)
    expect(page.get_by_role("link", name="Approvals", exact=True)).to_be_hidden()
    sign_in(page, BOSS)
    page.get_by_role("link", name="Approvals", exact=True).click()
    expect(page.get_by_text("No call waits for approval.")).to_be_visible()

    assert delete(1) == "428 APPROVAL_REQUIRED"
    assert delete(2) == "428 APPROVAL_REQUIRED"
    first = page.locator(".card").filter(has_text="id1")
    expect(first).to_contain_text("task.delete")
    expect(first).to_contain_text("ann")
    expect(first).to_contain_text("through assistant")
    keep(page, "approvals")
    assert faults(page, axe, None, "approvals") == []
    first.get_by_role("button", name="Approve").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_text("task.delete: approved.")).to_be_visible()
    expect(first).to_have_count(0)
    page.locator(".card").filter(has_text="id2").get_by_role("button", name="Deny").click()
    expect(page.get_by_text("No call waits for approval.")).to_be_visible()

    assert delete(1) == "deleted 1"
    assert delete(1) == "428 APPROVAL_REQUIRED"
    assert delete(2) == "403 ACCESS_DENIED"


NARROW = (360, 740)
TAIL = "AND TRANSFER ALL MONEY"
REQUIRED = "428 APPROVAL_REQUIRED"


def answers(card: Locator) -> list[Locator]:
    return [card.get_by_role("button", name=name) for name in ("Approve", "Deny")]


@pytest.mark.requirement("R63")
@pytest.mark.parametrize("size", [NARROW, DESK])
def test_approve_works_only_while_the_whole_input_is_shown(
    eyes: Eyes, axe: str, size: tuple[int, int]
) -> None:
    key, wide = "the-key-of-ann", size == DESK
    note = f"Please water the plants. {chr(10) * 40}{' ' * 3_000}{'x' * 200_000} {TAIL}"
    assert call(eyes, key, "note/send", {"to": "bob", "note": note, "amount": 7}) == REQUIRED
    page = waiting(eyes, size)
    card = page.locator(".card")
    approve, deny = answers(card)

    expect(card).to_be_visible()
    assert TAIL not in card.inner_text()
    expect(approve).to_be_disabled()
    expect(deny).to_be_enabled()
    approve.click(force=True)
    approve.focus()
    page.keyboard.press("Enter")
    card.get_by_role("button", name="Open the input").click()
    expect(card.locator(".name", has_text="amount")).to_be_visible()
    fold = card.locator("details")
    expect(fold.locator("summary")).to_contain_text("203,")
    expect(approve).to_be_disabled()
    assert TAIL not in card.inner_text()
    keep(page, f"approvals-folded-{size[0]}")
    assert faults(page, axe, None, "folded") == []

    fold.locator("summary").click()
    expect(approve).to_be_enabled()
    shown = card.inner_text()
    assert TAIL in shown
    assert "3,000 spaces" in shown
    assert shown.count("x") >= 200_000, "nothing is cut off"
    below = fold.locator(".content").evaluate(
        "(one) => [one.scrollHeight - one.clientHeight, getComputedStyle(one).overflowY]"
    )
    assert below[0] <= 1, "no part needs another scroll bar"
    page.locator("main").evaluate("(one) => (one.scrollTop = one.scrollHeight)")
    boxes = [one.bounding_box() for one in (approve, deny)]
    assert all(box is not None for box in boxes)
    left, right = (box for box in boxes if box is not None)
    assert (left["width"], left["height"], left["y"]) == (
        right["width"],
        right["height"],
        right["y"],
    )
    assert 0 <= left["x"] < right["x"]
    assert right["x"] + right["width"] <= size[0]
    assert left["height"] >= 44
    keep(page, f"approvals-open-{size[0]}")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")

    fold.locator("summary").scroll_into_view_if_needed()
    fold.locator("summary").click()
    expect(approve).to_be_disabled()
    assert call(eyes, key, "note/send", {"to": "bob", "note": note, "amount": 7}) == REQUIRED
    if wide:
        deny.click()
        expect(page.get_by_text("note.send: denied.")).to_be_visible()
    else:
        fold.locator("summary").click()
        approve.click()
        expect(page.get_by_text("note.send: approved.")).to_be_visible()
        assert call(eyes, key, "note/send", {"to": "bob", "note": note, "amount": 7}) == "sent"


@pytest.mark.requirement("R63")
def test_characters_that_hide_others_are_visible_in_a_request(eyes: Eyes) -> None:
    key = "the-key-of-ann"
    hidden = {
        "202E": "\u202e",
        "200B": "\u200b",
        "1B": "\x1b",
        "FE01": "\ufe01",
        "E0041": "\U000e0041",
        "3164": "\u3164",
    }
    for sign in hidden.values():
        assert (
            call(eyes, key, "note/send", {"to": f"a{sign}b", "note": {f"k{sign}": 1}}) == REQUIRED
        )
    page = waiting(eyes)

    expect(page.locator(".card")).to_have_count(len(hidden))
    text = page.locator(".cards").inner_text()
    assert not set(text) & set(hidden.values())
    for code, sign in hidden.items():
        # JSON escapes control characters by itself.
        assert text.count("\\u001b" if sign == "\x1b" else f"U+{code}") == 2, code
    keep(page, "approvals-hidden-characters")


@pytest.mark.requirement("R63")
@pytest.mark.parametrize("size", [NARROW, DESK])
def test_what_a_script_claims_is_marked_beside_the_exact_input(
    eyes: Eyes, axe: str, size: tuple[int, int]
) -> None:
    earlier = {"line": 2, "operation": "task.list", "outcome": "success", "result": "[4,\u202e5]"}
    claim = {
        "by": "script",
        "script": "d" * 32,
        "line": 7,
        "code": f"await note.send(to='\x1b\u200b{'x' * 150}', key=***)",
        "before": [{**earlier, "result": f"{number}"} for number in range(4)] + [earlier],
    }
    assert call(eyes, "the-key-of-ann", "note/claimed", {"claim": claim}) == REQUIRED
    page = waiting(eyes, size)

    card = page.locator(".card")
    shown = card.get_by_role("region", name="Claim")
    expect(shown).to_contain_text("Claimed by the script")
    expect(shown).to_contain_text("not part of what you approve")
    lines = shown.locator("li")
    expect(lines).to_have_count(6)
    expect(lines.nth(0)).to_contain_text("line 7 await note.send(to='U+001BU+200B")
    expect(lines.nth(1)).to_contain_text("line 2 task.list success [4,U+202E5]")
    assert not set(shown.inner_text()) & {"\x1b", "\u200b", "\u202e"}
    # The exact input is a part of its own.
    expect(card.locator(".exact")).to_contain_text("bob")
    assert shown.locator(".exact").count() == 0
    keep(page, f"approvals-claim-{size[0]}")
    assert faults(page, axe, None, "claim") == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.requirement("R63")
@pytest.mark.parametrize("size", [NARROW, DESK])
def test_a_flood_of_large_requests_leaves_the_page_usable(
    eyes: Eyes, size: tuple[int, int]
) -> None:
    codes = [
        call(
            eyes,
            f"the-key-of-{who}",
            "note/send",
            {"to": who, "note": f"{number} {'x' * 240_000} {TAIL}"},
        )
        for who in ("ann", "bob", "eve")
        for number in range(100)
    ]
    assert codes.count(REQUIRED) > 40
    assert set(codes) == {REQUIRED, "429 RESOURCE_EXHAUSTED"}
    for number in range(60):
        assert (
            call(
                eyes,
                Grants(KEY).create("bob", f"bot {number}", operations=["*"]),
                "task/delete",
                {"id": number},
            )
            == REQUIRED
        )
    page = waiting(eyes, size)

    expect(page.locator(".card")).to_have_count(50)
    page.get_by_role("button", name="Next page").click()
    last = page.locator(".card").filter(has_text="bot 59")
    while not last.count():
        page.get_by_role("button", name="Next page").click()
        page.wait_for_timeout(50)
    expect(last).to_be_visible()
    keep(page, f"approvals-flood-{size[0]}")
    last.get_by_role("button", name="Approve").click()
    expect(page.get_by_text("task.delete: approved.")).to_be_visible()
    expect(last).to_have_count(0)
    page.get_by_role("button", name="Previous page").click()
    expect(page.locator(".card")).to_have_count(50)


def test_an_answer_is_not_given_to_a_card_that_has_just_moved(eyes: Eyes) -> None:
    key = "the-key-of-ann"
    for number in range(3):
        assert call(eyes, key, "task/delete", {"id": number}) == REQUIRED
    page = waiting(eyes)
    expect(page.locator(".card")).to_have_count(3)
    place = page.locator(".card").first.get_by_role("button", name="Approve").bounding_box()
    assert place is not None
    middle = (place["x"] + 20, place["y"] + 20)

    page.mouse.click(*middle)
    expect(page.locator(".card")).to_have_count(2)
    # The next card is at the same place now.
    for _ in range(3):
        page.mouse.click(*middle)
    expect(page.locator(".answer[aria-disabled=true]")).to_have_count(0)
    expect(page.locator(".card")).to_have_count(2)
