"""A person's consent to one exact call, and the record of calls."""

import asyncio
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import Any

import anyio
import msgspec
import pytest
from tests.authority.conftest import SetClock
from tests.authority.test_grants import BrokenValues
from tests.limits import time_limit
from tests.support import begin

from operations import (
    CallError,
    ErrorCode,
    ErrorDefinition,
    Identity,
    MCPResponseMeta,
    Operation,
    OperationContext,
    OperationRegistry,
    ResponseEnvelope,
)
from operations.authority import (
    ApprovalRule,
    Authority,
    Grants,
    SQLiteValues,
    Store,
    narrow,
    new_block,
)
from operations.authority import approvals as module
from operations.authority import queue as queue_module
from operations.authority.ledger import Ledger, LedgerError, _signed, verify
from operations.base.concurrency import ConcurrencyLimiter
from operations.base.slots import held_slot
from operations.contract.channel import CallerChannel
from operations.tools import ToolConfig, configure_tools

pytestmark = pytest.mark.anyio

KEY = b"k" * 32
ALICE = Identity("alice", ["task"])
BOSS = Identity("boss", ["approvals:answer"])
DENIED, REQUIRED = ErrorCode.ACCESS_DENIED, ErrorCode.APPROVAL_REQUIRED


class Office:
    """A registry with one operation that needs approval, and the people around it."""

    def __init__(self, store: Any = None, ledger: Any = None, **rule: Any) -> None:
        self.registry = OperationRegistry(authority=Authority(store))
        if ledger is not None:
            self.registry.record(ledger)
        self.ran: list[Any] = []

        @self.registry.operation("task.delete", scopes=["task"])
        async def delete(id: int) -> str:
            self.ran.append(id)
            await asyncio.sleep(0)
            return "deleted"

        @self.registry.operation("task.watch", scopes=["task"])
        async def watch(id: int) -> AsyncIterator[int]:
            self.ran.append(id)
            yield id

        @self.registry.operation("agent.run", calls=["task.*"])
        async def run(id: int, context: OperationContext) -> Any:
            return (await context.env.task.delete({"id": id})).data

        configure_tools(
            self.registry, {"task.*": ToolConfig(approve=ApprovalRule(**rule), retry=2, timeout=30)}
        )
        self.registry.register_object(self.registry.authority.approvals)

    async def call(
        self, name: str = "task.delete", who: Identity | None = ALICE, id: int = 1, **context: Any
    ) -> Any:
        try:
            made = OperationContext(identity=who, **context)
            return (await self.registry.execute(name, {"id": id}, made)).data
        except CallError as error:
            if error.code == REQUIRED:
                assert error.retryable  # noqa: PT017
                assert error.details["until"] > time() * 1000  # noqa: PT017
            return error.code

    async def pending(self, who: Identity | None = BOSS, **context: Any) -> list[Any]:
        made = OperationContext(identity=who, **context)
        found: list[Any] = (await self.registry.execute("approvals.list", {}, made)).data[
            "approvals"
        ]
        return found

    async def answer(
        self, who: Identity | None = BOSS, *, approve: bool = True, **context: Any
    ) -> Any:
        (record,) = await self.pending(None, trusted=True)
        answer = {"id": record["id"], "approve": approve}
        try:
            made = OperationContext(identity=who, **context)
            return (await self.registry.execute("approvals.answer", answer, made)).data["state"]
        except CallError as error:
            return error.code


async def agent(*blocks: Any, **options: Any) -> Identity:
    options.setdefault("operations", ["*"])
    grants = Grants(KEY)
    token = grants.create(ALICE, "bot", **options)
    for block in blocks:
        token = narrow(token, block)
    identity = await grants.resolve(token)
    assert identity is not None
    return identity


async def test_an_approved_call_runs_once_and_only_with_the_same_input() -> None:
    office = Office()

    assert await office.call() == REQUIRED
    assert await office.call() == REQUIRED
    (record,) = await office.pending()
    assert (record["operation"], record["input"], record["caller"]) == (
        "task.delete",
        {"id": 1},
        "alice",
    )
    assert await office.answer() == "approved"
    assert await office.call(id=2) == REQUIRED
    assert await office.call(who=Identity("bob", ["task"])) == REQUIRED
    assert await office.call() == "deleted"
    assert await office.call() == REQUIRED
    assert office.ran == [1]


