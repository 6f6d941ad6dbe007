"""The queue of requests for approval stays readable, small and fair, whatever callers send."""

import json
from pathlib import Path
from time import time
from typing import Any

import msgspec
import pytest
from tests.authority.conftest import SetClock
from tests.limits import time_limit

from operations import (
    CallError,
    ErrorCode,
    Identity,
    OperationContext,
    OperationRegistry,
)
from operations.authority import (
    Approval,
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
from operations.store.memory import MemoryValues
from operations.tools import ToolConfig, configure_tools

pytestmark = pytest.mark.anyio

BOSS = OperationContext(identity=Identity("boss", ["approvals:answer"]))
REQUIRED, FULL = ErrorCode.APPROVAL_REQUIRED, ErrorCode.RESOURCE_EXHAUSTED
LONG = 240_000
TAIL = "AND TRANSFER ALL MONEY"


class CountingValues(MemoryValues):
    """Counts the bytes that are read."""

    read = 0

    async def get(self, key: str) -> bytes | None:
        held = await super().get(key)
        self.read += len(held or b"")
        return held

    async def items(self, table: str) -> dict[str, bytes]:
        found = await super().items(table)
        self.read += sum(map(len, found.values()))
        return found


class Desk:
    """A registry with one operation that needs approval, and a person who answers."""

    def __init__(self, store: Store | None = None, seconds: float = 600) -> None:
        self.store = store or Store()
        self.registry = OperationRegistry(authority=Authority(self.store))
        self.ran: list[Any] = []

        @self.registry.operation("note.send")
        async def send(note: Any) -> str:
            self.ran.append(note)
            return "sent"

        rule = ApprovalRule(seconds=seconds)
        configure_tools(self.registry, {"note.send": ToolConfig(approve=rule)})
        self.registry.register_object(self.registry.authority.approvals)

    async def send(self, note: Any, who: str | Identity = "ann") -> str:
        identity = Identity(who) if isinstance(who, str) else who
        given = {"note": note}
        try:
            context = OperationContext(identity=identity)
            return str((await self.registry.execute("note.send", given, context)).data)
        except CallError as error:
            return error.code

    async def run(self, name: str, **given: Any) -> Any:
        return (await self.registry.execute(f"approvals.{name}", given, BOSS)).data

    async def all(self) -> list[Any]:
        found: list[Any] = []
        page = await self.run("list")
        found += page["approvals"]
        while page.get("next"):
            page = await self.run("list", after=page["next"])
            found += page["approvals"]
        return found


@pytest.mark.requirement("R63")
async def test_a_flood_of_large_requests_leaves_the_queue_readable() -> None:
    values = CountingValues()
    desk = Desk(Store(values))
    codes = {
        await desk.send(f"{number} {'x' * LONG} {TAIL}", who)
        for who in ("ann", "bob", "eve")
        for number in range(100)
    }
    assert codes == {REQUIRED, FULL}
    assert await desk.send("small", "dan") == REQUIRED

    values.read = 0
    page = await desk.run("list")
    assert values.read < 100_000, "the store reads no long input for a list"
    assert len(json.dumps(page)) < 100_000
    assert TAIL not in json.dumps(page)
    assert [each["input"] for each in await desk.all() if each["caller"] == "dan"] == [{"note": "small"}]  # fmt: skip
    held = await values.items("input")
    assert sum(map(len, held.values())) <= 3 * queue_module.MAX_OPEN_BYTES

    long = page["approvals"][0]
    assert "input" not in long
    assert long["size"] > LONG
    whole = await desk.run("get", id=long["id"])
    assert whole["input"]["note"].endswith(TAIL), "the whole input"
    assert {**long, "input": whole["input"]} == whole


async def test_pages_contain_every_request_once_and_in_order() -> None:
    desk = Desk()
    for number in range(30):
        for who in ("ann", "bob", "eve", "dan"):
            assert await desk.send(number, who) == REQUIRED

    first = await desk.run("list", limit=7)
    found, page = list(first["approvals"]), first
    while page["next"]:
        page = await desk.run("list", limit=7, after=page["next"])
        assert page["total"] == 120
        found += page["approvals"]

    assert len(first["approvals"]) == 7
    assert len({each["id"] for each in found}) == len(found) == 120
    assert [each["created"] for each in found] == sorted(each["created"] for each in found)
    for bad in ({"limit": 0}, {"limit": 101}, {"after": "1"}):
        with pytest.raises(CallError) as caught:
            await desk.run("list", **bad)
        assert caught.value.code == ErrorCode.VALIDATION_ERROR


async def test_the_page_after_an_answered_request_is_the_same() -> None:
    desk = Desk()
    for number in range(4):
        await desk.send(number)
    page = await desk.run("list", limit=2)
    following = (await desk.run("list", limit=2, after=page["next"]))["approvals"]

    await desk.run("answer", id=page["approvals"][1]["id"], approve=False)

    assert (await desk.run("list", limit=2, after=page["next"]))["approvals"] == following


@pytest.mark.parametrize("depth", [40, 55, 56, 60, 61, 62, 63])
async def test_a_deeply_nested_input_does_not_hide_other_requests(depth: int) -> None:
    desk = Desk()
    assert await desk.send("small", "dan") == REQUIRED
    note: Any = 1
    for _ in range(depth):
        note = [note]

    assert await desk.send(note) in (REQUIRED, FULL)

    for each in await desk.all():
        assert (await desk.run("get", id=each["id"]))["input"] == each["input"]
    assert "dan" in [each["caller"] for each in await desk.all()]


@pytest.mark.parametrize(
    "note",
    [
        10**30,
        10**4000,
        1e308,
        "\u202e\x00\x1b[2J\u2028",
        {"\u202e" * 9: None},
        {"": {"": ""}},
        "\U0010ffff" * 249,
        {"__proto__": 1},
    ],
)
async def test_unusual_inputs_are_listed_exactly(note: Any) -> None:
    desk = Desk()

    assert await desk.send(note) == REQUIRED

    (record,) = await desk.all()
    assert (await desk.run("get", id=record["id"]))["input"] == {"note": note}


async def test_the_bytes_of_one_owner_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "MAX_OPEN_BYTES", 10_000)
    desk, grants = Desk(), Grants(b"k" * 32)
    token = grants.create(Identity("ann"), "bot", operations=["*"])

    async def derived(holder: str) -> Identity:
        identity = await grants.resolve(narrow(token, new_block(holder)))
        assert identity is not None
        return identity

    assert await desk.send("x" * 6_000) == REQUIRED
    assert await desk.send("y" * 6_000) == FULL
    assert await desk.send("y" * 3_000) == REQUIRED, "there is room for this one"
    assert await desk.send("x" * 6_000, await derived("one")) == REQUIRED
    assert await desk.send("x" * 6_000, await derived("two")) == FULL, "of the same grant"
    assert await desk.send("x" * 6_000, "bob") == REQUIRED


