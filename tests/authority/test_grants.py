"""Grants: chains of blocks that only narrow, their tokens, budgets and revocations."""

import asyncio
from base64 import urlsafe_b64encode
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from pathlib import Path
from random import Random
from time import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.authority.conftest import SetClock

from operations import (
    AccessControl,
    CallError,
    ErrorCode,
    Identity,
    OperationContext,
    OperationRegistry,
    check_access,
)
from operations.authority import (
    Authority,
    Block,
    Grant,
    GrantError,
    Grants,
    SQLiteValues,
    Store,
    StoreError,
    narrow,
    new_block,
    read_token,
)
from operations.authority import grants as resolving
from operations.authority.grants import has_expired
from operations.base import clock as _clock
from operations.base.clock import MachineClock
from operations.calls import PendingRequestMap, serve_calls
from operations.pubsub.memory import MemoryTarget
from operations.store.memory import MemoryValues
from operations.tools import ToolConfig, configure_tools

KEY = b"k" * 32
ALICE = Identity("alice", ["task"], {"project:7": ["edit"]})
DENIED = ErrorCode.ACCESS_DENIED

pytestmark = pytest.mark.anyio

# ---------------------------------------------------------------------- blocks only narrow

PATTERNS = ["*", "a.*", "a.x", "b.*", "?.x", "approvals.*", "[ab].y"]
NUMBER = {"properties": {"n": {"maximum": 3}}}
SCHEMAS: list[Any] = [True, False, NUMBER, {"required": ["n"]}, {"type": "object"}]


def any_block(random: Random) -> Block:
    def some(most: int) -> list[str]:
        return random.sample(PATTERNS, random.randint(0, most))

    return Block(
        id="1",
        holder=random.choice(["bot", "sub"]),
        operations=tuple(some(2)),
        input={pattern: random.choice(SCHEMAS) for pattern in some(2)},
        calls={pattern: random.randint(0, 2) for pattern in some(2)},
        until=random.choice([None, None, 0, 2**60]),
        approve=tuple(some(1)),
    )


# Drawn from a list: drawing every field of every block takes most of the time of the test.
blocks = st.sampled_from([any_block(Random(seed)) for seed in range(500)])
ids = st.sampled_from(["a.x", "a.y", "b.x", "b.y", "approvals.answer"])
inputs = st.sampled_from([{}, {"n": 1}, {"n": 5}, None])


@pytest.mark.requirement("R63")
@settings(max_examples=150, deadline=None)
@given(st.lists(blocks, min_size=1, max_size=5), ids, inputs)
def test_no_narrowing_allows_a_call_that_an_earlier_block_rejects(
    chain: list[Block], operation_id: str, value: Any
) -> None:
    # The blocks of a grant have different ids.
    chain = [msgspec.structs.replace(block, id=str(number)) for number, block in enumerate(chain)]
    token = resolving.mint(KEY, resolving.Subject(id="alice"), chain[0])
    seen: list[tuple[bool, bool, int, set[tuple[str, int]]]] = []
    for number in range(len(chain)):
        if number:
            token = narrow(token, chain[number])
        grant = resolving.verify(token, KEY)[1]
        limits = grant.rules(operation_id)
        seen.append(
            (
                grant.covers(operation_id, authority=operation_id.startswith("approvals."))
                and grant.accepts(
                    operation_id,
                    value,
                    lambda given: given,
                    authority=operation_id.startswith("approvals."),
                ),
                not limits.approve,
                -len(limits.accepts),
                set(limits.budgets),
            )
        )
    for before, after in pairwise(seen):
        assert after[:3] <= before[:3] if after[0] == before[0] else not after[0]
        assert after[1] <= before[1], "a narrowed grant needs every approval of its parent"
        assert after[3] >= before[3], "a narrowed grant counts against every budget of its parent"


# ---------------------------------------------------------------------- tokens


def token_of(**options: Any) -> str:
    return Grants(KEY).create(ALICE, "bot", **{"operations": ["task.*"], **options})


@pytest.mark.requirement("R45")
def test_r45_ids_of_blocks_have_128_bits() -> None:
    grants = Grants(KEY)
    context = OperationContext(identity=ALICE)
    delegated = grants.delegate("group")("a.x", context)
    assert delegated is not None
    _, (minted,) = read_token(delegated)

    ids = [minted.id, *(new_block("agent").id for _ in range(10))]
    assert {len(bytes.fromhex(each)) for each in ids} == {16}
    assert len(set(ids)) == len(ids)


