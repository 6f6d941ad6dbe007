"""A WebSocket whose peer does not read, or reads slowly."""

import asyncio
import gc
import json
import sys
import traceback
from collections import UserDict
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest
from tests.calls.waiting import until
from tests.limits import scaled, time_limit
from tests.proxies import running_proxy
from tests.receivers import SilentReceiver
from tests.servers import free_port
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response

from operations.base.errors import NotSentError, TransportError
from operations.pubsub.base import Delivery
from operations.pubsub.websocket import AcceptedTarget, connect_websocket, serve_websocket
from operations.pubsub.websocket.target import BATCHES, WebSocketTarget

KEEPALIVE: dict[str, Any] = {"ping_interval": 1, "ping_timeout": 1}
LARGE = json.dumps({"type": "call.responded", "payload": "x" * 14_000_000}).encode()
SMALL = json.dumps({"type": "call.responded", "payload": "x" * 1000}).encode()


@asynccontextmanager
async def reader(
    *, batches: bool = False, **options: Any
) -> AsyncGenerator[tuple[WebSocketTarget, ServerConnection]]:
    """A connection, and its other end, which reads only on request."""
    connections: list[ServerConnection] = []

    def respond(connection: ServerConnection, request: Request, response: Response) -> None:
        if batches:
            response.headers[BATCHES] = "1"

    async def handle(connection: ServerConnection) -> None:
        connection.transport.pause_reading()
        connections.append(connection)
        await connection.wait_closed()

    async with serve(
        handle,
        "127.0.0.1",
        0,
        max_size=None,
        close_timeout=0.1,
        ping_interval=None,
        process_response=respond,
    ) as server:
        port = server.sockets[0].getsockname()[1]
        async with connect_websocket(f"ws://127.0.0.1:{port}", **options) as target:
            await until(lambda: connections)
            try:
                yield target, connections[0]
            finally:
                for connection in connections:
                    connection.transport.abort()


@pytest.mark.requirement("R48")
async def test_r48_a_client_that_is_disconnected_after_each_connect_backs_off() -> None:
    came: list[float] = []
    enough = asyncio.Event()

    async def throw_out(target: AcceptedTarget) -> None:
        came.append(asyncio.get_running_loop().time())
        if len(came) == 12:
            enough.set()
        await target.aclose()

    async with serve_websocket(throw_out) as server:
        url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with connect_websocket(url):
            await asyncio.wait_for(enough.wait(), scaled(60))

    # At random up to 0.05, 0.1, 0.2, 0.4 and then 0.6 s: a twelfth of that would be no growth at all.
    assert came[-1] - came[0] > 0.6


@pytest.mark.requirement("R13")
@pytest.mark.parametrize("values", [["9" * 5000], ["100", "90"], ["many"], ["-1"]])
async def test_a_client_reconnects_to_a_server_that_announces_a_malformed_limit(
    values: list[str],
) -> None:
    came = asyncio.Semaphore(0)

    async def throw_out(connection: ServerConnection) -> None:
        came.release()

    def announce(connection: ServerConnection, request: Request, response: Response) -> None:
        for value in values:
            response.headers["Operations-Max-Bytes"] = value

    async with serve(throw_out, "127.0.0.1", 0, process_response=announce) as server:
        port = server.sockets[0].getsockname()[1]
        async with connect_websocket(f"ws://127.0.0.1:{port}", max_bytes=1000) as target:
            with time_limit(20):
                for _ in range(3):
                    await came.acquire()

    assert target.max_bytes == (90 if "90" in values else 1000)


@pytest.mark.requirement("R13")
async def test_an_unexpected_error_while_connecting_again_leads_to_another_attempt() -> None:
    came = asyncio.Semaphore(0)
    reads = count(1)

    class Headers(UserDict[str, str]):
        """Headers that a program computes for each handshake, with a defect."""

        def __iter__(self) -> Iterator[str]:
            if next(reads) == 2:
                raise RuntimeError("a defect")
            return super().__iter__()

    async def throw_out(connection: ServerConnection) -> None:
        came.release()

    async with serve(throw_out, "127.0.0.1", 0) as server:
        url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with connect_websocket(url, headers=Headers(authorization="Bearer t")):
            with time_limit(20):
                for _ in range(3):
                    await came.acquire()

    assert next(reads) > 3


@pytest.mark.requirement("R42")
async def test_a_peer_that_sends_and_leaves_before_anyone_listens_is_noticed() -> None:
    noticed = asyncio.Event()

    async def wait(target: AcceptedTarget) -> None:
        await target.wait_closed()
        noticed.set()

    async with serve_websocket(wait) as server:
        async with connect_websocket(
            f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ) as target:
            await target.send("peer", SMALL)
        await asyncio.wait_for(noticed.wait(), scaled(20))