async def test_twenty_repeats_on_one_approval_run_once() -> None:
    office = Office()
    await office.call()
    await office.answer()

    results = await asyncio.gather(*(office.call() for _ in range(20)))

    assert results.count("deleted") == 1
    assert results.count(REQUIRED) == 19
    assert office.ran == [1]


async def test_the_caller_sees_why_its_call_was_denied() -> None:
    office, boss = Office(), OperationContext(identity=BOSS)
    caller = OperationContext(identity=ALICE)
    await office.call()
    (record,) = await office.pending()
    answer = {"id": record["id"], "approve": False, "reason": "not today"}
    await office.registry.execute("approvals.answer", answer, boss)

    with pytest.raises(CallError, match="approved: not today") as caught:
        await office.registry.execute("task.delete", {"id": 1}, caller)

    assert caught.value.code == DENIED
    assert caught.value.details == {"approval": record["id"], "reason": "not today"}


async def test_a_denied_call_is_rejected_until_the_answer_expires(
    set_clock: SetClock,
) -> None:
    now = [time()]
    set_clock(lambda: now[0])
    office = Office(seconds=60)
    await office.call()

    assert await office.answer(approve=False) == "denied"
    assert await office.call() == DENIED
    now[0] += 61
    assert await office.call() == REQUIRED
    await office.answer()
    now[0] += 61
    assert await office.call() == REQUIRED, "an approval that was not used has expired"
    assert office.ran == []


async def test_a_caller_cannot_approve_its_own_call() -> None:
    office, bot = Office(), await agent(operations=["task.*", "approvals.*"])
    able = ["task", "approvals:answer"]
    alice = Identity("alice", able)
    token = Grants(KEY).create(alice, "bot", operations=["task.*", "approvals.*"])
    self_made = await Grants(KEY).resolve(token)
    narrowed = await Grants(KEY).resolve(narrow(token, new_block("other")))
    starred = await Grants(KEY).resolve(Grants(KEY).create(alice, "star", operations=["*"]))
    del bot

    await office.call(who=alice)
    assert await office.answer(alice) == DENIED
    assert await office.answer(self_made) == DENIED, "the agent of a caller answers for the caller"
    await office.answer(approve=False)
    await office.call(who=self_made)
    for who in (self_made, narrowed, starred):
        assert await office.answer(who) == DENIED
    assert await office.answer(Identity("eve", ["task"])) == DENIED
    assert await office.answer(None) == DENIED
    assert await office.answer(alice) == "approved", "a person approves the call of its agent"
    assert await office.call(who=self_made) == "deleted"
    await office.call(who=None, trusted=True)
    assert await office.answer(None, trusted=True) == DENIED


async def test_a_rule_may_require_another_scope_and_depend_on_the_input() -> None:
    office = Office(scope="approvals:danger", when={"properties": {"id": {"minimum": 10}}})

    assert await office.call(id=1) == "deleted"
    assert await office.call(id=10) == REQUIRED
    assert await office.pending() == []
    assert await office.answer() == ErrorCode.VALIDATION_ERROR
    assert await office.answer(Identity("chief", ["approvals:answer", "approvals:danger"])) == "approved"  # fmt: skip


async def test_a_rule_applies_to_the_default_of_an_omitted_parameter() -> None:
    office = Office()

    @office.registry.operation("task.pay")
    async def pay(amount: int = 5000) -> int:
        return amount

    when = {"required": ["amount"], "properties": {"amount": {"minimum": 1000}}}
    configure_tools(office.registry, {"task.pay": ToolConfig(approve=ApprovalRule(when=when))})
    context = OperationContext(identity=ALICE)
    assert (await office.registry.execute("task.pay", {"amount": 5}, context)).data == 5
    with pytest.raises(CallError) as caught:
        await office.registry.execute("task.pay", {}, context)
    assert caught.value.code == REQUIRED


