"""The operator's view of workers on real brokers: counts, queues, dead letters, logs, traces and discovery."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import nats
import pytest
from nats.micro.service import ServiceInfo, ServicePing, ServiceStats
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from tests.calls.waiting import caller, complete_report, until
from tests.calls.worlds import BrokerWorld, World, nats_world, redis_world
from tests.limits import time_limit
from tests.receivers import SilentReceiver
from tests.servers import Broker, NatsServer, running

from operations.base.errors import CallError, ErrorCode, TransportError
from operations.calls import CallServer, PendingRequestMap, WorkerConfig, from_calls
from operations.calls.protocol.events import CallRequested, RequestPayload, encode_event
from operations.calls.source.monitoring import GroupMonitor, monitor_group
from operations.contract.access import Identity
from operations.contract.context import OperationContext
from operations.pubsub.base import EventTarget
from operations.pubsub.memory import MemoryTarget
from operations.registry import OperationRegistry
from operations.telemetry.metrics import group_metrics, worker_metrics
from operations.telemetry.otel import current_trace, instrument


class Latch:
    """A registry whose operation `latch.pass` waits until the latch opens."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.begun = 0
        self.registry = OperationRegistry()

        @self.registry.operation("latch.pass", type="query")
        async def pass_(fail: bool = False) -> str:
            self.begun += 1
            await self.opened.wait()
            if fail:
                raise CallError("CLOSED", "no")
            return "passed"

        @self.registry.operation("latch.items")
        async def items() -> AsyncGenerator[int]:
            for number in range(3):
                yield number


@pytest.fixture(scope="module")
def jetstream() -> Iterator[Broker]:
    broker = NatsServer()
    broker.options = ("-js", "-sd", broker.folder)
    with running(broker):
        yield broker


@pytest.fixture(params=("redis", "jetstream"))
def keeping(request: pytest.FixtureRequest) -> tuple[BrokerWorld, dict[str, Any]]:
    """A broker that keeps requests and dead letters, and the options of its targets."""
    if request.param == "redis":
        return redis_world(request.getfixturevalue("redis_server").url), {}
    return nats_world(request.getfixturevalue("jetstream").url), {"queue": "jetstream"}


async def test_an_operator_sees_workers_calls_and_the_queue(
    keeping: tuple[BrokerWorld, dict[str, Any]],
) -> None:
    world, options = keeping
    latch = Latch()
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        # One in JetStream takes two seconds to close.
        names = ["one"] if options else ["one", "two"]
        for name in names:
            await enter(
                world.serve(
                    latch.registry, target=options, name=name, version="1.4.0", concurrency=1
                )
            )
        calls = await enter(PendingRequestMap(await enter(world.connect(**options))))
        monitor = await enter(monitor_group(await enter(world.connect(**options))))
        waiting = [asyncio.create_task(calls.call("latch.pass")) for _ in range(len(names) + 3)]
        await until(lambda: latch.begun == len(names))
        with time_limit(30):
            while (report := await complete_report(monitor, len(names))).waiting != 3 or (
                report.lag or 0
            ) < 0.05:
                await asyncio.sleep(0.01)

        assert [each.name for each in report.workers] == names
        assert {each.version for each in report.workers} == {"1.4.0"}
        assert [each.running for each in report.workers] == [1 for _ in names]
        assert (report.running, report.waiting, report.silent) == (len(names), 3, 0)
        assert report.lag is not None
        assert report.lag < 30
        assert report.dead_letters == 0
        text = group_metrics([report]).decode()
        assert 'operations_queue_depth{group="operations"} 3\n' in text
        assert f'operations_group_workers{{group="operations"}} {len(names)}\n' in text

        latch.opened.set()
        await asyncio.gather(*waiting)
        report = await complete_report(monitor, len(names))
        assert sum(each.finished for each in report.workers) == len(names) + 3
        assert (report.running, report.waiting, report.lag) == (0, 0, 0)
        assert sum(each.queue_seconds for each in report.workers) > 0.1


