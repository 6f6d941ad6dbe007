"""Requests that wait for a worker in JetStream."""

import asyncio
import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import time
from typing import Any

import nats
import pytest
from nats.js.api import DiscardPolicy
from tests.calls.operations_under_test import build_registry
from tests.calls.processes import worker_processes
from tests.calls.shim import Shim
from tests.calls.waiting import started, until
from tests.calls.worlds import nats_world
from tests.limits import time_limit
from tests.pubsub.ledger import Ledger
from tests.receivers import SilentReceiver
from tests.servers import Broker, NatsServer, proxy, running

from operations.base.errors import CallError, ErrorCode, TransportError
from operations.calls import PendingRequestMap, serve_calls
from operations.calls.source.monitoring import monitor_group
from operations.pubsub.base import Delivery
from operations.pubsub.nats import connect_nats
from operations.registry import OperationRegistry


@asynccontextmanager
async def connected(broker: Broker) -> AsyncGenerator[Any]:
    client: Any = await nats.connect(broker.url)
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def calling(
    url: str, registry: OperationRegistry | None = None, **options: Any
) -> AsyncGenerator[PendingRequestMap]:
    async with (
        connect_nats(url, queue="jetstream", **options) as there,
        serve_calls(registry or build_registry(), there),
        connect_nats(url, queue="jetstream", **options) as here,
        PendingRequestMap(here) as calls,
    ):
        yield calls


DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def jetstream() -> Iterator[Broker]:
    broker = NatsServer("-js")
    broker.options = ("-js", "-sd", broker.folder)
    with running(broker):
        yield broker


async def test_a_request_waits_for_a_worker(jetstream: Broker) -> None:
    async with (
        connect_nats(jetstream.url, queue="jetstream") as here,
        PendingRequestMap(here) as calls,
    ):
        call = asyncio.create_task(calls.call("math.add", {"a": 1, "b": 2}, timeout=60))
        await asyncio.sleep(0.3)
        assert not call.done()
        async with (
            connect_nats(jetstream.url, queue="jetstream") as there,
            serve_calls(build_registry(), there),
        ):
            with time_limit(20):
                assert (await call).data == 3
            items = [item.data async for item in calls.subscribe("count.up", {"n": 100})]
            assert items == list(range(100))


@pytest.mark.parametrize("is_consumer_deleted", [False, True])
async def test_requests_wait_for_a_worker_although_the_last_one_has_left(
    jetstream: Broker, tmp_path: Path, is_consumer_deleted: bool
) -> None:
    path = tmp_path / "ledger"
    value = {"seconds": 0, "path": str(path)}
    async with (
        connect_nats(jetstream.url, queue="jetstream") as here,
        PendingRequestMap(here, heartbeat=0.1) as calls,
    ):
        async with (
            connect_nats(jetstream.url, queue="jetstream") as there,
            serve_calls(build_registry(), there),
        ):
            # It takes longer than a heartbeat, so the caller learns of the worker.
            await calls.call("slow.write", {**value, "seconds": 0.3}, timeout=30)
        if is_consumer_deleted:
            async with connected(jetstream) as admin:
                await admin.jetstream().delete_consumer("operations_durable", "workers_operations")
        waiting = [
            asyncio.create_task(calls.call("slow.write", value, timeout=60, replayable=False))
            for _ in range(10)
        ]
        async with connected(jetstream) as admin:
            asked = await admin.subscribe("$JS.API.CONSUMER.INFO.>")
            # More than enough heartbeats for a call to count as lost.
            await asyncio.wait(waiting, timeout=1)
            # They do not ask for each call.
            assert asked.pending_msgs < 10
        assert not any(call.done() for call in waiting)
        async with (
            connect_nats(jetstream.url, queue="jetstream") as there,
            serve_calls(build_registry(), there),
        ):
            with time_limit(40):
                assert [(await call).data for call in waiting] == ["written"] * 10

    assert len(started(path)) == 11


@pytest.mark.parametrize("name", ["operations_durable", "THEIRS"])
async def test_the_stream_of_an_operator_is_used_unchanged(jetstream: Broker, name: str) -> None:
    async with connected(jetstream) as admin:
        made = await admin.jetstream().add_stream(
            name=name, subjects=["operations.durable.>"], max_msgs=77, duplicate_window=30
        )
        async with calling(jetstream.url, replicas=3) as calls:
            assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3
        assert (await admin.jetstream().stream_info(name)).config == made.config