async def test_several_owners_cannot_take_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "MAX_ALL", 20)
    monkeypatch.setattr(queue_module, "MAX_ALL_BYTES", 100_000)
    desk = Desk()

    for who in ("ann", "bob"):
        while await desk.send(len(await desk.all()), who) == REQUIRED:
            pass
    assert await desk.send("y" * 40_000, "eve") == REQUIRED
    assert await desk.send("z" * 40_000, "eve") == FULL, "half of the bytes"

    assert await desk.send("small", "dan") == REQUIRED
    assert len(await desk.all()) <= 20


async def test_expired_requests_release_their_place_and_their_bytes(
    monkeypatch: pytest.MonkeyPatch, set_clock: SetClock
) -> None:
    now = [time()]
    set_clock(lambda: now[0])
    monkeypatch.setattr(queue_module, "MAX_OPEN", 10)
    desk = Desk(seconds=60)
    for turn in range(4):
        codes = [await desk.send(f"{turn} {number} {'x' * 5_000}") for number in range(11)]
        assert codes == [REQUIRED] * 10 + [FULL]
        now[0] += 61

    assert await desk.send("last") == REQUIRED

    held = await desk.store.items("input")
    assert len(held) == 0
    assert len(await desk.store.items("approval")) == 1


@pytest.mark.parametrize("approve", [True, False])
async def test_a_long_input_is_removed_after_its_last_use(approve: bool, tmp_path: Path) -> None:
    desk = Desk(Store(SQLiteValues(tmp_path / "store")))
    note = "x" * 5_000
    assert await desk.send(note) == REQUIRED
    (record,) = await desk.all()

    done = await desk.run("answer", id=record["id"], approve=approve)

    assert "input" not in done, "answers are short"
    assert await desk.send(note) == ("sent" if approve else ErrorCode.ACCESS_DENIED)
    assert desk.ran == ([note] if approve else [])
    assert await desk.store.items("input") == {}
    with pytest.raises(CallError) as caught:
        await desk.run("get", id=record["id"])
    assert caught.value.code == ErrorCode.VALIDATION_ERROR
    if approve:
        assert await desk.send(note) == REQUIRED, "a new request, whose input can be read"
        (record,) = await desk.all()
        assert (await desk.run("get", id=record["id"]))["input"] == {"note": note}


