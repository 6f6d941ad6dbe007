"""Attacks by holders of grants, by callers that wait for approval, between hubs, and on the file of the ledger."""

import asyncio
import gc
import hmac
import json
from base64 import urlsafe_b64encode
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from time import time
from typing import Any

import aiohttp
import anyio
import pytest
from starlette.requests import HTTPConnection
from tests.authority.conftest import SetClock
from tests.authority.test_approvals import ALICE, BOSS, DENIED, KEY, REQUIRED, Office, agent
from tests.authority.test_entry_points import World, _rpc, build, served
from tests.limits import time_limit
from tests.support import begin

from operations import CallError, ErrorCode, Identity, OperationContext, OperationRegistry
from operations.authority import (
    ApprovalRule,
    Authority,
    GrantError,
    Grants,
    Ledger,
    Store,
    StoreError,
    narrow,
    new_block,
    read_token,
)
from operations.authority import grants as resolving
from operations.authority.ledger import LedgerError, verify
from operations.calls import PendingRequestMap, from_calls, serve_calls
from operations.calls.socket import WebSocketHub
from operations.contract.channel import CallerChannel
from operations.front.config import ServerConfig
from operations.front.credentials import Credential, CredentialResolver
from operations.front.front import Front
from operations.front.limits import Limits, caller_key
from operations.pubsub.memory import MemoryTarget
from operations.pubsub.websocket import connect_websocket
from operations.server import CredentialError, IdentityResolver, create_app
from operations.server.http11.running import running
from operations.store.memory import MemoryValues
from operations.tools import ToolConfig, configure_tools

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("R63")]

# ---------------------------------------------------------------------- grants


def encoded(value: Any) -> str:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return urlsafe_b64encode(text).rstrip(b"=").decode()


async def test_no_modified_token_is_valid() -> None:
    grants = Grants(KEY)
    token = narrow(
        grants.create(ALICE, "bot", operations=["task.*"]), new_block("sub", operations=["task.a"])
    )
    prefix, subject, first, second, signature = token.split(".")
    wide = encoded({"id": "1", "holder": "x", "operations": ["*"]})
    forged = [
        ".".join(parts)
        for parts in (
            (prefix, subject, first, signature),
            (prefix, subject, second, signature),
            (prefix, subject, second, first, signature),
            (prefix, subject, first, second, second, signature),
            (prefix, subject, first, wide, signature),
            (prefix, subject, wide, second, signature),
            (prefix, encoded({"id": "boss"}), first, second, signature),
            (prefix, subject, signature),
            (prefix, subject, first, second, ""),
            (prefix, subject, first, second, encoded(b"\0" * 32)),
            (prefix, subject, first, second, signature, ""),
            (prefix, subject, first + "=", second, signature),
            (prefix, subject, first, second, signature + "!"),
            (prefix, subject, first, second, signature + "="),
            (prefix, subject, first, second, "\n" + signature),
            ("opg2", subject, first, second, signature),
        )
    ]
    flipped = [
        token[:at] + ("A" if token[at] != "A" else "B") + token[at + 1 :]
        for at in range(len("opg1."), len(token))
    ]
    keys = (await grants.resolve(token)).grant.keys  # type: ignore[union-attr]
    # The names of blocks, which approvals show, are not enough to extend a chain.
    extended = [f"{prefix}.{subject}.{first}.{wide}.{encoded(bytes.fromhex(key))}" for key in keys]
    for each in (*forged, *flipped, *extended, token + "\u0000", token.upper()):
        try:
            assert await grants.resolve(each) is None
        except GrantError:
            continue


@pytest.mark.requirement("R11")
def test_no_id_is_the_key_of_another_caller() -> None:
    agent = Identity("ann", acting=("bot",))
    strangers = Identity("ann\nbot"), Identity("ann\\nbot"), Identity("ann", acting=("bot\n",))

    assert len({each.key for each in (agent, *strangers)}) == 4
    assert len({each.limit_key for each in (agent, *strangers)}) == 4
    assert Identity("ann").key == "ann"


@pytest.mark.parametrize(
    "block",
    [
        b'{"id":"1","holder":"x","operations":["*"],"calls":{"*":-1}}',
        b'{"id":"1","holder":"x","operations":["*"],"calls":{"*":1.5}}',
        b'{"id":"1","holder":"x","operations":["*"],"until":"never"}',
        b'{"id":"1","holder":"x","operations":["*"],"until":1e400}',
        b'{"id":"1","holder":"x","operations":"*"}',
        b'{"id":"1","holder":"x","operations":["*"],"scopes":["admin"]}',
        b'{"id":"1","holder":"x","operations":["*"],"input":{"*":{"$ref":"http://127.0.0.1/x"}}}',
        b'{"id":"1","holder":"x","operations":["*"],"input":{"*":{"type":"nonsense"}}}',
        b'{"id":"1","holder":"x","operations":["*"],"input":{"*":' + b"[" * 4000 + b"}}",
        b"[]",
        b"\xff",
    ],
)
async def test_a_block_that_cannot_be_read_rejects_its_whole_grant(block: bytes) -> None:
    grants = Grants(KEY)
    token = grants.create(ALICE, "bot", operations=["*"])
    head, _, signature = token.rpartition(".")
    segment = encoded(block)
    mac = hmac.digest(resolving._decode(signature, None), segment.encode(), "sha256")

    with pytest.raises(GrantError):
        await grants.resolve(f"{head}.{segment}.{encoded(mac)}")