def test_a_token_shows_its_blocks_and_no_key_is_needed_to_narrow() -> None:
    token = narrow(token_of(), new_block("sub", operations=["task.read"], seconds=60))

    subject, chain = read_token(token)

    assert token.startswith("opg1.")
    assert (subject.id, subject.scopes) == ("alice", ("task",))
    assert [(each.holder, each.operations) for each in chain] == [
        ("bot", ("task.*",)),
        ("sub", ("task.read",)),
    ]


def _truncated(token: str) -> str:
    """Remove the last block and keep the signature."""
    *head, _, signature = token.split(".")
    return ".".join([*head, signature])


def _widened(token: str) -> str:
    """Replace the last block by one that allows everything."""
    *head, _, signature = token.split(".")
    block = b'{"id":"1","holder":"bot","operations":["*"]}'
    return ".".join([*head, urlsafe_b64encode(block).rstrip(b"=").decode(), signature])


def _swapped(token: str) -> str:
    prefix, subject, first, second, signature = token.split(".")
    return ".".join([prefix, subject, second, first, signature])


@pytest.mark.parametrize(
    "forge",
    [
        _truncated,
        _widened,
        _swapped,
        lambda token: token[:-1],
        lambda token: token + "A",
        lambda token: token.replace("opg1", "opg2"),
        lambda token: token.rpartition(".")[0],
        lambda token: "opg1.",
        lambda token: "opg1.." + "." * 50,
        lambda token: "opg1." + "x" * 9000,
        lambda token: "opg1.é.é.é",
        lambda token: resolving.mint(b"x" * 32, resolving.Subject(id="alice"), new_block("bot")),
        lambda token: "opg1." + urlsafe_b64encode(b"[" * 3000).decode().rstrip("=") + ".e30.e30",
    ],
)
async def test_a_forged_token_is_rejected(forge: Any) -> None:
    grants = Grants(KEY)
    token = narrow(token_of(), new_block("sub", operations=["task.read"]))
    assert await grants.resolve(token) is not None

    with pytest.raises((GrantError, CallError)):
        if await grants.resolve(forge(token)) is None:
            raise CallError(DENIED, "not a grant")


@pytest.mark.parametrize(
    "options",
    [
        {"input": {"*": {"$ref": "https://example.com/schema"}}},
        {"input": {"*": {"type": "nonsense"}}},
        {"calls": {"*": -1}},
        {"operations": [""]},
        {"operations": [7]},
        {"seconds": "5"},
        {"seconds": inf},
    ],
)
def test_a_grant_that_cannot_work_is_not_made(options: dict[str, Any]) -> None:
    with pytest.raises(GrantError):
        token_of(**options)


async def test_a_holder_cannot_let_the_revocation_of_its_block_revoke_the_grant_before() -> None:
    grants = Grants(KEY)
    token = grants.create(ALICE, "bot", operations=["*"])
    block = msgspec.structs.replace(new_block("sub"), id=read_token(token)[1][0].id)
    with pytest.raises(GrantError, match="same id"):
        narrow(token, block)

    # A holder need not use this function.
    subject, first, signature = token.split(".")[1:]
    whole = resolving._extended(
        f"opg1.{subject}.{first}", resolving._decode(signature, None), block
    )
    with pytest.raises(GrantError, match="same id"):
        await grants.resolve(whole)


@pytest.mark.requirement("R63")
@pytest.mark.parametrize("subject", ["", "x" * 257])
def test_a_grant_needs_a_subject_that_can_be_named(subject: str) -> None:
    for whose in (subject, Identity(subject)):
        with pytest.raises(GrantError, match="1 to 256 characters"):
            Grants(KEY).create(whose, "bot", operations=["*"])


def test_a_short_key_and_a_grant_without_operations_are_rejected() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        Grants("short")
    with pytest.raises(GrantError, match="name the operations"):
        Grants(KEY).create(ALICE, "bot")


