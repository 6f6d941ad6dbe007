"""Redis with Sentinel and as a cluster, and the ways to sign in to brokers."""

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from redis.asyncio import Redis
from tests.calls.operations_under_test import build_registry
from tests.calls.waiting import lines
from tests.pubsub.test_nats_connecting import certificate
from tests.servers import BIN, Broker, NatsServer, RedisServer, free_port, running

from operations.calls import PendingRequestMap, serve_calls
from operations.errors import CallError, ErrorCode, TransportError
from operations.pubsub.nats import connect_nats
from operations.pubsub.redis import connect_redis

__all__ = ["certificate"]


class Sentinel(Broker):
    """A Sentinel that watches over one master, alone."""

    scheme = "redis+sentinel"

    def __init__(self, master: int, *, tls: str = "") -> None:
        super().__init__()
        path = Path(self.folder, "sentinel.conf")
        path.write_text(
            f"port {self.port}\nbind 127.0.0.1\nsentinel monitor mymaster 127.0.0.1 {master} 1\n"
            "sentinel down-after-milliseconds mymaster 300\n"
            f"sentinel failover-timeout mymaster 2000\n{tls}",
            encoding="utf-8",
        )

    def command(self) -> list[str]:
        return [str(BIN / "redis-server"), "sentinel.conf", "--sentinel"]


@asynccontextmanager
async def calling(url: str, connect: Any, **options: Any) -> AsyncGenerator[PendingRequestMap]:
    async with (
        connect(url, **options) as far,
        serve_calls(build_registry(), far),
        connect(url, **options) as near,
        PendingRequestMap(near) as calls,
    ):
        yield calls


@pytest.mark.requirement("R34", "F4")
async def test_calls_go_on_after_sentinel_has_promoted_a_replica(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    fast = (
        "--repl-diskless-sync",
        "yes",
        "--repl-diskless-sync-delay",
        "0",
        "--repl-ping-replica-period",
        "1",
    )
    with ExitStack() as stack:
        master = stack.enter_context(running(RedisServer(*fast)))
        replica = stack.enter_context(
            running(RedisServer("--replicaof", "127.0.0.1", str(master.port), *fast))
        )
        sentinel = stack.enter_context(running(Sentinel(master.port)))
        watching: Any = Redis(port=sentinel.port)
        async with watching, Redis(port=replica.port) as copy:
            with anyio.fail_after(15):
                while (await watching.sentinel_master("mymaster"))["num-slaves"] < 1 or (
                    await copy.info("replication")
                )["master_link_status"] != "up":
                    await asyncio.sleep(0.05)
        dead = free_port()
        url = f"redis+sentinel://127.0.0.1:{dead},127.0.0.1:{sentinel.port}/mymaster"
        async with calling(url, connect_redis) as calls:

            async def write() -> str:
                try:
                    value = {"seconds": 0.01, "path": str(ledger)}
                    await calls.call("slow.write", value, timeout=20)
                except CallError as error:
                    return error.code
                return "written"

            assert await write() == "written"
            master.kill()
            outcomes = await asyncio.gather(*(write() for _ in range(20)))
            with anyio.fail_after(20):
                while await write() != "written":
                    await asyncio.sleep(0.1)

    ran = lines(ledger).count("finished")
    known = 2 + outcomes.count("written")
    assert set(outcomes) <= {"written", ErrorCode.UNAVAILABLE, ErrorCode.TIMEOUT}
    # None ran twice, and every one that was reported as written was.
    assert known <= ran <= 22


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[Broker]]:
    with ExitStack() as stack:
        nodes: list[Broker] = []
        for _ in range(3):
            # The port of the cluster's bus is 10,000 above.
            node = RedisServer("--cluster-enabled", "yes", "--cluster-node-timeout", "1000")
            while node.port > 55_000:
                node.port = free_port()
            nodes.append(stack.enter_context(running(node)))
        yield nodes


async def told(node: Broker, *command: Any) -> str:
    """The answer of a node to a command about the cluster."""
    redis: Any = Redis(port=node.port)
    async with redis:
        return str(await redis.execute_command("CLUSTER", *command))