async def test_duplicate_keys_in_a_block_cannot_widen() -> None:
    grants = Grants(KEY)
    head, _, signature = grants.create(ALICE, "bot", operations=["task.a"]).rpartition(".")
    segment = encoded(b'{"id":"1","holder":"x","operations":["task.a"],"operations":["*"]}')
    mac = hmac.digest(resolving._decode(signature, None), segment.encode(), "sha256")
    found = await grants.resolve(f"{head}.{segment}.{encoded(mac)}")

    assert found is not None
    assert found.grant is not None
    assert found.grant.covers("task.a", authority=False)
    assert not found.grant.covers("task.b", authority=False)


@pytest.mark.parametrize(
    "pattern", ["*", "?pprovals.*", "[a]pprovals.*", "**", "appr*", "approvals.*"]
)
async def test_only_its_exact_id_lets_a_grant_answer(pattern: str) -> None:
    identity = await agent(operations=[pattern])
    assert identity.grant is not None
    assert not identity.grant.covers("approvals.answer", authority=True)


async def test_a_later_revocation_of_the_same_id_does_not_end_the_first(
    monkeypatch: pytest.MonkeyPatch,
    set_clock: SetClock,
) -> None:
    now = [time()]
    set_clock(lambda: now[0])
    monkeypatch.setattr(resolving, "_FRESH_SECONDS", -1)
    grants = Grants(KEY)
    parent = grants.create(ALICE, "bot", operations=["*"])
    parent_id = read_token(parent)[1][0].id
    await grants.revoke(parent_id)
    # A holder chooses the id of its block, and lets the operator revoke that for a short time.
    await grants.revoke(parent_id, until=int(now[0] * 1000) + 10)

    now[0] += 60
    with pytest.raises(GrantError, match="revoked"):
        await grants.resolve(parent)


async def test_a_cached_token_ends_with_its_subject_and_its_lifetime(
    set_clock: SetClock,
) -> None:
    now = [time()]
    set_clock(lambda: now[0])
    people = {"ann": Identity("ann", ["task"]), "old": Identity("old", expires_at=0)}
    grants = Grants(KEY, subjects=people.get)
    token = grants.create("ann", "bot", operations=["*"], seconds=60)
    assert await grants.resolve(token) is await grants.resolve(token)

    people["ann"] = Identity("ann")
    assert (await grants.resolve(token)).scopes == frozenset()  # type: ignore[union-attr]
    del people["ann"]
    with pytest.raises(GrantError, match="not known"):
        await grants.resolve(token)
    people["ann"] = Identity("ann")
    now[0] += 61
    with pytest.raises(GrantError, match="expired"):
        await grants.resolve(token)
    with pytest.raises(GrantError, match="expired"):
        await grants.resolve(grants.create("old", "bot", operations=["*"]))


async def test_a_narrowed_grant_has_no_rate_of_its_own() -> None:
    registry, grants = OperationRegistry(), Grants(KEY)

    @registry.operation("task.do")
    async def do() -> str:
        return "done"

    configure_tools(registry, {"task.do": ToolConfig(rate=0.001)})
    token = grants.create(ALICE, "bot", operations=["*"])
    tokens = [token, *(narrow(token, new_block(f"sub{number}")) for number in range(3))]
    tokens.append(grants.create(ALICE, "other", operations=["*"]))

    outcomes, callers = list[Any](), set[str]()
    for each in tokens:
        context = OperationContext(identity=await grants.resolve(each))
        callers.add(caller_key(context.identity, ""))
        try:
            outcomes.append((await registry.execute("task.do", {}, context)).data)
        except CallError as error:
            outcomes.append(error.code)

    assert outcomes == ["done", *[ErrorCode.RESOURCE_EXHAUSTED] * 3, "done"]
    assert len(callers) == 2
    assert caller_key(ALICE, "") not in callers


# ---------------------------------------------------------------------- budgets and approvals behind a hub


async def behind(
    store: Any, namespace: str | None = None, **options: Any
) -> tuple[Grants, Callable[..., Any]]:
    """Return a client that calls a worker on behalf of a grant's holder, as a hub does."""
    root = Grants(KEY, store=store)
    at_worker = Grants(root.for_name("workers"), store=store)
    worker = OperationRegistry(authority=Authority(store))

    @worker.operation("far.other", scopes=["task"])
    async def other() -> str:
        return "other"

    @worker.operation("far.run", calls=["far.*"])
    async def run(context: OperationContext) -> Any:
        return (await context.env.far.other()).data

    @worker.operation("far.twice", calls=["far.twice"])
    async def twice(context: OperationContext, is_first: bool = True) -> Any:
        return is_first and (await context.env.far.twice({"is_first": False})).data

    @worker.operation("far.again")
    async def again(context: OperationContext, is_first: bool = True) -> Any:
        return is_first and (await context.env.far.again({"is_first": False})).data

    token = root.create(ALICE, "bot", operations=["far.*"], **options)
    identity = await root.resolve(token)

    async def call(operation: str) -> Any:
        delegate = root.delegate("workers", namespace=namespace)
        passed_on = delegate(operation, OperationContext(identity=identity))
        assert passed_on is not None
        context = OperationContext(identity=await at_worker.resolve(passed_on))
        try:
            return (await worker.execute(operation, {}, context)).data
        except CallError as error:
            return error.code

    return root, call


async def test_budgets_travel_with_a_delegated_call() -> None:
    _, call = await behind(Store(), calls={"far.other": 2})

    # The hub has counted the call itself; the worker counts its nested calls.
    assert [await call("far.other") for _ in range(3)] == ["other"] * 3
    assert [await call("far.run") for _ in range(3)] == [
        "other",
        "other",
        ErrorCode.RESOURCE_EXHAUSTED,
    ]


async def test_approvals_travel_with_a_delegated_call_also_for_the_pattern_of_the_call() -> None:
    _, call = await behind(Store(), approve=["far.*"])

    assert await call("far.other") == "other", "the hub has obtained that approval"
    assert await call("far.run") == REQUIRED, "a further call has none"


