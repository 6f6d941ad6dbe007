"""The clock of a broker that stores requests is set while calls wait there."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.calls.waiting import lines
from tests.calls.worlds import nats_world, redis_world
from tests.limits import time_limit
from tests.servers import NatsServer, RedisServer, running

from operations.base.errors import CallError
from operations.calls import PendingRequestMap, serve_calls
from operations.calls.protocol.events import CallRequested, RequestPayload, encode_event
from operations.pubsub.base import EventTarget
from operations.pubsub.nats import jetstream
from operations.pubsub.redis import subscriptions
from operations.registry import OperationRegistry

HOUR = 3600


class Clock:
    """The clock that workers read at the broker.

    Attributes:
        ahead: Seconds by which it is ahead of the times that the broker stores with requests; None if NATS does not
            report it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead: int | None = 0
        self._ask: Any = subscriptions.__dict__["ask"]
        self._describe: Any = jetstream.JetStream.describe
        monkeypatch.setattr(subscriptions, "ask", self._read_redis)
        clock = self

        async def describe(self: Any, queue: str) -> Any:
            return await clock._read_nats(self, queue)

        monkeypatch.setattr(jetstream.JetStream, "describe", describe)

    async def _read_redis(self, connection: Any, *command: Any, **named: Any) -> Any:
        reply = await self._ask(connection, *command, **named)
        if command != ("TIME",):
            return reply
        return int(reply[0]) + (self.ahead or 0), reply[1]

    async def _read_nats(self, stream: Any, queue: str) -> Any:
        if self.ahead is None:
            raise TimeoutError
        found = await self._describe(stream, queue)
        found.ts += timedelta(seconds=self.ahead)
        return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture(params=("redis", "nats"))
def connect(request: pytest.FixtureRequest) -> Any:
    """Connects to a broker that stores requests."""
    broker: Any = RedisServer()
    options: dict[str, Any] = {}
    if request.param == "nats":
        broker = NatsServer("-js")
        broker.options = ("-js", "-sd", broker.folder)
        options = {"queue": "jetstream"}
    with running(broker):
        world = (redis_world if request.param == "redis" else nats_world)(broker.url)
        yield lambda: world.connect(**options)


class Shop:
    """A mutation that is recorded in a ledger, and a query that waits."""

    def __init__(self, ledger: Path) -> None:
        self.ledger = ledger
        self.began, self.released = asyncio.Event(), asyncio.Event()
        self.registry = OperationRegistry()

        @self.registry.operation("shop.pay")
        async def pay(number: int) -> int:
            with ledger.open("a", encoding="utf-8") as file:
                file.write(f"{number}\n")
            return number

        @self.registry.operation("shop.wait", type="query")
        async def wait() -> None:
            self.began.set()
            await self.released.wait()

        @self.registry.operation("shop.ping", type="query")
        async def ping() -> str:
            return "pong"


@asynccontextmanager
async def serving(
    connect: Any, shop: Shop, **options: Any
) -> AsyncGenerator[tuple[PendingRequestMap, EventTarget]]:
    """One worker, a caller, and the connection of another caller."""
    async with (
        connect() as there,
        serve_calls(shop.registry, there, **options),
        connect() as here,
        PendingRequestMap(here) as calls,
        connect() as other,
    ):
        with time_limit(60):
            yield calls, other


@pytest.mark.requirement("R30", "F13")
@pytest.mark.parametrize("ahead", [HOUR, -HOUR])
async def test_calls_run_after_the_clock_of_the_broker_was_set(
    connect: Any, clock: Clock, ahead: int, tmp_path: Path
) -> None:
    shop = Shop(tmp_path / "ledger")
    clock.ahead = ahead
    async with serving(connect, shop) as (calls, _):
        with suppress(CallError):
            # The first request, for which the worker reads the clock.
            await calls.call("shop.ping")
        clock.ahead = 0
        await asyncio.sleep(0.6)  # The worker reads the clock at most every half second.

        for number in range(10):
            assert (await calls.call("shop.pay", {"number": number}, timeout=5)).data == number
            assert (await calls.call("shop.ping", timeout=5)).data == "pong"

    assert lines(shop.ledger) == [str(number) for number in range(10)]


@pytest.mark.requirement("R36", "F13")
@pytest.mark.parametrize("ahead", [0, -HOUR, None])
async def test_a_mutation_that_waited_begins_only_for_its_caller_whatever_the_clock_of_the_broker(
    connect: Any, clock: Clock, ahead: int | None, tmp_path: Path
) -> None:
    """If the clock was set back, waiting requests seem to come from the future."""
    shop = Shop(tmp_path / "ledger")
    clock.ahead = ahead
    async with serving(connect, shop, concurrency=1, heartbeat=0.1) as (calls, other):
        waiting = asyncio.create_task(calls.call("shop.wait"))
        await shop.began.wait()
        paid = asyncio.create_task(calls.call("shop.pay", {"number": 1}, timeout=50))
        box = other.mailbox()
        request = RequestPayload(
            request_id="0" * 32,
            operation_id="shop.pay",
            input={"number": 2},
            timeout_ms=50_000,
            reply_to=box,
        )
        body = encode_event(CallRequested(payload=request))
        # Its caller does not confirm it.
        await other.enqueue("operations", body, key="0" * 32, reply_to=box, wait=5)
        await asyncio.sleep(0.2)  # longer than a heartbeat
        shop.released.set()
        await waiting
        assert (await calls.call("shop.ping", timeout=30)).data == "pong"
        assert (await paid).data == 1

    assert lines(shop.ledger) == ["1"]
