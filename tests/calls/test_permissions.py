"""F18: with the broker's permissions of the recipes, nobody reads or forges another's answers."""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import nats
import pytest
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError
from tests.calls.operations_under_test import build_registry
from tests.calls.waiting import lines, started, until
from tests.servers import Broker, NatsServer, RedisServer, running

from operations.calls import PendingRequestMap, serve_calls
from operations.calls.events import (
    CallProbed,
    CallRequested,
    ProbePayload,
    RequestPayload,
    encode_event,
    encode_response,
)
from operations.envelopes import local_envelope
from operations.errors import CallError, TransportError
from operations.pubsub.nats import connect_nats
from operations.pubsub.redis import connect_redis

DOCS = Path(__file__).resolve().parents[2] / "docs"
RECIPES = DOCS / "recipes"

AS_WRITTEN = re.findall(
    r'^(connect_(\w+)\(.*client="(\w+)".*\))', (DOCS / "calls.md").read_text("utf-8"), re.MULTILINE
)
"""How the page says to connect: the code, the transport, and who."""

pytestmark = pytest.mark.requirement("R41", "R10", "F18")


def connect(broker: Broker, user: str, **options: Any) -> Any:
    """Connect as the page says; Bob as Alice."""
    written = {(scheme, who): code for code, scheme, who in AS_WRITTEN}
    code = written.get((broker.scheme, user)) or written[broker.scheme, "alice"]
    here = code.replace("127.0.0.1", f"127.0.0.1:{broker.port}").replace("alice", user)
    connectors: dict[str, Any] = {"connect_nats": connect_nats, "connect_redis": connect_redis}
    # What the text of our own page says, with something else where a test wants it.
    name, arguments = here.split("(", 1)
    args, given = eval(f"(lambda *args, **given: (args, given))({arguments}")  # noqa: S307
    return connectors[name](*args, **{**given, **options})


@asynccontextmanager
async def guarded(
    scheme: str, **of_worker: Any
) -> AsyncGenerator[tuple[Broker, PendingRequestMap]]:
    """A broker with the recipe's rules, a worker, and Alice."""
    if scheme == "nats":
        broker: Broker = NatsServer(config=(RECIPES / "nats.conf").read_text(encoding="utf-8"))
    else:
        broker = RedisServer("--aclfile", str(RECIPES / "redis.acl"))
    with running(broker):
        async with AsyncExitStack() as stack:
            worker = await stack.enter_async_context(connect(broker, "worker", **of_worker))
            await stack.enter_async_context(serve_calls(build_registry(), worker))
            alice = await stack.enter_async_context(connect(broker, "alice"))
            yield broker, await stack.enter_async_context(PendingRequestMap(alice))