@pytest.mark.requirement("R63")
@pytest.mark.parametrize("pattern", ["shop.far.*", "shop.*", "s*r", "far.other"])
async def test_limits_travel_with_a_delegated_call_to_workers_in_a_namespace(pattern: str) -> None:
    _, call = await behind(Store(), "shop", approve=[pattern])
    assert await call("far.run") == REQUIRED

    _, call = await behind(Store(), "shop", calls={pattern: 1})
    assert [await call("far.run") for _ in range(2)] == ["other", ErrorCode.RESOURCE_EXHAUSTED]


@pytest.mark.requirement("R63")
async def test_the_namespaces_of_two_hubs_are_combined() -> None:
    root = Grants(KEY)
    middle = Grants(root.for_name("middle"))
    token = root.create(ALICE, "bot", operations=["*"], approve=["here.there.far.other"])
    context = OperationContext(identity=await root.resolve(token))
    passed_on = root.delegate("middle", namespace="here")("there.far.run", context)
    assert passed_on is not None
    context = OperationContext(identity=await middle.resolve(passed_on))
    passed_on = middle.delegate("last", namespace="there")("far.run", context)
    assert passed_on is not None
    received = await Grants(middle.for_name("last")).resolve(passed_on)
    assert received is not None
    assert received.grant is not None

    assert received.grant.further.rules("far.other").approve
    assert not received.grant.further.rules("far.more").approve


@pytest.mark.requirement("R63")
@pytest.mark.parametrize("limits", [{}, {"approve": ["shop.*"]}, {"calls": {"shop.*": 1}}])
async def test_only_grants_with_limits_carry_a_namespace_which_older_workers_reject(
    limits: Any,
) -> None:
    root = Grants(KEY)
    token = root.create(ALICE, "bot", operations=["*"], **limits)
    context = OperationContext(identity=await root.resolve(token))
    passed_on = root.delegate("workers", namespace="shop")("far.run", context)
    assert passed_on is not None
    origin = read_token(passed_on)[0].origin
    assert origin is not None
    assert origin.prefix == ("shop." if limits else "")


async def test_a_delegated_call_covers_no_further_call_of_the_same_operation() -> None:
    # The hub has approved, counted and checked one call with one input.
    _, call = await behind(Store(), approve=["far.twice"])
    assert await call("far.twice") == REQUIRED
    _, call = await behind(Store(), calls={"far.twice": 1})
    assert [await call("far.twice"), await call("far.twice")] == [
        False,
        ErrorCode.RESOURCE_EXHAUSTED,
    ]
    _, call = await behind(Store(), input={"far.again": {"not": {"required": ["is_first"]}}})
    assert await call("far.again") == DENIED


async def test_a_delegated_call_may_be_forwarded_to_trusted_workers() -> None:
    store = Store()
    root = Grants(KEY, store=store)
    middle, last = (OperationRegistry(authority=Authority(store)) for _ in range(2))

    @last.operation("far.who")
    async def who(context: OperationContext) -> str | None:
        return None if context.identity is None else context.identity.id

    token = root.create(ALICE, "bot", operations=["far.*"], calls={"far.who": 1})
    context = OperationContext(identity=await root.resolve(token))
    passed_on = root.delegate("middle")("far.who", context)
    assert passed_on is not None
    received = await Grants(root.for_name("middle"), store=store).resolve(passed_on)
    target = MemoryTarget()
    async with serve_calls(last, target), from_calls(target) as service:
        middle.register_all(service)
        envelope = await middle.execute("far.who", {}, OperationContext(identity=received))
        unknown = OperationRegistry(remote=service.calls)
        again = await unknown.execute("far.who", {}, OperationContext(identity=received))

    assert (envelope.data, again.data) == ("alice", "alice")


@asynccontextmanager
async def hub_and_worker() -> AsyncGenerator[tuple[Grants, OperationRegistry, list[Any]]]:
    """Yield the grants and the registry of a hub that delegates calls, and the calls that reached the bank."""
    store, target, ran = Store(), MemoryTarget(), list[Any]()
    root = Grants(KEY, store=store)
    at_worker = Grants(root.for_name("workers"), store=store)
    hub, worker = (OperationRegistry(authority=Authority(store)) for _ in range(2))

    @worker.operation("bank.pay", scopes=["bank"])
    async def pay(context: OperationContext) -> str:
        ran.append(context.identity)
        return "paid"

    @worker.operation("order.place", scopes=["bank"], calls=["bank.*"])
    async def place(context: OperationContext) -> Any:
        return (await context.env.bank.pay()).data

    @worker.operation("order.other", scopes=["bank"])
    async def other(context: OperationContext) -> Any:
        return (await context.env.order.place()).data

    @hub.operation("agent.run", calls=["order.*"])
    async def run(context: OperationContext, tool: str = "order.place") -> Any:
        return (await context.env.call(tool)).data

    def resolve(credential: str) -> Any:
        able = Identity("hub", ["bank"])
        return able if credential == "hub" else at_worker.resolve(credential)

    async with (
        serve_calls(worker, target, resolve=resolve),
        from_calls(
            target, credential="hub", delegate=root.delegate("workers"), send_identity=False
        ) as service,
    ):
        hub.register_all(service)
        yield root, hub, ran


async def outcome_at(hub: OperationRegistry, identity: Identity | None, **input: Any) -> Any:
    try:
        context = OperationContext(identity=identity)
        return (await hub.execute("agent.run", input, context)).data
    except CallError as error:
        return error.code


