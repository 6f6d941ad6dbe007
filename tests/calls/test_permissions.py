"""F18, R61: with the permissions of the recipes, no client reads, forges, aborts or deletes the calls of another."""

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from hashlib import sha1
from pathlib import Path
from secrets import token_hex
from typing import Any

import nats
import pytest
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ResponseError
from tests.calls.operations_under_test import build_registry
from tests.calls.waiting import complete_report, lines, started, until
from tests.limits import time_limit
from tests.servers import REDIS_7, VALKEY, Broker, NatsServer, RedisServer, running

from operations.base.errors import CallError, TransportError
from operations.calls import CallServer, PendingRequestMap, serve_calls
from operations.calls.protocol.events import (
    AbortPayload,
    CallAborted,
    CallConfirmed,
    CallCredited,
    CallProbed,
    CallRequested,
    ConfirmPayload,
    CreditPayload,
    ProbePayload,
    RequestPayload,
    encode_event,
    encode_response,
)
from operations.calls.source.monitoring import monitor_group
from operations.contract.access import Identity
from operations.contract.envelopes import local_envelope
from operations.pubsub.base import Delivery, EventTarget
from operations.pubsub.nats import connect_nats
from operations.pubsub.redis import connect_redis
from operations.pubsub.redis.subscriptions import _READ_SHA, PUT_SHA
from operations.pubsub.stores import open_broker_store

DOCS = Path(__file__).resolve().parents[2] / "docs"
RECIPES = DOCS / "recipes"

AS_WRITTEN = re.findall(
    r"^(connect_(\w+)\(.*(alice|worker)-secret.*\))",
    (DOCS / "calls.md").read_text("utf-8"),
    re.MULTILINE,
)
"""The code of the page for connecting: the code, the transport, and the client."""

SECRET = "alice's own token"

pytestmark = pytest.mark.requirement("R41", "R10", "F18", "R61")

SERVERS = {"redis": REDIS_7, "valkey": VALKEY}
KINDS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            not program.exists(), reason=f"scripts/install --dev could not get {name}"
        ),
    )
    for name, program in SERVERS.items()
]
on_redis = pytest.mark.parametrize("scheme", KINDS)
on_each = pytest.mark.parametrize("scheme", ["nats", *KINDS])


def connect(broker: Broker, user: str, **options: Any) -> Any:
    """Connect with the code of the documentation; Bob uses the code for Alice."""
    written = {(scheme, who): code for code, scheme, who in AS_WRITTEN}
    code = written.get((broker.scheme, user)) or written[broker.scheme, "alice"]
    here = code.replace("127.0.0.1", f"127.0.0.1:{broker.port}").replace("alice", user)
    if user == "worker":
        here = here.replace('"worker", "bob"', '"alice", "bob"')
    connectors: dict[str, Any] = {"connect_nats": connect_nats, "connect_redis": connect_redis}
    # The code of our own page, with other options where a test needs them.
    name, arguments = here.split("(", 1)
    args, given = eval(f"(lambda *args, **given: (args, given))({arguments}")  # noqa: S307
    return connectors[name](*args, **{**given, **options})


class Guarded:
    """A broker with the permissions of a recipe, a worker, and Alice."""

    def __init__(
        self, broker: Broker, worker: CallServer, alice: PendingRequestMap, path: Path
    ) -> None:
        self.broker = broker
        self.worker = worker
        self.alice = alice
        self.path = path

    async def begin(self, operation: str = "slow.sleep", seconds: float = 0.4) -> Any:
        """Let Alice make a call, and wait until it runs; return its task and its id."""
        value = {"seconds": seconds, "path": str(self.path)}
        call = asyncio.create_task(self.alice.call(operation, value, credential=SECRET, timeout=10))
        await until(lambda: started(self.path))
        (request_id,) = self.alice.pending
        return call, request_id


