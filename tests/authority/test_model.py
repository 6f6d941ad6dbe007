"""Random grants, budgets, expiries, approvals and revocations at every entry point, compared with a simple model."""

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.authority.conftest import SetClock
from tests.authority.test_entry_points import (
    CALLERS,
    ENTRY_POINTS,
    Call,
    Failed,
    World,
    build,
    in_python,
)
from tests.limits import time_limit
from tests.servers import NatsServer, RedisServer
from tests.servers import running as broker_running

from operations import Identity, OperationRegistry
from operations.authority import Authority, Grants, narrow, new_block, read_token
from operations.authority import grants as resolving
from operations.base.clock import clock
from operations.base.json.values import canonical
from operations.calls import PendingRequestMap, from_calls, serve_calls
from operations.front.limits import Limits
from operations.pubsub.base import EventTarget
from operations.pubsub.memory import MemoryTarget
from operations.pubsub.nats import connect_nats
from operations.pubsub.redis import connect_redis
from operations.pubsub.websocket import connect_websocket
from operations.server import APIKeys, create_app, credential_resolver, hash_key
from operations.server.http11.running import running

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("R63")]

DENIED, REQUIRED, EXHAUSTED = "ACCESS_DENIED", "APPROVAL_REQUIRED", "RESOURCE_EXHAUSTED"
UNSEEN = "ACCESS_DENIED or OPERATION_NOT_FOUND"

SCOPES = {
    "task.add": "task",
    "task.delete": "task",
    "open.ping": "",
    "admin.drop": "admin",
    "price.of": "internal",
    "order.total": "",
    "agent.run": "",
}
RESULTS = {"task.delete": "deleted", "open.ping": "pong", "price.of": 7}
PATTERNS = [
    "*",
    "task.*",
    "task.add",
    "task.delete",
    "agent.*",
    "order.*",
    "*.add",
    "open.ping",
    "a*",
    "price.*",
    "t?sk.*",
]
HOLDERS = ["bot", "sub", "cook", "clerk"]
SECONDS = 3600
"""How long a request for approval stays open."""


def matches(pattern: str, text: str) -> bool:
    if not pattern or not text:
        return pattern.strip("*") == text
    if pattern[0] == "*":
        return matches(pattern[1:], text) or matches(pattern, text[1:])
    return pattern[0] in ("?", text[0]) and matches(pattern[1:], text[1:])


@dataclass
class Link:
    """One block of a grant. `largest` limits the numbers in the input of some operations."""

    id: str
    operations: list[str]
    largest: dict[str, int]
    calls: dict[str, int]
    approve: list[str]
    until: float


@dataclass
class Token:
    subject: str
    chain: tuple[int, ...]
    text: str


@dataclass
class Model:
    """What the rules of grants and approvals allow."""

    now: float
    links: list[Link] = field(default_factory=list[Link])
    revoked: set[str] = field(default_factory=set[str])
    counts: dict[Any, int] = field(default_factory=dict[Any, int])
    approvals: dict[Any, tuple[str, float]] = field(default_factory=dict[Any, tuple[str, float]])

    def of(self, token: Token) -> list[Link]:
        return [self.links[number] for number in token.chain]

    def is_valid(self, token: Token) -> bool:
        links = self.of(token)
        return all(each.id not in self.revoked and self.now < each.until for each in links)

    def sees(self, token: Token, operation: str) -> bool:
        scope = SCOPES[operation]
        return (not scope or scope in CALLERS[token.subject].scopes) and all(
            any(matches(pattern, operation) for pattern in each.operations)
            for each in self.of(token)
        )

    def accepts(self, token: Token, operation: str, value: Any) -> bool:
        numbers = [each for each in value.values() if isinstance(each, int)]
        return all(
            number <= most
            for each in self.of(token)
            for pattern, most in each.largest.items()
            if matches(pattern, operation)
            for number in numbers
        )

    def spend(self, token: Token, operation: str, value: Any, at: str, *, rule: bool, grant: bool) -> str:  # fmt: skip
        """Use an approval, then the budgets; return the code of an error."""
        by_grant = any(matches(each, operation) for link in self.of(token) for each in link.approve)
        if (rule and operation == "task.delete") or (grant and by_grant):
            key = (token.chain, operation, canonical(value), at)
            state, until = self.approvals.get(key, ("used", 0.0))
            if state == "used" or until <= self.now:
                state, until = "pending", self.now + SECONDS
            self.approvals[key] = ("used" if state == "approved" else state, until)
            if state != "approved":
                return REQUIRED if state == "pending" else DENIED
        counters = {
            (number, pattern): most
            for number in token.chain
            for pattern, most in self.links[number].calls.items()
            if grant and matches(pattern, operation)
        }
        if any(self.counts.get(each, 0) >= most for each, most in counters.items()):
            return EXHAUSTED
        for each in counters:
            self.counts[each] = self.counts.get(each, 0) + 1
        return ""

    def call(self, token: Token, operation: str, value: Any, way: str) -> Any:
        if not self.is_valid(token):
            return DENIED
        if not self.sees(token, operation):
            return UNSEEN
        if not self.accepts(token, operation, value):
            return DENIED
        at = "worker" if way == "hub" else ""
        # A hub applies the grant, and the worker behind it its own rules.
        error = self.spend(token, operation, value, "", rule=not at, grant=True)
        if at and not error:
            error = self.spend(token, operation, value, at, rule=True, grant=False)
        nested = {"order.total": "price.of", "agent.run": value.get("tool")}.get(operation)
        if error or nested is None:
            return error or RESULTS.get(operation, value.get("n"))
        is_declared = nested in ("price.of", "task.delete")
        if not is_declared and (at or not self.sees(token, nested)):
            return DENIED
        inner = {"id": 9} if nested == "task.delete" else {}
        error = self.spend(token, nested, inner, at, rule=True, grant=True)
        return error or RESULTS[nested]