async def test_limits_of_a_caller_travel_with_calls_that_an_operation_of_the_hub_declares() -> None:
    async with hub_and_worker() as (root, hub, ran):
        approved = await root.resolve(
            root.create(ALICE, "bot", operations=["agent.*"], approve=["bank.*"])
        )
        counted = await root.resolve(
            root.create(ALICE, "bot", operations=["agent.*"], calls={"bank.*": 1})
        )

        assert await outcome_at(hub, approved) == REQUIRED
        assert ran == []
        assert [await outcome_at(hub, counted) for _ in range(2)] == [
            "paid",
            ErrorCode.RESOURCE_EXHAUSTED,
        ]
    assert [(each.id, each.acting) for each in ran] == [("alice", ("bot", "hub"))]
    assert "bank" not in ran[0].scopes, "the authority of the operation adds no scope to the caller"


async def test_the_authority_of_a_hub_is_valid_for_the_declared_call_only() -> None:
    async with hub_and_worker() as (_, hub, ran):
        assert await outcome_at(hub, ALICE) == "paid"
        assert await outcome_at(hub, None) == "paid", "with the credential of the hub"
        assert await outcome_at(hub, ALICE, tool="order.other") == DENIED, "undeclared there"
        assert await outcome_at(hub, ALICE, tool="bank.pay") == DENIED, "undeclared here"
        with pytest.raises(CallError) as caught:
            await hub.execute("order.place", {}, OperationContext(identity=ALICE))
    assert caught.value.code == DENIED
    assert [each.id for each in ran] == ["alice", "hub"]


async def test_the_authority_of_a_hub_does_not_reveal_a_hidden_operation() -> None:
    root, worker = Grants(KEY), OperationRegistry()

    @worker.operation("order.hidden")
    async def hidden() -> str:
        return "hidden"

    async def call() -> Any:
        context = OperationContext(identity=ALICE, authority=("agent.run", "order.hidden"))
        token = root.delegate("workers")("order.hidden", context)
        identity = await Grants(root.for_name("workers")).resolve(token or "")
        return await worker.execute("order.hidden", {}, OperationContext(identity=identity))

    assert (await call()).data == "hidden"
    configure_tools(worker, {"order.hidden": ToolConfig(hide=True)})
    with pytest.raises(CallError) as caught:
        await call()
    assert caught.value.code == DENIED


async def test_a_caller_with_many_resources_can_be_named_to_workers() -> None:
    root = Grants(KEY)
    at_worker = Grants(root.for_name("workers"))
    many = Identity("alice", ["task"], {f"project:{each}": ["read"] for each in range(1_000)})
    token = root.delegate("workers")("task.add", OperationContext(identity=many))

    resolved = await at_worker.resolve(token or "")
    assert resolved is not None
    assert len(resolved.resources or {}) == 1_000
    more = Identity("alice", [f"scope:{each}" for each in range(50_000)])
    with pytest.raises(CallError) as caught:
        root.delegate("workers")("task.add", OperationContext(identity=more))
    assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED
    with pytest.raises(GrantError, match="8192 characters"):
        root.create(many, "bot", operations=["task.*"])


async def test_a_caller_cannot_approve_its_own_call_through_a_hub() -> None:
    store = Store()
    root, office = Grants(KEY, store=store), Office(store)
    able = Identity("alice", ["task", "approvals:answer"])
    at_worker = Grants(root.for_name("workers"))

    async def through_hub(operation: str, identity: Identity) -> Identity | None:
        made = root.delegate("workers")(operation, OperationContext(identity=identity))
        return await at_worker.resolve(made or "")

    assert await office.call(who=await through_hub("task.delete", able)) == REQUIRED
    assert await office.answer(able) == DENIED, "the same person without the hub"
    assert await office.answer(await through_hub("approvals.answer", able)) == DENIED
    assert await office.answer(await through_hub("approvals.answer", BOSS)) == "approved"
    assert await office.call(who=await through_hub("task.delete", able)) == "deleted"


async def test_a_hub_does_not_use_the_approval_that_its_worker_needs() -> None:
    store, target = Store(), MemoryTarget()
    root, office = Grants(KEY, store=store), Office(store)
    at_worker = Grants(root.for_name("workers"), store=store)
    hub = OperationRegistry(authority=Authority(store))
    # The worker has a rule for the operation, and the hub applies the grant.
    identity = await root.resolve(
        root.create(ALICE, "bot", operations=["task.*"], approve=["task.*"])
    )

    def resolve(credential: str) -> Any:
        return ALICE if credential == "hub" else at_worker.resolve(credential)

    outcomes = list[Any]()
    async with (
        serve_calls(office.registry, target, resolve=resolve),
        from_calls(target, credential="hub", delegate=root.delegate("workers")) as service,
    ):
        hub.register_all(service)
        while "deleted" not in outcomes and len(outcomes) < 6:
            try:
                context = OperationContext(identity=identity)
                outcomes.append((await hub.execute("task.delete", {"id": 1}, context)).data)
            except CallError as error:
                outcomes.append(error.code)
                await office.answer()

    assert outcomes == [REQUIRED, REQUIRED, REQUIRED, "deleted"]
    assert office.ran == [1]


async def test_agents_named_by_a_token_of_another_issuer_do_not_answer_for_each_other() -> None:
    office = Office()
    able = ["task", "approvals:answer"]
    await office.call(who=Identity("alice", able, acting=("bot",)))

    assert await office.answer(Identity("alice", able, acting=("bot",))) == DENIED
    assert await office.answer(Identity("alice", able, acting=("other",))) == DENIED
    assert await office.answer(Identity("alice", able)) == "approved"