async def test_a_rule_applies_to_the_default_of_a_property_of_an_object() -> None:
    office = Office()

    @dataclass
    class Order:
        amount: int = 5000

    @office.registry.operation("task.buy")
    async def buy(order: Order) -> int:
        return order.amount

    inner = {"required": ["amount"], "properties": {"amount": {"minimum": 1000}}}
    rule = ApprovalRule(when={"properties": {"order": inner}})
    configure_tools(office.registry, {"task.buy": ToolConfig(approve=rule)})
    context = OperationContext(identity=ALICE)
    assert (await office.registry.execute("task.buy", {"order": {"amount": 5}}, context)).data == 5
    with pytest.raises(CallError) as caught:
        await office.registry.execute("task.buy", {"order": {}}, context)
    assert caught.value.code == REQUIRED


async def test_a_rule_whose_schema_cannot_be_used_requires_approval() -> None:
    assert await Office(when={"type": "nonsense"}).call() == REQUIRED


async def test_approval_rules_hold_within_the_reach_of_an_operation_and_for_subscriptions() -> None:
    office = Office()

    assert await office.call("agent.run") == REQUIRED
    context = OperationContext(identity=ALICE)
    with pytest.raises(CallError) as caught:
        _ = [item async for item in office.registry.subscribe("task.watch", {"id": 1}, context)]
    assert caught.value.code == REQUIRED
    assert office.ran == []


async def test_a_grant_may_require_approval_which_its_holder_cannot_confirm() -> None:
    office = Office(when={"not": {}}, ask_caller=True)
    bot = await agent(new_block("sub", approve=["task.*"]))
    channel = CallerChannel(elicit=answering("accept"))

    assert await office.call(channel=channel) == "deleted", "no rule applies"
    assert await office.call(who=bot, channel=channel) == REQUIRED
    (record,) = await office.pending()
    assert (record["caller"], record["acting"]) == ("alice", ["bot", "sub"])


def answering(action: Any) -> Callable[..., Any]:
    async def elicit(message: str, schema: Any) -> Any:
        assert message == 'Run task.delete with {"id":1}?'
        return {"action": action}

    return elicit


@pytest.mark.parametrize(("action", "result"), [("accept", "deleted"), ("decline", DENIED)])
async def test_a_caller_may_confirm_its_own_call_if_the_rule_allows_it(
    action: str, result: str
) -> None:
    office = Office(ask_caller=True)

    assert await office.call(channel=CallerChannel(elicit=answering(action))) == result
    assert len(office.ran) == (result == "deleted")
    held = await office.registry.authority.store.items("approval")
    assert [json.loads(each)["confirmed"] for each in held.values()] == [True]
    assert await Office(ask_caller=True).call() == REQUIRED, "it cannot be asked"


@pytest.mark.parametrize("action", ["cancel", "", None])
async def test_a_caller_that_dismisses_the_question_is_asked_again(action: Any) -> None:
    office = Office(ask_caller=True, hold=0.2 if action is None else 30)

    assert await office.call(channel=CallerChannel(elicit=answering(action))) == REQUIRED
    assert office.ran == []
    assert await office.call(channel=CallerChannel(elicit=answering("accept"))) == "deleted"


async def test_a_waiting_call_runs_when_it_is_approved_and_releases_its_slot() -> None:
    office, limiter = Office(hold=30), ConcurrencyLimiter(limit=1, limit_per_caller=1)
    held_slot.set(limiter.enter("alice").lent)
    call = asyncio.create_task(office.call())
    while not await office.pending():
        await asyncio.sleep(0)

    while limiter.total:
        await asyncio.sleep(0)
    await office.answer()

    assert await call == "deleted"
    assert limiter.__dict__["total"] == 1


async def test_a_waiting_call_ends_before_its_deadline_and_at_most_a_thousand_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    office = Office(hold=30)

    assert await office.call(deadline=(time() + 1.2) * 1000) == REQUIRED
    monkeypatch.setattr(module, "MAX_WAITING", 0)
    assert await office.call() == REQUIRED