async def test_calls_of_a_large_frame_start_before_all_its_messages_are_read() -> None:
    order: list[str] = []
    received = asyncio.Event()

    class Starter(SilentReceiver):
        def receive(self, delivery: Delivery) -> None:
            order.append("message")
            # As a worker starts a call: in the next turn of the event loop.
            asyncio.get_running_loop().call_soon(order.append, "start")
            if order.count("message") == 100:
                received.set()

    async def listen(target: AcceptedTarget) -> None:
        await target.listen((), Starter())
        await target.wait_closed()

    async with serve_websocket(listen) as server:
        port = server.sockets[0].getsockname()[1]
        url = f"ws://127.0.0.1:{port}"
        async with connect(url, additional_headers={BATCHES: "1"}) as peer:
            await peer.send(
                b"\n".join([b'{"type":"call.responded","payload":{}}'] * 100), text=True
            )
            await asyncio.wait_for(received.wait(), scaled(20))

    assert order.index("start") < 50


async def test_a_connection_cannot_be_used_on_another_event_loop() -> None:
    async with serve_websocket(AcceptedTarget.wait_closed) as server:
        port = server.sockets[0].getsockname()[1]
        async with connect_websocket(f"ws://127.0.0.1:{port}") as target:
            uses: list[Coroutine[Any, Any, Any]] = [
                target.send("peer", SMALL),
                target.enqueue("", SMALL, key="k", reply_to="", wait=1),
                target.listen((target.mailbox(),), SilentReceiver()),
            ]
            for use in uses:
                with pytest.raises(NotSentError, match="another event loop"):
                    await asyncio.to_thread(asyncio.run, use)


@pytest.mark.parametrize(("server_limit", "client_limit"), [(2000, 1_000_000), (1_000_000, 2000)])
async def test_messages_of_one_moment_arrive_if_one_end_has_a_low_limit(
    server_limit: int, client_limit: int
) -> None:
    arrived: list[bytes] = []
    complete = asyncio.Event()

    class Counting(SilentReceiver):
        def receive(self, delivery: Delivery) -> None:
            arrived.append(delivery.body)
            if len(arrived) == 16:
                complete.set()

    async def read(target: AcceptedTarget) -> None:
        await target.listen((target.mailbox(),), Counting())
        await target.wait_closed()

    async with serve_websocket(read, max_received=server_limit) as server:
        port = server.sockets[0].getsockname()[1]
        async with connect_websocket(f"ws://127.0.0.1:{port}", max_bytes=client_limit) as target:
            await asyncio.gather(*(target.send("peer", SMALL) for _ in range(16)))
            with time_limit(20):
                await complete.wait()
    assert arrived == [SMALL] * 16


@pytest.mark.requirement("R35", "F6", "F7")
async def test_f7_a_peer_that_stops_reading_is_detected() -> None:
    async with reader(**KEEPALIVE) as (target, _):
        for body in (LARGE, SMALL):
            with time_limit(20), pytest.raises(TransportError):
                await target.send("peer", body)


@pytest.mark.requirement("R35", "F7")
async def test_f7_a_peer_that_reads_slowly_is_kept() -> None:
    loop = asyncio.get_running_loop()
    body = LARGE * 3
    async with reader(max_bytes=len(body), **KEEPALIVE) as (target, peer):
        sending = asyncio.create_task(target.send("peer", body))
        end = loop.time() + 4
        while loop.time() < end:
            # So much at a time that the system lets the sender know.
            peer.transport.resume_reading()
            for _ in range(4):
                await asyncio.sleep(0)
            peer.transport.pause_reading()
            await asyncio.sleep(0.2)
        assert target.is_connected
        peer.transport.resume_reading()
        with time_limit(20):
            assert await peer.recv(decode=False) == body
            await sending


async def test_closing_does_not_wait_for_a_peer_that_reads_nothing() -> None:
    with time_limit(20):
        async with reader() as (target, _):
            waiting = [asyncio.create_task(target.send("peer", body)) for body in (LARGE, SMALL)]
            await asyncio.sleep(0)
            await target.aclose()
            await asyncio.wait(waiting)
    assert [type(each.exception()) for each in waiting] == [TransportError] * 2


@pytest.mark.parametrize("variable", ["https_proxy", "http_proxy"])
async def test_a_proxy_of_the_environment_that_is_down_is_named(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setenv(variable, f"http://me:s3cret@127.0.0.1:{port}")
    with pytest.raises(TransportError) as caught:
        async with connect_websocket("ws://hub.example.com/ws"):
            pass

    message = (
        f"ws://hub.example.com/ws cannot be reached through the proxy http://127.0.0.1:{port}: "
    )
    assert message in str(caught.value)


async def test_a_proxy_that_requires_a_login_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_proxy(407) as proxy:
        monkeypatch.setenv("https_proxy", proxy.url)
        with pytest.raises(TransportError, match=rf"{proxy.url}: .* HTTP 407: write the user"):
            async with connect_websocket("wss://hub.example.com/ws"):
                pass


async def test_hosts_of_no_proxy_are_connected_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.0/8")
    async with serve_websocket(AcceptedTarget.wait_closed) as server:
        port = server.sockets[0].getsockname()[1]
        async with connect_websocket(f"ws://127.0.0.1:{port}"):
            pass


async def test_a_socks_proxy_is_reported_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "socks5h://me:s3cret@127.0.0.1:9")
    with pytest.raises(
        TransportError, match="install python-socks, or add the host to NO_PROXY"
    ) as caught:
        async with connect_websocket("wss://hub.example.com/ws"):
            pass

    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("proxy", ["ftp://me:s3cret@127.0.0.1:9", "http://me:s3cret@127.0.0.1:9/x"])