@pytest.mark.parametrize("entry_point", ["worker", "websocket"])
async def test_a_call_that_waits_for_approval_gives_back_its_slot_at_a_worker(
    entry_point: str,
) -> None:
    office, target = Office(hold=20), MemoryTarget()
    limits: dict[str, Any] = {"concurrency": 1, "per_principal": 1}

    @office.registry.operation("task.plain")
    async def plain() -> str:
        return "plain"

    configure_tools(office.registry, {"task.plain": ToolConfig(approve=False)})
    alice = OperationContext(identity=ALICE)
    if entry_point == "websocket":
        front = Front(office.registry, ServerConfig(limits=Limits(calls=1, calls_per_caller=1)))
        limits["front"] = front
    with time_limit(15):
        async with (
            serve_calls(office.registry, target, **limits) as worker,
            PendingRequestMap(target) as calls,
        ):
            waiting = asyncio.create_task(calls.call("task.delete", {"id": 1}, alice))
            while not await office.pending() or worker.active:
                await asyncio.sleep(0)
            assert (await calls.call("task.plain", {}, alice)).data == "plain"
            await office.answer()
            assert (await waiting).data == "deleted"
            assert worker.active == 0
    assert office.ran == [1]


# ---------------------------------------------------------------------- one exact call


def anything() -> tuple[OperationRegistry, list[Any]]:
    registry, ran = OperationRegistry(), list[Any]()

    @registry.operation("task.do")
    async def do(value: Any) -> str:
        ran.append(value)
        return "done"

    configure_tools(registry, {"task.do": ToolConfig(approve=ApprovalRule(hold=5))})
    return registry, ran


async def approve_all(registry: OperationRegistry) -> None:
    approvals, boss = registry.authority.approvals, OperationContext(trusted=True)
    for each in (await approvals.pending(boss)).approvals:
        await approvals.answer(each.id, True, boss)


@pytest.mark.parametrize(
    ("approved", "tried"),
    [
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        (2**53, 2**53 + 1),
        (2**64 - 1, float(2**64)),
        (2**70, 2**70 + 1),
        ("é", "e\u0301"),
        ("a", "a\u200b"),
        (None, "null"),
        ([1, 2], [2, 1]),
        ({"a": None}, {}),
    ],
)
async def test_an_approval_does_not_match_a_similar_input(approved: Any, tried: Any) -> None:
    registry = Office().registry
    deleting = registry.get("task.delete")
    assert deleting is not None
    ids = set[str]()
    for value in (approved, tried):
        with pytest.raises(CallError) as caught:
            await registry.authority.admit(
                deleting, "digest", value, OperationContext(identity=ALICE), None, lambda same: same
            )
        ids.add(caught.value.details["approval"].partition("-")[0])
    assert len(ids) == 2


async def test_the_time_limit_of_the_server_leaves_time_for_the_approval() -> None:
    registry, ran = anything()
    configure_tools(registry, {"task.do": ToolConfig(approve=ApprovalRule(hold=30))})
    app = create_app(registry, timeout=0.9)
    async with running(app) as url, aiohttp.ClientSession() as session:

        async def post(**headers: str) -> int:
            async with session.post(url + "/task/do", json={"value": 1}, headers=headers) as reply:
                return reply.status

        assert await post(**{"Operations-Timeout": "2500"}) == 428, "the caller's own limit holds"
        held = asyncio.create_task(post())
        with time_limit(20):
            while registry.authority.approvals._waiting == 0:
                await asyncio.sleep(0.01)
            await approve_all(registry)
            assert await held == 200
    assert ran == [1]


async def test_the_order_of_keys_does_not_matter_and_of_duplicate_keys_the_last_counts() -> None:
    registry, ran = anything()
    app = create_app(registry)
    async with running(app) as url, aiohttp.ClientSession() as session:

        async def post(body: str) -> int:
            headers = {"content-type": "application/json", "request-timeout": "2"}
            async with session.post(url + "/task/do", data=body, headers=headers) as response:
                return response.status

        configure_tools(registry, {"task.do": ToolConfig(approve=True)})
        assert await post('{"value": {"b": 1, "a": 9, "a": 2}}') == 428
        await approve_all(registry)
        assert await post('{"value": {"a": 9, "b": 1}}') == 428
        assert await post('{"value": {"a": 2, "b": 1}}') == 200
    assert ran == [{"a": 2, "b": 1}]


@pytest.mark.parametrize("value", ["\ud800", float("nan"), float("inf")])
async def test_an_input_that_has_no_exact_text_cannot_be_approved(value: Any) -> None:
    registry, ran = anything()

    with pytest.raises(CallError) as caught:
        await registry.execute("task.do", {"value": value}, OperationContext(identity=ALICE))
    assert caught.value.code == ErrorCode.VALIDATION_ERROR
    assert ran == []


async def test_the_approved_input_runs_even_if_it_changes_meanwhile() -> None:
    registry, ran = anything()
    value = {"amount": [1]}
    context = OperationContext(identity=ALICE)
    call = asyncio.create_task(registry.execute("task.do", {"value": value}, context))
    while not (await registry.authority.approvals.pending(OperationContext(trusted=True))).total:
        await asyncio.sleep(0)

    value["amount"][0] = 1_000_000
    await approve_all(registry)

    await call
    assert ran == [{"amount": [1]}]


async def test_a_question_escapes_invisible_characters_of_the_input() -> None:
    registry, _ = anything()
    configure_tools(registry, {"task.do": ToolConfig(approve=ApprovalRule(ask_caller=True))})
    questions: list[str] = []

    async def elicit(message: str, schema: Any) -> Any:
        questions.append(message)
        return {"action": "accept"}

    context = OperationContext(channel=CallerChannel(elicit=elicit))
    await registry.execute("task.do", {"value": "safe\u202etxt.exe\u200b\n"}, context)

    assert questions == ['Run task.do with {"value":"safe\\u202etxt.exe\\u200b\\n"}?']


