"""F35: a consumer or stream of JetStream that is deleted, purged or wiped under load."""

import asyncio
import shutil
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.js.errors import NotFoundError
from tests.calls.waiting import until
from tests.limits import time_limit
from tests.pubsub.ledger import Ledger
from tests.receivers import SilentReceiver
from tests.servers import Broker, NatsServer, proxy, running

from operations.base.errors import CallError, ErrorCode
from operations.calls import CallServer, PendingRequestMap, serve_calls
from operations.pubsub.base import Claim, Delivery
from operations.pubsub.nats import connect_nats
from operations.pubsub.nats.jetstream import _MessageClaim
from operations.registry import OperationRegistry

pytestmark = pytest.mark.slow

STREAM, CONSUMER = "operations_durable", "workers_operations"
FAULTS = 6


@pytest.fixture
def jetstream() -> Iterator[Broker]:
    broker = NatsServer("-js")
    broker.options = ("-js", "-sd", broker.folder)
    with running(broker):
        yield broker


@asynccontextmanager
async def working(broker: Broker, ledger: Ledger) -> AsyncGenerator[list[PendingRequestMap]]:
    """Three workers and two callers, each with its own connection."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        for _ in range(3):
            there = await enter(connect_nats(broker.url, queue="jetstream", connect_timeout=30))
            await enter(serve_calls(ledger.registry(), there))
        yield [
            await enter(
                PendingRequestMap(
                    await enter(connect_nats(broker.url, queue="jetstream")), heartbeat=0.2
                )
            )
            for _ in range(2)
        ]


async def delete_consumer(broker: Broker, admin: Any) -> None:
    await admin.delete_consumer(STREAM, CONSUMER)


async def recreate_consumer(broker: Broker, admin: Any) -> None:
    config = (await admin.consumer_info(STREAM, CONSUMER)).config
    await admin.delete_consumer(STREAM, CONSUMER)
    await admin.add_consumer(STREAM, config)


async def delete_stream(broker: Broker, admin: Any) -> None:
    await admin.delete_stream(STREAM)


async def purge(broker: Broker, admin: Any) -> None:
    await admin.purge_stream(STREAM)


async def wipe(broker: Broker, admin: Any) -> None:
    broker.kill()
    shutil.rmtree(Path(broker.folder, "jetstream"))
    broker.start()


class Claims(SilentReceiver):
    """Keeps the claims of requests, and does not start them."""

    def __init__(self) -> None:
        self.arrived = asyncio.Queue[Claim]()

    def receive(self, delivery: Delivery) -> None:
        assert delivery.claim is not None
        self.arrived.put_nowait(delivery.claim)


@pytest.mark.requirement("R36", "F35")
async def test_f35_a_worker_whose_deletion_had_no_response_does_not_know_that_it_has_the_request(
    jetstream: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("operations.pubsub.nats.jetstream._CONFIRM", 0.5)
    options: Any = {"queue": "jetstream", "connect_timeout": 30}
    first, second = Claims(), Claims()
    async with (
        connect_nats(jetstream.url, **options) as here,
        proxy(jetstream.port) as through,
        connect_nats(f"nats://127.0.0.1:{through.port}", **options) as there,
    ):
        reading = await here.consume("operations", first)
        await here.enqueue("operations", b"pay", key="1", reply_to="", wait=30)
        with time_limit(30):
            mine = await first.arrived.get()
        await reading.aclose()
        client: Any = await nats.connect(jetstream.url)
        await recreate_consumer(jetstream, client.jetstream())
        await client.close()
        reading = await there.consume("operations", second)
        with time_limit(30):
            theirs = await second.arrived.get()

        assert await mine.acquire(alone=True)
        through.swallow()
        deletion = asyncio.create_task(theirs.acquire(alone=True))
        await until(lambda: through.heard.count(b"STREAM.MSG.DELETE") >= 2)
        through.swallow(False)
        with time_limit(30):
            is_theirs = await deletion
        await reading.aclose()

    assert not mine.is_disputed
    assert not is_theirs or theirs.is_disputed


@pytest.mark.requirement("R36", "F35")
async def test_f35_a_disputed_mutation_starts_if_its_caller_confirms_it(
    jetstream: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire = _MessageClaim.acquire

    async def disputed(self: Any, *, alone: bool) -> bool:
        is_ours = await acquire(self, alone=alone)
        self.is_disputed = True
        return is_ours

    monkeypatch.setattr(_MessageClaim, "acquire", disputed)
    registry, servers, confirmed = OperationRegistry(), list[CallServer](), list[bool]()

    @registry.operation("shop.pay")
    async def pay() -> str:
        confirmed.extend(job.confirmed is not None for job in servers[0].jobs.values())
        return "paid"

    options: Any = {"queue": "jetstream", "connect_timeout": 30}
    async with (
        connect_nats(jetstream.url, **options) as there,
        # No request waits long enough to be confirmed for its age.
        serve_calls(registry, there, heartbeat=600) as server,
        connect_nats(jetstream.url, **options) as here,
        PendingRequestMap(here) as calls,
    ):
        servers.append(server)
        with time_limit(60):
            assert (await calls.call("shop.pay", replayable=False)).data == "paid"

    assert confirmed == [True]


@pytest.mark.requirement("R36", "F35")
async def test_f35_a_worker_that_refuses_a_mutation_deletes_it(
    jetstream: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consumer that was created again also confirms acknowledgements of requests that another worker runs."""
    acquire, deletes, release = _MessageClaim.acquire, list[bool](), asyncio.Event()

    async def recorded(self: Any, *, alone: bool) -> bool:
        deletes.append(alone)
        return await acquire(self, alone=alone)

    monkeypatch.setattr(_MessageClaim, "acquire", recorded)
    registry = OperationRegistry()

    @registry.operation("shop.pay")
    async def pay() -> str:
        await release.wait()
        return "paid"

    options: Any = {"queue": "jetstream", "connect_timeout": 30}
    async with (
        connect_nats(jetstream.url, **options) as there,
        serve_calls(registry, there, per_principal=1, heartbeat=600) as server,
        connect_nats(jetstream.url, **options) as here,
        PendingRequestMap(here) as calls,
    ):
        running = asyncio.create_task(calls.call("shop.pay", replayable=False))
        await until(lambda: server.active)
        with time_limit(60), pytest.raises(CallError) as caught:
            await calls.call("shop.pay", replayable=False)
        release.set()
        with time_limit(60):
            assert (await running).data == "paid"

    assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED
    assert deletes == [True, True]


@pytest.mark.requirement("R36", "F35")
@pytest.mark.parametrize("fault", [delete_consumer, recreate_consumer, delete_stream, purge, wipe])
async def test_f35_no_mutation_runs_twice_although_jetstream_loses_its_state(
    jetstream: Broker, tmp_path: Path, fault: Callable[[Broker, Any], Awaitable[None]]
) -> None:
    ledger = Ledger(tmp_path / "ledger")
    client: Any = await nats.connect(
        jetstream.url, max_reconnect_attempts=-1, reconnect_time_wait=0.1
    )
    async with working(jetstream, ledger) as callers, ledger.traffic(*callers, payers=32):
        for _ in range(FAULTS):
            await ledger.progress(300)
            try:
                await fault(jetstream, client.jetstream())
            except NotFoundError:
                # The workers have not created it again yet.
                await asyncio.sleep(0.2)
        await ledger.progress(300)
    await client.close()

    ledger.check(failures=len(ledger.outcomes))
    failures = {outcome for outcome in ledger.outcomes.values() if outcome != "paid"}
    assert all(outcome.startswith(ErrorCode.UNAVAILABLE) for outcome in failures), failures