async def test_a_caller_has_a_limited_number_of_requests_without_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queue_module, "MAX_OPEN", 2)
    office, bob = Office(), Identity("bob", ["task"])
    full = ErrorCode.RESOURCE_EXHAUSTED

    assert [await office.call(id=task) for task in (1, 2, 3)] == [REQUIRED, REQUIRED, full]
    # Repeated calls, and other callers, are not affected.
    assert [await office.call(id=1), await office.call(who=bob, id=3)] == [REQUIRED, REQUIRED]

    (first,) = [each for each in await office.pending() if each["input"] == {"id": 1}]
    answer = {"id": first["id"], "approve": True}
    await office.registry.execute("approvals.answer", answer, OperationContext(identity=BOSS))
    assert await office.call(id=3) == REQUIRED
    assert await office.call(id=1) == "deleted"


async def test_calls_at_the_same_time_do_not_exceed_the_limit_of_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_module, "MAX_OPEN", 2)
    office = Office(Store(SQLiteValues(tmp_path / "store")))

    codes = await asyncio.gather(*(office.call(id=task) for task in range(10)))

    assert Counter(codes) == {REQUIRED: 2, ErrorCode.RESOURCE_EXHAUSTED: 8}
    assert len(await office.pending()) == 2


async def test_grants_derived_from_one_grant_share_the_limit_of_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queue_module, "MAX_OPEN", 1)
    office, grants = Office(), Grants(KEY)
    token = grants.create(ALICE, "bot", operations=["*"])

    async def call_as(holder: str, task: int) -> Any:
        who = await grants.resolve(narrow(token, new_block(holder)))
        return await office.call(who=who, id=task)

    assert await call_as("one", 1) == REQUIRED
    assert await call_as("other", 2) == ErrorCode.RESOURCE_EXHAUSTED
    assert await office.call(id=2) == REQUIRED, "the person"


async def test_requests_are_removed_some_time_after_they_have_expired(
    monkeypatch: pytest.MonkeyPatch,
    set_clock: SetClock,
) -> None:
    now = [time()]
    set_clock(lambda: now[0])
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    store = Store()
    office = Office(store, seconds=60)
    for number in range(5):
        assert await office.call(id=number) == REQUIRED
    assert len(await store.items("approval")) == 5

    now[0] += 2 * 24 * 3600
    # Nobody lists the requests.
    assert await office.call(id=7) == REQUIRED

    assert len(await store.items("approval")) == 1


async def test_answers_survive_a_restart_and_cross_hubs(tmp_path: Path) -> None:
    stores = [Store(SQLiteValues(tmp_path / "a.db")), Store(SQLiteValues(tmp_path / "a.db"))]
    here, there = (Office(store, hold=10) for store in stores)
    waiting = asyncio.create_task(here.call())
    while not await there.pending():
        await asyncio.sleep(0.01)

    await there.answer()
    assert await waiting == "deleted"

    await Office(stores[0]).call()
    await Office(stores[1]).answer()
    again = Office(Store(SQLiteValues(tmp_path / "a.db")))
    assert await again.call() == "deleted"
    assert await again.call() == REQUIRED


@pytest.mark.parametrize("content", [None, b"", b"garbage" * 1000])
async def test_a_file_that_is_removed_or_replaced_rejects_the_call(
    content: bytes | None, tmp_path: Path
) -> None:
    path = tmp_path / "a.db"
    office = Office(Store(SQLiteValues(path)))
    assert await office.call() == REQUIRED
    await office.answer()

    path.unlink()
    if content is not None:
        path.write_bytes(content)

    assert await office.call() == ErrorCode.UNAVAILABLE
    assert office.ran == []


async def test_a_store_that_does_not_work_rejects_the_call() -> None:
    office = Office(Store(BrokenValues()))

    assert await office.call() == ErrorCode.UNAVAILABLE
    assert office.ran == []


async def test_a_changed_contract_needs_a_new_approval() -> None:
    office = Office()
    await office.call()
    await office.answer()
    known = office.registry.registered("task.delete")
    assert known is not None
    changed = Operation(
        msgspec.structs.replace(known.spec, description="Delete everything."), known.handler
    )
    office.registry.register(changed, replace=True)

    assert await office.call() == REQUIRED