async def test_an_invalid_proxy_is_reported_without_its_password(proxy: str) -> None:
    with pytest.raises(
        TransportError, match=r"the proxy of ws://127\.0\.0\.1:9/x cannot"
    ) as caught:
        async with connect_websocket("ws://127.0.0.1:9/x", proxy=proxy):
            pass

    assert "s3cret" not in "".join(traceback.format_exception(caught.value, chain=True))


async def send_until_full(target: WebSocketTarget) -> int:
    """Send messages until the peer does not accept more, and return their number."""
    sent = 0

    async def produce() -> None:
        nonlocal sent
        while sent < 100_000:
            await target.send("peer", SMALL)
            sent += 1

    producer = asyncio.create_task(produce())
    before = -1
    while sent != before:
        before = sent
        await asyncio.sleep(0.1)
    producer.cancel()
    return sent


async def test_messages_that_were_sent_arrive_before_the_connection_is_closed() -> None:
    async def count(peer: ServerConnection) -> int:
        return len([body async for body in peer])

    async with reader(close_timeout=20) as (target, peer):
        sent = await send_until_full(target)
        counting = asyncio.create_task(count(peer))
        closing = asyncio.create_task(target.aclose())
        await asyncio.sleep(0)
        peer.transport.resume_reading()
        with time_limit(20):
            await closing
            assert await counting >= sent


async def test_a_message_whose_sender_stopped_waiting_for_space_is_not_stored() -> None:
    abandoned = json.dumps({"type": "call.responded", "payload": "abandoned"}).encode()

    async with reader(close_timeout=20) as (target, peer):
        filling = asyncio.create_task(target.send("peer", LARGE))
        await asyncio.sleep(0)
        sending = [asyncio.create_task(target.send("peer", abandoned)) for _ in range(100)]
        await asyncio.sleep(0)
        for each in sending:
            each.cancel()
        await asyncio.wait(sending)
        last = asyncio.create_task(target.send("peer", SMALL))
        await asyncio.sleep(0)
        peer.transport.resume_reading()
        with time_limit(20):
            assert [await peer.recv(decode=False), await peer.recv(decode=False)] == [LARGE, SMALL]
            await asyncio.gather(filling, last)


@pytest.mark.parametrize("batches", [False, True])
async def test_waiting_messages_are_sent_in_order_except_those_of_cancelled_senders(
    batches: bool,
) -> None:
    bodies = [json.dumps({"n": n, "payload": "x" * 1000}).encode() for n in range(2000)]
    references = sys.getrefcount(bodies[-3])

    async with (
        reader(batches=batches, close_timeout=20) as (target, peer),
        reader() as (other, other_peer),
    ):
        filling = asyncio.create_task(target.send("peer", LARGE))
        await asyncio.sleep(0)
        sending = [asyncio.create_task(target.send("peer", body)) for body in bodies]
        await asyncio.sleep(0)
        assert not any(each.done() for each in sending), (
            "nothing is stored for a peer that does not read"
        )
        cancelled = sending.pop(-3)
        cancelled.cancel()
        await asyncio.wait({cancelled})
        del cancelled
        gc.collect()
        remaining = sys.getrefcount(bodies[-3])
        assert remaining == references, "the message of a cancelled sender is not stored"

        other_peer.transport.resume_reading()
        with time_limit(20):
            await other.send("peer", SMALL)
            assert await other_peer.recv(decode=False) == SMALL, "other connections are not blocked"

        del bodies[-3]
        peer.transport.resume_reading()
        with time_limit(20):
            assert await peer.recv(decode=False) == LARGE
            arrived: list[bytes] = []
            while len(arrived) < len(bodies):
                arrived += (await peer.recv(decode=False)).split(b"\n")
                if bodies[-1] is not SMALL:
                    # A message that is sent later does not overtake those that wait.
                    bodies.append(SMALL)
                    sending.append(asyncio.create_task(target.send("peer", SMALL)))
            assert arrived == bodies
            await asyncio.gather(filling, *sending)


async def test_a_message_to_a_peer_that_closes_fails_with_the_reason() -> None:
    async with reader() as (target, peer):
        closing = asyncio.create_task(peer.close(1001, "maintenance"))
        with time_limit(20), pytest.raises(TransportError, match="maintenance"):
            while True:
                await target.send("peer", SMALL)
                await asyncio.sleep(0)
        await closing


@pytest.mark.requirement("R33", "F8")
async def test_a_sender_is_slowed_down_by_a_peer_that_does_not_read() -> None:
    async with reader() as (target, _):
        sent = await send_until_full(target)

    # Little more than the system's own buffers.
    assert sent < 20_000
