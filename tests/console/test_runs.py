"""Callers follow their runs in the console: they answer, cancel, retry and decide."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from playwright.sync_api import Browser, Page, expect
from tests.console.conftest import DESK, Eyes, Witness, faults, keep
from tests.console.test_sources import served, sign_in

from operations import Identity, OperationContext, OperationRegistry
from operations.runs import Runs
from operations.server import hash_key

ANN, BOSS = "the-key-of-ann", "the-key-of-the-boss"
NARROW = (360, 740)
MODULE = """
import asyncio
from typing import Any

from operations import CallError, OperationContext, operation

begun = asyncio.Event()

@operation("order.charge", scopes=["shop"])
async def charge(amount: int) -> int:
    return amount

@operation("order.ship", scopes=["shop"])
async def ship(to: str) -> str:
    return f"shipped to {to}"

@operation("order.place", scopes=["shop"], durable=True)
async def place(to: str, context: OperationContext) -> str:
    await context.call(charge, 5)
    answer = await context.elicit(
        "How many boxes?",
        {"type": "object", "properties": {"boxes": {"type": "integer"}}, "required": ["boxes"]},
    )
    await context.call(ship, to)
    paid = await context.wait_for("paid")
    if paid != "yes":
        raise CallError("NOT_PAID", f"{answer['content']['boxes']} boxes wait for their payment")
    return f"{answer['content']['boxes']} boxes"

@operation("order.pay", scopes=["shop"])
async def pay(amount: int) -> int:
    begun.set()
    await asyncio.Event().wait()
    return amount