@pytest.mark.requirement("R34")
async def test_in_a_cluster_any_node_leads_to_the_shard_of_the_prefix(
    cluster: list[Broker],
) -> None:
    bounds = [(0, 5460), (5461, 10922), (10923, 16383)]
    for node, (start, end) in zip(cluster, bounds, strict=True):
        await told(node, "ADDSLOTS", *range(start, end + 1))
        await told(cluster[0], "MEET", "127.0.0.1", node.port)
    with anyio.fail_after(20):
        for node in cluster:
            while "cluster_state:ok" not in await told(node, "INFO"):
                await asyncio.sleep(0.05)
    hosts = ",".join(f"127.0.0.1:{node.port}" for node in cluster)
    # They are on different shards.
    for prefix in ("alpha:", "beta:", "gamma:", "delta:"):
        async with calling(f"redis+cluster://{hosts}", connect_redis, prefix=prefix) as calls:
            assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3
            items = [item.data async for item in calls.subscribe("count.up", {"n": 3})]
            assert items == [0, 1, 2]


async def test_an_address_of_sentinel_without_a_master_is_an_error() -> None:
    with pytest.raises(TransportError, match="names no master"):
        async with connect_redis("redis+sentinel://127.0.0.1:1"):
            pass


async def test_an_address_with_several_hosts_is_never_quoted() -> None:
    with pytest.raises(TransportError) as caught:
        async with connect_redis("redis+sentinel://user:SEKRIT@127.0.0.1:x/mymaster"):
            pass
    assert "SEKRIT" not in str(caught.value)


@asynccontextmanager
async def tls_before(port: int, folder: Path) -> AsyncGenerator[int]:
    """A port that speaks TLS, asks for a certificate and passes everything on to `port`."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=folder / "cert.pem")
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    context.verify_mode = ssl.CERT_REQUIRED

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with suppress(OSError):
                while data := await source.read(65536):
                    sink.write(data)
            sink.close()

        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    async with server:
        yield int(server.sockets[0].getsockname()[1])


@pytest.mark.requirement("R16")
async def test_redis_with_a_certificate_of_the_client(
    certificate: Path, redis_server: Broker
) -> None:
    cert, key = certificate / "cert.pem", certificate / "key.pem"
    async with tls_before(redis_server.port, certificate) as port:
        url = f"rediss://127.0.0.1:{port}"
        given = {"ca_file": cert, "cert_file": cert, "key_file": key}
        async with calling(url, connect_redis, prefix="tls:", **given) as calls:
            assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3
        with pytest.raises(TransportError):
            async with connect_redis(url, ca_file=cert):
                pass


async def test_nats_with_an_nkey(tmp_path: Path) -> None:
    nkeys: Any = pytest.importorskip("nkeys")
    seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
    path = tmp_path / "user.nk"
    path.write_bytes(seed)
    public = nkeys.from_seed(bytearray(seed)).public_key.decode()
    with running(
        NatsServer(config=f"authorization {{ users = [ {{ nkey: {public} }} ] }}")
    ) as broker:
        async with calling(broker.url, connect_nats, nkey_file=path) as calls:
            assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3
        with pytest.raises(TransportError):
            async with connect_nats(broker.url):
                pass


async def test_nats_with_a_list_of_urls_certificates_and_logins(certificate: Path) -> None:
    cert, key = certificate / "cert.pem", certificate / "key.pem"
    config = (
        f'tls {{ cert_file: "{cert}", key_file: "{key}", ca_file: "{cert}", verify: true }}\n'
        "authorization { user: ann, password: secret }"
    )
    with running(NatsServer(config=config)) as broker:
        login = "tls://ann:secret@127.0.0.1"
        url = f"{login}:{free_port()},{login}:{broker.port}"
        given = {"ca_file": cert, "cert_file": cert, "key_file": key}
        async with calling(url, connect_nats, **given) as calls:
            assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3


@pytest.mark.filterwarnings("ignore:parameter 'timeout':DeprecationWarning")
async def test_nats_over_a_websocket() -> None:
    port = free_port()
    with running(NatsServer(config=f"websocket {{ port: {port}, no_tls: true }}")) as _:
        async with calling(f"ws://127.0.0.1:{port}", connect_nats) as calls:
            assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3


async def test_connections_have_names() -> None:
    with running(RedisServer()) as broker:
        async with (
            connect_redis(broker.url, client="ann"),
            Redis(port=broker.port, decode_responses=True) as redis,
        ):
            names = {each["name"] for each in await redis.client_list()}
    assert "operations-ann" in names