async def test_without_a_broker_that_keeps_requests_those_in_the_workers_are_counted(
    nats_server: Broker,
) -> None:
    world, latch = nats_world(nats_server.url), Latch()
    async with (
        world.serve(latch.registry, concurrency=1) as (server,),
        caller(world) as calls,
        world.connect() as target,
        monitor_group(target) as monitor,
    ):
        waiting = [asyncio.create_task(calls.call("latch.pass", {"fail": True})) for _ in range(3)]
        await until(lambda: server.waiting == 2)
        report = await complete_report(monitor, 1)
        latch.opened.set()
        await asyncio.gather(*waiting, return_exceptions=True)
        text = worker_metrics(server).decode()
        with pytest.raises(TransportError, match="jetstream"):
            await monitor.letters()

    assert (len(report.workers), report.running, report.waiting) == (1, 1, 2)
    assert (report.lag, report.dead_letters) == (None, None)
    assert 'operations_worker_calls_total{group="operations",outcome="failed"} 3\n' in text
    assert 'operations_worker_queue_seconds_count{group="operations"} 3\n' in text


async def test_a_worker_that_does_not_answer_is_reported(redis_server: Broker) -> None:
    world = redis_world(redis_server.url)
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(world.connect())
        monitor = await stack.enter_async_context(monitor_group(target))
        silent = await target.listen((target.control("operations"),), SilentReceiver())
        stack.push_async_callback(silent.aclose)
        with time_limit(20):
            report = await monitor.look()

    assert (report.workers, report.silent) == ([], 1)


# ------------------------------------------------------------ dead letters


def request_of(**fields: Any) -> bytes:
    payload = RequestPayload(request_id="r1", attempt=3, **fields)
    return encode_event(CallRequested(payload=payload))


@pytest.fixture
async def mourned(
    keeping: tuple[BrokerWorld, dict[str, Any]],
) -> AsyncIterator[tuple[OperationRegistry, GroupMonitor, EventTarget]]:
    world, options = keeping
    registry = OperationRegistry()
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        await enter(world.serve(registry, target=options))
        target = await enter(world.connect(**options))
        yield registry, await enter(monitor_group(target)), target


@pytest.mark.requirement("R49")
async def test_dead_letters_are_listed_inspected_replayed_and_removed(
    mourned: tuple[OperationRegistry, GroupMonitor, EventTarget],
) -> None:
    registry, monitor, target = mourned
    seen: list[Any] = []

    @registry.operation("shop.count", type="query")
    async def count(n: int) -> int:
        seen.append(n)
        if n == 2:
            raise CallError("STILL_BROKEN", "no")
        return n

    for body in (*(request_of(operation_id="shop.count", input={"n": n}) for n in (1, 2)), b"{}"):
        await target.dead_letter("operations", body)
    with time_limit(20):
        while (await monitor.look()).dead_letters != 3:
            await asyncio.sleep(0.01)
    second, first = await monitor.letters()
    assert (first.operation, first.input, first.deliveries) == ("shop.count", {"n": 1}, 3)
    assert (await monitor.letter(second.id)).input == {"n": 2}

    assert (await monitor.replay(first.id)).data == 1
    with pytest.raises(CallError) as caught:
        await monitor.replay(second.id)
    assert caught.value.code == "STILL_BROKEN"
    assert seen == [1, 2]
    # Successful replays are removed; failed ones are kept.
    assert [each.id for each in await monitor.letters()] == [second.id]

    await monitor.remove(second.id)
    for wrong in (second.id, first.id, "nonsense", "", "0", "9" * 30):
        with pytest.raises(CallError) as caught:
            await monitor.letter(wrong)
        assert caught.value.code == ErrorCode.VALIDATION_ERROR
        with pytest.raises(CallError):
            await monitor.remove(wrong)