"""


async def lose_a_call(folder: Path) -> None:
    """Leave a run whose call has begun, and whose process is gone."""
    spec = spec_from_file_location("lost_work", folder / "work.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    runs = Runs(f"sqlite:{folder / 'runs.db'}", grace=0)
    async with OperationRegistry([module.pay], runs=runs) as registry:
        ann = OperationContext(identity=Identity("ann", ["shop"]))
        await registry.start("order.pay", {"amount": 7}, ann)
        await module.begun.wait()
        store: Any = runs
        store._executor.stop_all("the process ends")


@pytest.fixture
def eyes(browser: Browser, tmp_path: Path) -> Iterator[Eyes]:
    (tmp_path / "work.py").write_text(MODULE)
    # The browser has an event loop in this thread.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, lose_a_call(tmp_path)).result()
    keys = "".join(
        f'[access.keys.{name}]\nsha256 = "{hash_key(key)}"\nscopes = {json.dumps(scopes)}\n'
        for name, key, scopes in (
            ("ann", ANN, ["shop"]),
            ("boss", BOSS, ["approvals:answer", "runs:manage"]),
        )
    )
    (tmp_path / "operations.toml").write_text(
        f'modules = ["work.py"]\n{keys}'
        '[tools."order.ship"]\napprove = true\n'
        '[runs]\nurl = "sqlite:runs.db"\nkeep_steps = true\n[record.trace]\nenabled = false\n'
    )
    with served(tmp_path / "operations.toml", works=True) as address:
        witness = Witness(address)
        yield Eyes(browser, witness)
        for context in browser.contexts:
            context.close()
        assert witness.found == []


def send(address: str, key: str, path: str, body: Any = ..., **headers: str) -> Any:
    """Send a request as another client."""
    data = None if body is ... else json.dumps(body).encode()
    headers |= {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = Request(f"{address}/{path}", data, headers)  # noqa: S310 - of this test
    with urlopen(request, timeout=30) as response:  # noqa: S310
        return json.loads(response.read() or b"null")


def state_is(page: Page, status: str) -> None:
    expect(page.locator(".facts [data-status]")).to_have_attribute("data-status", status)


def test_a_caller_follows_a_run_to_its_end(eyes: Eyes, axe: str) -> None:
    address = eyes.witness.address
    send(address, ANN, "order/place", {"to": "Bonn"}, Prefer="respond-async")
    page = eyes.open(csp=False)
    sign_in(page, ANN)
    page.get_by_role("link", name="Runs", exact=True).click()
    expect(page.get_by_role("row")).to_have_count(3)
    keep(page, "runs")
    page.get_by_label("Status").select_option("input_required")
    expect(page.get_by_role("row")).to_have_count(2)
    page.get_by_role("link", name="order.place").click()

    # A question, answered with its form.
    state_is(page, "input_required")
    page.get_by_label("boxes").fill("3")
    keep(page, "run-question")
    page.get_by_role("button", name="Answer", exact=True).click()
    # An approval, answered by another person.
    expect(page.get_by_text("Waits for approval")).to_be_visible()
    (asked,) = send(address, BOSS, "call", {"operation": "approvals.list", "input": {}})["data"][
        "approvals"
    ]
    answer = {"id": asked["id"], "approve": True}
    send(address, BOSS, "call", {"operation": "approvals.answer", "input": answer})
    # A signal, which lets the run fail.
    expect(page.get_by_text("Waits for the signal")).to_be_visible()
    page.get_by_label("Value of the signal").fill("no")
    page.get_by_role("button", name="Send", exact=True).click()
    state_is(page, "failed")
    expect(page.get_by_text("3 boxes wait for their payment")).to_be_visible()

    steps = page.get_by_role("region", name="Steps").get_by_role("listitem")
    expect(steps.filter(has_text="order.charge")).to_contain_text("recorded")
    expect(steps.filter(has_text="elicit")).to_contain_text("by ann")
    expect(steps.filter(has_text="approval")).to_contain_text("by boss")
    assert faults(page, axe, None, "run") == []
    keep(page, "run-failed")
    page.set_viewport_size({"width": NARROW[0], "height": NARROW[1]})
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW[0]
    keep(page, "run-failed-narrow")

    # Its recorded steps stay.
    page.set_viewport_size({"width": DESK[0], "height": DESK[1]})
    page.get_by_role("button", name="Retry", exact=True).click()
    expect(page.locator(".facts div").filter(has_text="Attempts")).to_contain_text("2")
    state_is(page, "failed")


def test_a_manager_decides_and_cancels(eyes: Eyes, axe: str) -> None:
    address = eyes.witness.address
    send(address, ANN, "order/place", {"to": "Bonn"}, Prefer="respond-async")
    page = eyes.open("#/~runs", size=NARROW, csp=False)
    sign_in(page, BOSS)
    page.goto(f"{address}/#/~runs")
    unknown = page.get_by_role("row").filter(has_text="order.pay")
    expect(unknown).to_contain_text("unknown")
    keep(page, "runs-narrow")
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW[0]
    unknown.get_by_role("link").click()
    state_is(page, "unknown")
    assert faults(page, axe, None, "unknown run") == []
    keep(page, "run-unknown-narrow")
    page.get_by_label("Result of the call as JSON").fill("7")
    page.get_by_role("button", name="It ran, with this result").click()
    state_is(page, "completed")

    page.goto(f"{address}/#/~runs")
    page.get_by_role("link", name="order.place").click()
    state_is(page, "input_required")
    page.get_by_role("button", name="Cancel the run").click()
    state_is(page, "cancelled")
    expect(page.get_by_role("button", name="Retry")).to_be_visible()


def test_a_caller_decides_about_a_call_that_was_cancelled(eyes: Eyes) -> None:
    started = send(
        eyes.witness.address, ANN, "order/pay", {"amount": 8}, Prefer="respond-async, wait=0"
    )
    page = eyes.open(csp=False)
    sign_in(page, ANN)
    page.goto(f"{eyes.witness.address}/#/~runs/{started['id']}")
    state_is(page, "working")
    page.get_by_role("button", name="Cancel the run").click()
    state_is(page, "cancelled")
    expect(page.get_by_role("form", name="Decide")).to_contain_text("order.pay")
    expect(page.get_by_role("button", name="Retry", exact=True)).to_have_count(0)
    page.get_by_label("Result of the call as JSON").fill("8")
    page.get_by_role("button", name="It ran, with this result").click()

    state_is(page, "completed")


def test_a_run_of_another_caller_is_not_there(eyes: Eyes) -> None:
    started = send(eyes.witness.address, ANN, "order/place", {"to": "Bonn"}, Prefer="respond-async")
    path = f"/runs/{started['id']}/events"
    eyes.witness.expect(path, 404)
    page = eyes.open(f"#/~runs/{started['id']}")

    expect(page.get_by_role("alert")).to_contain_text("There is no run")