async def test_a_rule_with_another_scope_needs_a_new_approval() -> None:
    store = Store()
    before, after = Office(store), Office(store, scope="finance")
    assert await before.call() == REQUIRED
    assert await before.answer() == "approved"

    assert await after.call() == REQUIRED
    assert [each["scope"] for each in await after.pending(None, trusted=True)] == ["finance"]
    assert after.ran == []


async def test_the_queue_can_be_followed() -> None:
    office = Office()
    context = OperationContext(identity=BOSS)
    queue = office.registry.subscribe("approvals.watch", {}, context)

    assert (await anext(queue)).data["approvals"] == []
    await office.call()
    assert [each["input"] for each in (await anext(queue)).data["approvals"]] == [{"id": 1}]
    await office.answer()
    assert (await anext(queue)).data["approvals"] == []
    await queue.aclose()


async def test_following_the_queue_does_not_delay_a_shutdown() -> None:
    office = Office()
    approvals = office.registry.authority.approvals
    queue = approvals.watch(OperationContext(trusted=True))
    assert (await anext(queue)).total == 0

    following = asyncio.ensure_future(anext(queue))
    await anyio.wait_all_tasks_blocked()
    approvals.is_up = lambda: False
    office.registry.authority.store.wake()

    with pytest.raises(StopAsyncIteration), time_limit(5):
        await following


async def test_a_call_that_waits_for_approval_does_not_delay_a_shutdown() -> None:
    office = Office(hold=60)
    approvals = office.registry.authority.approvals
    call = asyncio.create_task(office.call())
    while not (await approvals.pending(OperationContext(trusted=True))).total:
        await asyncio.sleep(0)

    approvals.is_up = lambda: False
    office.registry.authority.store.wake()

    with time_limit(5):
        assert await call == REQUIRED
    await office.answer()
    approvals.is_up = lambda: True
    assert await office.call() == "deleted", "the request stays valid"


# ---------------------------------------------------------------------- the ledger


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_the_ledger_records_calls_without_their_arguments(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path, KEY, head=tmp_path / "head", strict=True)
    office = Office(ledger=ledger, when={"properties": {"id": {"minimum": 10}}})
    bot = await agent()

    await office.call("agent.run", who=bot, id=7)
    await office.call(id=10)
    await office.answer()
    await office.call(id=10)
    ledger.close()

    found = [
        (each["event"], each["operation"], each.get("outcome"), each.get("authority"))
        for each in lines_of(path)
        if not each["operation"].startswith("approvals.")
    ]
    assert found == [
        ("begun", "agent.run", None, None),
        ("begun", "task.delete", None, "agent.run"),
        ("ended", "task.delete", "ok", "agent.run"),
        ("ended", "agent.run", "ok", None),
        ("rejected", "task.delete", "APPROVAL_REQUIRED", None),
        ("begun", "task.delete", None, None),
        ("ended", "task.delete", "ok", None),
    ]
    first = lines_of(path)[0]
    assert (first["identity"], first["acting"]) == ("alice", ["bot"])
    assert "approval" in lines_of(path)[-2]
    assert '"id"' not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0
    assert verify([path], KEY, tmp_path / "head").problem is None