class Run:
    """Random steps in a world and in its model."""

    def __init__(self, world: World, ways: dict[str, Call], seed: int, now: float) -> None:
        self.world, self.ways, self.random = world, ways, random.Random(seed)
        self.model = Model(now)
        self.tokens: list[Token] = []

    def extend(self, parent: Token | None) -> None:
        """Create a grant, or narrow one."""
        rng, model = self.random, self.model
        some = [rng.sample(PATTERNS, rng.choice([0, 0, 1, 2])) for _ in range(2)]
        seconds = rng.choice([None, None, 500, 3000])
        link = Link(
            "",
            rng.sample(PATTERNS, rng.randint(1, 4)) + rng.choice([[], ["*"]]),
            {pattern: rng.randint(1, 3) for pattern in some[0]},
            {pattern: rng.randint(0, 9) for pattern in some[1]},
            rng.sample(PATTERNS, rng.choice([0, 0, 0, 1])),
            model.now + (seconds or 1e9),
        )
        schema = {
            each: {"additionalProperties": {"maximum": n}} for each, n in link.largest.items()
        }
        options: Any = {
            "operations": link.operations,
            "input": schema,
            "calls": link.calls,
            "approve": link.approve,
            "seconds": seconds,
        }
        holder = rng.choice(HOLDERS)
        if parent is None:
            subject = rng.choice(["alice", "bob"])
            text = self.world.grants.create(subject, holder, **options)
        else:
            subject, text = parent.subject, narrow(parent.text, new_block(holder, **options))
        link.id = read_token(text)[1][-1].id
        chain = (*(() if parent is None else parent.chain), len(model.links))
        model.links.append(link)
        self.tokens.append(Token(subject, chain, text))

    async def made(self, way: str, token: str, operation: str, value: Any) -> Any:
        try:
            return await self.ways[way](self.world, operation, value, token)
        except Failed as failed:
            return failed.args[0]

    async def call(self, token: Token, count: int) -> None:
        """Make one call, or several at the same time, and compare the outcomes."""
        rng, model = self.random, self.model
        visible = [each for each in SCOPES if model.sees(token, each)]
        operation = rng.choice(visible if visible and rng.random() < 0.8 else [*SCOPES])
        inputs: dict[str, Any] = {
            "task.add": {"n": rng.randint(0, 4)},
            "task.delete": {"id": rng.choice([1, 2, 9])},
            "agent.run": {"tool": rng.choice(["task.delete", "admin.drop", "open.ping"])},
        }
        value = inputs.get(operation, {})
        # The order of concurrent calls decides which of them use approvals of the hub, the worker or nested calls.
        is_simple = count == 1 or operation in ("task.add", "open.ping")
        ways = [rng.choice([*self.ways]) for _ in range(count if is_simple else 1)]
        expected = [model.call(token, operation, value, way) for way in ways]
        found = await asyncio.gather(
            *(self.made(way, token.text, operation, value) for way in ways)
        )
        seen = [UNSEEN if UNSEEN in expected and each in UNSEEN else each for each in found]
        what = (ways, operation, value, token.subject, model.of(token))
        assert sorted(map(repr, seen)) == sorted(map(repr, expected)), what

    async def answer(self) -> None:
        """Let a person answer one call that waits, and compare the queues."""
        rng, model = self.random, self.model
        waiting = (await self.made("http", "boss", "approvals.list", {"limit": 100}))["approvals"]
        pending = [
            key
            for key, (state, until) in model.approvals.items()
            if state == "pending" and until > model.now
        ]
        asked = sorted((key[1], key[2]) for key in pending)
        assert sorted((each["operation"], canonical(each["input"])) for each in waiting) == asked
        if len(pending) == 1 or (pending and rng.random() < 0.3):
            state = rng.choice(["approved", "approved", "denied"])
            for record in waiting:
                answer = {"id": record["id"], "approve": state == "approved"}
                way = rng.choice([each for each in self.ways if each != "hub"])
                done = await self.made(way, "boss", "approvals.answer", answer)
                assert done["state"] == state
            for key in pending:
                model.approvals[key] = (state, model.approvals[key][1])

    async def step(self) -> None:
        rng, model = self.random, self.model
        kinds = ["create", "narrow", "call", "burst", "revoke", "answer", "time"]
        kind = rng.choices(kinds, [4, 9, 60, 8, 3, 15, 4])[0]
        valid = [each for each in self.tokens[-12:] if model.is_valid(each)]
        if kind == "create" or not valid:
            self.extend(None)
            return
        token = rng.choice(valid if rng.random() < 0.85 else self.tokens[-12:])
        if kind == "narrow":
            self.extend(token if len(token.chain) < 4 else None)
        elif kind in ("call", "burst"):
            await self.call(token, 1 if kind == "call" else 8)
        elif kind == "revoke":
            block = model.links[rng.choice(token.chain)].id
            model.revoked.add(block)
            await self.world.grants.revoke(block)
        elif kind == "answer":
            await self.answer()
        else:
            model.now += rng.choice([200, 600, 3000])


