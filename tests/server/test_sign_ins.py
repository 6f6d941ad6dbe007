"""Credentials cannot be guessed at full speed, and those who have the right one are not kept out."""

import asyncio

import anyio
import pytest
from starlette.requests import HTTPConnection
from starlette.types import Receive, Scope, Send
from tests.server.asgi import Client

from operations import CallError, Identity, OperationRegistry
from operations._sign_ins import SignIns, address_of
from operations.calls import PendingRequestMap
from operations.cli.serving import SocketDoor
from operations.mcp import to_mcp
from operations.pubsub.websocket import connect_websocket
from operations.server import APIKeys, Limits, create_app, hash_key
from operations.server.identity import IdentityResolver
from operations.server.running import running

HERE, ELSEWHERE = "10.0.0.1", "10.0.0.2"
FEW = Limits(guesses=3, guesses_per_address=0.0001)


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


@pytest.mark.requirement("R13", "R21")
async def test_an_address_has_so_many_guesses() -> None:
    client = attacked()

    answers = [await shown(client, f"guess {number}") for number in range(6)]

    assert answers == [401, 401, 401, 429, 429, 429]
    # Also at a path where no credential is needed: an answer there would tell as much.
    assert await shown(client, "guess", "/test/open") == 429
    # The right one is not told from a wrong one any more.
    assert await shown(client, "alice") == 429
    response = await client.post("/test/run", headers={"authorization": "Bearer guess"})
    assert (response.status, response.json["code"]) == (429, "RESOURCE_EXHAUSTED")
    assert "retry-after" in response.headers


async def test_whoever_guesses_keeps_nobody_else_out() -> None:
    client = attacked()
    assert await shown(client, "alice") == 200

    for number in range(6):
        await shown(client, f"guess {number}")

    assert await shown(client, "alice") == 200, "who signed in from here goes on"
    assert await shown(client, "bob", address=ELSEWHERE) == 200
    assert (await client.post("/test/open")).status == 200, "who shows nothing guesses nothing"


async def test_a_mistake_that_is_repeated_is_one_guess() -> None:
    client = attacked()

    assert {await shown(client, "old key") for _ in range(10)} == {401}
    assert await shown(client, "alice") == 200


@pytest.mark.requirement("R13")
async def test_guesses_at_the_same_time_are_bounded_and_owed() -> None:
    release = asyncio.Event()

    async def later(connection: HTTPConnection) -> Identity | None:
        await release.wait()
        raise KeyError("unknown")

    client = attacked(later)
    guesses = [asyncio.create_task(shown(client, f"guess {number}")) for number in range(50)]
    refused, _ = await asyncio.wait(guesses, return_when=asyncio.FIRST_COMPLETED)
    release.set()
    answers = await asyncio.gather(*guesses)

    assert sorted(answers) == [401] * 30 + [429] * 20
    assert {task.result() for task in refused} == {429}, "refused unseen"
    assert await shown(client, "one more") == 429


async def test_guesses_beyond_the_limit_are_owed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("operations._rates.monotonic", lambda: now)
    sign_ins = SignIns(1, 2)

    assert all(sign_ins.begin(HERE, number) for number in range(10))
    for number in range(10):
        sign_ins.end(HERE, number, was_wrong=True)

    for later in (0.0, 5.0, 8.9):
        now = later
        with pytest.raises(CallError, match="wrong credentials"):
            sign_ins.begin(HERE, "next")
    now = 9.0
    assert sign_ins.begin(HERE, "next")


async def test_those_who_have_the_right_one_may_come_all_at_once() -> None:
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


async def test_what_could_not_be_looked_at_was_not_wrong() -> None:
    async def down(connection: HTTPConnection) -> Identity | None:
        raise ConnectionError("the directory is down")

    client = attacked(down)

    assert {await shown(client, f"key {number}") for number in range(10)} == {401}


@pytest.mark.requirement("R13")
async def test_what_could_not_be_looked_at_is_bounded_and_still_a_guess_afterwards() -> None:
    is_down = True

    async def directory(connection: HTTPConnection) -> Identity | None:
        if is_down:
            raise ConnectionError("the directory is down")
        raise KeyError("unknown")

    client = attacked(directory, Limits(guesses=3, guesses_per_address=1))
    during = [await shown(client, f"guess {number}") for number in range(20)]
    is_down = False
    after = [await shown(client, f"guess {number}") for number in range(20)]

    assert during == [401] * 20
    assert after == [401] * 3 + [429] * 17

    is_down = True
    client = attacked(directory)
    during = [await shown(client, f"guess {number}") for number in range(40)]
    assert during == [401] * 30 + [429] * 10


async def test_the_limit_can_be_taken_away() -> None:
    client = attacked(limits=Limits(guesses_per_address=None))

    assert {await shown(client, f"guess {number}") for number in range(50)} == {401}


async def test_sessions_are_not_begun_by_guessing_either() -> None:
    client = attacked()

    assert [await shown(client, f"{number}", "/session") for number in range(4)][-1] == 429


async def test_mcp_alone_counts_guesses_as_well() -> None:
    def identify(request: HTTPConnection) -> Identity | None:
        key = request.headers.get("x-api-key")
        return None if key is None else {"alice": Identity("alice")}[key]

    app = to_mcp(OperationRegistry(), identify=identify).asgi_app()
    async with app.running():
        client = Client(app, address=HERE)
        answers = [await shown(client, f"guess {number}", "/mcp") for number in range(25)]
        other = await shown(client, "alice", "/mcp", address=ELSEWHERE)

    assert answers == [401] * 20 + [429] * 5
    assert other not in (401, 429)