@pytest.mark.requirement("F21")
async def test_a_full_stream_is_an_error_that_may_be_retried(jetstream: Broker) -> None:
    async with (
        connected(jetstream) as admin,
        connect_nats(jetstream.url, queue="jetstream") as target,
        PendingRequestMap(target) as calls,
    ):
        streams = admin.jetstream()
        found = (await streams.stream_info("operations_durable")).config
        await streams.update_stream(found.evolve(max_msgs=1, discard=DiscardPolicy.NEW))
        waiting = asyncio.create_task(calls.call("math.add", {"a": 1, "b": 2}))
        with time_limit(30):
            while not (await streams.stream_info("operations_durable")).state.messages:
                await asyncio.sleep(0.01)
        with pytest.raises(CallError) as caught:
            await calls.call("math.add", {"a": 1, "b": 2})
        waiting.cancel()
        await asyncio.wait({waiting})

    assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED
    assert caught.value.retryable
    assert caught.value.begun is False


async def test_a_stream_that_cannot_have_so_many_replicas_is_an_error(jetstream: Broker) -> None:
    with pytest.raises(TransportError, match="replicas"):
        async with connect_nats(jetstream.url, queue="jetstream", replicas=3):
            pass


async def test_workers_then_callers_are_switched_to_queues_in_jetstream(
    jetstream: Broker, tmp_path: Path
) -> None:
    ledger = Ledger(tmp_path / "ledger")

    def connect(stores: bool) -> Any:
        return connect_nats(jetstream.url, queue="jetstream" if stores else "core")

    async with AsyncExitStack() as old, AsyncExitStack() as new:
        plain = await old.enter_async_context(connect(False))
        await old.enter_async_context(serve_calls(ledger.registry(), plain))
        near = await new.enter_async_context(connect(False))
        calls = await new.enter_async_context(PendingRequestMap(near))
        stored = await new.enter_async_context(connect(True))
        later = await new.enter_async_context(PendingRequestMap(stored))
        async with ledger.traffic(calls):
            await ledger.progress(20)
            there = await new.enter_async_context(connect(True))
            await new.enter_async_context(serve_calls(ledger.registry(), there))
            await ledger.progress(20)
            async with ledger.traffic(later):
                await ledger.progress(20)
                await old.aclose()
                await ledger.progress(20)

    ledger.check(failures=0)


async def test_headers_count_towards_the_largest_message() -> None:
    broker = NatsServer(config="max_payload: 8KB")
    broker.options += ("-js", "-sd", broker.folder)
    registry = OperationRegistry()

    @registry.operation("text.length", type="query")
    async def length(text: str) -> int:
        return len(text)

    with running(broker):
        async with calling(broker.url, registry=registry) as calls:
            most = calls.target.max_bytes
            with pytest.raises(CallError, match="more than") as caught:
                await calls.call("text.length", {"text": "x" * most})
            assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED
            excess = int(re.findall(r"\d+", caught.value.message)[0]) - most
            # The times in a request are not always as many digits.
            largest = most - excess - 16
            assert (await calls.call("text.length", {"text": "x" * largest})).data == largest
    assert 7 * 1024 < most < 8 * 1024


async def test_a_request_survives_a_restart_of_the_server(jetstream: Broker) -> None:
    async with (
        connect_nats(jetstream.url, queue="jetstream") as here,
        PendingRequestMap(here) as calls,
    ):
        call = asyncio.create_task(calls.call("math.add", {"a": 1, "b": 2}, timeout=60))
        await asyncio.sleep(0.3)
        jetstream.kill()
        jetstream.start()
        async with (
            connect_nats(jetstream.url, queue="jetstream") as there,
            serve_calls(build_registry(), there),
        ):
            with time_limit(40):
                assert (await call).data == 3


