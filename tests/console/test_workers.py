"""Operators see the workers of a hub's broker in the console, and replay and drop dead letters."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect
from redis import Redis
from tests.console.conftest import Eyes, Witness, faults, keep
from tests.console.test_sources import OPERATOR, served, sign_in
from tests.servers import RedisServer, running

from operations.calls.protocol.events import CallRequested, RequestPayload, encode_event
from operations.server import hash_key

CONFIG = """
setup = "app:worker"
[brokers.bus]
url = "URL"
group = "shop"
workers = true
[access.keys.op]
sha256 = "KEY"
scopes = ["hub:operate"]
[record.trace]
enabled = false
"""
MODULE = """
from operations import CallError, OperationRegistry
from operations.calls import serve_calls
from operations.pubsub.redis import connect_redis

registry = OperationRegistry()

@registry.operation("shop.count", type="query")
async def count(n: int) -> int:
    if n == 2:
        raise CallError("BROKEN", "it is still broken")
    return n

async def worker(hub):
    async with (
        connect_redis("URL") as target,
        serve_calls(registry, target, group="shop", name="w1", version="1.4.0"),
    ):
        yield
"""


@pytest.fixture
def eyes(browser: Browser, tmp_path: Path) -> Iterator[Eyes]:
    with running(RedisServer()) as broker:
        client: Any = Redis.from_url(broker.url)
        for n in (1, 2):
            payload = RequestPayload(
                request_id=f"r{n}", operation_id="shop.count", input={"n": n}, attempt=3
            )
            body = encode_event(CallRequested(payload=payload))
            client.xadd("operations:aside:shop:any", {"e": body})
        client.close()
        (tmp_path / "app.py").write_text(MODULE.replace("URL", broker.url))
        config = CONFIG.replace("URL", broker.url).replace("KEY", hash_key(OPERATOR))
        (tmp_path / "operations.toml").write_text(config)
        with served(tmp_path / "operations.toml") as address:
            witness = Witness(address)
            yield Eyes(browser, witness)
            for context in browser.contexts:
                context.close()
            assert witness.found == []


def test_an_operator_sees_workers_and_handles_dead_letters(eyes: Eyes, axe: str) -> None:
    page = eyes.open(csp=False)
    expect(page.get_by_role("link", name="Workers", exact=True)).to_be_hidden()
    sign_in(page, OPERATOR)
    page.get_by_role("link", name="Workers", exact=True).click()
    worker = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name="w1"))
    expect(worker).to_contain_text("1.4.0")
    expect(page.get_by_text("bus: 1 worker, 0 running, 0 waiting, 2 dead letters")).to_be_visible()

    page.get_by_role("button", name="Dead letters").focus()
    page.keyboard.press("Enter")
    first = page.get_by_role("row").filter(has_text='"n": 1')
    second = page.get_by_role("row").filter(has_text='"n": 2')
    expect(first).to_contain_text("3 deliveries")
    keep(page, "workers")
    assert faults(page, axe, None, "workers") == []
    eyes.witness.expect("/call", 500)
    second.get_by_role("button", name="Replay").click()
    expect(page.get_by_role("alert")).to_contain_text("it is still broken")
    first.get_by_role("button", name="Replay").click()
    expect(first).to_have_count(0)
    second.get_by_role("button", name="Drop").click()
    expect(page.get_by_text("bus has no dead letters.")).to_be_visible()
    expect(page.get_by_text("bus: 1 worker, 0 running, 0 waiting, 0 dead letters")).to_be_visible()