async def test_credentials_inside_a_socket_are_not_guessed_either() -> None:
    registry = OperationRegistry()
    registry.operation("test.run", scopes=["run"])(_fine)
    door = SocketDoor(registry, {"alice": Identity("alice", ["run"])}.get)
    app = create_app(registry, websocket=door)
    with anyio.fail_after(20):
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


@pytest.mark.requirement("R13")
async def test_what_a_socket_could_not_look_at_is_bounded_and_still_a_guess_afterwards() -> None:
    registry = OperationRegistry()
    registry.operation("test.run", scopes=["run"])(_fine)
    is_down = True

    async def directory(credential: str) -> Identity | None:
        if is_down:
            raise ConnectionError("the directory is down")
        return Identity("alice", ["run"]) if credential == "alice" else None

    app = create_app(registry, websocket=SocketDoor(registry, directory))
    with anyio.fail_after(20):
        async with (
            running(app) as url,
            connect_websocket(url.replace("http", "ws") + "/ws") as target,
            PendingRequestMap(target) as calls,
        ):

            async def code(credential: str) -> str:
                with pytest.raises(CallError) as caught:
                    await calls.call("test.run", {}, credential=credential)
                return caught.value.code

            during = [await code(f"guess {number}") for number in range(100)]
            is_down = False
            assert (await calls.call("test.run", {}, credential="alice")).data == "fine"
            after = [await code(f"guess {number}") for number in range(25)]
            is_down = True
            beyond = [await code(f"another {number}") for number in range(3)]

    assert during == ["ACCESS_DENIED"] * 100, "what could not be looked at was not wrong"
    assert after == ["ACCESS_DENIED"] * 20 + ["RESOURCE_EXHAUSTED"] * 5
    assert beyond == ["RESOURCE_EXHAUSTED"] * 3


@pytest.mark.requirement("R13")
async def test_a_socket_does_not_look_at_more_than_so_many_in_vain() -> None:
    registry = OperationRegistry()
    registry.operation("test.run", scopes=["run"])(_fine)
    asked: list[str] = []

    def directory(credential: str) -> Identity | None:
        asked.append(credential)
        raise ConnectionError("the directory is down")

    app = create_app(registry, websocket=SocketDoor(registry, directory))
    with anyio.fail_after(20):
        async with (
            running(app) as url,
            connect_websocket(url.replace("http", "ws") + "/ws") as target,
            PendingRequestMap(target) as calls,
        ):
            tries = (calls.call("test.run", {}, credential=f"{number}") for number in range(220))
            errors = await asyncio.gather(*tries, return_exceptions=True)

    codes = [error.code for error in errors if isinstance(error, CallError)]
    # Two come back every second.
    assert 200 <= len(asked) < 210
    assert codes.count("ACCESS_DENIED") == len(asked)
    assert codes.count("RESOURCE_EXHAUSTED") == 220 - len(asked)


async def test_one_credential_is_not_hidden_behind_another() -> None:
    """Resolvers differ in which of two they read; a guess is one, wherever it stands."""

    def first(connection: HTTPConnection) -> Identity | None:
        return {"alice": Identity("alice")}[connection.headers["x-api-key"]]

    client = attacked(first)
    for number in range(3):
        await shown(client, f"guess {number}")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        both = [(b"x-api-key", b"alice"), (b"x-api-key", b"guess 0")]
        await client.app({**scope, "headers": [*scope["headers"], *both]}, receive, send)

    assert (await Client(app, address=HERE).post("/test/open")).status == 429


async def test_mcp_lets_those_who_have_the_right_one_come_all_at_once() -> None:
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


async def test_mcp_does_not_mark_what_could_not_be_looked_at() -> None:
    is_down = True

    def identify(request: HTTPConnection) -> Identity | None:
        if is_down:
            raise ConnectionError("the directory is down")
        raise KeyError("unknown")

    app = to_mcp(OperationRegistry(), identify=identify).asgi_app()
    async with app.running():
        client = Client(app, address=HERE)
        during = [await shown(client, f"guess {number}", "/mcp") for number in range(25)]
        is_down = False
        after = [await shown(client, f"guess {number}", "/mcp") for number in range(25)]

    assert during == [401] * 25
    assert after == [401] * 20 + [429] * 5


async def _fine() -> str:
    return "fine"


def test_guesses_come_back_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("operations._rates.monotonic", lambda: now)
    sign_ins = SignIns(0.5, 1)

    assert sign_ins.begin(HERE, "a")
    sign_ins.end(HERE, "a", was_wrong=True)
    with pytest.raises(CallError):
        sign_ins.begin(HERE, "b")
    now = 2.0
    assert sign_ins.begin(HERE, "b")


def test_memory_of_guesses_is_bounded() -> None:
    sign_ins = SignIns(None, 1, remembered=10)

    for number in range(100):
        sign_ins.begin(HERE, number)
        sign_ins.end(HERE, number, was_wrong=True)

    assert not sign_ins.begin(HERE, 99)
    assert not sign_ins.begin(HERE, 90)
    assert sign_ins.begin(HERE, 89), "forgotten"


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
def test_a_household_has_one_address(host: str, address: str) -> None:
    assert address_of((host, 5000)) == address
    assert address_of(None) == ""