async def test_a_group_verifies_under_its_own_key_only() -> None:
    root = Grants(KEY)
    worker = Grants(root.for_name("workers"))
    token = Grants(root.for_name("workers")).create(ALICE, "hub", operations=["*"])

    assert await worker.resolve(token) is not None
    for other in (root, Grants(root.for_name("others"))):
        with pytest.raises(GrantError):
            await other.resolve(token)


# ---------------------------------------------------------------------- resolving


async def test_the_identity_behind_a_grant_has_the_access_of_its_subject_now() -> None:
    callers = {"alice": ALICE}
    grants = Grants(KEY, subjects=callers.get)
    token = narrow(grants.create("alice", "bot", operations=["*"]), new_block("sub", seconds=60))

    identity = await grants.resolve(token)
    assert identity is not None
    assert (identity.id, identity.scopes, identity.acting) == ("alice", {"task"}, ("bot", "sub"))
    assert identity.expires_at == read_token(token)[1][1].until
    assert await grants.resolve(token) is identity
    assert await grants.resolve("another kind of key") is None

    callers["alice"] = Identity("alice")
    changed = await grants.resolve(token)
    assert changed is not None
    assert changed.scopes == frozenset()
    callers.clear()
    with pytest.raises(GrantError, match="not known"):
        await grants.resolve(token)


def test_a_grant_receives_its_issuer_as_a_copy() -> None:
    issuer, other = Grants(KEY), Grants(KEY)
    grant = Grant(blocks=(new_block("bot", operations=["*"]),), keys=("key",))
    found = [grant.issued_by(issuer), grant.issued_by(other)]

    assert [grant.issuer, *(each.issuer for each in found)] == [None, issuer, other]
    assert found == [grant, grant]
    assert [msgspec.json.encode(each) for each in found] == [msgspec.json.encode(grant)] * 2
    assert found[0].issued_by(issuer) is found[0]


@dataclass
class Times:
    """The real time that the machine shows, and the time that has passed."""

    wall: float = 2e9
    elapsed: float = 0.0

    def pass_by(self, seconds: float) -> None:
        self.wall += seconds
        self.elapsed += seconds


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    times = Times()
    machine = MachineClock(lambda: times.wall, lambda: times.elapsed)
    monkeypatch.setattr(_clock, "machine", machine)
    return times


@pytest.mark.requirement("R63")
async def test_an_expired_grant_stays_expired_if_the_clock_goes_back(
    times: Times, caplog: pytest.LogCaptureFixture
) -> None:
    grants = Grants(KEY)
    token = grants.create(ALICE, "bot", operations=["*"], seconds=120)
    identity = await grants.resolve(token)
    assert identity is not None
    assert identity.grant is not None
    assert identity.grant.covers("a.b", authority=False)

    times.pass_by(121)
    assert not identity.grant.covers("a.b", authority=False)
    times.wall -= 1000
    with pytest.raises(GrantError, match="expired"):
        await grants.resolve(token)
    assert "was set back" in caplog.text
    times.wall = float("nan")
    assert not identity.grant.covers("a.b", authority=False)
    with pytest.raises(ValueError, match="NaN"):
        await grants.resolve(token)


@pytest.mark.requirement("R63")
async def test_a_clock_that_goes_back_a_little_is_tolerated_and_a_larger_step_denies_until_it_caught_up(
    times: Times,
) -> None:
    grants, person = Grants(KEY), Identity("ann", expires_at=(times.wall + 3600) * 1000)
    identity = await grants.resolve(grants.create(ALICE, "bot", operations=["*"], seconds=3600))
    endless = await grants.resolve(grants.create(ALICE, "bot", operations=["*"]))
    assert identity is not None
    assert identity.grant is not None
    assert endless is not None
    assert endless.grant is not None

    for back, is_covered in ((59, True), (2, False), (-2, True), (600, False), (-600, True)):
        times.wall -= back
        assert identity.grant.covers("a.b", authority=False) is is_covered
        assert has_expired(person) is not is_covered
        assert endless.grant.covers("a.b", authority=False)
    times.wall -= 600
    assert not identity.grant.covers("a.b", authority=False)
    # The clock is corrected slowly: it runs while the time that passes is not counted.
    times.wall += 599
    assert identity.grant.covers("a.b", authority=False)


