"""Requests that wait for a worker in JetStream."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from tests.calls.operations_under_test import build_registry
from tests.calls.shim import Shim
from tests.calls.waiting import started
from tests.servers import Broker, NatsServer, running

from operations.calls import PendingRequestMap, serve_calls
from operations.errors import TransportError
from operations.pubsub.nats import connect_nats


@pytest.fixture
def jetstream() -> Iterator[Broker]:
    broker = NatsServer("-js")
    broker.options = ("-js", "-sd", broker.folder)
    with running(broker):
        yield broker


async def test_a_request_waits_for_a_worker(jetstream: Broker) -> None:
    async with connect_nats(jetstream.url, durable=True) as here, PendingRequestMap(here) as calls:
        call = asyncio.create_task(calls.call("math.add", {"a": 1, "b": 2}, timeout=10))
        await asyncio.sleep(0.3)
        assert not call.done()
        async with (
            connect_nats(jetstream.url, durable=True) as there,
            serve_calls(build_registry(), there),
        ):
            with anyio.fail_after(5):
                assert (await call).data == 3
            items = [item.data async for item in calls.subscribe("count.up", {"n": 100})]
            assert items == list(range(100))


async def test_a_request_survives_a_restart_of_the_server(jetstream: Broker) -> None:
    async with connect_nats(jetstream.url, durable=True) as here, PendingRequestMap(here) as calls:
        call = asyncio.create_task(calls.call("math.add", {"a": 1, "b": 2}, timeout=20))
        await asyncio.sleep(0.3)
        jetstream.kill()
        jetstream.start()
        async with (
            connect_nats(jetstream.url, durable=True) as there,
            serve_calls(build_registry(), there),
        ):
            with anyio.fail_after(10):
                assert (await call).data == 3


@pytest.mark.requirement("R36", "F10")
async def test_f10_a_durable_request_runs_once_in_the_whole_group(
    jetstream: Broker, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    async with (
        connect_nats(jetstream.url, durable=True) as one,
        connect_nats(jetstream.url, durable=True) as two,
        connect_nats(jetstream.url, durable=True) as here,
        serve_calls(build_registry(), one),
        serve_calls(build_registry(), two),
        PendingRequestMap(Shim(here, on_put=lambda body: (body, body))) as calls,
    ):
        for _ in range(5):
            await calls.call("slow.write", {"seconds": 0, "path": str(path)})

    assert len(started(path)) == 5


async def test_without_jetstream_durability_is_refused(nats_server: Broker) -> None:
    with pytest.raises(TransportError, match="JetStream"):
        async with connect_nats(nats_server.url, durable=True):
            pass
