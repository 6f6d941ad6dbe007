"""Redis with Sentinel and as a cluster, and the ways to sign in to brokers."""

import asyncio
import base64
import json
import os
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot
from redis.exceptions import ResponseError
from tests.calls.operations_under_test import build_registry
from tests.calls.waiting import until
from tests.limits import time_limit
from tests.pubsub.ledger import Ledger
from tests.pubsub.test_nats_connecting import certificate
from tests.servers import (
    BIN,
    REDIS_7,
    VALKEY,
    Broker,
    NatsServer,
    RedisServer,
    free_port,
    running,
)

from operations.base.errors import TransportError
from operations.calls import PendingRequestMap, serve_calls
from operations.calls.kind import connect_broker
from operations.config import load_config
from operations.hub.place import HubPlace
from operations.pubsub.nats import connect_nats
from operations.pubsub.redis import connect_redis
from operations.registry import OperationRegistry

__all__ = ["certificate"]

# Both are installed by `scripts/install --dev`.
nkeys: Any = import_module("nkeys") if find_spec("nkeys") else None
needs_nkeys = pytest.mark.skipif(nkeys is None, reason="nkeys is not installed")


class Sentinel(Broker):
    """A Sentinel that watches over one master, alone."""

    scheme = "redis+sentinel"

    def __init__(self, master: int, tls: str = "", down_after: int = 1000) -> None:
        super().__init__()
        self._program = REDIS_7 if tls else BIN / "redis-server"
        path = Path(self.folder, "sentinel.conf")
        port = f"port 0\ntls-port {self.port}\ntls-replication yes" if tls else f"port {self.port}"
        path.write_text(
            f"{tls}{port}\nbind 127.0.0.1\nsentinel monitor mymaster 127.0.0.1 {master} 1\n"
            f"sentinel down-after-milliseconds mymaster {down_after}\n"
            "sentinel failover-timeout mymaster 2000\n",
            encoding="utf-8",
        )

    def command(self) -> list[str]:
        return [str(self._program), "sentinel.conf", "--sentinel"]


@asynccontextmanager
async def calling(
    url: str, connect: Any, registry: OperationRegistry | None = None, **options: Any
) -> AsyncGenerator[PendingRequestMap]:
    async with (
        connect(url, **options) as far,
        serve_calls(registry or build_registry(), far),
        connect(url, **options) as further,
        serve_calls(registry or build_registry(), further),
        connect(url, **options) as near,
        # Lost calls are found soon.
        PendingRequestMap(near, heartbeat=0.2) as calls,
    ):
        yield calls


async def until_workers_are_known(calls: PendingRequestMap) -> None:
    """Wait until mutations survive an outage: no longer than a second after the caller has started."""
    await until(lambda: calls._workers.is_complete)


@pytest.mark.requirement("R34", "F4")
@pytest.mark.parametrize("is_killed", [False, True])
async def test_calls_continue_after_sentinel_has_promoted_a_replica(
    tmp_path: Path, is_killed: bool
) -> None:
    """The master is killed, or replaced on request as in a rolling restart."""
    ledger = Ledger(tmp_path / "ledger")
    fast = (
        *("--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0"),
        *("--repl-ping-replica-period", "1"),
    )
    with ExitStack() as stack:
        first = stack.enter_context(running(RedisServer(*fast)))
        second = stack.enter_context(
            running(RedisServer("--replicaof", "127.0.0.1", str(first.port), *fast))
        )
        sentinel = stack.enter_context(running(Sentinel(first.port)))
        await replicated(sentinel, second)
        dead = free_port()
        url = f"redis+sentinel://127.0.0.1:{dead},127.0.0.1:{sentinel.port}/mymaster"
        async with (
            calling(url, connect_redis, ledger.registry()) as calls,
            ledger.traffic(calls),
            Redis(port=sentinel.port) as watching,
        ):
            await until_workers_are_known(calls)
            await ledger.progress(50)
            if is_killed:
                first.kill()
            else:
                await watching.execute_command("SENTINEL", "FAILOVER", "mymaster")  # type: ignore[no-untyped-call]
            await ledger.progress(50)
            while "role:master" not in await replication(second):
                await ledger.progress(20)
            await ledger.progress(50)

    # The replica may lack the last request of each payer, which is sent again.
    ledger.check(failures=0)


async def replicated(sentinel: Broker, replica: Broker) -> None:
    """Wait until a replica is in sync with its master, and Sentinel knows it."""
    watching: Any = Redis(port=sentinel.port)
    async with watching:
        with time_limit(30):
            while (await watching.sentinel_master("mymaster"))["num-slaves"] < 1 or (
                "master_link_status:up" not in await replication(replica)
            ):
                await asyncio.sleep(0.05)