@pytest.mark.requirement("R63")
@pytest.mark.parametrize("year", [365 * 24 * 3600])
async def test_a_step_forward_does_not_last(
    year: int, times: Times, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolving, "_FRESH_SECONDS", -1)
    store = Store()
    grants = Grants(KEY, store=store)
    token = grants.create(ALICE, "bot", operations=["*"], seconds=3600)
    revoked = grants.create(ALICE, "bot", operations=["*"], seconds=3600)
    block = read_token(revoked)[1][0]
    await grants.revoke(block.id, block.until)
    identity = await grants.resolve(token)
    assert identity is not None
    assert identity.grant is not None

    times.wall += year
    assert not identity.grant.covers("a.b", authority=False)
    assert "was set forward" in caplog.text
    during = grants.create(ALICE, "bot", operations=["*"], seconds=3600)
    with pytest.raises(GrantError, match="expired"):
        await grants.resolve(during)
    times.wall -= year
    times.pass_by(60)

    # Grants are valid again, those made meanwhile are not valid for a year, and revocations were not removed.
    assert identity.grant.covers("a.b", authority=False)
    assert await grants.resolve(during) is not None
    with pytest.raises(GrantError, match="revoked"):
        await grants.resolve(revoked)
    later = grants.create(ALICE, "bot", operations=["*"], seconds=3600)
    times.pass_by(3601)
    for each in (token, during, later):
        with pytest.raises(GrantError, match="expired"):
            await grants.resolve(each)


@pytest.mark.requirement("R63")
async def test_a_step_forward_that_lasts_is_the_real_time(times: Times) -> None:
    grants = Grants(KEY)
    times.wall += 8 * 3600
    assert await grants.resolve(grants.create(ALICE, "bot", operations=["*"])) is not None
    grants.create(ALICE, "bot", operations=["*"], seconds=60)
    times.pass_by(_clock.SETTLED + 1)

    token = grants.create(ALICE, "bot", operations=["*"], seconds=60)

    assert await grants.resolve(token) is not None
    # It is no second step if the correction of the clock is corrected.
    times.wall -= 8 * 3600
    assert await grants.resolve(grants.create(ALICE, "bot", operations=["*"], seconds=60))


@pytest.mark.requirement("R30")
@pytest.mark.parametrize("seconds", [None, 300])
async def test_workers_accept_the_grant_of_a_call_if_clocks_differ_by_four_minutes(
    seconds: float | None, set_clock: SetClock
) -> None:
    now, hub = [2e9], Grants(KEY)
    set_clock(lambda: now[0])
    deadline = None if seconds is None else (now[0] + seconds) * 1000
    context = OperationContext(identity=ALICE, deadline=deadline)
    token = hub.delegate("workers")("task.add", context)
    assert token is not None
    # The call is made late, at a worker whose clock is ahead.
    now[0] += (seconds or 0) + 240

    identity = await Grants(hub.for_name("workers")).resolve(token)

    assert identity is not None
    assert identity.id == ALICE.id
    assert identity.grant is not None
    assert not identity.grant.has_ended


async def test_the_error_of_an_expired_grant_names_the_clock(
    set_clock: SetClock,
) -> None:
    now, grants, target = [2e9], Grants(KEY), MemoryTarget()
    set_clock(lambda: now[0])
    token = grants.create(ALICE, "bot", operations=["*"], seconds=60)
    now[0] += 61
    async with (
        serve_calls(OperationRegistry(), target, resolve=grants.resolve),
        PendingRequestMap(target) as calls,
    ):
        with pytest.raises(CallError, match="the clock of its issuer differs"):
            await calls.call("services.list", credential=token)


class BrokenValues(MemoryValues):
    async def items(self, table: str) -> dict[str, bytes]:
        raise OSError("away")

    async def get(self, key: str) -> bytes | None:
        raise OSError("away")


async def test_a_store_that_does_not_work_is_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Store(BrokenValues())
    for _ in range(50):
        with pytest.raises(StoreError):
            await store.get("a")

    assert [each.levelname for each in caplog.records].count("WARNING") == 1