# ---------------------------------------------------------------------- races and outages


async def test_fifty_callers_and_two_approvers_race_for_one_approval() -> None:
    office = Office(hold=5)
    calls = [asyncio.create_task(office.call(deadline=(time() + 4) * 1000)) for _ in range(50)]
    while not await office.pending():
        await asyncio.sleep(0)

    (record,) = await office.pending()

    async def answer(approve: bool) -> str:
        try:
            context = OperationContext(identity=BOSS)
            given = {"id": record["id"], "approve": approve}
            return str(
                (await office.registry.execute("approvals.answer", given, context)).data["state"]
            )
        except CallError as error:
            return error.code

    answers = await asyncio.gather(answer(True), answer(False), answer(True))
    results = await asyncio.gather(*calls)

    assert answers.count(ErrorCode.VALIDATION_ERROR) == 2
    assert len(office.ran) == results.count("deleted") == int("approved" in answers)


async def test_an_old_answer_does_not_match_a_new_request() -> None:
    office = Office()
    await office.call()
    (old,) = await office.pending()
    await office.answer()
    assert await office.call() == "deleted"
    await office.call()
    (new,) = await office.pending()

    assert new["id"] != old["id"]
    with pytest.raises(CallError):
        await office.registry.execute(
            "approvals.answer", {"id": old["id"], "approve": True}, OperationContext(identity=BOSS)
        )
    assert await office.call() == REQUIRED


async def test_an_answer_sent_twice_does_not_approve_the_call_that_asked_first() -> None:
    values = MemoryValues()
    one, other = Office(Store(values), hold=20), Office(Store(values))
    first = asyncio.create_task(one.call())
    while not await other.pending():
        await asyncio.sleep(0)
    (record,) = await other.pending()
    answer, boss = {"id": record["id"], "approve": True}, OperationContext(identity=BOSS)
    await other.registry.execute("approvals.answer", answer, boss)
    assert await other.call() == "deleted", "the same call, at another hub"
    one.registry.authority.store.wake()
    while not await other.pending():
        await asyncio.sleep(0)

    with pytest.raises(CallError, match="There is no approval"):
        await other.registry.execute("approvals.answer", answer, boss)
    await other.answer(approve=False)
    one.registry.authority.store.wake()
    assert await first == DENIED
    assert one.ran == []


async def test_a_call_that_waits_longer_than_its_request_asks_again() -> None:
    store = Store()
    office, announced, announce = Office(store, hold=20, seconds=0.3), list[str](), store.announce

    async def count() -> None:
        held = await store.items("approval")
        announced.extend(json.loads(each)["id"] for each in held.values())
        await announce()

    store.announce = count  # type: ignore[method-assign]
    call, asked = asyncio.create_task(office.call()), set[str]()
    with time_limit(15):
        while len(asked) < 3:
            asked |= {each["id"] for each in await office.pending()}
            await asyncio.sleep(0.01)
    call.cancel()
    # A request may also have expired between two looks at those that are pending.
    assert asked <= set(announced)
    assert len(announced) == len(set(announced)), "a request was announced twice"


@pytest.mark.parametrize("end", ["revoked", "expired"])
async def test_a_grant_that_ends_while_its_call_waits_runs_nothing(
    end: str, set_clock: SetClock
) -> None:
    now = [time()]
    set_clock(lambda: now[0])
    store = Store()
    office, grants = Office(store, hold=5), Grants(KEY, store=store)
    token = grants.create(ALICE, "bot", operations=["*"], seconds=60)
    call = asyncio.create_task(office.call(who=await grants.resolve(token)))
    while not await office.pending():
        await asyncio.sleep(0)

    if end == "revoked":
        await grants.revoke(read_token(token)[1][0].id)
    else:
        now[0] += 61
    await office.answer()

    assert await call == DENIED
    assert office.ran == []


@asynccontextmanager
async def reachable(
    office: Office, identity: IdentityResolver, resolve: CredentialResolver
) -> AsyncGenerator[tuple[str, aiohttp.ClientSession, PendingRequestMap]]:
    """Serve an office over HTTP and to callers of a worker."""
    target = MemoryTarget()
    async with (
        running(create_app(office.registry, identity=identity)) as url,
        serve_calls(office.registry, target, resolve=resolve),
        PendingRequestMap(target) as calls,
        aiohttp.ClientSession() as session,
    ):
        yield url, session, calls