@asynccontextmanager
async def guarded(
    scheme: str, path: Path, of_worker: dict[str, Any] | None = None, **serving: Any
) -> AsyncGenerator[Guarded]:
    if scheme == "nats":
        broker: Broker = NatsServer(config=(RECIPES / "nats.conf").read_text(encoding="utf-8"))
    else:
        program = SERVERS[scheme]
        broker = RedisServer("--aclfile", str(RECIPES / "redis.acl"), program=program)

    def resolve(token: str) -> Identity | None:
        return Identity("alice") if token == SECRET else None

    with running(broker):
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            worker = await enter(connect(broker, "worker", **(of_worker or {})))
            server = await enter(serve_calls(build_registry(), worker, resolve=resolve, **serving))
            alice = await enter(PendingRequestMap(await enter(connect(broker, "alice"))))
            yield Guarded(broker, server, alice, path)


@on_each
async def test_f18_with_the_recipe_everything_still_works(scheme: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    async with guarded(scheme, path) as guard, connect(guard.broker, "bob") as target:
        alice = guard.alice
        async with PendingRequestMap(target) as bob:
            assert (await alice.call("math.add", {"a": 1, "b": 2})).data == 3
            assert (await bob.call("math.add", {"a": 2, "b": 2})).data == 4
            answers = await asyncio.gather(
                *(who.call("math.add", {"a": n, "b": 1}) for n in range(50) for who in (alice, bob))
            )
            assert [each.data for each in answers] == [n + 1 for n in range(50) for _ in "ab"]
        items = [item.data async for item in alice.subscribe("count.up", {"n": 1000})]
        assert items == list(range(1000))
        async for item in alice.subscribe("count.forever", {"path": str(path)}):
            if item.data == 300:
                break
        await until(lambda: "stopped after" in "".join(lines(path)))
        path.unlink()
        call, _ = await guard.begin(seconds=60)
        # Long enough for a heartbeat, which needs permissions of its own.
        await asyncio.sleep(1.5)
        assert not call.done()
        call.cancel()
        await until(lambda: "cancelled" in path.read_text(encoding="utf-8"))


@on_each
async def test_an_operator_uses_the_account_of_a_worker_and_clients_see_no_dead_letters(
    scheme: str, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        guard = await enter(guarded(scheme, tmp_path / "log", name="w1"))
        operator = await enter(monitor_group(await enter(connect(guard.broker, "worker"))))
        alice = await enter(monitor_group(guard.alice.target))
        for monitor in (operator, alice):
            report = await complete_report(monitor, 1)
            assert [each.name for each in report.workers] == ["w1"]
        if scheme == "redis":
            # Core NATS keeps none.
            payload = RequestPayload(request_id="r1", operation_id="math.add")
            await guard.alice.target.dead_letter(
                "operations", encode_event(CallRequested(payload=payload))
            )
            with time_limit(20):
                while not await operator.letters():
                    await asyncio.sleep(0.01)
            assert [each.operation for each in await operator.letters()] == ["math.add"]
        with pytest.raises(TransportError):
            await alice.letters()


@on_each
@pytest.mark.parametrize("name", ["any", "bob"])
async def test_a_caller_with_the_wrong_name_gets_an_error_at_once(
    scheme: str, name: str, tmp_path: Path
) -> None:
    async with (
        guarded(scheme, tmp_path / "log") as guard,
        connect(guard.broker, "alice", client=name) as target,
    ):
        with time_limit(20), pytest.raises(TransportError, match="client=") as caught:
            async with PendingRequestMap(target):
                pass

    assert re.search(rf"operations[.:]box[.:]{name}[.:]", str(caught.value))


QUEUE = "Redis refused a request for operations:queue:operations:alice"

MISSING = [
    ("nats", '"operations.queue.*.alice", ', 'publish to "operations.queue.operations.alice"'),
    ("redis", " (~operations:queue:*:alice +evalsha +xadd +xdel +xlen +xrange)", QUEUE),
    ("redis", " +pubsub|numsub", QUEUE),
    ("redis", " (~operations:seen:alice:* +set)", QUEUE),
]
"""A part of Alice's permissions for requests, and how the error names it."""

MISSING_TO_LISTEN = [
    ("nats", ', "operations.topic.*.callers"', "subscription to .operations.topic.operations.call"),
    ("redis", " +xread", "XREAD"),
    ("redis", " &operations:topic:*", "SUBSCRIBE operations:topic:operations.callers"),
]
"""The same for the replies to requests and the announcements of workers."""


@asynccontextmanager
async def lacking(scheme: str, permission: str, folder: Path) -> AsyncGenerator[Broker]:
    """A broker with the permissions of a recipe, except one of Alice, and a worker."""
    recipe = (RECIPES / ("nats.conf" if scheme == "nats" else "redis.acl")).read_text("utf-8")
    assert permission in recipe
    changed = recipe.replace(permission, "", 1)
    broker: Broker = NatsServer(config=changed)
    if scheme != "nats":
        (folder / "acl").write_text(changed)
        broker = RedisServer("--aclfile", str(folder / "acl"), program=SERVERS[scheme])
    with running(broker):
        async with connect(broker, "worker") as target, serve_calls(build_registry(), target):
            yield broker


def on_servers(cases: list[tuple[str, str, str]]) -> pytest.MarkDecorator:
    marks = {str(each.values[0]): each.marks for each in KINDS}
    listed = [
        pytest.param(scheme, permission, named, marks=marks.get(scheme, ()))
        for of, permission, named in cases
        for scheme in (SERVERS if of == "redis" else ["nats"])
    ]
    return pytest.mark.parametrize(("scheme", "permission", "named"), listed)


@on_servers(MISSING)
async def test_a_request_that_is_not_permitted_fails_at_once_and_names_the_permission(
    scheme: str, permission: str, named: str, tmp_path: Path
) -> None:
    async with (
        lacking(scheme, permission, tmp_path) as broker,
        connect(broker, "alice") as target,
        PendingRequestMap(target) as alice,
    ):
        for _ in range(2):
            with time_limit(10), pytest.raises(CallError) as caught:
                await alice.call("math.add", {"a": 1, "b": 2}, timeout=60)
            assert caught.value.code == "UNAVAILABLE"
            assert not caught.value.retryable
            assert named in caught.value.message
            assert "add the missing permission" in caught.value.message


@on_servers(MISSING_TO_LISTEN)
async def test_a_caller_that_may_not_listen_fails_at_once_and_names_the_permission(
    scheme: str, permission: str, named: str, tmp_path: Path
) -> None:
    async with lacking(scheme, permission, tmp_path) as broker, connect(broker, "alice") as target:
        with time_limit(10), pytest.raises(TransportError, match=named):
            async with PendingRequestMap(target):
                pass


@on_redis
@pytest.mark.parametrize("command", ["xreadgroup", "xgroup", "script", "subscribe"])
async def test_a_worker_that_may_not_read_requests_does_not_start(
    scheme: str, command: str, tmp_path: Path
) -> None:
    recipe = (RECIPES / "redis.acl").read_text("utf-8")
    (tmp_path / "acl").write_text(recipe.replace("+@all", f"+@all -{command}"))
    acl = str(tmp_path / "acl")
    with running(RedisServer("--aclfile", acl, program=SERVERS[scheme])) as broker:
        async with connect(broker, "worker") as target:
            refused = rf"Redis refused {command.upper()}.* add the missing permission"
            with time_limit(10), pytest.raises(TransportError, match=refused):
                async with serve_calls(build_registry(), target):
                    pass


@on_redis
async def test_a_client_that_no_worker_lists_gets_an_error(scheme: str, tmp_path: Path) -> None:
    async with guarded(scheme, tmp_path / "log", {"clients": ["bob"]}) as guard:
        with pytest.raises(CallError, match=r"clients=\['alice'\]"):
            await guard.alice.call("math.add", {"a": 1, "b": 2})


def aborted(request_id: str, mailbox: str) -> bytes:
    return encode_event(CallAborted(payload=AbortPayload(request_id=request_id)))


def probed(request_id: str, mailbox: str) -> bytes:
    return encode_event(
        CallProbed(payload=ProbePayload(request_ids=[request_id], reply_to=mailbox))
    )


def answered(request_id: str, mailbox: str) -> bytes:
    """A request with the id of another caller's call, whose result would be sent to that caller."""
    payload = RequestPayload(
        request_id=request_id,
        operation_id="echo.any",
        input={"value": "forged"},
        reply_to=mailbox,
    )
    return encode_event(CallRequested(payload=payload))


def malformed(request_id: str, mailbox: str) -> bytes:
    return answered(request_id, mailbox).replace(b'"echo.any"', b"7")


def confirmed(request_id: str, mailbox: str) -> bytes:
    return encode_event(CallConfirmed(payload=ConfirmPayload(request_id=request_id)))


def credited(request_id: str, mailbox: str) -> bytes:
    return encode_event(CallCredited(payload=CreditPayload(request_id=request_id, credit=10**6)))


async def send_everywhere(target: EventTarget, worker: CallServer, body: bytes, key: str) -> None:
    """Send an event to all workers, to one of them and to their queue, as a client can."""
    for address in (target.control("operations"), worker.mailbox):
        await target.send(address, body)
    await target.enqueue("operations", body, key=key, reply_to=target.mailbox(), wait=1)


def heard_by(calls: PendingRequestMap) -> list[bytes]:
    """Return a list to which every message that a caller receives is added."""
    receive, heard = calls.receive, list[bytes]()

    def overhear(delivery: Delivery) -> None:
        heard.append(delivery.body)
        receive(delivery)

    calls.receive = overhear  # type: ignore[method-assign]
    return heard


@on_each
async def test_r61_a_client_that_knows_the_id_of_a_call_cannot_end_it(
    scheme: str, tmp_path: Path
) -> None:
    forgeries = (aborted, answered, malformed, probed, confirmed, credited)
    async with (
        guarded(scheme, tmp_path / "log") as guard,
        connect(guard.broker, "bob") as bob,
        PendingRequestMap(bob) as calls,
    ):
        heard = heard_by(guard.alice)
        call, request_id = await guard.begin()
        for number, forge in enumerate(forgeries):
            # Bob even knows the mailbox, which only Alice and the workers know.
            body = forge(request_id, guard.alice.mailbox)
            await send_everywhere(bob, guard.worker, body, f"forged{number}")
        # By then the worker has read the forgeries.
        assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3
        assert (await call).data == "slept"
        await bob.send(bob.control("operations"), probed(request_id, guard.alice.mailbox))
        assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3

    assert [body for body in heard if b"forged" in body or b"malformed" in body] == []
    assert sum(b"call.responded" in body for body in heard) == 1


@on_each
async def test_r61_a_client_cannot_use_up_the_id_of_a_call_before_it_arrives(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = "f" * 32
    async with (
        guarded(scheme, tmp_path / "log") as guard,
        connect(guard.broker, "bob") as bob,
        PendingRequestMap(bob) as calls,
    ):
        for number, forge in enumerate((aborted, answered)):
            body = forge(known, calls.mailbox)
            await send_everywhere(bob, guard.worker, body, (known, "other")[number])
        assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3
        monkeypatch.setattr("operations.calls.source.sending.new_request_id", lambda: known)
        call, request_id = await guard.begin(seconds=0.1)
        assert request_id == known
        assert (await call).data == "slept"


@on_each
@pytest.mark.requirement("R11")
async def test_r11_a_client_cannot_fetch_or_follow_a_call_of_another_by_its_id(
    scheme: str, tmp_path: Path
) -> None:
    async with (
        guarded(scheme, tmp_path / "log") as guard,
        connect(guard.broker, "bob") as bob,
        PendingRequestMap(bob) as calls,
    ):
        heard = heard_by(calls)
        call, request_id = await guard.begin("slow.write")
        await send_everywhere(bob, guard.worker, probed(request_id, calls.mailbox), "first")
        assert (await call).data == "written"
        await send_everywhere(bob, guard.worker, probed(request_id, calls.mailbox), "second")
        assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3

    assert len(started(guard.path)) == 1
    assert not [body for body in heard if request_id.encode() in body]


REDIS_ATTACKS: dict[str, list[tuple[Any, ...]]] = {
    "read requests": [
        ("XREAD", "STREAMS", "{queue}", "0"),
        ("XRANGE", "{queue}", "-", "+"),
        ("XREVRANGE", "{queue}", "+", "-"),
        ("XREADGROUP", "GROUP", "workers", "bob", "STREAMS", "{queue}", ">"),
        ("XREADGROUP", "GROUP", "workers", "bob", "STREAMS", "{own}", ">"),
        ("XGROUP", "CREATE", "{queue}", "thieves", "0"),
        ("XAUTOCLAIM", "{queue}", "workers", "bob", "0", "0-0"),
        ("XINFO", "STREAM", "{queue}", "FULL"),
        ("XLEN", "{queue}"),
        ("DUMP", "{queue}"),
        ("COPY", "{queue}", "operations:box:bob:copy"),
    ],
    "read mailboxes": [
        ("XREAD", "STREAMS", "{box}", "0"),
        ("XRANGE", "{box}", "-", "+"),
        ("SUBSCRIBE", "{box}"),
        ("PSUBSCRIBE", "*"),
        ("SUBSCRIBE", "operations:control:operations:alice"),
    ],
    "write": [
        ("XADD", "{queue}", "*", "e", "forged"),
        ("XADD", "{box}", "*", "e", "forged"),
        ("PUBLISH", "operations:control:operations:alice", "forged"),
        ("PUBLISH", "{worker}:alice", "forged"),
        ("PUBLISH", "{worker}", "forged"),
        ("PUBLISH", "operations:topic:operations.callers", "forged"),
        ("SET", "operations:limit:alice:operations", "0"),
        ("SET", "operations:limit:bob:operations", "1000000"),
        ("SET", "operations:seen:alice:operations:{id}", ""),
        ("XADD", "operations:aside:operations:alice", "*", "e", "forged"),
        # Pretends to be a worker that reads the queue.
        ("SUBSCRIBE", "{queue}"),
    ],
    "delete": [
        ("DEL", "{queue}"),
        ("DEL", "{own}"),
        ("DEL", "{box}"),
        ("UNLINK", "{queue}"),
        ("XDEL", "{queue}", "0-1"),
        ("XTRIM", "{queue}", "MAXLEN", "0"),
        ("XTRIM", "{own}", "MAXLEN", "0"),
        ("EXPIRE", "{queue}", "0"),
        ("SET", "{own}", "not a stream"),
        ("RENAME", "{queue}", "operations:box:bob:queue"),
        ("FLUSHALL",),
        ("FLUSHDB",),
        ("XGROUP", "DESTROY", "{queue}", "workers"),
        ("XGROUP", "DESTROY", "{own}", "workers"),
    ],
    "run scripts": [
        ("EVAL", "while true do end", "0"),
        ("EVAL", "return redis.call('XRANGE', '{queue}', '-', '+')", "1", "{own}"),
        ("SCRIPT", "LOAD", "return 1"),
        ("SCRIPT", "FLUSH"),
        ("SCRIPT", "KILL"),
        ("FUNCTION", "LOAD", "#!lua name=x\nredis.register_function('x', function() end)"),
        ("FCALL", "x", "0"),
        # Scripts that workers have loaded.
        (
            "EVALSHA",
            "{put}",
            "1",
            "{queue}",
            "9",
            "9",
            "operations:limit:alice:operations",
            "x",
            "k",
            "e",
        ),
        ("EVALSHA", "{read}", "1", "{queue}", "bob", "10"),
        ("EVALSHA", "{read}", "1", "{own}", "bob", "10"),
    ],
    "look around": [
        ("KEYS", "*"),
        ("SCAN", "0"),
        ("RANDOMKEY",),
        ("MONITOR",),
        ("PUBSUB", "CHANNELS"),
        ("CLIENT", "LIST"),
        ("CLIENT", "KILL", "TYPE", "normal"),
        ("CLIENT", "PAUSE", "10000"),
        ("CLIENT", "TRACKING", "ON", "BCAST", "PREFIX", "operations:"),
        ("CONFIG", "GET", "*"),
        ("ACL", "LIST"),
        ("INFO",),
        ("SHUTDOWN",),
        ("REPLICAOF", "127.0.0.1", "1"),
    ],
}


@on_redis
@pytest.mark.parametrize("kind", REDIS_ATTACKS)
async def test_r61_redis_rejects_the_commands_of_an_attacker(
    scheme: str, kind: str, tmp_path: Path
) -> None:
    async with guarded(scheme, tmp_path / "log", concurrency=1) as guard:
        blocker, _ = await guard.begin(seconds=60)
        # It waits in the queue, with Alice's credential.
        waiting = asyncio.create_task(
            guard.alice.call("math.add", {"a": 1, "b": 2}, credential=SECRET, timeout=20)
        )
        await until(lambda: len(guard.alice.pending) == 2)
        *_, request_id = guard.alice.pending
        queue = "operations:queue:operations:alice"
        admin: Any = Redis.from_url(f"redis://worker:worker-secret@127.0.0.1:{guard.broker.port}")
        async with admin:
            with time_limit(20):
                while SECRET.encode() not in b"".join(
                    fields[b"e"] for _, fields in await admin.xrange(queue)
                ):
                    await asyncio.sleep(0.01)
        names = {
            "queue": queue,
            "own": "operations:queue:operations:bob",
            "box": guard.alice.mailbox,
            "worker": guard.worker.mailbox,
            "id": request_id,
            "put": PUT_SHA,
            "read": _READ_SHA,
        }
        bob: Any = Redis.from_url(f"redis://bob:bob-secret@127.0.0.1:{guard.broker.port}")
        async with bob:
            for command in REDIS_ATTACKS[kind]:
                words = [
                    re.sub(r"\{(\w+)\}", lambda found: names[found[1]], word) for word in command
                ]
                with pytest.raises(
                    ResponseError, match=r"(?i)permission|user executing the script can't"
                ):
                    raise AssertionError(f"{words}: {await bob.execute_command(*words)}")
        blocker.cancel()
        assert (await waiting).data == 3


@on_redis
async def test_scripts_that_were_flushed_are_loaded_again(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients cannot load scripts themselves."""
    monkeypatch.setattr("operations.pubsub.redis.subscriptions._TIDY_EVERY", 0.1)
    async with guarded(scheme, tmp_path / "log", {"clients": ["alice"]}) as guard:
        assert (await guard.alice.call("math.add", {"a": 1, "b": 2})).data == 3
        admin: Any = Redis.from_url(f"redis://worker:worker-secret@127.0.0.1:{guard.broker.port}")
        async with admin:
            await admin.script_flush()
        with time_limit(20):
            while True:
                with suppress(CallError):
                    assert (await guard.alice.call("math.add", {"a": 1, "b": 2})).data == 3
                    break
                await asyncio.sleep(0.05)


@on_redis
async def test_r61_the_shipped_script_is_all_that_clients_run(scheme: str, tmp_path: Path) -> None:
    """The queue of a client is the only key that it can name, and other scripts stay unknown."""
    async with guarded(scheme, tmp_path / "log") as guard:
        bob: Any = Redis.from_url(f"redis://bob:bob-secret@127.0.0.1:{guard.broker.port}")
        async with bob:
            with pytest.raises(NoPermissionError):
                await bob.evalsha("0" * 40, 1, "operations:queue:operations:alice")
            with pytest.raises(ResponseError, match=r"NOSCRIPT|No matching script"):
                await bob.evalsha("0" * 40, 1, "operations:queue:operations:bob")


async def test_r61_nats_rejects_messages_and_subscriptions_of_an_attacker(
    tmp_path: Path,
) -> None:
    overheard: list[Any] = []
    errors: list[str] = []

    async def on_error(error: Exception) -> None:
        errors.append(str(error))

    async def overhear(message: Any) -> None:
        overheard.append(message)

    async with guarded("nats", tmp_path / "log") as guard:
        bob = await nats.connect(
            guard.broker.url, user="bob", password="bob-secret", error_cb=on_error
        )
        subjects = [
            *("operations.box.alice.>", "operations.box.>", "operations.queue.>", ">", "$SYS.>"),
            *("operations.queue.operations.alice", "operations.queue.operations.bob"),
            *("operations.control.*.alice", "operations.control.*.bob", "operations.control.>"),
            *("operations.aside.>", "_INBOX.>", "$JS.API.>"),
        ]
        for subject in subjects:
            await bob.subscribe(subject, cb=overhear)
        await bob.subscribe("operations.queue.operations.*", queue="workers", cb=overhear)
        call, request_id = await guard.begin()
        forged = encode_response(request_id, local_envelope("forged", "slow.sleep"))
        abort = aborted(request_id, "")
        published = {
            f"{guard.alice.mailbox}._": forged,
            "operations.queue.operations.alice": answered(request_id, guard.alice.mailbox),
            "operations.control.operations.alice": abort,
            f"{guard.worker.mailbox}.alice": abort,
            guard.worker.mailbox: abort,
            "operations.topic.operations.callers": forged,
            "operations.box.worker.x": forged,
            "operations.aside.operations.alice": forged,
            "$JS.API.STREAM.DELETE.operations_queue": b"",
        }
        for subject, body in published.items():
            await bob.publish(subject, body)
        # Workers reply only to the mailboxes of the callers.
        for reply in (f"{guard.alice.mailbox}.{request_id}", "operations.queue.operations.alice"):
            await bob.publish("operations.control.operations.bob", b"", reply=reply)
        await bob.flush()
        assert (await call).data == "slept"
        assert guard.worker.malformed == 0
        await bob.close()

    assert overheard == []
    refused = {found[1] for each in errors if (found := re.search(r'to "([^"]+)"', each))}
    assert refused >= {subject.lower() for subject in (*subjects, *published)}


@on_each
async def test_f18_a_client_can_have_the_permissions_checked_when_it_starts(
    scheme: str, nats_server: Broker, redis_server: Broker, tmp_path: Path
) -> None:
    async with guarded(scheme, tmp_path / "log") as guard:
        async with (
            connect(guard.broker, "bob", private=True) as target,
            PendingRequestMap(target) as bob,
        ):
            assert (await bob.call("math.add", {"a": 1, "b": 2})).data == 3
        with pytest.raises(TransportError, match="mailboxes of others"):
            async with connect(guard.broker, "worker", private=True):
                pass

    open_to_all: Any = (
        connect_nats(nats_server.url, private=True)
        if scheme == "nats"
        else connect_redis(redis_server.url, private=True)
    )
    with pytest.raises(TransportError, match="mailboxes of others"):
        async with open_to_all:
            pass


@pytest.mark.parametrize("name", ["alice:x", "a.b", "*", ">", "", "a b", "a" * 65, "ä"])
async def test_the_name_of_a_client_is_one_word(
    name: str, nats_server: Broker, redis_server: Broker
) -> None:
    attempts: list[Callable[[], Awaitable[Any]]] = [
        connect_nats(nats_server.url, client=name).__aenter__,
        connect_redis(redis_server.url, client=name).__aenter__,
        connect_redis(redis_server.url, clients=[name]).__aenter__,
    ]
    for attempt in attempts:
        with pytest.raises(TransportError, match="name of a client"):
            await attempt()


@asynccontextmanager
async def one_at_a_time(
    broker: Broker, *names: str
) -> AsyncGenerator[tuple[CallServer, list[PendingRequestMap]]]:
    """A worker that runs one call at a time, and clients of these names."""
    shared: dict[str, Any] = {"prefix": f"{token_hex(4)}:"}
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        worker = await enter(connect_redis(broker.url, clients=names, **shared))
        server = await enter(serve_calls(build_registry(), worker, concurrency=1))
        targets = [await enter(connect_redis(broker.url, client=name, **shared)) for name in names]
        yield server, [await enter(PendingRequestMap(target)) for target in targets]


async def test_requests_of_several_clients_are_consumed_in_turn(redis_server: Broker) -> None:
    """A client with many requests does not delay another, and a worker takes only requests that it can begin."""
    order: list[str] = []
    async with one_at_a_time(redis_server, "busy", "calm") as (server, (busy, calm)):

        async def call(calls: PendingRequestMap, name: str) -> None:
            await calls.call("slow.sleep", {"seconds": 0})
            order.append(name)

        blocker = asyncio.create_task(busy.call("slow.sleep", {"seconds": 60}))
        await until(lambda: server.active == 1)
        async with asyncio.TaskGroup() as tasks:
            for calls, name, count in ((busy, "busy", 20), (calm, "calm", 3)):
                for _ in range(count):
                    tasks.create_task(call(calls, name))
            with time_limit(20):
                while (await server.target.state("operations")).waiting != 23:
                    await asyncio.sleep(0.01)
            blocker.cancel()

    assert server.active == 0
    assert sum(name == "calm" for name in order[:9]) == 3


async def test_requests_that_arrive_at_the_same_moment_wait_for_room(
    redis_server: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read over several queues may return a request of each, more than the worker has room for."""
    nothing = "return {}"
    monkeypatch.setattr("operations.pubsub.redis.subscriptions._READ", nothing)
    sha = sha1(nothing.encode(), usedforsecurity=False).hexdigest()
    monkeypatch.setattr("operations.pubsub.redis.subscriptions._READ_SHA", sha)
    path = tmp_path / "log"
    async with one_at_a_time(redis_server, "a", "b", "c", "d") as (server, maps):
        blocker = asyncio.create_task(maps[0].call("slow.sleep", {"seconds": 0.2}))
        await until(lambda: server.active == 1)
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, len(server.jobs))
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        with time_limit(20):
            answers = await asyncio.gather(
                *(calls.call("slow.write", {"seconds": 0.01, "path": str(path)}) for calls in maps)
            )
        watching.cancel()
        await blocker

    assert [answer.data for answer in answers] == ["written"] * 4
    assert len(started(path)) == 4
    assert most == 1


async def test_a_worker_writes_to_no_address_but_mailboxes(
    nats_server: Broker, redis_server: Broker
) -> None:
    """A request cannot make a worker publish to an arbitrary address by naming it as its reply address."""
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
            (on_redis, "operations:queue:operations:any"),
        ):
            with suppress(TransportError):
                await target.send(address, b"{}")
                pytest.fail(f"{address} was accepted")


def broker_of_a_hub(scheme: str, folder: Path) -> Broker:
    """A broker whose user `hub` is a client of the recipe, with the permissions for the store of approvals."""
    page = (DOCS / "authority.md").read_text("utf-8")
    if scheme == "nats":
        (more,) = re.findall(r'^"operations.topic.authority", .*', page, re.MULTILINE)
        users = (RECIPES / "nats.conf").read_text("utf-8").replace("alice", "hub")
        users = users.replace('box.hub.>"]\n', f'box.hub.>", {more}]\n', 1)
        users = users.replace(
            'subscribe: ["operations.box.hub',
            f'subscribe: [{more.split(",")[0]}, "operations.box.hub',
        )
        return NatsServer("-js", "-sd", str(folder), config=users)
    (more,) = re.findall(r"^\(~operations:authority:.*", page, re.MULTILINE)
    lines = (RECIPES / "redis.acl").read_text("utf-8").splitlines()
    (client,) = (line for line in lines if line.startswith("user alice "))
    (folder / "users.acl").write_text(
        f"user default off\n{client.replace('alice', 'hub')} {more}\n"
    )
    return RedisServer("--aclfile", str(folder / "users.acl"), program=SERVERS[scheme])


@on_each
async def test_the_documented_permissions_are_enough_for_the_store_of_approvals(
    scheme: str, tmp_path: Path
) -> None:
    broker = broker_of_a_hub(scheme, tmp_path)
    with running(broker):
        async with (
            connect(broker, "hub") as first,
            connect(broker, "hub") as second,
            open_broker_store(first) as here,
            open_broker_store(second) as there,
        ):
            changed = there.changed
            assert await here.swap("approval.a", None, b"1")
            assert await here.swap("approval.a", b"1", b"2")
            await here.announce()
            with time_limit(20):
                await changed.wait()
            assert await there.items("approval") == {"approval.a": b"2"}
            assert await there.swap("approval.a", b"2", None)
            assert await here.get("approval.a") is None
