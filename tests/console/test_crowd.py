"""The console stays quick with five thousand operations."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect
from tests.console.conftest import Eyes, Witness
from tests.console.hub import build_crowd, served

# The best of a few: how long the page needs, not how busy the machine is.
FASTEST = """async (act) => {
  const run = new Function(`return (${act})`)();
  let best = Infinity;
  for (let turn = 0; turn < 8; turn += 1) {
    await new Promise(requestAnimationFrame);
    const began = performance.now();
    run(turn);
    document.body.offsetHeight;
    best = Math.min(best, performance.now() - began);
  }
  return best;
}"""


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    with served(build_crowd()) as address:
        yield address


@pytest.fixture
def crowd(browser: Browser, witness: Witness) -> Iterator[Page]:
    # The clock of the test is put into the page as text, which the policy of the page forbids.
    page = Eyes(browser, witness).open(csp=False)
    expect(page.get_by_role("status")).to_have_text("5,000 operations")
    yield page
    page.context.close()


def fastest(page: Page, act: str) -> float:
    return float(page.evaluate(FASTEST, act))


def test_every_keystroke_and_every_scroll_is_answered_at_once(crowd: Page) -> None:
    search = """(turn) => {
      const box = document.getElementById("search");
      box.value = "operation 4" + turn;
      box.dispatchEvent(new Event("input"));
    }"""
    unfold = """() => document.querySelector(".row.group").click()"""
    scroll = """(turn) => {
      const list = document.querySelector(".list");
      list.scrollTop = list.scrollHeight * turn / 8;
      list.dispatchEvent(new Event("scroll"));
    }"""

    assert fastest(crowd, search) < 100
    assert fastest(crowd, scroll) < 100
    crowd.locator("#search").fill("")
    assert fastest(crowd, unfold) < 100
    rows = crowd.locator(".row").count()
    assert 0 < rows < 120, "only what is in sight exists"


def test_the_best_of_five_thousand_is_one_search_away(crowd: Page) -> None:
    crowd.keyboard.press("/")
    crowd.keyboard.type("number 4321")
    expect(crowd.locator(".row.operation .name").first).to_have_text("space21.operation4321")
    crowd.keyboard.press("Enter")
    expect(crowd.get_by_role("heading", level=1)).to_have_text("space21.operation4321")


def test_namespaces_are_folded_and_open_one_by_one(crowd: Page) -> None:
    expect(crowd.locator(".row.operation")).to_have_count(0)
    crowd.get_by_role("button", name="space07 200 operations").click()
    expect(crowd.locator(".row.operation").first).to_be_focused()
    crowd.keyboard.press("End")
    expect(crowd.get_by_role("button", name="space24 200", exact=True)).to_be_focused()
