"""The first connection to NATS: with TLS if it is required, and with the reason if it fails."""

import asyncio
import gc
import logging
import ssl
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from tests.calls.operations_under_test import build_registry
from tests.calls.waiting import until
from tests.limits import time_limit
from tests.servers import Broker, NatsServer, free_port, proxy, running

from operations.base.errors import TransportError
from operations.calls import PendingRequestMap, serve_calls
from operations.pubsub.base import Delivery, Receiver
from operations.pubsub.nats import connect_nats

SECRET = "SEKRIT-4711"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a key and its certificate, for 127.0.0.1."""
    folder = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "broker")])
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(signed.public_bytes(Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    return folder


def secured(folder: Path, more: str = "") -> NatsServer:
    tls = f'tls {{ cert_file: "{folder}/cert.pem", key_file: "{folder}/key.pem" }}'
    return NatsServer(config=f"{tls}\n{more}")


def trusting(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(folder / "cert.pem"))


@pytest.mark.requirement("R16")
@pytest.mark.parametrize("scheme", ["tls", "nats"])
async def test_r16_without_tls_at_the_server_nothing_is_sent_to_it(
    scheme: str, nats_server: Broker, certificate: Path
) -> None:
    tls = trusting(certificate) if scheme == "nats" else None
    async with proxy(nats_server.port) as through:
        url = f"{scheme}://user:{SECRET}@127.0.0.1:{through.port}"
        with (
            time_limit(20),
            pytest.raises(TransportError, match="does not support TLS") as caught,
        ):
            async with connect_nats(url, tls=tls):
                pass
        assert b"INFO" in through.heard
        assert b"CONNECT" not in through.heard
        assert SECRET.encode() not in through.heard
    assert SECRET not in str(caught.value)


@pytest.mark.requirement("R16")
@pytest.mark.parametrize("more", ["", "allow_non_tls: true"])
async def test_r16_with_tls_messages_are_encrypted(certificate: Path, more: str) -> None:
    with running(secured(certificate, more)) as broker:
        async with proxy(broker.port) as through:
            url = f"tls://user:{SECRET}@127.0.0.1:{through.port}"
            async with (
                connect_nats(url, tls=trusting(certificate)) as target,
                serve_calls(build_registry(), target),
                PendingRequestMap(target) as calls,
            ):
                assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3
            assert b"CONNECT" not in through.heard


@pytest.mark.requirement("R16")
async def test_r16_no_data_is_sent_to_a_server_that_returns_without_tls(
    certificate: Path, nats_server: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    with running(secured(certificate)) as broker:
        async with proxy(broker.port) as through:
            url = f"tls://user:{SECRET}@127.0.0.1:{through.port}"
            async with connect_nats(url, tls=trusting(certificate)) as target:
                through.heard.clear()
                through.target = nats_server.port
                through.cut()
                await until(lambda: through.heard.count(b"INFO") > 1)
                assert not target.is_connected
                assert SECRET.encode() not in through.heard
                through.target = broker.port
                await until(lambda: target.is_connected)
    told = [each for each in caplog.records if "does not support TLS" in each.message]
    assert [each.levelno for each in told] == [logging.WARNING]


async def test_the_end_of_a_connection_with_tls_is_logged_only_by_this_library(
    certificate: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(secured(certificate)) as broker:
        url = f"tls://127.0.0.1:{broker.port}"
        async with connect_nats(url, tls=trusting(certificate)) as target:
            broker.stop()
            await until(lambda: not target.is_connected)
    assert {each.name for each in caplog.records} == {"operations"}


async def test_an_untrusted_certificate_ends_the_attempt(certificate: Path) -> None:
    with (
        running(secured(certificate)) as broker,
        time_limit(20),
        pytest.raises(TransportError, match="if its authority is private, set ca_file"),
    ):
        async with connect_nats(f"tls://127.0.0.1:{broker.port}"):
            pass


@pytest.mark.parametrize(
    "login", ["", f"user:{SECRET}2@", f"{SECRET}3@"], ids=["none", "wrong", "token"]
)
async def test_a_rejected_login_fails_at_once(login: str) -> None:
    with (
        running(NatsServer("--user", "user", "--pass", SECRET)) as broker,
        time_limit(20),
        pytest.raises(TransportError, match=r"Authorization Violation.*login") as caught,
    ):
        async with connect_nats(f"nats://{login}127.0.0.1:{broker.port}"):
            pass
    assert f"127.0.0.1:{broker.port}" in str(caught.value)
    assert SECRET not in str(caught.value)


async def test_a_client_can_be_closed_at_any_moment_of_a_reconnect() -> None:
    """Otherwise tasks of nats-py fail with errors that are never retrieved, or stay connected."""
    writers: list[asyncio.StreamWriter] = []
    errors: list[dict[str, Any]] = []
    accepted = asyncio.Event()

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        accepted.set()
        writer.write(b'INFO {"server_id":"a","version":"2.10.0","max_payload":1048576}\r\n')
        with suppress(ConnectionError):
            while line := await reader.readline():
                if line.startswith(b"PING"):
                    writer.write(b"PONG\r\n")
        writer.close()

    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
        url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for turns in range(40):
            async with connect_nats(url):
                accepted.clear()
                writers[-1].transport.abort()
                await accepted.wait()
                for _ in range(turns):
                    await asyncio.sleep(0)
    gc.collect()

    assert errors == []


@pytest.mark.parametrize("how", ["address", "options", "token"])
async def test_a_login_may_contain_characters_that_an_address_may_not(how: str) -> None:
    login, written = "p@ss/%41,w", "p%40ss%2F%2541%2Cw"
    server = NatsServer(
        *(("--auth", login) if how == "token" else ("--user", "a b", "--pass", login))
    )
    with running(server) as broker:
        address = f"127.0.0.1:{broker.port}"
        if how == "options":
            connecting = connect_nats(f"nats://{address}", user="a b", password=login)
        else:
            user = written if how == "token" else f"a%20b:{written}"
            connecting = connect_nats(f"nats://{user}@{address}")
        async with connecting as target:
            assert target.is_connected


@pytest.fixture(params=["nobody", "redis", "unknown"])
def nowhere(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """Invalid addresses of NATS servers, and their errors."""
    if request.param == "nobody":
        yield f"127.0.0.1:{free_port()}", "connection refused"
    elif request.param == "redis":
        yield f"127.0.0.1:{request.getfixturevalue('redis_server').port}", "is it NATS"
    else:
        yield "nowhere.invalid:4222", "not known|resolution"


async def test_an_address_without_a_server_is_named_with_the_reason(
    nowhere: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    address, reason = nowhere
    with pytest.raises(TransportError, match=reason) as caught:
        async with connect_nats(f"nats://user:{SECRET}@{address}", connect_timeout=2.5):
            pass
    assert f"at {address}: " in str(caught.value)
    assert SECRET not in str(caught.value)
    assert "was lost" not in caplog.text


@pytest.mark.parametrize("group", ["a b", "a.*", ">", "", ".a", "b\u00fcro", "a\r\nPUB x 1"])
async def test_a_group_that_is_not_a_subject_is_rejected_at_the_start(
    nats_server: Broker, group: str
) -> None:
    async with connect_nats(nats_server.url) as target:
        with pytest.raises(TransportError, match="not a NATS subject"):
            async with serve_calls(build_registry(), target, group=group):
                pass
        with pytest.raises(TransportError, match="not a NATS subject"):
            async with PendingRequestMap(target, group=group):
                pass
        # The connection is as good as before.
        async with (
            serve_calls(build_registry(), target, group="billing.eu"),
            PendingRequestMap(target, group="billing.eu") as calls,
        ):
            assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3


@pytest.mark.parametrize("name", ["prefix", "client"])
async def test_names_that_are_not_subjects_are_rejected_before_connecting(name: str) -> None:
    with pytest.raises(TransportError, match=r"not a NATS subject|name of a client"):
        async with connect_nats("nats://127.0.0.1:1", **{name: "a *"}):  # type: ignore[arg-type]
            pass


class Discarding(Receiver):
    """Ignores everything."""

    def receive(self, delivery: Delivery) -> None:
        pass


async def test_a_subject_that_is_not_permitted_is_reported_to_each_of_several_listeners() -> None:
    rules = 'authorization { users: [{ user: a, password: b, permissions: { subscribe: { deny: "*.topic.no" } } }] }'
    with running(NatsServer(config=rules)) as broker:
        async with connect_nats(broker.url, user="a", password="b") as target:
            topic = target.topic("no")
            outcomes = await asyncio.gather(
                *(target.listen([topic], Discarding()) for _ in range(3)), return_exceptions=True
            )

    assert [type(each) for each in outcomes] == [TransportError] * 3