def cluster_node(program: Path) -> RedisServer:
    return RedisServer(
        *("--cluster-enabled", "yes", "--cluster-node-timeout", "1000"),
        *("--cluster-require-full-coverage", "no", "--repl-diskless-sync-delay", "0"),
        program=program,
    )


async def cluster_command(node: Broker, *command: Any) -> str:
    """The answer of a node to a command about the cluster."""
    async with Redis(port=node.port, decode_responses=True) as redis:
        return str(await redis.execute_command("CLUSTER", *command))  # type: ignore[no-untyped-call]


BOUNDS = [(0, 5460), (5461, 10922), (10923, 16383)]


@pytest.fixture(scope="module", params=[REDIS_7, VALKEY], ids=["redis", "valkey"])
def nodes(request: pytest.FixtureRequest) -> Iterator[list[Broker]]:
    if not request.param.exists():
        pytest.skip(f"{request.param.name} is not installed: scripts/install --dev")
    with ExitStack() as stack:
        yield [stack.enter_context(running(cluster_node(request.param))) for _ in range(4)]


@pytest.fixture
async def cluster(nodes: list[Broker]) -> list[Broker]:
    """Three masters, and a replica of the first one."""
    *masters, replica = nodes
    if "cluster_state:ok" not in await cluster_command(replica, "INFO"):
        for node, (start, end) in zip(masters, BOUNDS, strict=True):
            await cluster_command(node, "ADDSLOTSRANGE", start, end)
        for node in nodes[1:]:
            await cluster_command(nodes[0], "MEET", "127.0.0.1", node.port)
        first = await cluster_command(masters[0], "MYID")
        with time_limit(20):
            while first not in await cluster_command(replica, "NODES"):
                await asyncio.sleep(0.05)
            await cluster_command(replica, "REPLICATE", first)
            for node in nodes:
                while "cluster_state:ok" not in (state := await cluster_command(node, "INFO")) or (
                    "cluster_slots_assigned:16384" not in state
                ):
                    await asyncio.sleep(0.05)
    return nodes


def address_of(cluster: list[Broker]) -> str:
    return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in cluster)


@pytest.mark.requirement("R34")
async def test_in_a_cluster_any_node_leads_to_the_shard_of_the_prefix(
    cluster: list[Broker],
) -> None:
    # They are on different shards.
    for prefix in ("alpha:", "beta:", "gamma:", "delta:"):
        async with calling(address_of(cluster[1:]), connect_redis, prefix=prefix) as calls:
            assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3
            items = [item.data async for item in calls.subscribe("count.up", {"n": 3})]
            assert items == [0, 1, 2]


