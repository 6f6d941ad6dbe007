"""A cluster of three NATS servers: no mutation runs twice, and losing one server fails no call."""

import asyncio
import os
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from secrets import token_hex
from time import monotonic
from typing import Any

import nats
import pytest
from tests.limits import time_limit
from tests.pubsub.ledger import Ledger
from tests.servers import NatsCluster

from operations.calls import PendingRequestMap, serve_calls
from operations.pubsub.nats import connect_nats

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def servers() -> Iterator[NatsCluster]:
    cluster = NatsCluster()
    try:
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
async def cluster(servers: NatsCluster) -> NatsCluster:
    """A cluster with all its nodes."""
    with time_limit(90):
        await servers.healthy()
    return servers


@asynccontextmanager
async def calling(
    cluster: NatsCluster, ledger: Ledger, **options: Any
) -> AsyncGenerator[list[PendingRequestMap]]:
    """A worker and a caller at every node."""
    prefix = f"t{token_hex(4)}"
    async with AsyncExitStack() as stack:
        callers: list[PendingRequestMap] = []
        for number in range(3):
            url = cluster.url_from(number)
            there, here = [
                await stack.enter_async_context(connect_nats(url, prefix=prefix, **options))
                for _ in range(2)
            ]
            await stack.enter_async_context(serve_calls(ledger.registry(), there))
            callers.append(await stack.enter_async_context(PendingRequestMap(here)))
        yield callers


async def leader_of(cluster: NatsCluster, prefix: str) -> str:
    """The name of the server that leads the stream of a prefix."""
    client: Any = await nats.connect(cluster.nodes[0].url)
    try:
        info = await client.jetstream().stream_info(f"{prefix}_durable")
        assert info.config.num_replicas == 3
        return str(info.cluster.leader)
    finally:
        await client.close()


@pytest.mark.requirement("R34", "R36")
async def test_losing_the_leader_of_the_stream_loses_no_call(
    cluster: NatsCluster, tmp_path: Path
) -> None:
    """The servers need 4 to 9 seconds for an election. `scripts/soak cluster` repeats this test."""
    ledger = Ledger(tmp_path / "ledger", timeout=60)
    plain = Ledger(tmp_path / "plain", timeout=60)
    end = monotonic() + float(os.environ.get("OPERATIONS_SOAK_SECONDS", "0"))
    async with (
        calling(cluster, ledger, queue="jetstream", replicas=3) as callers,
        calling(cluster, plain) as plain_callers,
    ):
        prefix = callers[0].mailbox.partition(".")[0]
        async with ledger.traffic(*callers), plain.traffic(*plain_callers, payers=2):
            while True:
                await ledger.progress(50)
                cluster.node(await leader_of(cluster, prefix)).kill()
                await ledger.progress(200, seconds=90)
                if monotonic() > end:
                    break
                with time_limit(90):
                    await cluster.healthy()

    ledger.check(failures=0)
    plain.check(failures=0)


@pytest.mark.requirement("R34", "R36")
async def test_calls_survive_a_rolling_restart_of_a_cluster(
    cluster: NatsCluster, tmp_path: Path
) -> None:
    stored, plain = (
        Ledger(tmp_path / "stored", timeout=60),
        Ledger(tmp_path / "plain", timeout=60),
    )
    async with (
        calling(cluster, stored, queue="jetstream", replicas=3) as stored_callers,
        calling(cluster, plain) as plain_callers,
        stored.traffic(*stored_callers, payers=2),
        plain.traffic(*plain_callers, payers=2),
    ):
        for node in cluster.nodes:
            await stored.progress(20, seconds=90)
            await asyncio.to_thread(node.stop)
            await stored.progress(20, seconds=90)
            with time_limit(90):
                await cluster.healthy()

    stored.check(failures=0)
    plain.check(failures=0)