@pytest.mark.requirement("R34", "F4")
async def test_f4_a_worker_reads_a_queue_in_jetstream_as_soon_as_the_server_is_back(
    jetstream: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        connect_nats(jetstream.url, queue="jetstream") as here,
        PendingRequestMap(here) as calls,
        connect_nats(jetstream.url, queue="jetstream") as there,
        AsyncExitStack() as working,
    ):
        async with connected(jetstream) as admin:
            asked = await admin.subscribe("$JS.API.CONSUMER.MSG.NEXT.>")
            await admin.flush()
            with monkeypatch.context() as patched:
                patched.setattr("operations.pubsub.nats.jetstream._WAIT", 60)
                await working.enter_async_context(serve_calls(build_registry(), there))
                await asked.next_msg(timeout=20)
        jetstream.kill()
        await until(lambda: not (here.is_connected or there.is_connected))
        jetstream.start()
        with time_limit(20):
            assert (await calls.call("math.add", {"a": 1, "b": 2}, timeout=60)).data == 3


@pytest.mark.requirement("R36", "F10")
async def test_f10_a_stored_request_runs_once_in_the_whole_group(
    jetstream: Broker, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    async with (
        connect_nats(jetstream.url, queue="jetstream") as one,
        connect_nats(jetstream.url, queue="jetstream") as two,
        connect_nats(jetstream.url, queue="jetstream") as here,
        serve_calls(build_registry(), one),
        serve_calls(build_registry(), two),
        PendingRequestMap(Shim(here, on_enqueue=lambda body: (body, body))) as calls,
    ):
        for _ in range(5):
            await calls.call("slow.write", {"seconds": 0, "path": str(path)})

    assert len(started(path)) == 5


@pytest.mark.requirement("R39", "F21")
async def test_f21_a_request_without_a_waiting_caller_does_not_run(
    jetstream: Broker, tmp_path: Path
) -> None:
    late, lasting = tmp_path / "late", tmp_path / "lasting"
    async with (
        connect_nats(jetstream.url, queue="jetstream") as here,
        PendingRequestMap(here) as calls,
    ):
        with pytest.raises(CallError) as caught:
            await calls.call("slow.write", {"seconds": 0, "path": str(late)}, timeout=0.3)
        with pytest.raises(CallError) as idle:
            await anext(calls.subscribe("count.forever", {"path": str(late)}, idle_timeout=0.3))
        call = asyncio.create_task(
            calls.call("slow.write", {"seconds": 0, "path": str(lasting)}, timeout=30)
        )
        async with (
            connect_nats(jetstream.url, queue="jetstream") as there,
            serve_calls(build_registry(), there) as worker,
        ):
            with time_limit(20):
                await call
            assert not worker.jobs

    assert caught.value.code == idle.value.code == ErrorCode.TIMEOUT
    assert started(lasting)
    assert not late.exists()


@pytest.mark.requirement("R39")
async def test_the_age_of_a_request_is_measured_by_the_server(
    jetstream: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("serving.jobs", "serving.execution"):
        monkeypatch.setattr(f"operations.calls.{module}.time", lambda: time() + 3600)
    async with (
        connect_nats(jetstream.url, queue="jetstream") as here,
        PendingRequestMap(here) as calls,
        connect_nats(jetstream.url, queue="jetstream") as there,
        serve_calls(build_registry(), there),
    ):
        with time_limit(20):
            assert (await calls.call("math.add", {"a": 1, "b": 2}, timeout=20)).data == 3


@pytest.mark.requirement("R34")
@pytest.mark.parametrize("what", ["stream", "consumer"])
async def test_r34_deleted_streams_of_jetstream_are_created_again(
    jetstream: Broker, what: str
) -> None:
    async with (
        connect_nats(jetstream.url, queue="jetstream") as here,
        PendingRequestMap(here) as calls,
        connect_nats(jetstream.url, queue="jetstream") as there,
        serve_calls(build_registry(), there),
    ):
        assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3
        async with connected(jetstream) as admin:
            if what == "stream":
                await admin.jetstream().delete_stream("operations_durable")
            else:
                await admin.jetstream().delete_consumer("operations_durable", "workers_operations")
        for _ in range(10):
            with time_limit(20):
                assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3


@pytest.mark.requirement("R34")
async def test_r34_a_deleted_stream_that_others_watch_is_created_again(jetstream: Broker) -> None:
    """With another subscriber, the server does not report that no stream stores the request."""
    async with (
        connect_nats(jetstream.url, queue="jetstream") as here,
        PendingRequestMap(here) as calls,
        connected(jetstream) as admin,
    ):
        await admin.subscribe("operations.durable.>")
        made = await admin.subscribe("$JS.API.STREAM.CREATE.operations_durable")
        await admin.jetstream().delete_stream("operations_durable")
        call = asyncio.create_task(calls.call("math.add", {"a": 1, "b": 2}, timeout=60))
        await made.next_msg(timeout=20)
        async with (
            connect_nats(jetstream.url, queue="jetstream") as there,
            serve_calls(build_registry(), there),
        ):
            with time_limit(20):
                assert (await call).data == 3


async def test_a_stream_is_not_created_again_while_the_server_deletes_it(
    jetstream: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the server sometimes has a stream that never stores anything."""
    pause, loop = 0.5, asyncio.get_running_loop()
    monkeypatch.setattr("operations.pubsub.nats.jetstream._RETRY", pause)
    async with calling(jetstream.url) as calls, connected(jetstream) as admin:
        made = await admin.subscribe("$JS.API.STREAM.CREATE.operations_durable")
        deleted_at = loop.time()
        await admin.jetstream().delete_stream("operations_durable")
        call = asyncio.create_task(calls.call("math.add", {"a": 1, "b": 2}))
        await made.next_msg(timeout=20)
        assert loop.time() - deleted_at >= pause
        with time_limit(20):
            assert (await call).data == 3


async def test_a_request_that_jetstream_cannot_store_is_unavailable(jetstream: Broker) -> None:
    assert isinstance(jetstream, NatsServer)
    async with (
        connect_nats(jetstream.url, queue="jetstream") as here,
        PendingRequestMap(here) as calls,
    ):
        jetstream.kill()
        await until(lambda: not here.is_connected)
        jetstream.options = ()
        jetstream.start()
        await until(lambda: here.is_connected)
        with time_limit(20), pytest.raises(CallError) as caught:
            await calls.call("math.add", {"a": 1, "b": 2}, timeout=4)

    assert caught.value.code == ErrorCode.UNAVAILABLE
    assert caught.value.retryable


async def test_without_jetstream_durability_is_rejected(nats_server: Broker) -> None:
    with pytest.raises(TransportError, match="nats-server -js"):
        async with connect_nats(nats_server.url, queue="jetstream"):
            pass


def guarded() -> NatsServer:
    """A server with the permissions of the recipe, and those that the page adds to it."""
    page = (DOCS / "calls.md").read_text("utf-8")
    *of_workers, sending, finding, counting = re.findall(r'`("(?:\$JS|operations)\.[^`]+")`', page)
    rules = (DOCS / "recipes" / "nats.conf").read_text("utf-8")
    more = rules.replace(
        'publish: ["operations.>"', ", ".join(('publish: ["operations.>"', *of_workers))
    )
    for user in ("alice", "bob"):
        queue = f'"operations.queue.*.{user}"'
        added = sending.replace("alice", user)
        more = more.replace(queue, f"{queue}, {added}, {finding}, {counting}")
    broker = NatsServer(config=more)
    broker.options += ("-js", "-sd", broker.folder)
    return broker


def connect_as(user: str, broker: Broker) -> Any:
    password = f"{user}-secret"
    return connect_nats(broker.url, queue="jetstream", client=user, user=user, password=password)


async def test_with_permissions_durability_needs_the_documented_ones() -> None:
    with running(guarded()) as broker:
        async with (
            connect_as("worker", broker) as there,
            serve_calls(build_registry(), there),
            connect_as("alice", broker) as here,
            PendingRequestMap(here) as calls,
        ):
            items = [item.data async for item in calls.subscribe("count.up", {"n": 600})]
            assert items == list(range(600))


@pytest.mark.requirement("R61")
async def test_r61_with_permissions_an_attacker_cannot_reach_requests_in_the_stream() -> None:
    answers: list[Any] = []
    errors: list[str] = []

    async def on_error(error: Exception) -> None:
        errors.append(str(error))

    async def hear(message: Any) -> None:
        answers.append(message.data)

    stream, consumer = "operations_durable", "workers_operations"
    attacks = {
        f"$JS.API.STREAM.MSG.GET.{stream}": b'{"seq":1}',
        f"$JS.API.DIRECT.GET.{stream}": b'{"seq":1}',
        f"$JS.API.DIRECT.GET.{stream}.operations.durable.operations.alice": b"",
        f"$JS.API.CONSUMER.CREATE.{stream}": b"{}",
        f"$JS.API.CONSUMER.DURABLE.CREATE.{stream}.thief": b"{}",
        f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}": b"1",
        f"$JS.API.CONSUMER.DELETE.{stream}.{consumer}": b"",
        f"$JS.API.STREAM.MSG.DELETE.{stream}": b'{"seq":1}',
        f"$JS.API.STREAM.PURGE.{stream}": b"",
        f"$JS.API.STREAM.DELETE.{stream}": b"",
        f"$JS.API.STREAM.UPDATE.{stream}": b"{}",
        f"$JS.ACK.{stream}.{consumer}.1.1.1.1.0": b"+ACK",
        "operations.durable.operations.alice": b"{}",
    }
    with running(guarded()) as broker:
        async with connect_as("worker", broker) as there, serve_calls(build_registry(), there):
            pass
        async with (
            connect_as("alice", broker) as here,
            PendingRequestMap(here) as calls,
        ):
            waiting = asyncio.create_task(calls.call("math.add", {"a": 1, "b": 2}, timeout=20))
            await until(lambda: [call for call in calls.pending.values() if call.receipt])
            bob = await nats.connect(
                broker.url, user="bob", password="bob-secret", error_cb=on_error
            )
            await bob.subscribe("operations.box.bob.>", cb=hear)
            for subject, body in attacks.items():
                await bob.publish(subject, body, reply="operations.box.bob.x")
            for subject in ("operations.durable.>", "$JS.EVENT.ADVISORY.>", "$JS.API.>"):
                await bob.subscribe(subject, cb=hear)
            await bob.flush()
            await until(lambda: len(errors) >= len(attacks) + 3)
            await bob.close()
            async with connect_as("worker", broker) as there, serve_calls(build_registry(), there):
                assert (await waiting).data == 3

    assert answers == []


@pytest.mark.requirement("R61")
async def test_r61_a_client_cannot_use_up_the_id_of_a_stored_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = "f" * 32
    with running(guarded()) as broker:
        async with (
            connect_as("worker", broker) as there,
            serve_calls(build_registry(), there),
            connect_as("alice", broker) as here,
            PendingRequestMap(here) as calls,
        ):
            bob = await nats.connect(broker.url, user="bob", password="bob-secret")
            subject, headers = "operations.durable.operations.bob", {"Nats-Msg-Id": known}
            await bob.publish(subject, b"{}", headers=headers)
            await bob.flush()
            await bob.close()
            monkeypatch.setattr("operations.calls.source.sending.new_request_id", lambda: known)
            assert (await calls.call("math.add", {"a": 1, "b": 2}, timeout=20)).data == 3


async def test_missing_permissions_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("operations.pubsub.nats.jetstream._ANSWER", 0.5)
    broker = NatsServer(config=(DOCS / "recipes" / "nats.conf").read_text("utf-8"))
    with running(broker), pytest.raises(TransportError, match="Permissions in docs"):
        async with connect_nats(
            broker.url, client="alice", user="alice", password="alice-secret", queue="jetstream"
        ):
            pass


async def test_mutations_that_wait_in_the_stream_are_not_lost(
    jetstream: Broker, tmp_path: Path
) -> None:
    path = tmp_path / "ledger"
    async with (
        connect_nats(jetstream.url, queue="jetstream") as there,
        serve_calls(build_registry(), there, concurrency=1),
        connect_nats(jetstream.url, queue="jetstream") as here,
        PendingRequestMap(here, heartbeat=0.1) as calls,
    ):
        with time_limit(20):
            results = await asyncio.gather(
                *(
                    calls.call("slow.write", {"seconds": 0.4, "path": str(path)}, replayable=False)
                    for _ in range(4)
                )
            )

    assert [result.data for result in results] == ["written"] * 4
    assert len(started(path)) == 4


@pytest.mark.requirement("R49", "F30")
async def test_a_stored_request_that_kills_every_worker_becomes_a_dead_letter(
    jetstream: Broker, tmp_path: Path
) -> None:
    """The workers are processes, and the input of the request really kills them."""
    path, world = tmp_path / "log", nats_world(jetstream.url)
    async with (
        worker_processes(world, 4, target={"queue": "jetstream"}),
        world.connect(queue="jetstream") as here,
        PendingRequestMap(here, heartbeat=0.2) as calls,
    ):
        with time_limit(140), pytest.raises(CallError) as caught:
            await calls.call("slow.crash", {"path": str(path)}, timeout=150)
        assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3
        async with monitor_group(here) as monitor:
            (letter,) = await monitor.letters()
            assert (letter.operation, letter.deliveries) == ("slow.crash", 3)
            assert (await monitor.look()).dead_letters == 1

    assert caught.value.details == {"deliveries": 3}
    assert len(started(path)) == 3


@pytest.mark.usefixtures("nothing_left")
async def test_a_request_that_cannot_be_acknowledged_leaves_nothing_behind(
    jetstream: Broker,
) -> None:
    removed = asyncio.Event()

    class Removing(SilentReceiver):
        def receive(self, delivery: Delivery) -> None:
            jetstream.kill()
            assert delivery.claim is not None
            delivery.claim.remove()
            removed.set()

    async with connect_nats(jetstream.url, queue="jetstream") as target:
        await target.consume("operations", Removing())
        await target.enqueue("operations", b"{}", key="1", reply_to="", wait=5)
        with time_limit(30):
            await removed.wait()


@pytest.mark.requirement("R13", "F15")
@pytest.mark.parametrize("reply", ["", "somewhere", "$JS.ACK.x"])
async def test_f15_no_message_stops_the_reader_of_a_queue_in_jetstream(
    jetstream: Broker, reply: str
) -> None:
    inboxes: list[str] = []

    async def note(message: Any) -> None:
        inboxes.append(message.reply)

    async with connected(jetstream) as admin:
        await admin.subscribe("$JS.API.CONSUMER.MSG.NEXT.>", cb=note)
        await admin.flush()
        async with calling(jetstream.url) as calls:
            with time_limit(30):
                await until(lambda: inboxes)
                await admin.publish(inboxes[0], b"{}", reply=reply, headers={"Odd": "1"})
                await admin.flush()
                for number in range(3):
                    result = await calls.call("math.add", {"a": 1, "b": number}, timeout=20)
                    assert result.data == 1 + number


@pytest.mark.alone
async def test_a_worker_with_a_slow_connection_stops_without_keeping_requests(
    jetstream: Broker,
) -> None:
    async with (
        connect_nats(jetstream.url, queue="jetstream") as here,
        PendingRequestMap(here) as calls,
        proxy(jetstream.port) as slow,
        connected(jetstream) as admin,
    ):
        slow.delay = 0.05
        pending: list[asyncio.Task[Any]] = []

        async def load() -> None:
            while True:
                call = calls.call("math.add", {"a": 1, "b": len(pending)}, timeout=60)
                pending.append(asyncio.create_task(call))
                await asyncio.sleep(0.01)

        handled: set[int] = set()

        async def note(message: Any) -> None:
            # The subject of an acknowledgement: $JS.ACK.<stream>.<consumer>.<deliveries>.<number>...
            handled.add(int(message.subject.split(".")[5]))

        await admin.subscribe("$JS.ACK.operations_durable.workers_operations.>", cb=note)
        for _ in range(3):
            async with (
                connect_nats(f"nats://127.0.0.1:{slow.port}", queue="jetstream") as there,
                serve_calls(build_registry(), there) as worker,
            ):
                loading = asyncio.create_task(load())
                began = worker.counters.finished
                await until(lambda: worker.counters.finished >= began + 20)  # noqa: B023
                await worker.aclose()
                loading.cancel()
            described = await admin.jetstream().consumer_info(
                "operations_durable", "workers_operations"
            )
            # The server would keep a request that was neither started nor returned for ten seconds.
            fetched = set(range(1, described.delivered.stream_seq + 1))
            await until(lambda: fetched <= handled)  # noqa: B023
        async with (
            connect_nats(jetstream.url, queue="jetstream") as there,
            serve_calls(build_registry(), there),
        ):
            with time_limit(60):
                results = await asyncio.gather(*pending)
    assert [each.data for each in results] == [1 + number for number in range(len(pending))]