async def test_revoking_a_block_revokes_its_children_and_not_its_parent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(resolving, "_FRESH_SECONDS", -1)
    store, other = Store(SQLiteValues(tmp_path / "a.db")), Store(SQLiteValues(tmp_path / "a.db"))
    here, there = Grants(KEY, store=store), Grants(KEY, store=other)
    parent = here.create(ALICE, "bot", operations=["*"])
    child = narrow(parent, new_block("sub"))
    grandchild = narrow(child, new_block("subsub"))

    await here.revoke(read_token(child)[1][1].id)

    assert await there.resolve(parent) is not None
    for token in (child, grandchild):
        with pytest.raises(GrantError, match="revoked"):
            await there.resolve(token)
    await there.revoke(read_token(parent)[1][0].id)
    with pytest.raises(GrantError, match="revoked"):
        await here.resolve(parent)


async def test_a_grant_is_revoked_by_the_key_in_the_records_of_its_calls() -> None:
    grants = Grants(KEY)
    parent = grants.create(ALICE, "bot", operations=["*"])
    child = narrow(parent, new_block("sub"))
    identity = await grants.resolve(child)
    assert identity is not None

    await grants.revoke(identity.presented[1][1])

    assert await grants.resolve(parent) is not None
    with pytest.raises(GrantError, match="revoked"):
        await grants.resolve(child)


async def test_a_hub_whose_clock_is_ahead_does_not_end_a_revocation(
    monkeypatch: pytest.MonkeyPatch,
    set_clock: SetClock,
) -> None:
    monkeypatch.setattr(resolving, "_FRESH_SECONDS", -1)
    store = Store()
    here, ahead = Grants(KEY, store=store), Grants(KEY, store=store)
    token = here.create(ALICE, "bot", operations=["*"], seconds=60)
    block = read_token(token)[1][0]
    await here.revoke(block.id, block.until)
    other = ahead.create(ALICE, "bot", operations=["*"])
    now = time()
    with monkeypatch.context() as changed:
        changed.setattr(_clock, "machine", MachineClock(lambda: now + 3600, lambda: now))
        assert await ahead.resolve(other) is not None

    with pytest.raises(GrantError, match="revoked"):
        await here.resolve(token)
    now += 25 * 3600
    set_clock(lambda: now)
    assert await here.resolve(other) is not None
    assert await store.items("revoked") == {}


async def test_a_block_revoked_while_revocations_are_read_is_revoked() -> None:
    class SlowValues(MemoryValues):
        async def items(self, table: str) -> dict[str, bytes]:
            found = await super().items(table)
            asked.set()
            await answered.wait()
            return found

    asked, answered = asyncio.Event(), asyncio.Event()
    grants = Grants(KEY, store=Store(SlowValues()))
    token = grants.create(ALICE, "bot", operations=["*"])
    reading = asyncio.create_task(grants.resolve(token))
    await asked.wait()
    await grants.revoke(read_token(token)[1][0].id)
    answered.set()

    with pytest.raises(GrantError, match="revoked"):
        await reading
    with pytest.raises(GrantError, match="revoked"):
        await grants.resolve(token)


async def test_a_grant_is_rejected_if_revocations_cannot_be_read() -> None:
    grants = Grants(KEY, store=Store(BrokenValues()))
    with pytest.raises(StoreError):
        await grants.resolve(grants.create(ALICE, "bot", operations=["*"]))


async def test_callers_that_wait_for_a_store_fail_together() -> None:
    attempts = list[str]()

    class Hanging(MemoryValues):
        async def items(self, table: str) -> dict[str, bytes]:
            attempts.append(table)
            await asyncio.sleep(0.05)
            raise OSError

    grants = Grants(KEY, store=Store(Hanging()))
    token = grants.create(ALICE, "bot", operations=["*"])
    found = await asyncio.gather(*(grants.resolve(token) for _ in range(5)), return_exceptions=True)

    assert [type(each) for each in found] == [StoreError] * 5
    assert len(attempts) == 1
    with pytest.raises(StoreError):
        await grants.resolve(token)
    assert len(attempts) == 2, "the next caller tries again"


# ---------------------------------------------------------------------- calls


def build(store: Any = None) -> OperationRegistry:
    registry = OperationRegistry(authority=Authority(store))

    @registry.operation("task.add", scopes=["task"])
    async def add(n: int) -> int:
        return n

    @registry.operation("open.ping")
    async def ping() -> str:
        return "pong"

    @registry.operation("admin.drop", scopes=["admin"])
    async def drop() -> str:
        return "dropped"

    @registry.operation("agent.run", calls=["admin.*"])
    async def run(tool: str, context: OperationContext) -> Any:
        return (await context.env.call(tool)).data

    return registry