@pytest.mark.requirement("R34", "R36")
async def test_calls_continue_while_a_replica_takes_over_a_shard(
    cluster: list[Broker], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """First the master hands it over, as in a rolling restart; then the new master is killed."""
    caplog.set_level("DEBUG", "operations")
    new = cluster[-1]
    prefix = next(f"p{n}:" for n in count() if key_slot(f"{{p{n}}}".encode()) <= BOUNDS[0][1])
    ledger = Ledger(tmp_path / "ledger")
    with time_limit(20):
        while "slave_repl_offset" not in await replication(new) or (
            "master_link_status:up" not in await replication(new)
        ):
            await asyncio.sleep(0.05)
    async with (
        calling(address_of(cluster), connect_redis, ledger.registry(), prefix=prefix) as calls,
        ledger.traffic(calls),
    ):
        await until_workers_are_known(calls)
        await ledger.progress(50)
        await hand_over(new, ledger)
        await ledger.progress(100)
        assert set(ledger.outcomes.values()) == {"paid"}
        assert "the shard has moved, slot" in caplog.text
        # A second outage may end mutations that were sent less than a second after the first.
        calm = asyncio.get_running_loop().time() + 3
        while asyncio.get_running_loop().time() < calm:
            await ledger.progress(10)
        new.kill()
        await ledger.progress(100)
        new.start()
    # The replica may lack the last request of each payer, which is sent again.
    ledger.check(failures=0)


async def hand_over(replica: Broker, ledger: Ledger) -> None:
    """Let a master hand its shard over to its replica, which rejects this while it reconnects to the master."""
    with time_limit(60):
        while "role:master" not in await replication(replica):
            with suppress(ResponseError):
                await cluster_command(replica, "FAILOVER")
            await ledger.progress(20)


async def replication(node: Broker) -> str:
    async with Redis(port=node.port, decode_responses=True) as redis:
        answer = await redis.execute_command("INFO", "replication")  # type: ignore[no-untyped-call]
        return "\n".join(f"{key}:{value}" for key, value in answer.items())


async def test_a_cluster_of_redis_6_is_rejected() -> None:
    with running(cluster_node(BIN / "redis-server")) as node:
        await cluster_command(node, "ADDSLOTS", *range(16384))
        with pytest.raises(TransportError, match="version 7"):
            async with connect_redis(address_of([node])):
                pass


async def test_an_address_of_sentinel_without_a_master_is_an_error() -> None:
    with pytest.raises(TransportError, match="names no master"):
        async with connect_redis("redis+sentinel://127.0.0.1:1"):
            pass


async def test_an_address_with_several_hosts_is_never_quoted() -> None:
    with pytest.raises(TransportError) as caught:
        async with connect_redis("redis+sentinel://user:SEKRIT@127.0.0.1:x/mymaster"):
            pass
    assert "SEKRIT" not in str(caught.value)


@pytest.mark.requirement("R16")
@pytest.mark.parametrize("kind", ["rediss", "rediss+sentinel", "rediss+cluster"])
async def test_redis_with_a_certificate_of_the_client(
    kind: str, certificate: Path, tmp_path: Path
) -> None:
    if not REDIS_7.exists():
        pytest.skip("redis-server with TLS is not installed: scripts/install --dev")
    cert, key = certificate / "cert.pem", certificate / "key.pem"
    files = {"tls-cert-file": cert, "tls-key-file": key, "tls-ca-cert-file": cert}
    with ExitStack() as stack:
        server = cluster_node(REDIS_7) if kind == "rediss+cluster" else RedisServer(program=REDIS_7)
        server.options += (
            *chain.from_iterable((f"--{name}", str(path)) for name, path in files.items()),
            *("--port", "0", "--tls-port", str(server.port), "--tls-cluster", "yes"),
        )
        stack.enter_context(running(server))
        url = f"{kind}://127.0.0.1:{server.port}"
        trusted: Any = {"ssl_ca_certs": cert, "ssl_certfile": cert, "ssl_keyfile": key}
        if kind == "rediss+cluster":
            admin: Any = Redis(host="127.0.0.1", port=server.port, ssl=True, **trusted)
            async with admin:
                await admin.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
                with time_limit(30):
                    while "cluster_state:ok" not in str(
                        await admin.execute_command("CLUSTER", "INFO")
                    ):
                        await asyncio.sleep(0.05)
        elif kind == "rediss+sentinel":
            settings = "".join(f"{name} {path}\n" for name, path in files.items())
            sentinel = stack.enter_context(running(Sentinel(server.port, settings, 30_000)))
            url = f"{kind}://127.0.0.1:{sentinel.port}/mymaster"
        settings = f"url = '{url}'\nca_file = '{cert}'\n"
        client = f"advanced.cert_file = '{cert}'\nadvanced.key_file = '{key}'"
        async with calling_from_file(tmp_path, settings + client):
            pass
        with pytest.raises(TransportError, match="set cert_file and key_file"):
            async with calling_from_file(tmp_path, f"{settings}advanced.connect_timeout = 1"):
                pass
        with pytest.raises(TransportError, match="if its authority is private, set ca_file"):
            async with calling_from_file(tmp_path, f"url = '{url}'\nadvanced.connect_timeout = 1"):
                pass


@pytest.mark.parametrize("is_tls", [True, False], ids=["tls", "plain"])
async def test_the_error_names_the_scheme_to_try_at_a_port_with_or_without_tls(
    is_tls: bool, certificate: Path
) -> None:
    if not REDIS_7.exists():
        pytest.skip("redis-server with TLS is not installed: scripts/install --dev")
    server = RedisServer(program=REDIS_7)
    wrong, right = ("redis", "rediss") if is_tls else ("rediss", "redis")
    if is_tls:
        cert, key = str(certificate / "cert.pem"), str(certificate / "key.pem")
        files = ("--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", cert)
        server.options += (*files, "--port", "0", "--tls-port", str(server.port))
    with running(server), pytest.raises(TransportError, match=f"write {right}:// instead"):
        async with connect_redis(f"{wrong}://127.0.0.1:{server.port}", connect_timeout=1):
            pass


@asynccontextmanager
async def calling_from_file(folder: Path, settings: str) -> AsyncGenerator[PendingRequestMap]:
    """A worker and a caller whose connections are described by an `operations.toml`."""
    path = folder / "operations.toml"
    path.write_text(f"[brokers.main]\n{settings}", encoding="utf-8")
    file = load_config(path)

    def connect(_: str) -> Any:
        return connect_broker(file.config.tables("brokers")["main"], HubPlace(file))

    async with calling("", connect) as calls:
        assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3
        yield calls


class Signer:
    """An nkey that signs the JSON Web Tokens of NATS."""

    def __init__(self, kind: int) -> None:
        self.seed: bytes = nkeys.encode_seed(os.urandom(32), kind)
        self._key: Any = nkeys.from_seed(bytearray(self.seed))
        self.public: str = self._key.public_key.decode()

    def token(self, subject: str, **nats: Any) -> str:
        """Return a token for `subject`, signed with this key."""
        claims = {"iss": self.public, "sub": subject, "iat": 0, "nats": {"version": 2, **nats}}
        parts = [{"typ": "JWT", "alg": "ed25519-nkey"}, claims]
        text = b".".join(_base64(json.dumps(part).encode()) for part in parts)
        return b".".join((text, _base64(self._key.sign(text)))).decode()


def _base64(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


@needs_nkeys
async def test_nats_with_an_nkey(tmp_path: Path) -> None:
    user = Signer(nkeys.PREFIX_BYTE_USER)
    (tmp_path / "user.nk").write_bytes(user.seed)
    config = f"authorization {{ users = [ {{ nkey: {user.public} }} ] }}"
    with running(NatsServer("-js", config=config)) as broker:
        settings = f"url = '{broker.url}'\nadvanced.nkey_file = 'user.nk'\nqueue = 'jetstream'\nadvanced.replicas = 1"
        async with calling_from_file(tmp_path, settings):
            pass
        with pytest.raises(TransportError):
            async with connect_nats(broker.url):
                pass


@needs_nkeys
async def test_nats_with_a_file_of_credentials(tmp_path: Path) -> None:
    operator, account, stranger, user = (
        Signer(kind)
        for kind in (
            nkeys.PREFIX_BYTE_OPERATOR,
            nkeys.PREFIX_BYTE_ACCOUNT,
            nkeys.PREFIX_BYTE_ACCOUNT,
            nkeys.PREFIX_BYTE_USER,
        )
    )
    no_limits = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)
    limits = {**no_limits, "wildcards": True}
    of_account = operator.token(account.public, type="account", limits=limits)
    config = (
        f"operator: {operator.token(operator.public, type='operator')}\n"
        f"resolver: MEMORY\nresolver_preload: {{ {account.public}: {of_account} }}"
    )
    for signer in (account, stranger):
        token = signer.token(user.public, type="user", subs=-1, data=-1, payload=-1)
        (tmp_path / f"{signer.public}.creds").write_text(
            f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n",
            encoding="utf-8",
        )
    with running(NatsServer(config=config)) as broker:
        settings = f"url = '{broker.url}'\nadvanced.user_credentials = '{account.public}.creds'"
        async with calling_from_file(tmp_path, settings):
            pass
        with pytest.raises(TransportError, match="Authorization Violation"):
            async with connect_nats(
                broker.url, user_credentials=tmp_path / f"{stranger.public}.creds"
            ):
                pass


async def test_nats_with_a_list_of_urls_certificates_and_logins(
    certificate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = certificate / "cert.pem", certificate / "key.pem"
    config = (
        f'tls {{ cert_file: "{cert}", key_file: "{key}", ca_file: "{cert}", verify: true }}\n'
        "authorization { user: ann, password: secret }"
    )
    monkeypatch.setenv("ANNS_PASSWORD", "secret")
    with running(NatsServer(config=config)) as broker:
        settings = (
            f"url = 'tls://127.0.0.1:{free_port()},tls://127.0.0.1:{broker.port}'\n"
            "user = 'ann'\npassword = { env = 'ANNS_PASSWORD' }\n"
            f"ca_file = '{cert}'\n"
        )
        files = f"advanced.cert_file = '{cert}'\nadvanced.key_file = '{key}'"
        async with calling_from_file(tmp_path, settings + files):
            pass
        with pytest.raises(TransportError, match="set cert_file and key_file"):
            async with calling_from_file(tmp_path, settings + "advanced.connect_timeout = 1"):
                pass


@pytest.mark.filterwarnings("ignore:parameter 'timeout':DeprecationWarning")
async def test_nats_over_a_websocket(tmp_path: Path) -> None:
    port = free_port()
    with running(NatsServer(config=f"websocket {{ port: {port}, no_tls: true }}")) as _:
        async with calling_from_file(tmp_path, f"url = 'ws://127.0.0.1:{port}'"):
            pass


async def test_connections_have_names() -> None:
    with running(RedisServer()) as broker:
        async with (
            connect_redis(broker.url, client="ann"),
            Redis(port=broker.port, decode_responses=True) as redis,
        ):
            names = {each["name"] for each in await redis.client_list()}
    assert "operations-ann" in names
