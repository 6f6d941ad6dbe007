"""Addresses contain secrets: neither errors about unreachable addresses nor logs show them."""

import base64
import logging
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from tests.servers import Broker, NatsServer, RedisServer, running

from operations.base.errors import TransportError
from operations.calls import PendingRequestMap, serve_calls
from operations.contract.access import Identity
from operations.pubsub.nats import NatsConfig, connect_nats
from operations.pubsub.redis import RedisConfig, connect_redis, connect_redis_interop
from operations.pubsub.websocket import AcceptedTarget, connect_websocket, serve_websocket
from operations.registry import OperationRegistry

SECRET = "SEKRIT"


def everything_said(error: BaseException | None) -> Iterator[str]:
    """Return the text of an error and of all errors that are chained to it, shown or not."""
    while error is not None:
        yield from (str(error), repr(error), repr(vars(error)), repr(error.args))
        yield from traceback.format_exception(error)
        error = error.__cause__ or error.__context__


@pytest.mark.requirement("R16")
@pytest.mark.parametrize("connect", [connect_redis, connect_redis_interop])
@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("redis://:SEKRIT@127.0.0.1:port/", "port"),
        ("redis://user:SEKRIT@127.0.0.1:99999/", "port"),
        ("redis://:SEKRIT/1@127.0.0.1:6379/", "%2F"),
        ("redis://:SEKRIT#1@127.0.0.1:6379/", "%23"),
        ("redis://:SEKRIT@[::1/", "host"),
        ("redis://:SEKRIT@h\u2100st/", "host"),
        ("redis://:SEKRIT%ff@127.0.0.1/", "UTF-8"),
        ("http://:SEKRIT@127.0.0.1/", "redis://"),
        (":SEKRIT@127.0.0.1", "redis://"),
        ("redis://127.0.0.1/?protocol=SEKRIT", "option"),
        ("redis://127.0.0.1/?nonsense=SEKRIT", "option"),
        ("redis://127.0.0.1/?retry=SEKRIT", "option"),
        ("rediss://127.0.0.1/?ssl_cert_reqs=SEKRIT", "option"),
        ("redis://:SEKRIT@127.0.0.1:1/", "reached"),
    ],
)
async def test_an_unreachable_redis_address_is_reported(
    connect: Callable[..., Any], url: str, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    await nowhere(partial(connect, connect_timeout=2), url, word, caplog)


@pytest.mark.requirement("R16")
@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("nats://user:SEKRIT@127.0.0.1:none", "port"),
        ("nats://user:SEKRIT/1@127.0.0.1:4222", "%2F"),
        ("nats://user:SEKRIT@127.0.0.1:1,nats://user:SEKRIT@127.0.0.1:none", "port"),
        ("user:SEKRIT@127.0.0.1:none", "port"),
        ("nats://SEKRIT@[::1", "host"),
        ("nats://user:SEKRIT@h\u2100st", "host"),
        ("nats://user:SEKRIT@", "host"),
        ("redis://user:SEKRIT@127.0.0.1:1", "nats://"),
        ("nats://user:SEKRIT@127.0.0.1:1,ws://user:SEKRIT@127.0.0.1:1", "mixing"),
        ("nats://user:SEKRIT@127.0.0.1:1", "connection refused"),
    ],
)
async def test_an_unreachable_nats_address_is_reported(
    url: str, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    await nowhere(lambda url: connect_nats(url, connect_timeout=2), url, word, caplog)


@pytest.mark.requirement("R16")
@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("ws://user:SEKRIT@127.0.0.1:none/ws", "port"),
        ("ws://user:SEKRIT/1@127.0.0.1:80/", "%2F"),
        ("ws://user:SEKRIT@[::1/", "host"),
        ("ws://user:SEKRIT@h\u2100st/", "host"),
        ("ws://user:SEKRIT@a..b/", "host"),
        ("ws:///user:SEKRIT@127.0.0.1", "host"),
        ("ws://user:SEKRIT%ff@127.0.0.1/", "UTF-8"),
        ("http://user:SEKRIT@127.0.0.1:1/", "ws://"),
        ("ws://SEKRIT@127.0.0.1:1/", "user:password"),
        ("ws://127.0.0.1:1/#SEKRIT", "user:password"),
        ("ws://user:SEKRIT@127.0.0.1:1/ws", "reached"),
        ("ws://127.0.0.1:1/ws?token=SEKRIT", "reached"),
    ],
)
async def test_an_unreachable_websocket_address_is_reported(
    url: str, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    await nowhere(connect_websocket, url, word, caplog)


async def nowhere(
    connect: Callable[[str], Any], url: str, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(TransportError) as caught:
        async with connect(url):
            pass

    assert word in str(caught.value)
    assert not [text for text in everything_said(caught.value) if SECRET in text]
    assert SECRET not in caplog.text


@pytest.mark.requirement("R16")
@pytest.mark.parametrize(
    ("make", "connect"),
    [
        (lambda: RedisServer("--requirepass", SECRET), connect_redis),
        (lambda: NatsServer("--user", "default", "--pass", SECRET), connect_nats),
    ],
    ids=["redis", "nats"],
)
async def test_a_login_at_a_broker_is_in_no_log(
    make: Callable[[], Broker], connect: Callable[[str], Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with running(make()) as broker:
        url = f"{broker.scheme}://default:{SECRET}@127.0.0.1:{broker.port}"
        async with connect(url) as target:
            assert target.is_connected
            assert SECRET not in repr((target, vars(target)))
        with pytest.raises(TransportError) as caught:
            async with connect(url.replace(SECRET, f"{SECRET}2")):
                pass

    assert not [text for text in everything_said(caught.value) if SECRET in text]
    assert SECRET not in caplog.text


@pytest.mark.requirement("R16")
async def test_messages_of_a_websocket_are_not_logged(
    registry: OperationRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    @registry.operation("echo.back", type="query")
    async def back(value: str) -> str:
        return value

    async def attach(target: AcceptedTarget) -> None:
        async with serve_calls(registry, target, resolve=lambda _: Identity("ann")):
            await target.wait_closed()

    async with serve_websocket(attach) as server:
        port = server.sockets[0].getsockname()[1]
        url = f"ws://user:{SECRET}@127.0.0.1:{port}/?token={SECRET}"
        async with (
            connect_websocket(url, headers={"X-Key": SECRET}) as target,
            PendingRequestMap(target, credential=SECRET) as calls,
        ):
            assert (await calls.call("echo.back", {"value": SECRET})).data == SECRET

    assert SECRET not in caplog.text
    assert base64.b64encode(f"user:{SECRET}".encode()).decode() not in caplog.text


async def test_one_of_several_nats_servers_is_enough(nats_server: Broker) -> None:
    async with connect_nats(f"nats://127.0.0.1:1, {nats_server.url}") as target:
        assert target.is_connected


@pytest.mark.requirement("R16")
def test_the_repr_of_a_config_does_not_show_the_address() -> None:
    assert SECRET not in repr(RedisConfig(f"redis://user:{SECRET}@127.0.0.1:1"))
    assert SECRET not in repr(NatsConfig(f"nats://user:{SECRET}@127.0.0.1:1"))
