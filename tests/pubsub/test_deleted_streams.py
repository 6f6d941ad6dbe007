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
from tests.pubsub.ledger import Ledger
from tests.servers import Broker, NatsServer, running

from operations.base.errors import ErrorCode
from operations.calls import PendingRequestMap, serve_calls
from operations.pubsub.nats import connect_nats

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