@pytest.mark.requirement("R16", "R49")
async def test_a_dead_letter_has_no_credential() -> None:
    letters: list[bytes] = []

    class Keeping(MemoryTarget):
        async def dead_letter(self, queue: str, body: bytes) -> None:
            letters.append(body)

    target = Keeping()
    # One worker takes every request and loses it; the other responds to all probes but has no request.
    taking = await target.consume("operations", SilentReceiver())
    worker = CallServer(OperationRegistry(), target, WorkerConfig())
    await worker.listen()
    async with PendingRequestMap(target, heartbeat=0.05) as calls:
        with time_limit(30), pytest.raises(CallError) as caught:
            await calls.call("shop.count", {"n": 1}, credential="CANARY", replayable=True)
    await taking.aclose()
    await worker.aclose()

    assert caught.value.details == {"deliveries": 3}
    (letter,) = letters
    assert b"shop.count" in letter
    assert b"CANARY" not in letter


# ------------------------------------------------------------ logs, traces, discovery


async def test_every_call_of_a_worker_is_a_line_with_its_operation_and_duration(
    broker_world: World, caplog: pytest.LogCaptureFixture
) -> None:
    latch = Latch()

    async def resolve(credential: str) -> Identity:
        return Identity("alice")

    caplog.set_level(logging.INFO, "operations.access")
    async with (
        broker_world.serve(latch.registry, concurrency=1, max_waiting=1, resolve=resolve),
        caller(broker_world, credential="CANARY") as calls,
    ):
        tasks = [asyncio.create_task(calls.call("latch.pass", {"fail": n == 1})) for n in (0, 1)]
        await until(lambda: latch.begun == 1)
        await asyncio.sleep(0.5)
        latch.opened.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(CallError):
            await calls.call("latch.nothing", {}, OperationContext(request_id="of-the-hub"))

    lines = [json.loads(record.message) for record in caplog.records]
    assert "CANARY" not in caplog.text
    assert [(line["operation"], line["code"]) for line in lines] == [
        ("latch.pass", None),
        ("latch.pass", "CLOSED"),
        ("latch.nothing", "OPERATION_NOT_FOUND"),
    ]
    assert {(line["group"], line["caller"]) for line in lines} == {("operations", "alice")}
    assert [line["parentRequestId"] for line in lines] == [None, None, "of-the-hub"]
    assert lines[0]["ms"] >= 40
    assert lines[1]["queuedMs"] >= 40
    assert lines[1]["ms"] < lines[1]["queuedMs"]


def spans_of(registry: OperationRegistry, exporter: InMemorySpanExporter) -> TracerProvider:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrument(registry, tracer_provider=provider)
    return provider


async def test_client_and_server_spans_continue_the_trace_of_the_caller(
    broker_world: World,
) -> None:
    latch, hub, here, there = Latch(), OperationRegistry(), *(InMemorySpanExporter() for _ in "12")
    spans_of(latch.registry, there)
    tracer = spans_of(hub, here).get_tracer("test")
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(broker_world.serve(latch.registry, concurrency=1))
        target = await stack.enter_async_context(broker_world.connect())
        service = await stack.enter_async_context(from_calls(target))
        hub.register_all(service)
        with tracer.start_as_current_span("root") as root:
            tasks = [asyncio.create_task(hub.execute("latch.pass")) for _ in range(2)]
            await until(lambda: latch.begun == 1)
            await asyncio.sleep(0.5)
            latch.opened.set()
            await asyncio.gather(*tasks)
            items = [item.data async for item in hub.subscribe("latch.items")]
            sent = current_trace()
            await service.calls.call("latch.pass", metadata=dict(sent))

    assert items == [0, 1, 2]
    (client,) = (
        span
        for span in here.get_finished_spans()
        if (span.name, span.kind) == ("latch.items", SpanKind.CLIENT)
    )
    (subscribed,) = (span for span in there.get_finished_spans() if span.name == "latch.items")
    assert _parent(subscribed) == client.context.span_id
    ours = [span for span in here.get_finished_spans() if span.name == "latch.pass"]
    clients = {span.context.span_id: span for span in ours if span.kind is SpanKind.CLIENT}
    *served, direct = [span for span in there.get_finished_spans() if span.name == "latch.pass"]
    trace_id = root.get_span_context().trace_id
    assert (len(ours), len(clients), len(served)) == (4, 2, 2)
    assert {span.context.trace_id for span in (*ours, *served, direct)} == {trace_id}
    assert {_parent(span) for span in served} == set(clients)
    assert _parent(direct) == root.get_span_context().span_id
    assert all(span.kind is SpanKind.SERVER for span in served)
    waited = sorted(_attribute(span, "operations.queue.seconds") for span in served)
    assert waited[0] < waited[1]
    assert waited[1] >= 0.04