async def context_of(**options: Any) -> OperationContext:
    options.setdefault("operations", ["*"])
    grants = Grants(KEY)
    return OperationContext(identity=await grants.resolve(grants.create(ALICE, "bot", **options)))


async def outcome(
    registry: OperationRegistry, context: OperationContext, name: str, **input: Any
) -> Any:
    try:
        return (await registry.execute(name, input, context)).data
    except CallError as error:
        if error.code == DENIED and error.details is not None:
            return error.details
        return error.code


async def test_a_grant_restricts_open_operations_and_adds_no_scope() -> None:
    registry = build()

    narrowed = await context_of(operations=["task.*", "admin.*"])
    assert await outcome(registry, narrowed, "task.add", n=1) == 1
    assert await outcome(registry, narrowed, "open.ping") == DENIED
    assert await outcome(registry, narrowed, "admin.drop") == DENIED


async def test_the_input_must_satisfy_every_schema() -> None:
    registry = build()
    context = await context_of(input={"task.*": {"properties": {"n": {"maximum": 3}}}})

    assert await outcome(registry, context, "task.add", n=3) == 3
    assert await outcome(registry, context, "task.add", n=4) == DENIED
    assert await outcome(registry, context, "task.add") == ErrorCode.VALIDATION_ERROR


@pytest.mark.parametrize(
    ("schema", "is_accepted"),
    [
        ({"properties": {"project": {"const": "test"}}}, False),
        ({"allOf": [{"properties": {"project": {"const": "test"}}}]}, False),
        ({"properties": {"project": {"enum": ["test", "live"]}}}, True),
        ({"properties": {"title": {}}, "additionalProperties": False}, True),
        ({"properties": {"title": {}}, "additionalProperties": {"const": "test"}}, False),
        ({"properties": {"title": {}}, "additionalProperties": {"const": "live"}}, True),
        ({"patternProperties": {"^pro": {"const": "test"}}}, False),
        ({"patternProperties": {"^pro": {"const": "live"}, "^x": {"const": "test"}}}, True),
        ({"patternProperties": {"^pro": {}}, "additionalProperties": {"const": "tea"}}, True),
        ({"patternProperties": {"^pro": False}}, True),
        ({"properties": {"title": {}}, "unevaluatedProperties": {"const": "test"}}, False),
        ({"not": {"required": ["project"]}}, True),
        ({"dependentSchemas": {"title": {"properties": {"project": {"const": "test"}}}}}, False),
        ({"dependentSchemas": {"title": {"properties": {"project": {"const": "live"}}}}}, True),
        (True, True),
    ],
)
async def test_an_omitted_parameter_is_restricted_by_its_default(
    schema: Any, is_accepted: bool
) -> None:
    registry = OperationRegistry()

    @registry.operation("task.start")
    async def start(title: str, project: str = "live") -> str:
        return project

    context = await context_of(input={"task.*": schema})
    found = await outcome(registry, context, "task.start", title="tea")
    assert found == ("live" if is_accepted else DENIED)


@dataclass
class Order:
    amount: int = 5000
    note: str = ""


AMOUNT = {"properties": {"amount": {"maximum": 100}}}