@pytest.mark.parametrize("scheme", ["nats", "redis"])
async def test_f18_with_the_recipe_everything_still_works(scheme: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    async with guarded(scheme) as (broker, alice), connect(broker, "bob") as target:
        async with PendingRequestMap(target) as bob:
            assert (await alice.call("math.add", {"a": 1, "b": 2})).data == 3
            assert (await bob.call("math.add", {"a": 2, "b": 2})).data == 4
        items = [item.data async for item in alice.subscribe("count.up", {"n": 1000})]
        assert items == list(range(1000))
        async for item in alice.subscribe("count.forever", {"path": str(path)}):
            if item.data == 300:
                break
        await until(lambda: "stopped after" in "".join(lines(path)))
        path.unlink()
        task = asyncio.create_task(
            alice.call("slow.sleep", {"seconds": 60, "path": str(path)}, timeout=60)
        )
        # Long enough for a heartbeat, which needs permissions of its own.
        await until(lambda: started(path))
        await asyncio.sleep(2)
        assert not task.done()
        task.cancel()
        await until(lambda: "cancelled" in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("scheme", ["nats", "redis"])
async def test_a_worker_that_does_not_say_its_name_is_found_in_the_log(
    scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with guarded(scheme, client="any") as (_, alice):
        assert (await alice.call("math.add", {"a": 1, "b": 2})).data == 3
        with pytest.raises(CallError):
            async for _ in alice.subscribe("count.up", {"n": 600}, idle_timeout=1):
                pass

    (told,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert re.search(r"operations[.:]box[.:]any[.:].*client=", told.message)


@pytest.mark.parametrize("scheme", ["nats", "redis"])
@pytest.mark.parametrize("name", ["any", "bob"])
async def test_a_caller_with_the_wrong_name_is_told_so_at_once(scheme: str, name: str) -> None:
    async with guarded(scheme) as (broker, _), connect(broker, "alice", client=name) as target:
        with anyio.fail_after(20), pytest.raises(TransportError, match="client=") as caught:
            async with PendingRequestMap(target):
                pass

    assert re.search(rf"operations[.:]box[.:]{name}[.:]", str(caught.value))


async def test_f18_bob_can_neither_read_nor_write_alices_mailbox_on_nats(tmp_path: Path) -> None:
    path = tmp_path / "log"
    overheard: list[Any] = []
    errors: list[Exception] = []

    async def on_error(error: Exception) -> None:
        errors.append(error)

    async def overhear(message: Any) -> None:
        overheard.append(message)

    async with guarded("nats") as (broker, alice):
        bob = await nats.connect(broker.url, user="bob", password="bob-secret", error_cb=on_error)
        for subject in ("operations.box.alice.>", "operations.queue.>", ">"):
            await bob.subscribe(subject, cb=overhear)
        call = asyncio.create_task(
            alice.call("slow.sleep", {"seconds": 0.5, "path": str(path)}, timeout=10)
        )
        await until(lambda: started(path))
        (request_id,) = alice.pending
        forged = encode_response(request_id, local_envelope("forged", "slow.sleep"))
        await bob.publish(f"{alice.mailbox}._", forged)
        await bob.flush()
        assert (await call).data == "slept"
        await bob.close()

    assert overheard == []
    assert len(errors) >= 4


async def test_f18_bob_can_neither_read_nor_write_alices_mailbox_on_redis(tmp_path: Path) -> None:
    path = tmp_path / "log"
    async with guarded("redis") as (broker, alice):
        bob = Redis.from_url(f"redis://bob:bob-secret@127.0.0.1:{broker.port}")
        call = asyncio.create_task(
            alice.call("slow.sleep", {"seconds": 0.5, "path": str(path)}, timeout=10)
        )
        await until(lambda: started(path))
        (request_id,) = alice.pending
        forged = encode_response(request_id, local_envelope("forged", "slow.sleep"))
        with pytest.raises(NoPermissionError):
            await bob.xadd(alice.mailbox, {"e": forged})
        with pytest.raises(NoPermissionError):
            await bob.xread({alice.mailbox: "0"})
        with pytest.raises(NoPermissionError):
            await bob.delete(alice.mailbox)
        with pytest.raises(NoPermissionError):
            await bob.xgroup_create("operations:queue:operations", "thieves", "0")
        assert (await call).data == "slept"
        await bob.aclose()


@pytest.mark.parametrize("scheme", ["nats", "redis"])
async def test_f18_a_client_can_have_the_permissions_checked_when_it_starts(
    scheme: str, nats_server: Broker, redis_server: Broker
) -> None:
    async with guarded(scheme) as (broker, _):
        async with (
            connect(broker, "bob", private=True) as target,
            PendingRequestMap(target) as bob,
        ):
            assert (await bob.call("math.add", {"a": 1, "b": 2})).data == 3
        with pytest.raises(TransportError, match="mailboxes of others"):
            async with connect(broker, "worker", private=True):
                pass

    open_to_all: Any = (
        connect_nats(nats_server.url, private=True)
        if scheme == "nats"
        else connect_redis(redis_server.url, private=True)
    )
    with pytest.raises(TransportError, match="mailboxes of others"):
        async with open_to_all:
            pass


@pytest.mark.parametrize("scheme", ["nats", "redis"])
@pytest.mark.requirement("R11")
async def test_r11_bob_cannot_fetch_or_follow_alices_call_even_if_he_knows_its_id(
    scheme: str, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    async with (
        guarded(scheme) as (broker, alice),
        connect(broker, "bob") as target,
        PendingRequestMap(target) as bob,
    ):
        heard: list[bytes] = []
        original = bob.receive

        def overhear(body: bytes, reply_to: str, age: float = 0.0, claim: Any = None) -> None:
            heard.append(body)
            original(body, reply_to)

        bob.receive = overhear  # type: ignore[method-assign]
        call = asyncio.create_task(
            alice.call("slow.write", {"seconds": 0.3, "path": str(path)}, timeout=10)
        )
        await until(lambda: started(path))
        (request_id,) = alice.pending

        async def ask() -> None:
            """Bob asks after Alice's call, and sends her request once more with his own address."""
            probe = ProbePayload(request_ids=[request_id], reply_to=bob.mailbox)
            workers = target.topic("operations.workers")
            await target.send(workers, encode_event(CallProbed(payload=probe)))
            again = RequestPayload(
                request_id=request_id,
                operation_id="slow.write",
                input={"seconds": 0, "path": str(path)},
                reply_to=bob.mailbox,
            )
            body = encode_event(CallRequested(payload=again))
            key = f"{request_id}-{len(heard)}"
            await target.enqueue("operations", body, key=key, reply_to=bob.mailbox, wait=1)

        await ask()
        assert (await call).data == "written"
        await ask()
        assert (await bob.call("math.add", {"a": 1, "b": 2})).data == 3

    assert len(started(path)) == 1
    assert not [body for body in heard if request_id.encode() in body]


async def test_a_worker_writes_to_no_address_but_mailboxes(
    nats_server: Broker, redis_server: Broker
) -> None:
    """A request cannot make a worker publish somewhere else by naming it as the place for answers."""
    async with (
        connect_nats(nats_server.url) as on_nats,
        connect_redis(redis_server.url) as on_redis,
    ):
        for target, address in (
            (on_nats, "billing.orders"),
            (on_nats, "operations.queue.operations"),
            (on_nats, "operations.box.any.x\r\nPUB billing.orders 1\r\nx"),
            (on_nats, "operations.box.any." + "x" * 5000),
            (on_nats, "operations.box.>"),
            (on_redis, "session:alice"),
            (on_redis, "operations:queue:operations"),
        ):
            with pytest.raises(Exception, match="no address of ours"):
                await target.send(address, b"{}")
