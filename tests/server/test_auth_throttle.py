"""Credentials cannot be guessed at full speed, and callers with a valid one are not delayed."""

import asyncio

import pytest
from starlette.requests import HTTPConnection
from tests.limits import time_limit
from tests.server.asgi import Client
from tests.support import first_done

from operations import CallError, Identity, OperationRegistry
from operations.calls import PendingRequestMap
from operations.front.credentials import AuthThrottle, CredentialError, InvalidCredentialError
from operations.front.limits import client_address
from operations.mcp import to_mcp
from operations.pubsub.websocket import connect_websocket
from operations.server import APIKeys, Limits, create_app, hash_key
from operations.server.http11.running import running
from operations.server.signin.identity import IdentityResolver

pytestmark = pytest.mark.usefixtures("short_delay")

HERE, ELSEWHERE = "10.0.0.1", "10.0.0.2"
UNFORGIVEN = Limits(failed_attempts_per_second=0.0001)
"""The default number of attempts, of which none is forgiven during a slow test."""
FEW = Limits(failed_attempts=3, failed_attempts_per_second=0.0001)


@pytest.fixture
def short_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("operations.front.credentials.DELAY_SECONDS", 0.01)


def attacked(identity: IdentityResolver | None = None, limits: Limits = FEW) -> Client:
    registry = OperationRegistry()

    @registry.operation("test.open")
    async def opened() -> str:
        return "open"

    @registry.operation("test.run", scopes=["run"])
    async def run() -> str:
        return "fine"

    keys = APIKeys({hash_key(key): Identity(key, ["run"]) for key in ("alice", "bob")})
    return Client(create_app(registry, identity=identity or keys, limits=limits), address=HERE)


async def shown(client: Client, key: str, target: str = "/test/run", address: str = "") -> int:
    there = Client(client.app, address=address or client.address)
    return (await there.post(target, headers={"x-api-key": key})).status


@pytest.mark.requirement("R13", "R60")
async def test_wrong_credentials_beyond_the_limit_are_delayed_and_rejected_with_429() -> None:
    client = attacked()

    answers = [await shown(client, f"guess {number}") for number in range(6)]

    assert answers == [401, 401, 401, 429, 429, 429]
    # Also at a path that needs no credential: another status would reveal as much.
    assert await shown(client, "guess", "/test/open") == 429
    response = await client.post("/test/run", headers={"authorization": "Bearer guess"})
    assert (response.status, response.json["code"]) == (429, "RESOURCE_EXHAUSTED")
    assert "retry-after" in response.headers


@pytest.mark.requirement("R60")
async def test_a_valid_credential_passes_after_wrong_guesses_from_its_address() -> None:
    client = attacked()

    for number in range(20):
        await shown(client, f"guess {number}")

    assert await shown(client, "alice") == 200
    assert await shown(client, "bob") == 200
    assert await shown(client, "bob", address=ELSEWHERE) == 200
    assert (await client.post("/test/open")).status == 200


@pytest.mark.requirement("R60")
async def test_the_delay_is_not_spent_on_valid_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("operations.front.credentials.DELAY_SECONDS", 3600.0)
    client = attacked()
    for number in range(3):
        await shown(client, f"guess {number}")

    waiting = [asyncio.create_task(shown(client, f"more {number}")) for number in range(5)]
    assert await shown(client, "alice") == 200
    done, _ = await asyncio.wait(waiting, timeout=0.05)

    assert done == set()
    for task in waiting:
        task.cancel()


async def test_a_wrong_credential_that_is_repeated_counts_once() -> None:
    client = attacked()

    assert {await shown(client, "old key") for _ in range(10)} == {401}
    assert [await shown(client, f"{number}") for number in range(3)] == [401, 401, 429]


@pytest.mark.requirement("R60")
async def test_a_known_credential_does_not_wait_for_the_checks_of_an_attacker() -> None:
    release = asyncio.Event()

    async def slow(connection: HTTPConnection) -> Identity | None:
        if connection.headers["x-api-key"] == "alice":
            return Identity("alice", ["run"])
        await release.wait()
        raise KeyError("unknown")

    client = attacked(slow, Limits(calls_per_caller=3))
    assert await shown(client, "alice") == 200
    guesses = [asyncio.create_task(shown(client, f"guess {number}")) for number in range(5)]
    refused, waiting = await first_done(guesses, 2)

    assert [task.result() for task in refused] == [429, 429]
    assert await shown(client, "alice") == 200
    release.set()
    assert {await task for task in waiting} == {401}


async def test_callers_with_a_valid_credential_may_arrive_at_once() -> None:
    asking: list[str] = []
    release = asyncio.Event()

    async def slow(connection: HTTPConnection) -> Identity | None:
        asking.append(connection.headers["x-api-key"])
        if len(asking) == 30:
            release.set()
        await release.wait()
        return Identity(connection.headers["x-api-key"], ["run"])

    client = attacked(slow)

    assert await asyncio.gather(*(shown(client, f"{n}") for n in range(30))) == [200] * 30


async def test_an_unchecked_credential_does_not_count_as_wrong() -> None:
    async def down(connection: HTTPConnection) -> Identity | None:
        raise ConnectionError("the directory is down")

    client = attacked(down)

    assert {await shown(client, f"key {number}") for number in range(10)} == {503}