async def test_the_ledger_records_the_outcome_that_the_caller_gets(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl", KEY)
    registry = OperationRegistry()
    registry.record(ledger)

    @registry.operation("far.fail", errors=[ErrorDefinition("GONE", "It is gone.")])
    async def fail(how: str, context: OperationContext) -> Any:
        match how:
            case "nested":
                await context.env.call("far.fail", {"what": 1})
            case "result":
                meta = MCPResponseMeta(is_error=True, content=[])
                return ResponseEnvelope("tea is empty", meta)
        raise ValueError(how)

    for how in ("broken", "GONE: no tea", "nested", "result"):
        with suppress(CallError):
            await registry.execute("far.fail", {"how": how})
    ledger.close()

    failed = ErrorCode.EXECUTION_ERROR
    ended = [each for each in lines_of(tmp_path / "ledger.jsonl") if each["event"] == "ended"]
    assert [each["outcome"] for each in ended] == [failed, "GONE", failed, failed]


async def written(path: Path, count: int = 4, **options: Any) -> Path:
    ledger = Ledger(path, KEY, **options)
    for number in range(count):
        begin(ledger, "a.b", {"n": number})
    ledger.close()
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [lines[0].replace("a.b", "a.c"), *lines[1:]],
        lambda lines: [lines[0].replace('"n":1', '"n": 1'), *lines[1:]],
        lambda lines: ['{"operation":"a.c",' + lines[0][1:], *lines[1:]],
        lambda lines: [lines[0], *lines[2:]],
        lambda lines: [lines[1], lines[0], *lines[2:]],
        lambda lines: [*lines, lines[-1]],
        lambda lines: lines[:-1],
        lambda lines: [*lines[:2], "{}", *lines[2:]],
        lambda lines: [],
    ],
)
async def test_a_changed_ledger_is_detected(
    tmp_path: Path, change: Callable[[list[str]], list[str]]
) -> None:
    head = tmp_path / "head"
    path = await written(tmp_path / "ledger.jsonl", head=head)
    assert verify([path], KEY, head).problem is None
    assert verify([path], b"x" * 32, head).problem is not None

    path.write_text("".join(f"{line}\n" for line in change(path.read_text().splitlines())))

    assert verify([path], KEY, head).problem is not None


def test_threads_share_one_ledger(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl", KEY)

    def record() -> None:
        for number in range(300):
            begin(ledger, "a.b", {"n": number})

    with ThreadPoolExecutor(4) as threads:
        for _ in range(4):
            threads.submit(record)
    ledger.close()

    found = verify([tmp_path / "ledger.jsonl"], KEY)
    assert (found.problem, found.lines) == (None, 1200)


async def test_a_ledger_is_not_continued_with_another_key(tmp_path: Path) -> None:
    path = await written(tmp_path / "ledger.jsonl")

    with pytest.raises(LedgerError, match="not a line of this ledger"):
        Ledger(path, b"x" * 32).open()


async def test_a_missing_end_is_reported_as_not_checked_without_a_head(tmp_path: Path) -> None:
    path = await written(tmp_path / "ledger.jsonl")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))

    found = verify([path], KEY)

    assert (found.problem, found.tail_checked, found.lines) == (None, False, 3)
    with pytest.raises(LedgerError, match="ends at line 3"):
        (tmp_path / "head").write_text("4 abc")
        Ledger(path, KEY, head=tmp_path / "head").open()


async def test_rotation_and_restarts_continue_with_the_chain(tmp_path: Path) -> None:
    path, head = tmp_path / "ledger.jsonl", tmp_path / "head"
    await written(path, 2, head=head)
    ledger = Ledger(path, KEY, head=head)
    begin(ledger, "a.b", {})
    path.rename(tmp_path / "old")
    begin(ledger, "a.b", {})
    begin(ledger, "a.b", {})
    with pytest.raises(LedgerError, match="another process"):
        Ledger(path, KEY).open()
    ledger.close()

    found = verify([tmp_path / "old", path], KEY, head)
    assert (found.problem, found.lines, found.last) == (None, 5, 5)
    assert verify([path], KEY, head).first == 4
    assert verify([path, tmp_path / "old"], KEY, head).problem is not None


@pytest.mark.parametrize("is_moved", [True, False])
def test_a_process_continues_the_lines_that_another_has_written(
    tmp_path: Path, is_moved: bool
) -> None:
    path, head = tmp_path / "l.jsonl", tmp_path / "head"
    one, other = (Ledger(path, KEY, head=head) for _ in range(2))

    def write(ledger: Ledger) -> None:
        begin(ledger, "task.delete", {})

    write(one)
    path.rename(tmp_path / "l.1")
    write(other)
    write(one)  # It has a line to write, but the file has another writer.
    files = [tmp_path / "l.1", path]
    if is_moved:
        path.rename(tmp_path / "l.2")
        files.insert(1, tmp_path / "l.2")
    else:
        other.close()
    write(one)
    found = verify(files, KEY, head)
    assert (found.problem, found.lines, found.lost) == (None, 3, 1)