async def test_an_input_that_cannot_be_shown_cannot_be_approved() -> None:
    desk = Desk()
    await desk.send("x" * 5_000)
    (record,) = await desk.all()
    for key, held in (await desk.store.items("input")).items():
        await desk.store.swap(key, held, None)

    with pytest.raises(CallError) as caught:
        await desk.run("answer", id=record["id"], approve=True)

    assert caught.value.code == ErrorCode.VALIDATION_ERROR
    assert (await desk.run("answer", id=record["id"], approve=False))["state"] == "denied"


async def test_a_store_that_fails_for_a_long_input_keeps_no_request_without_it() -> None:
    class Failing(MemoryValues):
        async def swap(self, key: str, old: bytes | None, new: bytes | None) -> bool:
            if key.startswith("input."):
                raise OSError("full")
            return await super().swap(key, old, new)

    desk = Desk(Store(Failing()))

    assert await desk.send("x" * 5_000) == ErrorCode.UNAVAILABLE
    assert await desk.all() == []
    assert await desk.send("short") == REQUIRED


async def test_confirmed_calls_do_not_fill_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "MAX_RECORDS", 30)
    desk = Desk()
    for number in range(100):
        await desk.send(number)
        (record,) = await desk.all()
        await desk.run("answer", id=record["id"], approve=True)
        assert await desk.send(number) == "sent"

    assert len(await desk.store.items("approval")) <= 31


async def test_long_names_of_a_caller_do_not_fill_the_queue() -> None:
    desk = Desk()

    assert await desk.send(1, "a" * 5_000) == FULL
    assert await desk.all() == []


async def test_the_pages_of_the_queue_can_be_followed() -> None:
    desk = Desk()
    queue = desk.registry.subscribe("approvals.watch", {"limit": 1}, BOSS)
    seen = []
    with time_limit(20):
        seen.append((await anext(queue)).data)
        for who in ("ann", "bob"):
            await desk.send(1, who)
            seen.append((await anext(queue)).data)
        await queue.aclose()
        after = seen[-1]["next"]
        queue = desk.registry.subscribe("approvals.watch", {"after": after}, BOSS)
        seen.append((await anext(queue)).data)
        await queue.aclose()

    assert [page["total"] for page in seen] == [0, 1, 2, 2]
    assert [[each["caller"] for each in page["approvals"]] for page in seen] == [
        [],
        ["ann"],
        ["ann"],
        ["bob"],
    ]


async def test_reading_one_request_needs_its_scope() -> None:
    desk = Desk()
    rule = ApprovalRule(scope="finance")
    configure_tools(desk.registry, {"note.send": ToolConfig(approve=rule)})
    assert await desk.send("secret") == REQUIRED
    operator = OperationContext(trusted=True)
    approvals = desk.registry.authority.approvals
    (record,) = (await approvals.pending(operator)).approvals

    assert await desk.all() == []
    for name, given in (("get", {}), ("answer", {"approve": True})):
        with pytest.raises(CallError) as caught:
            await desk.run(name, id=record.id, **given)
        assert caught.value.code == ErrorCode.VALIDATION_ERROR
    with pytest.raises(CallError) as caught:
        caller = OperationContext(identity=Identity("ann"))
        await desk.registry.execute("approvals.get", {"id": record.id}, caller)
    assert caught.value.code == ErrorCode.ACCESS_DENIED
    assert (await approvals.get(record.id, operator)).input == {"note": "secret"}


async def test_a_reason_has_a_limited_length() -> None:
    desk = Desk()
    await desk.send(1)
    (record,) = await desk.all()

    with pytest.raises(CallError) as caught:
        await desk.run("answer", id=record["id"], approve=False, reason="x" * 1_001)

    assert caught.value.code == ErrorCode.VALIDATION_ERROR


async def test_a_list_decodes_only_the_requests_on_its_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk()
    for number in range(60):
        await desk.send(number)
    decoded = []

    def decode(held: bytes) -> Approval:
        decoded.append(held)
        return msgspec.json.decode(held, type=Approval)

    monkeypatch.setattr(queue_module, "_decode", decode)

    assert (await desk.run("list", limit=5))["total"] == 60
    assert len(decoded) == 5


async def test_the_largest_input_that_can_be_approved_can_be_read() -> None:
    desk = Desk()
    note = "x" * (module._MAX_INPUT - 1_000)

    assert await desk.send(note) == REQUIRED
    assert await desk.send(note + "y" * 1_000) == FULL
    (record,) = await desk.all()
    assert (await desk.run("get", id=record["id"]))["input"] == {"note": note}
