"""Connects and handshakes end in time, and clients leave servers that do not serve them."""

import asyncio
import logging
import socket
import subprocess
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import hiredis
import pytest
from redis.asyncio import Redis
from tests.calls.waiting import until
from tests.limits import time_limit
from tests.receivers import SilentReceiver
from tests.servers import Broker, NatsServer, RedisServer, free_port, proxy, running

from operations.base.errors import TransportError
from operations.pubsub.base import Delivery
from operations.pubsub.config import RedisConfig
from operations.pubsub.nats import connect_nats
from operations.pubsub.redis import connect_redis, connect_redis_interop
from operations.pubsub.redis.connection import Connector
from operations.pubsub.websocket import connect_websocket


@contextmanager
def silent_port() -> Iterator[int]:
    """A port at which the system accepts connections, but no program responds."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield int(listening.getsockname()[1])


@pytest.mark.requirement("R35", "F6")
@pytest.mark.parametrize(
    ("connect", "scheme"),
    [
        (connect_redis, "redis"),
        (connect_redis, "redis://user:password@"),
        (connect_redis, "rediss"),
        (connect_redis_interop, "redis"),
        (connect_nats, "nats"),
        (connect_nats, "tls"),
        (connect_nats, "ws"),
        (connect_websocket, "ws"),
        (connect_websocket, "wss"),
    ],
)
async def test_a_silent_port_is_an_error_within_the_timeout(connect: Any, scheme: str) -> None:
    option = "open_timeout" if connect is connect_websocket else "connect_timeout"
    start = scheme if "://" in scheme else f"{scheme}://"
    with (
        silent_port() as port,
        time_limit(20),
        pytest.raises(TransportError, match="cannot be reached"),
    ):
        async with connect(f"{start}127.0.0.1:{port}", **{option: 0.3}):
            pass


@pytest.mark.parametrize(("wrong", "right"), [("redis", "rediss"), ("rediss", "redis")])
async def test_the_error_of_a_silent_redis_port_names_the_other_scheme(
    wrong: str, right: str
) -> None:
    with silent_port() as port, pytest.raises(TransportError, match=f"write {right}:// instead"):
        async with connect_redis(f"{wrong}://127.0.0.1:{port}", connect_timeout=0.1):
            pass


@pytest.mark.parametrize(
    ("connect", "url", "field"),
    [
        (connect_redis, "rediss://127.0.0.1:1", "ca_file"),
        (connect_redis, "rediss://127.0.0.1:1", "key_file"),
        (connect_nats, "tls://127.0.0.1:1", "cert_file"),
        (connect_nats, "nats://127.0.0.1:1", "user_credentials"),
        (connect_nats, "nats://127.0.0.1:1", "nkey_file"),
    ],
)
async def test_a_missing_file_is_reported_at_once(connect: Any, url: str, field: str) -> None:
    with time_limit(20), pytest.raises(TransportError, match=f"{field}: .*no file /a/file"):
        async with connect(url, connect_timeout=60, **{field: "/a/file"}):
            pass


def test_a_key_is_decrypted_with_the_password_of_the_address(tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    curve = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -passout pass:SEKRIT -subj /CN=x"
    command = ["openssl", "req", "-x509", *curve.split(), "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    files: dict[str, Any] = {"cert_file": cert, "key_file": key}

    Connector(RedisConfig("rediss://127.0.0.1:1?ssl_password=SEKRIT", **files))
    with pytest.raises(TransportError, match="the certificates cannot be read"):
        Connector(RedisConfig("rediss://127.0.0.1:1?ssl_password=wrong", **files))


async def test_an_nkey_that_cannot_be_read_is_an_error_of_the_connection(tmp_path: Path) -> None:
    seed = tmp_path / "seed.nk"
    seed.write_text("not a seed")
    with running(NatsServer()) as server, pytest.raises(TransportError, match="invalid seed"):
        async with connect_nats(server.url, nkey_file=seed):
            pass


@pytest.mark.requirement("R34", "R35")
async def test_a_client_leaves_a_redis_that_hangs_while_its_address_moves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr("operations.pubsub.redis.connection._READ_TIMEOUT", 1)
    monkeypatch.setattr("operations.pubsub.redis.connection.SILENCE", 1)
    monkeypatch.setattr("operations.pubsub.redis.connection.KEEPALIVE", 0.3)
    with silent_port() as hung, running(RedisServer()) as old, running(RedisServer()) as new:
        async with (
            proxy(old.port) as through,
            connect_redis(f"redis://127.0.0.1:{through.port}", connect_timeout=3) as target,
        ):
            # First the server hangs and is still at the address; then another one is there.
            through.swallow()
            through.target = hung
            await until(lambda: not target.is_connected)
            through.swallow(False)
            through.cut()
            await asyncio.sleep(0.5)
            assert not target.is_connected
            through.target = new.port
            await until(lambda: target.is_connected)
            box = target.mailbox()
            await target.listen((box,), SilentReceiver())
            assert await target.is_present(box)
    # One line, although the client lost several connections.
    assert caplog.text.count("the connection to Redis was lost") == 1


@pytest.mark.requirement("R34")
async def test_a_client_leaves_a_redis_that_became_read_only() -> None:
    with running(RedisServer()) as old, running(RedisServer()) as new:
        async with (
            proxy(old.port) as through,
            connect_redis(f"redis://127.0.0.1:{through.port}") as near,
            connect_redis(new.url) as far,
            Redis(port=old.port) as admin,
        ):
            received = asyncio.Event()

            class Worker(SilentReceiver):
                def receive(self, delivery: Delivery) -> None:
                    received.set()

            await near.consume("work", SilentReceiver())
            await far.consume("work", Worker())
            # The address leads to the new master, but the connections do not.
            through.target = new.port
            await admin.replicaof("127.0.0.1", new.port)
            request = b'{"type":"call.requested"}'
            with time_limit(20):
                await near.enqueue("work", request, key="1", reply_to="", wait=5)
                await received.wait()


@pytest.mark.requirement("R34")
async def test_a_client_leaves_a_redis_that_all_workers_have_left_for_the_new_master() -> None:
    with running(RedisServer()) as old, running(RedisServer()) as new:
        async with (
            proxy(old.port) as through,
            connect_redis(f"redis://127.0.0.1:{through.port}") as near,
            connect_redis(new.url) as far,
            Redis(port=old.port) as admin,
        ):
            await far.consume("work", SilentReceiver())
            through.target = new.port
            await admin.replicaof("127.0.0.1", new.port)
            with time_limit(20):
                assert await near.enqueue("work", b"{}", key="1", reply_to="", wait=5)


@pytest.mark.requirement("R34")
@pytest.mark.parametrize(
    ("server", "connect"), [(RedisServer, connect_redis), (NatsServer, connect_nats)]
)
async def test_a_client_that_starts_before_its_broker_connects(
    server: type[Broker], connect: Any
) -> None:
    broker = server()
    try:
        with time_limit(60):
            async with asyncio.TaskGroup() as tasks:
                connecting = tasks.create_task(_listening(connect(broker.url, connect_timeout=50)))
                done, _ = await asyncio.wait({connecting}, timeout=0.2)
                assert not done
                await asyncio.to_thread(broker.start)
    finally:
        broker.close()


async def _listening(connecting: Any) -> None:
    async with connecting as target:
        await target.listen((target.mailbox(),), SilentReceiver())


@pytest.mark.requirement("R34")
async def test_a_client_that_starts_while_a_master_is_replaced_connects() -> None:
    with running(RedisServer()) as old, running(RedisServer()) as new:
        async with proxy(old.port) as through, Redis(port=old.port) as admin:
            # The address leads to a replica for a moment.
            await admin.replicaof("127.0.0.1", new.port)
            url = f"redis://127.0.0.1:{through.port}"
            with time_limit(60):
                async with asyncio.TaskGroup() as tasks:
                    starting = tasks.create_task(_listening(connect_redis(url, connect_timeout=50)))
                    done, _ = await asyncio.wait({starting}, timeout=0.3)
                    assert not done
                    through.target = new.port


@pytest.mark.requirement("R16")
async def test_a_wrong_password_is_an_error_at_once() -> None:
    with running(RedisServer("--requirepass", "right")) as broker:
        url = f"redis://:wrong@127.0.0.1:{broker.port}"
        with time_limit(20), pytest.raises(TransportError):
            async with connect_redis(url, connect_timeout=60):
                pass


@pytest.mark.parametrize(
    ("connect", "url"),
    [
        (connect_redis, "redis://:{secret}@127.0.0.1:{port}"),
        (connect_redis, "redis://localhost:{port}"),
        (connect_redis, "redis+sentinel://127.0.0.1:{port}/main"),
        (connect_redis, "redis+cluster://127.0.0.1:{port}"),
        (connect_nats, "nats://user:{secret}@127.0.0.1:{port}"),
        (connect_nats, "nats://localhost:{port}"),
        (connect_websocket, "ws://localhost:{port}"),
    ],
)
async def test_an_error_names_the_address_without_a_server_and_what_to_do(
    connect: Any, url: str
) -> None:
    port, options = free_port(), {"connect_timeout": 2}
    with time_limit(20), pytest.raises(TransportError) as caught:
        async with connect(
            url.format(secret="SEKRIT", port=port),
            **({} if connect is connect_websocket else options),
        ):
            pass

    text = str(caught.value)
    assert "cannot be reached" in text
    assert f":{port}: connection refused; start the server, or check the address" in text.replace(
        " cannot be reached:", ":"
    )
    for noise in ("rrno", "Error 111", "Connect call", "SEKRIT"):
        assert noise not in text


async def test_a_missing_unix_socket_is_named() -> None:
    with pytest.raises(
        TransportError, match=r"at /nowhere\.sock: no such file or directory; start"
    ):
        async with connect_redis("unix:///nowhere.sock", connect_timeout=1):
            pass


@pytest.mark.parametrize(
    ("version", "refusal"),
    [(b"7.0.0", None), (b"", None), (b"unstable", None), (None, None), (b"6.2.1", "has 6.2.1")],
)
async def test_a_node_that_does_not_report_its_version_is_accepted(
    version: bytes | None, refusal: str | None
) -> None:
    async with node_of_a_cluster(version) as port:
        connector = Connector(RedisConfig(f"redis+cluster://127.0.0.1:{port}", connect_timeout=5))
        if refusal is None:
            connection = await connector.connect()
            await connection.disconnect(nowait=True)
        else:
            with pytest.raises(TransportError, match=refusal):
                await connector.connect()


@asynccontextmanager
async def node_of_a_cluster(version: bytes | None) -> AsyncGenerator[int]:
    """Yield the port of a server that speaks enough of RESP to be a node, and reports `version` in HELLO."""

    writers: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        commands = hiredis.Reader()
        while data := await reader.read(65536):
            commands.feed(data)
            while command := commands.gets():
                words = [word.upper() for word in command]
                if words[0] == b"HELLO":
                    pairs = [
                        b"server",
                        b"redis",
                        *([] if version is None else [b"version", version]),
                    ]
                    bulks = b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in pairs)
                    writer.write(b"*%d\r\n%b" % (len(pairs), bulks))
                elif words[:2] == [b"CLUSTER", b"SLOTS"]:
                    writer.write(
                        b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % port
                    )
                else:
                    writer.write(b"+OK\r\n")

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    async with server:
        yield port
        for writer in writers:
            writer.close()
            await writer.wait_closed()