@asynccontextmanager
async def reachable() -> AsyncGenerator[tuple[World, dict[str, Call]]]:
    """Yield a world that every entry point reaches, also through a hub that forwards calls."""
    world, ways = build(), dict(ENTRY_POINTS)
    grants = world.grants
    at_worker = Grants(grants.for_name("workers"), store=grants.store)
    every = Identity("hub", [*filter(None, SCOPES.values()), "approvals:answer"])

    def resolve(key: str) -> Any:
        return every if key == "hub" else at_worker.resolve(key)

    async with AsyncExitStack() as stack:
        app = create_app(
            world.registry,
            identity=[
                APIKeys({hash_key(key): caller for key, caller in CALLERS.items()}),
                credential_resolver(grants.resolve),
            ],
            mcp=True,
            websocket=True,
            resolve=world.resolve,
            limits=Limits(failed_attempts_per_second=None),
        )
        world.url = await stack.enter_async_context(running(app))
        url = world.url.replace("http", "ws") + "/ws"
        clients = dict[str, EventTarget]()
        clients["websocket credential"] = await stack.enter_async_context(connect_websocket(url))
        for name, connect, server in (
            ("redis", connect_redis, RedisServer()),
            ("nats", connect_nats, NatsServer()),
        ):
            broker = stack.enter_context(broker_running(server))
            target: Any = await stack.enter_async_context(connect(broker.url))
            worker = serve_calls(world.registry, target, resolve=world.resolve)
            await stack.enter_async_context(worker)
            clients[name] = await stack.enter_async_context(connect(broker.url))
        for name, client in clients.items():
            world.targets[name] = await stack.enter_async_context(PendingRequestMap(client))

        memory = MemoryTarget()
        await stack.enter_async_context(serve_calls(world.registry, memory, resolve=resolve))
        delegate = grants.delegate("workers")
        service = from_calls(memory, credential="hub", delegate=delegate)
        hub = OperationRegistry(authority=Authority(grants.store))
        hub.register_all(await stack.enter_async_context(service))

        async def through_hub(_: World, operation: str, value: Any, key: str) -> Any:
            return await in_python(World(hub, grants), operation, value, key)

        yield world, {**ways, "hub": through_hub}


@pytest.mark.parametrize("seed", range(2))
async def test_every_entry_point_follows_the_model(
    seed: int, monkeypatch: pytest.MonkeyPatch, set_clock: SetClock
) -> None:
    monkeypatch.setattr(resolving, "_FRESH_SECONDS", -1)
    async with reachable() as (world, ways):
        run = Run(world, ways, seed, clock() / 1000)
        set_clock(lambda: run.model.now)
        with time_limit(120):
            for _ in range(300):
                await run.step()