@pytest.mark.parametrize(
    ("schema", "value", "is_accepted"),
    [
        ({"order": AMOUNT}, {"order": {}}, False),
        ({"order": AMOUNT}, {"order": {"amount": 100}}, True),
        ({"order": {**AMOUNT, "additionalProperties": False}}, {"order": {"amount": 100}}, True),
        ({"order": {"allOf": [AMOUNT]}}, {"order": {"note": "x"}}, False),
        ({"order": {"$ref": "#/$defs/amount"}}, {"order": {}}, False),
        ({"order": {"$ref": "#/$defs/amount"}}, {"order": {"amount": 100}}, True),
        ({"further": {"items": {"$ref": "#/$defs/amount"}}}, {"further": [{}]}, False),
        ({"further": {"items": AMOUNT}}, {"further": [{"amount": 1}, {}]}, False),
        ({"further": {"items": AMOUNT}}, {"further": [{"amount": 1}]}, True),
        ({"further": {"allOf": [{"items": AMOUNT}]}}, {"further": [{}]}, False),
        ({"further": {"prefixItems": [AMOUNT]}}, {"further": [{}]}, False),
        ({"further": {"prefixItems": [AMOUNT]}}, {"further": [{"amount": 1}, {}]}, True),
        ({"further": {"prefixItems": [{}], "items": AMOUNT}}, {"further": [{}, {}]}, False),
        ({"further": {"contains": AMOUNT}}, {"further": [{}]}, False),
        ({"order": {"additionalProperties": {"maximum": 100}}}, {"order": {}}, False),
        ({"order": {"patternProperties": {"^a": {"maximum": 100}}}}, {"order": {}}, False),
        (
            {"order": {"patternProperties": {"^a": {"maximum": 100}}}},
            {"order": {"amount": 1}},
            True,
        ),
        ({"last": AMOUNT}, {"last": {}}, False),
        ({"last": AMOUNT}, {"last": None}, True),
        ({"last": AMOUNT}, {"order": {}}, True),
    ],
)
async def test_an_omitted_property_of_an_object_is_restricted_by_its_default(
    schema: Any, value: Any, is_accepted: bool
) -> None:
    registry = OperationRegistry()

    @registry.operation("shop.buy")
    async def buy(
        order: Order | None = None, further: list[Order] | None = None, last: Order | None = None
    ) -> str:
        return "bought"

    whole = {"properties": schema, "$defs": {"amount": AMOUNT}}
    context = await context_of(input={"shop.*": whole})
    found = await outcome(registry, context, "shop.buy", **value)
    assert found == ("bought" if is_accepted else DENIED)


@pytest.mark.parametrize("key", ["additionalProperties", "patternProperties"])
async def test_a_default_inside_any_object_is_restricted(key: str) -> None:
    registry = OperationRegistry()

    @registry.operation("shop.buy")
    async def buy(order: Order, name: str = "") -> str:
        return "bought"

    schema: Any = {key: AMOUNT if key == "additionalProperties" else {"": AMOUNT}}
    context = await context_of(input={"shop.*": schema})
    assert await outcome(registry, context, "shop.buy", order={}) == DENIED
    assert await outcome(registry, context, "shop.buy", order={"amount": 100}) == "bought"


async def test_nested_calls_are_checked_against_the_grant_unless_declared() -> None:
    registry = build()
    context = await context_of(operations=["agent.run"])

    assert await outcome(registry, context, "agent.run", tool="open.ping") == DENIED
    assert await outcome(registry, context, "agent.run", tool="admin.drop") == "dropped"