@pytest.mark.skipif(sys.platform == "win32", reason="processes cannot be forked")
def test_a_forked_process_does_not_write_to_the_ledger_of_its_parent(tmp_path: Path) -> None:
    path = tmp_path / "l.jsonl"
    ledger = Ledger(path, KEY, strict=True)

    def write() -> bool:
        try:
            begin(ledger, "task.delete", {})
        except CallError:
            return False
        return True

    assert write()
    process = os.fork()
    if not process:
        os._exit(write())
    assert write()
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    assert write()
    found = verify([path], KEY)
    assert (found.problem, found.lines) == (None, 3)


async def test_a_strict_ledger_rejects_calls_that_it_cannot_record(tmp_path: Path) -> None:
    for strict in (True, False):
        ledger = Ledger(tmp_path / "no folder" / "ledger.jsonl", KEY, strict=strict)
        office = Office(ledger=ledger, when={"not": {}})

        assert await office.call() == (ErrorCode.UNAVAILABLE if strict else "deleted")
        assert len(office.ran) == (not strict)


def test_a_ledger_that_failed_once_is_writable_without_a_call(tmp_path: Path) -> None:
    path = tmp_path / "late" / "ledger.jsonl"
    ledger = Ledger(path, KEY)
    assert ledger.check()
    begin(ledger, "a.b", {})
    assert [ledger.check() for _ in range(3)] == [False] * 3
    path.parent.mkdir()
    assert [ledger.check() for _ in range(3)] == [True] * 3
    ledger.close()

    found = verify([path], KEY)
    assert (found.problem, found.lines, found.lost) == (None, 1, 1)
    assert [line["event"] for line in lines_of(path)] == ["resumed"]


async def test_a_ledger_records_how_many_lines_could_not_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "late" / "ledger.jsonl"
    ledger = Ledger(path, KEY)
    office = Office(ledger=ledger, when={"not": {}})
    for _ in range(20):
        await office.call()
    path.parent.mkdir()
    for _ in range(2):
        await office.call()
    ledger.close()

    found = verify([path], KEY)
    assert (found.problem, found.lines, found.lost) == (None, 4, 40)
    assert [line.get("lost") for line in lines_of(path)] == [40, None, None, None]
    (warning,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert str(path) in warning.getMessage()


@pytest.mark.requirement("R63")
async def test_a_ledger_cannot_take_the_place_of_another_with_the_same_key(tmp_path: Path) -> None:
    for name in ("one.jsonl", "two.jsonl"):
        ledger = Ledger(tmp_path / name, KEY)
        office = Office(ledger=ledger)
        await office.call()
        ledger.close()
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    assert {each["ledger"] for each in lines_of(one)} == {"one.jsonl"}
    assert verify([one], KEY, name="one.jsonl").problem is None
    assert verify([one], KEY).problem is None

    one.write_bytes(two.read_bytes())

    assert "'two.jsonl'" in str(verify([one], KEY, name="one.jsonl").problem)
    with pytest.raises(LedgerError, match=r"it is the ledger 'two\.jsonl', not 'one\.jsonl'"):
        Ledger(one, KEY).open()
    # A file that log rotation has moved keeps its name.
    rotated = tmp_path / "two.jsonl.1"
    two.rename(rotated)
    ledger = Ledger(two, KEY)
    await Office(ledger=ledger).call()
    ledger.close()
    assert verify([rotated], KEY, name="two.jsonl").problem is None


async def test_a_ledger_of_an_earlier_version_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    text, mac = _signed(KEY, msgspec.json.encode({"n": 1, "event": "begun", "previous": ""}))
    path.write_bytes(text)
    ledger = Ledger(path, KEY)
    await Office(ledger=ledger).call()
    ledger.close()

    assert [each.get("ledger") for each in lines_of(path)][:2] == [None, "ledger.jsonl"]
    assert lines_of(path)[1]["previous"] == mac
    assert verify([path], KEY, name="ledger.jsonl").problem is None
    # Lines without a name do not follow one with a name.
    last = lines_of(path)[-1]
    line = {"n": last["n"] + 1, "event": "begun", "previous": last["mac"]}
    path.write_bytes(path.read_bytes() + _signed(KEY, msgspec.json.encode(line))[0])
    assert verify([path], KEY).problem is not None