async def test_the_limit_can_be_removed() -> None:
    client = attacked(limits=Limits(failed_attempts_per_second=None))

    assert {await shown(client, f"guess {number}") for number in range(50)} == {401}


async def test_wrong_guesses_open_no_session() -> None:
    client = attacked()

    assert [await shown(client, f"{number}", "/session") for number in range(4)][-1] == 429


async def test_mcp_alone_counts_guesses_as_well() -> None:
    def identify(request: HTTPConnection) -> Identity | None:
        key = request.headers.get("x-api-key")
        return None if key is None else {"alice": Identity("alice")}[key]

    app = to_mcp(OperationRegistry(), identify=identify, limits=UNFORGIVEN).asgi_app()
    async with app.running():
        client = Client(app, address=HERE)
        answers = [await shown(client, f"guess {number}", "/mcp") for number in range(25)]
        other = await shown(client, "alice", "/mcp", address=ELSEWHERE)

    assert answers == [401] * 20 + [429] * 5
    assert other not in (401, 429)


async def test_credentials_inside_a_socket_are_not_guessed_either() -> None:
    registry = OperationRegistry()
    registry.operation("test.run", scopes=["run"])(_fine)
    callers = {"alice": Identity("alice", ["run"])}
    app = create_app(registry, websocket=True, resolve=callers.get, limits=UNFORGIVEN)
    with time_limit(20):
        async with (
            running(app) as url,
            connect_websocket(url.replace("http", "ws") + "/ws") as target,
            PendingRequestMap(target) as calls,
        ):
            assert (await calls.call("test.run", {}, credential="alice")).data == "fine"
            codes: list[str] = []
            for number in range(25):
                with pytest.raises(CallError) as caught:
                    await calls.call("test.run", {}, credential=f"guess {number}")
                codes.append(caught.value.code)
            assert (await calls.call("test.run", {}, credential="alice")).data == "fine"

    assert codes == ["ACCESS_DENIED"] * 20 + ["RESOURCE_EXHAUSTED"] * 5


async def test_over_mcp_callers_with_a_valid_credential_may_arrive_at_once() -> None:
    asking: list[object] = []
    release = asyncio.Event()

    async def identify(request: HTTPConnection) -> Identity | None:
        asking.append(request)
        if len(asking) == 30:
            release.set()
        await release.wait()
        return Identity(request.headers["x-api-key"])

    app = to_mcp(OperationRegistry(), identify=identify).asgi_app()
    async with app.running():
        client = Client(app, address=HERE)
        answers = await asyncio.gather(*(shown(client, f"{n}", "/mcp") for n in range(30)))

    assert not {401, 429} & set(answers)


async def test_over_mcp_an_unchecked_credential_does_not_count_as_wrong() -> None:
    is_down = True

    def identify(request: HTTPConnection) -> Identity | None:
        if is_down:
            raise ConnectionError("the directory is down")
        raise KeyError("unknown")

    app = to_mcp(OperationRegistry(), identify=identify, limits=UNFORGIVEN).asgi_app()
    async with app.running():
        client = Client(app, address=HERE)
        during = [await shown(client, f"guess {number}", "/mcp") for number in range(25)]
        is_down = False
        after = [await shown(client, f"guess {number}", "/mcp") for number in range(25)]

    assert during == [503] * 25
    assert after == [401] * 20 + [429] * 5


async def _fine() -> str:
    return "fine"


async def test_failed_attempts_are_forgiven_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("operations.base.rates.monotonic", lambda: now)
    throttle = AuthThrottle(Limits(failed_attempts_per_second=0.5, failed_attempts=1))

    def reject() -> None:
        raise CredentialError("wrong")

    async def attempt(credential: str) -> str:
        try:
            await throttle.authenticate(HERE, (credential,), reject)
        except InvalidCredentialError:
            return "wrong"
        except CallError as error:
            return error.code
        return "valid"

    assert [await attempt("a"), await attempt("b")] == ["wrong", "RESOURCE_EXHAUSTED"]
    now = 1.9
    assert await attempt("c") == "RESOURCE_EXHAUSTED"
    now = 60
    assert await attempt("d") == "wrong"


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::"),
        ("fe80::1%eth0", "fe80::"),
        ("not:an:address", "not:an:address"),
    ],
)
def test_an_ipv6_network_has_one_address(host: str, address: str) -> None:
    assert client_address({"client": (host, 5000)}) == address
    assert client_address({}) == ""


@pytest.mark.requirement("R60")
async def test_failed_attempts_count_for_the_site_of_an_ipv6_network_as_well() -> None:
    throttle = AuthThrottle(Limits(failed_attempts_per_second=0.001, failed_attempts=2))

    def reject() -> None:
        raise CredentialError("wrong")

    async def attempt(address: str) -> str:
        try:
            await throttle.authenticate(
                client_address({"client": (address, 1)}), (address,), reject
            )
        except InvalidCredentialError:
            return "wrong"
        except CallError as error:
            return error.code
        return "valid"

    # Each attempt comes from another /64 of the same /48.
    attempts = [await attempt(f"2001:db8:1:{number:x}::1") for number in range(10)]

    assert attempts == ["wrong"] * 8 + ["RESOURCE_EXHAUSTED"] * 2
    assert await attempt("2001:db8:2::1") == "wrong"
    assert await attempt("192.0.2.7") == "wrong"