@pytest.mark.parametrize("options", [{}, {"calls": {"*": 100}}, {"input": {"*": True}}])
async def test_a_revoked_grant_ends_the_calls_of_an_agent_that_runs(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The operator revokes in another process.
    operator = Grants(KEY, store=Store(SQLiteValues(tmp_path / "a.db")))
    registry, grants = build(), Grants(KEY, store=Store(SQLiteValues(tmp_path / "a.db")))
    token = grants.create(ALICE, "bot", operations=["*"], **options)
    context = OperationContext(identity=await grants.resolve(token))

    @registry.operation("agent.loop")
    async def loop(context: OperationContext) -> list[Any]:
        before = await outcome(registry, context.child("open.ping"), "open.ping")
        await operator.revoke(read_token(token)[1][0].id)
        monkeypatch.setattr(resolving, "_FRESH_SECONDS", -1)
        return [before, await outcome(registry, context.child("open.ping"), "open.ping")]

    assert await outcome(registry, context, "agent.loop") == ["pong", DENIED]
    # An agent in this process, such as a toolbox, resolved its token only once.
    assert await outcome(registry, context, "open.ping") == DENIED


async def test_a_budget_also_counts_calls_that_an_operation_makes_on_its_own_authority() -> None:
    registry = build()
    context = await context_of(operations=["agent.run"], calls={"admin.*": 1})

    assert await outcome(registry, context, "agent.run", tool="admin.drop") == "dropped"
    exhausted = ErrorCode.RESOURCE_EXHAUSTED
    assert await outcome(registry, context, "agent.run", tool="admin.drop") == exhausted


async def test_budgets_hold_under_concurrency_and_across_two_hubs(tmp_path: Path) -> None:
    stores = [Store(SQLiteValues(tmp_path / "a.db")), Store(SQLiteValues(tmp_path / "a.db"))]
    context = await context_of(calls={"task.*": 7, "*": 100})
    calls = [
        outcome(build(stores[number % 2]), context, "task.add", n=number) for number in range(20)
    ]

    results = await asyncio.gather(*calls)

    assert results.count(ErrorCode.RESOURCE_EXHAUSTED) == 13


async def test_a_call_that_exceeds_one_budget_counts_against_none() -> None:
    registry, grants = build(), Grants(KEY)
    parent = grants.create(ALICE, "bot", operations=["*"], calls={"*": 2})
    child = narrow(parent, new_block("sub", calls={"*": 1}))
    of = {
        token: OperationContext(identity=await grants.resolve(token)) for token in (parent, child)
    }

    assert [await outcome(registry, of[child], "open.ping") for _ in range(3)] == [
        "pong",
        ErrorCode.RESOURCE_EXHAUSTED,
        ErrorCode.RESOURCE_EXHAUSTED,
    ]
    assert await outcome(registry, of[parent], "open.ping") == "pong"


async def test_the_holder_of_a_derived_grant_cannot_use_up_the_counters_of_the_others() -> None:
    registry, grants = build(), Grants(KEY)

    def derive(token: str) -> str:
        return narrow(token, new_block("sub", calls={"*": 10_000}))

    async def ping(token: str) -> Any:
        context = OperationContext(identity=await grants.resolve(token))
        return await outcome(registry, context, "open.ping")

    async def derive_many(token: str) -> int:
        """Use new grants until one is rejected; return how many worked."""
        for count in range(1_000):
            if await ping(derive(token)) == ErrorCode.RESOURCE_EXHAUSTED:
                return count
        raise AssertionError("there is no limit")

    root = grants.create(ALICE, "bot", operations=["*"])
    parent = derive(root)
    child = derive(parent)
    assert await derive_many(child) > 200
    assert await ping(derive(parent)) == "pong", "another child of the same parent"
    assert await derive_many(parent) > 200
    assert await ping(derive(root)) == "pong", "another child of the root"
    assert await ping(child) == "pong", "a grant that has a counter"


async def test_a_call_with_a_budget_is_rejected_if_the_store_does_not_work() -> None:
    context = await context_of(calls={"*": 7})

    assert (
        await outcome(build(Store(BrokenValues())), context, "open.ping") == ErrorCode.UNAVAILABLE
    )


async def test_the_counters_of_a_grant_are_removed_after_it_has_expired() -> None:
    store = Store()
    await store.change("budget.expired", lambda _: b'{"counts":{"*":1},"until":1}')
    await store.change("budget.endless", lambda _: b'{"counts":{"*":1},"until":null}')

    await outcome(build(store), await context_of(calls={"*": 7}), "open.ping")

    left = await store.items("budget")
    assert len(left) == 2
    assert "budget.expired" not in left


async def test_settings_and_middleware_count_a_call_once() -> None:
    registry = build()
    configure_tools(registry, {"task.*": ToolConfig(timeout=5, retry=1)})

    @registry.use
    async def through(call: Any, next: Any) -> Any:
        return await next(call)

    context = await context_of(calls={"*": 2})

    assert await outcome(registry, context, "task.add", n=1) == 1
    assert await outcome(registry, context, "task.add", n=1) == 1
    assert await outcome(registry, context, "task.add", n=1) == ErrorCode.RESOURCE_EXHAUSTED


@pytest.mark.requirement("R66")
def test_only_its_exact_id_lets_a_grant_answer_approvals() -> None:
    for operations, allowed in (
        (("*",), False),
        (("approvals.*",), False),
        (("approvals.answer",), True),
    ):
        block = Block(id="1", holder="bot", operations=operations)
        grant = Grant(blocks=(block,), keys=("k",))
        assert grant.covers("approvals.answer", authority=True) is allowed
        identity = Identity("alice", grant=grant)
        assert (
            check_access(AccessControl(), identity, "approvals.answer", authority=True) is allowed
        )
        assert check_access(AccessControl(), identity) is False