async def test_spans_of_a_cancelled_call_have_the_code_of_the_call(broker_world: World) -> None:
    latch, hub, here = Latch(), OperationRegistry(), InMemorySpanExporter()
    spans_of(hub, here)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(broker_world.serve(latch.registry))
        target = await stack.enter_async_context(broker_world.connect())
        hub.register_all(await stack.enter_async_context(from_calls(target)))
        call = asyncio.create_task(hub.execute("latch.pass"))
        await until(lambda: latch.begun == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        with pytest.raises(CallError) as caught:
            await hub.execute("latch.pass", timeout=0.1)

    assert caught.value.code == "TIMEOUT"
    codes = [(span.kind, _attribute(span, "error.type")) for span in here.get_finished_spans()]
    assert codes == [
        (SpanKind.CLIENT, "ABORTED"),
        (SpanKind.SERVER, "ABORTED"),
        (SpanKind.CLIENT, "TIMEOUT"),
        (SpanKind.SERVER, "TIMEOUT"),
    ]


def _parent(span: ReadableSpan) -> int:
    assert span.parent is not None
    return span.parent.span_id


def _attribute(span: ReadableSpan, name: str) -> Any:
    assert span.attributes is not None
    return span.attributes[name]


async def test_workers_answer_the_service_discovery_of_nats(nats_server: Broker) -> None:
    world, latch = nats_world(nats_server.url), Latch()
    latch.opened.set()

    async def ask(client: Any, subject: str, count: int) -> list[Any]:
        inbox = client.new_inbox()
        answers = await client.subscribe(inbox)
        await client.publish(subject, b"", reply=inbox)
        found = [json.loads((await answers.next_msg(timeout=60)).data) for _ in range(count)]
        await answers.unsubscribe()
        return found

    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        for version in ("1.4.0", "not a version"):
            await enter(world.serve(latch.registry, group="shop.eu", version=version))
        calls = await enter(PendingRequestMap(await enter(world.connect()), group="shop.eu"))
        for fail in (False, False, True):
            await asyncio.gather(calls.call("latch.pass", {"fail": fail}), return_exceptions=True)
        client = await nats.connect(nats_server.url)
        stack.push_async_callback(client.close)

        pings = [ServicePing.from_dict(each) for each in await ask(client, "$SRV.PING.shop_eu", 2)]
        assert {each.name for each in pings} == {"shop_eu"}
        assert {each.version for each in pings} == {"1.4.0", "0.0.0"}
        address = f"$SRV.INFO.shop_eu.{pings[0].id}"
        (info,) = [ServiceInfo.from_dict(each) for each in await ask(client, address, 1)]
        assert [each.subject for each in info.endpoints] == [f"{world.prefix}.queue.shop.eu.*"]
        raw = await ask(client, "$SRV.STATS.shop_eu", 2)
        stats = [ServiceStats.from_dict(each).endpoints[0] for each in raw]
        assert sum(each.num_requests for each in stats) == 3
        assert sum(each.num_errors for each in stats) == 1
        assert {each["type"] for each in raw} == {"io.nats.micro.v1.stats_response"}
        assert "latch" not in json.dumps(raw)

        # An answer must not be sent to a mailbox of a caller.
        await client.publish("$SRV.PING.shop_eu", b"", reply=calls.mailbox)
        await ask(client, "$SRV.PING.shop_eu", 2)
        assert calls.malformed == 0

    client = await nats.connect(nats_server.url)
    with pytest.raises(nats.errors.NoRespondersError):
        await client.request("$SRV.PING.shop_eu", b"", timeout=5)
    await client.close()
