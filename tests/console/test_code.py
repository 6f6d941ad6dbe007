"""A person writes a script in the console, checks and runs it, and sees its calls."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect
from tests.console.conftest import DESK, Eyes, Witness, faults, keep
from tests.console.test_sources import served, sign_in

from operations.server import hash_key

pytest.importorskip("pydantic_monty")

ANN, BOB = "the-key-of-ann", "the-key-of-bob"
NARROW = (360, 740)
MODULE = """
from operations import operation

@operation("shop.items", type="query")
async def items(limit: int = 10) -> list[int]:
    \"\"\"List the items \u202eof the shop.\"\"\"
    return [*range(limit)]

@operation("shop.order")
async def order(item: int) -> str:
    \"\"\"Order an item.\"\"\"
    return f"ordered {item}"
"""
SCRIPT = """\
for item in await shop.items(limit=2):
    print(await shop.order(item=item))
return {"sum": 41 + 1}
"""


@pytest.fixture
def runs() -> str:
    """More of the config."""
    return ""


@pytest.fixture
def eyes(browser: Browser, tmp_path: Path, runs: str) -> Iterator[Eyes]:
    (tmp_path / "work.py").write_text(MODULE)
    (tmp_path / "operations.toml").write_text(
        f"""
modules = ["work.py"]
[access.keys.ann]
sha256 = "{hash_key(ANN)}"
scopes = ["code"]
[access.keys.bob]
sha256 = "{hash_key(BOB)}"
[code]
scopes = ["code"]
{runs}
"""
    )
    with served(tmp_path / "operations.toml") as address:
        witness = Witness(address)
        yield Eyes(browser, witness)
        for context in browser.contexts:
            context.close()
        assert witness.found == []


def fits(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


@pytest.mark.requirement("R63")
@pytest.mark.parametrize("size", [NARROW, DESK])
def test_a_person_writes_checks_and_runs_a_script(
    eyes: Eyes, axe: str, size: tuple[int, int]
) -> None:
    eyes.witness.expect("/call", 422)
    page = eyes.open(size=size, csp=False)
    expect(page.get_by_role("link", name="Code", exact=True)).to_be_hidden()
    sign_in(page, ANN)
    page.get_by_role("link", name="Code", exact=True).click()
    expect(page.get_by_role("heading", name="Code", exact=True)).to_be_visible()
    assert faults(page, axe, None, "empty") == []

    page.get_by_label("Find operations").fill("items of the shop")
    page.keyboard.press("Enter")
    stubs = page.get_by_label("Stubs", exact=True).and_(page.locator("pre"))
    expect(stubs).to_contain_text("async def items(self, *, limit: int = ...) -> list[int]")
    assert "\u202e" not in stubs.inner_text()

    script = page.get_by_role("textbox", name="Script")
    script.fill("first = 1\nreturn await shop.itms()")
    page.get_by_role("button", name="Check").click()
    result = page.get_by_role("alert").and_(page.get_by_label("Result"))
    expect(result).to_contain_text("SCRIPT_REJECTED")
    expect(result).to_contain_text("itms")
    assert faults(page, axe, None, "rejected") == []
    keep(page, f"code-rejected-{size[0]}")
    result.get_by_role("button", name="line 2").click()
    assert page.evaluate("getSelection().toString()") == "return await shop.itms()"

    script.fill(SCRIPT)
    page.get_by_role("button", name="Check").click()
    expect(page.get_by_label("Result")).to_contain_text("Nothing has run.")
    expect(page.get_by_role("region", name="Calls")).to_have_count(0)
    script.press("Control+Enter")
    expect(page.get_by_label("Result")).to_contain_text("sum: 42")
    expect(page.get_by_label("Printed")).to_have_text("ordered 0\nordered 1\n")
    calls = page.get_by_role("region", name="Calls")
    expect(calls).to_contain_text("Calls: 3")
    rows = calls.get_by_role("listitem")
    expect(rows).to_have_count(4)
    expect(rows.nth(0)).to_contain_text("code.run")
    expect(rows.nth(1)).to_contain_text("shop.items")
    expect(rows.nth(3)).to_contain_text("shop.order")
    assert faults(page, axe, None, "result") == []
    keep(page, f"code-result-{size[0]}")
    assert fits(page)

    # The script stays while the page is not shown, and an exception has its calls as well.
    rows.nth(1).get_by_role("link").click()
    expect(page.get_by_role("heading", name="shop.items")).to_be_visible()
    page.get_by_role("link", name="Code", exact=True).click()
    expect(script).to_have_value(SCRIPT)
    script.fill("await shop.items()\nreturn [1][2]")
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_label("Result")).to_contain_text("SCRIPT_FAILED")
    expect(rows.nth(1)).to_contain_text("shop.items")
    assert fits(page)


@pytest.mark.requirement("R63")
def test_the_page_is_shown_only_to_callers_who_may_run_scripts(eyes: Eyes) -> None:
    page = eyes.open()
    sign_in(page, BOB)
    expect(page.locator("#summary")).to_contain_text("operations")
    expect(page.get_by_role("link", name="Code", exact=True)).to_be_hidden()
    page.goto(f"{eyes.witness.address}/#/~code")
    expect(page.get_by_text("You may not see this page.")).to_be_visible()
    expect(page.get_by_role("textbox", name="Script")).to_have_count(0)


@pytest.mark.requirement("R63")
@pytest.mark.parametrize(
    "runs", ['[runs]\nurl = "sqlite:runs.db"\n[tools."shop.order"]\napprove = true']
)
def test_a_script_that_waits_for_a_person_leads_to_its_run(eyes: Eyes) -> None:
    page = eyes.open("#/~code", size=NARROW)
    sign_in(page, ANN)
    page.get_by_role("textbox", name="Script").fill("return await shop.order(item=1)")
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_role("link", name="Open the run").click()
    expect(page.get_by_role("heading", name="code.run")).to_be_visible()
