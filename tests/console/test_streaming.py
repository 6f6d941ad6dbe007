"""Following a subscription."""

import re

from playwright.sync_api import Page, expect
from tests.console.conftest import Eyes, keep
from tests.console.hub import STATE
from tests.console.test_calling import until


def subscribe(page: Page) -> None:
    page.get_by_role("button", name="Subscribe").click()


def count(page: Page) -> int:
    return int(page.locator(".stream .fact").inner_text().split(" ")[0])


def test_items_arrive_pause_resume_and_stop(eyes: Eyes) -> None:
    page = eyes.open("#/clock.ticks")

    subscribe(page)
    expect(page.locator(".events li").nth(4)).to_be_visible()
    expect(page.locator(".chip")).to_have_text("live")
    keep(page, "stream")
    page.get_by_role("button", name="Pause").click()
    expect(page.locator(".chip")).to_have_text("paused")
    shown = page.locator(".events li").count()
    expect(page.locator(".stream .fact")).to_contain_text("waiting")
    assert page.locator(".events li").count() == shown
    page.get_by_role("button", name="Resume").click()
    expect(page.locator(".events li").nth(shown)).to_be_visible()
    assert STATE["open"] == 1
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".chip")).to_have_text("stopped")
    until(page, lambda: STATE["open"] == 0)
    # Nothing was lost or swapped on the way, newest first.
    numbers = [text.split(" ")[0] for text in page.locator(".events .number").all_inner_texts()]
    assert numbers == [f"#{number}" for number in range(len(numbers), 0, -1)]


def test_leaving_the_page_of_a_stream_ends_it(eyes: Eyes) -> None:
    page = eyes.open("#/clock.ticks")

    subscribe(page)
    until(page, lambda: STATE["open"] == 1)
    page.get_by_role("link", name="quote").click()
    until(page, lambda: STATE["open"] == 0)


def test_a_stream_that_fails_keeps_its_items_and_shows_the_error(eyes: Eyes) -> None:
    page = eyes.open("#/clock.ticks")

    page.get_by_label("fail_after", exact=True).fill("3")
    page.get_by_label("every").fill("0.01")
    subscribe(page)
    expect(page.get_by_role("alert")).to_contain_text("CLOCK_BROKEN")
    expect(page.locator(".events li")).to_have_count(3)


def test_input_that_a_stream_rejects_is_shown_at_its_field(eyes: Eyes) -> None:
    eyes.witness.expect("/subscribe", 422)
    page = eyes.open("#/clock.ticks")

    page.get_by_label("every").fill("often")
    subscribe(page)
    expect(page.get_by_label("every")).to_have_attribute("aria-invalid", "true")


def test_a_flood_of_items_does_not_block_the_page(eyes: Eyes) -> None:
    page = eyes.open("#/clock.count")

    page.get_by_label("to", exact=True).fill("10000")
    subscribe(page)
    expect(page.locator(".chip")).to_have_text("complete", timeout=60_000)
    # The count is drawn in the frame after the last item.
    expect(page.locator(".stream .fact")).to_have_text(re.compile(r"^10000 items,"))
    expect(page.locator(".events li")).to_have_count(200)
    expect(page.locator(".events .number").first).to_have_text("#10000")


def test_the_browsers_own_event_source_reads_the_same_streams(eyes: Eyes) -> None:
    page = eyes.open()

    seen = page.evaluate(
        """() => new Promise((resolve) => {
          const seen = [];
          const source = new EventSource("clock/count?to=3");
          source.onmessage = (event) => seen.push(JSON.parse(event.data));
          source.addEventListener("complete", () => {
            source.close();
            resolve(seen);
          });
        })"""
    )
    assert seen == [1, 2, 3]