@pytest.mark.parametrize("entry", ["http", "session", "messages"])
@pytest.mark.parametrize("end", ["removed", "without its scope"])
async def test_a_key_that_is_removed_while_its_call_waits_runs_nothing(
    end: str, entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("operations.front.credentials.RECHECK_SECONDS", 0)
    office, keys = Office(hold=20), {"key": ALICE}
    headers, value = {"x-api-key": "key"}, {"id": 1}
    with time_limit(20):
        async with reachable(office, api_keys(keys), keys.get) as (url, session, calls):

            async def call() -> str:
                if entry == "messages":
                    with pytest.raises(CallError) as caught:
                        await calls.call("task.delete", value, credential="key")
                    return caught.value.code
                async with session.post(f"{url}/task/delete", json=value, headers=headers) as r:
                    return str((await r.json())["code"])

            if entry == "session":
                async with session.post(f"{url}/session", headers=headers) as opened:
                    headers = {"cookie": opened.headers["set-cookie"].partition(";")[0]}
            called = asyncio.create_task(call())
            while not await office.pending():
                await asyncio.sleep(0)
            keys.clear() if end == "removed" else keys.update(key=Identity("alice"))
            await office.answer()
            assert await called == DENIED

    assert office.ran == []


async def test_a_peer_of_a_hub_whose_key_is_removed_while_its_call_waits_runs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("operations.front.credentials.RECHECK_SECONDS", 0)
    office, keys = Office(hold=20), {"key": ALICE}
    hub = WebSocketHub(office.registry)
    with time_limit(20):
        async with hub.serve(identify=api_keys(keys)) as server:
            port = server.sockets[0].getsockname()[1]
            headers = {"x-api-key": "key"}
            async with (
                connect_websocket(f"ws://127.0.0.1:{port}", headers=headers) as target,
                PendingRequestMap(target) as calls,
            ):
                called = asyncio.create_task(calls.call("task.delete", {"id": 1}))
                while not await office.pending():
                    await asyncio.sleep(0)
                keys.clear()
                await office.answer()
                with pytest.raises(CallError):
                    await called

    assert office.ran == []


@pytest.mark.parametrize("entry", ["http", "messages"])
@pytest.mark.parametrize(("removed", "ran"), [("old", []), ("new", [1])])
async def test_two_keys_of_one_caller_are_checked_separately_after_an_approval(
    removed: str, ran: list[int], entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("operations.front.credentials.RECHECK_SECONDS", 0)
    office, keys = Office(hold=20), {"old": ALICE, "new": ALICE}
    with time_limit(20):
        async with reachable(office, api_keys(keys), keys.get) as (url, session, calls):

            async def call(key: str, value: Any) -> Any:
                if entry == "http":
                    path, headers = f"{url}/task/delete", {"x-api-key": key}
                    async with session.post(path, json=value, headers=headers) as response:
                        body = await response.json()
                        return body if response.ok else body["code"]
                try:
                    return (await calls.call("task.delete", value, credential=key)).data
                except CallError as error:
                    return error.code

            called = asyncio.create_task(call("old", {"id": 1}))
            while not await office.pending():
                await asyncio.sleep(0)
            assert await call("new", {}) == ErrorCode.VALIDATION_ERROR
            del keys[removed]
            await office.answer()
            await called

    assert office.ran == ran


@pytest.mark.parametrize("entry", ["http", "messages"])
async def test_the_credentials_of_ended_calls_are_freed(entry: str) -> None:
    office = Office()

    def resolve(_: object) -> Identity:
        return Identity("alice", ())

    async with reachable(office, resolve, resolve) as (url, session, calls):
        before = count_credentials()
        for _ in range(20):
            if entry == "http":
                async with session.post(f"{url}/task/delete", json={"id": 1}) as response:
                    assert response.status == HTTPStatus.NOT_FOUND
            else:
                with pytest.raises(CallError):
                    await calls.call("task.delete", {"id": 1}, credential="key")
        assert count_credentials() < before + 10


def count_credentials() -> int:
    gc.collect()
    return sum(isinstance(each, Credential) for each in gc.get_objects())


def api_keys(keys: dict[str, Identity]) -> Callable[[HTTPConnection], Identity | None]:
    """Resolve the keys of a table that may change."""

    def resolve(connection: HTTPConnection) -> Identity | None:
        key = connection.headers.get("x-api-key")
        if key is not None and key not in keys:
            raise CredentialError("an unknown key")
        return keys[key] if key is not None else None

    return resolve


async def test_a_record_that_another_version_wrote_is_used_once() -> None:
    values = MemoryValues()
    office = Office(Store(values))
    assert await office.call() == REQUIRED
    ((key, held),) = (await values.items("approval")).items()
    await values.swap(key, held, b'{"later": 1, ' + held[1:])

    assert await office.answer() == "approved"
    ((_, held),) = (await values.items("approval")).items()
    await values.swap(key, held, held[:-1] + b', "later": 1}')
    with time_limit(20):
        assert [await office.call(), await office.call()] == ["deleted", REQUIRED]


class FailingValues(MemoryValues):
    """Fails at one step."""

    failing = ""

    async def swap(self, key: str, old: bytes | None, new: bytes | None) -> bool:
        if self.failing == "swap":
            raise OSError("away")
        return await super().swap(key, old, new)

    async def announce(self) -> None:
        if self.failing == "announce":
            raise OSError("away")

    async def items(self, table: str) -> dict[str, bytes]:
        if self.failing == "items":
            raise OSError("away")
        return await super().items(table)


async def test_a_store_that_fails_at_any_step_permits_no_call() -> None:
    values = FailingValues()
    store = Store(values, values.announce)
    office, grants = Office(store), Grants(KEY, store=store)
    token = grants.create(ALICE, "bot", operations=["*"], calls={"*": 5})

    values.failing = "swap"
    assert await office.call() == ErrorCode.UNAVAILABLE
    values.failing = "announce"
    assert await office.call() == REQUIRED
    assert await office.answer() == "approved"
    values.failing = "swap"
    assert await office.call() == ErrorCode.UNAVAILABLE, "it cannot be used up"
    bot = await grants.resolve(token)
    assert await office.call("agent.run", who=bot) == ErrorCode.UNAVAILABLE, "nor counted"
    values.failing = "items"
    with pytest.raises(CallError) as caught:
        await office.pending()
    assert caught.value.code == ErrorCode.UNAVAILABLE
    with pytest.raises(StoreError):
        await Grants(KEY, store=store).resolve(token)
    assert office.ran == []
    values.failing = ""
    assert await office.call() == "deleted"


# ---------------------------------------------------------------------- from outside


async def test_a_page_of_another_site_cannot_approve() -> None:
    jar = aiohttp.CookieJar(unsafe=True)
    async with served(build()) as world, aiohttp.ClientSession(cookie_jar=jar) as session:
        key = {"authorization": "Bearer boss"}
        async with session.post(world.url + "/session", headers=key) as response:
            cookies = response.headers.getall("set-cookie", [])
        assert [each for each in cookies if "SameSite=Strict" in each and "HttpOnly" in each]
        answer = {"id": "x-1", "approve": True}
        for headers in (
            {"origin": "https://evil.example"},
            {"origin": "null"},
            {"host": "evil.example"},
        ):
            url = world.url + "/approvals/answer"
            async with session.post(url, json=answer, headers=headers) as response:
                assert response.status in (403, 421)
        form = {"content-type": "text/plain"}
        async with session.post(url, data=json.dumps(answer), headers=form) as response:
            assert response.status == 415


async def test_only_the_session_that_was_asked_can_confirm() -> None:
    world = build()
    rule = {"task.delete": ToolConfig(approve=ApprovalRule(ask_caller=True))}
    configure_tools(world.registry, rule)
    async with served(world), anyio.create_task_group() as tasks:
        questions = await _session(world, "bob")
        other = await _session(world, "bob")
        foreign = await _session(world, "alice")
        done: list[Any] = []

        async def call() -> None:
            params = {"name": "task__delete", "arguments": {"id": 1}}
            done.append(await _rpc(world, "tools/call", params, "bob", questions))

        tasks.start_soon(call)
        while not await world.registry.authority.store.items("approval"):
            await asyncio.sleep(0.01)
        for key, headers in (("bob", other), ("alice", foreign), ("alice", questions)):
            for number in range(5):
                await _reply(world, number, key, headers)
        assert world.ran == []
        assert done == []
        for number in range(5):
            await _reply(world, number, "bob", questions)
    assert world.ran == [1]


async def _session(world: World, key: str) -> dict[str, str]:
    hello = {
        "protocolVersion": "2025-06-18",
        "capabilities": {"elicitation": {}},
        "clientInfo": {"name": "test", "version": "1"},
    }
    _, answered, _ = await _rpc(world, "initialize", hello, key, {})
    headers = {
        "mcp-protocol-version": "2025-06-18",
        "mcp-session-id": answered["mcp-session-id"],
        "content-type": "application/json",
        "accept": "application/json, text/event-stream",
        "authorization": f"Bearer {key}",
    }
    async with aiohttp.ClientSession() as session:
        ready = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        async with session.post(world.url + "/mcp", json=ready, headers=headers):
            pass
    return headers


async def _reply(world: World, number: int, key: str, headers: dict[str, str]) -> None:
    body = {"jsonrpc": "2.0", "id": number, "result": {"action": "accept", "content": {}}}
    headers = {**headers, "authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(world.url + "/mcp", json=body, headers=headers),
    ):
        pass


# ---------------------------------------------------------------------- the ledger


def recorded(path: Path, count: int, **options: Any) -> None:
    ledger = Ledger(path, KEY, **options)
    ledger.open()
    for number in range(count):
        begin(ledger, "a.b", {"n": number}, OperationContext(identity=ALICE))
    ledger.close()


def test_a_deleted_ledger_or_an_old_copy_is_detected(tmp_path: Path) -> None:
    path, head = tmp_path / "ledger.jsonl", tmp_path / "head"
    recorded(path, 0, head=head)
    assert verify([path], KEY, head).problem is None
    with pytest.raises(LedgerError, match="no folder/head"):
        Ledger(tmp_path / "other", KEY, head=tmp_path / "no folder" / "head").open()
    recorded(path, 3, head=head)
    old = path.read_bytes()
    recorded(path, 2, head=head)
    whole = path.read_bytes()

    path.write_bytes(old)
    assert verify([path], KEY, head).problem is not None
    with pytest.raises(LedgerError, match="head is 5"):
        Ledger(path, KEY, head=head).open()
    path.unlink()
    recorded(path, 1, head=head)
    assert verify([path], KEY, head).first == 6, "the earlier lines are known to be missing"
    path.write_bytes(whole)
    head.unlink()
    assert verify([path], KEY, head).problem is not None
    with pytest.raises(LedgerError, match=r"head .* is missing\. Restore the head; or .* new one"):
        Ledger(path, KEY, head=head).open()
    assert not head.exists()


def test_a_long_line_of_the_ledger_does_not_stop_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path, KEY)
    begin(ledger, "a.b", {}, OperationContext(identity=Identity("x" * 100_000)))
    ledger.close()
    recorded(path, 1)

    assert (verify([path], KEY).problem, verify([path], KEY).last) == (None, 2)


def test_a_ledger_continues_after_a_crash_at_any_point(tmp_path: Path) -> None:
    path, head = tmp_path / "ledger.jsonl", tmp_path / "head"
    recorded(path, 0, head=head)
    before = head.read_bytes()
    recorded(path, 1, head=head)
    head.write_bytes(before)
    assert verify([path], KEY, head).problem is None, "the first line was written"
    recorded(path, 1, head=head, sync=True)
    before = head.read_bytes()
    recorded(path, 1, head=head)
    head.write_bytes(before)

    assert verify([path], KEY, head).problem is None, "the line was written, its head was not"
    recorded(path, 1, head=head)
    with path.open("ab") as file:
        file.write(b'{"n":5,"time":17')
    recorded(path, 1, head=head)

    found = verify([path], KEY, head)
    assert (found.problem, found.last) == (None, 5)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]))
    assert verify([path], KEY, head).problem is not None


def test_names_cannot_forge_lines_of_the_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path, KEY)
    evil = Identity('eve"}\n{"n":2,"event":"begun","operation":"admin.drop"}\u2028')
    begin(ledger, "a.b", {}, OperationContext(identity=evil, request_id="\n\x00"))
    ledger.close()

    (line,) = path.read_bytes().splitlines()
    assert json.loads(line)["identity"] == evil.id
    assert verify([path], KEY).lines == 1
