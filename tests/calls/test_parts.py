"""Unit tests of small parts of callers and workers."""

import asyncio
import tracemalloc
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.limits import scaled, time_limit

from operations.base.deadline import NEVER, DeadlineTable
from operations.base.errors import CallError
from operations.calls.serving.admission import AdmissionQueue
from operations.calls.serving.jobs import MAX_UNREAD_BYTES, Pace, WorkerConfig
from operations.contract.context import new_request_id
from operations.pubsub.delivery import WEIGHT, Recent


@dataclass(eq=False)
class Work:
    size: int = 1
    principal: str = "p"
    worth_it: bool = True
    counted: dict[str, Any] = field(default_factory=dict[str, Any])
    task: object = "running"
    is_lent: bool = False
    is_stream: bool = False
    is_suspect: bool = False


class Floor:
    """Admission, and the calls that it started."""

    def __init__(self, **limits: Any) -> None:
        self.started: list[Work] = []
        self.admission: Any = AdmissionQueue(WorkerConfig(**limits))
        self.admission.start = self._start

    def offer(self, work: Work) -> str | None:
        """The reason why it is rejected."""
        try:
            self.admission.offer(work)
        except CallError as error:
            return error.message
        return None

    def identified(self, work: Work, principal: str) -> str | None:
        """The reason why it is rejected."""
        try:
            self.admission.count(work, principal)
        except CallError as error:
            return error.message
        return None

    def _start(self, work: Any) -> bool:
        if work.worth_it:
            self.started.append(work)
        return bool(work.worth_it)


def test_running_and_waiting_calls_are_limited_and_the_rest_is_rejected() -> None:
    floor = Floor(concurrency=2, max_waiting=1)
    work = [Work() for _ in range(4)]

    reasons = [floor.offer(one) for one in work]

    assert [reason is None for reason in reasons] == [True, True, True, False]
    assert floor.started == work[:2]
    floor.admission.done(work[0])
    assert floor.started == work[:3]
    assert floor.admission.running == 2
    assert floor.admission.waiting == 0


def busy_floor() -> tuple[Floor, list[Work]]:
    """One slot, and four calls that want it."""
    floor, work = Floor(concurrency=1, max_waiting=5), [Work() for _ in range(4)]
    for one in work:
        floor.offer(one)
    return floor, work


def test_a_call_that_waits_for_several_persons_gives_back_one_slot() -> None:
    floor, work = busy_floor()

    with floor.admission.lent(work[0]), floor.admission.lent(work[0]):
        assert floor.started == work[:2]
        assert floor.admission.running == 1
    assert floor.admission.running == 2


def test_a_call_that_ends_while_it_waits_for_a_person_has_no_slot_to_give_back() -> None:
    floor, work = busy_floor()

    # A task that the handler started outlives the call.
    with floor.admission.lent(work[0]):
        work[0].task = None
        floor.admission.done(work[0])
        assert floor.started == work[:2]
    assert floor.admission.running == 1


@pytest.mark.requirement("F37")
async def test_f37_a_call_that_may_have_killed_a_worker_runs_alone() -> None:
    floor = Floor(concurrency=8)
    stream, before, after = Work(is_stream=True), Work(), Work()
    suspects = [Work(is_suspect=True), Work(is_suspect=True)]
    work = [stream, before, *suspects, after]

    for one in work:
        assert floor.offer(one) is None

    assert floor.admission.free == 0
    # A subscription may never end, so it is not waited for.
    for index in range(1, len(work) - 1):
        assert floor.started == work[: index + 1]
        floor.admission.done(work[index])
    assert floor.started == work
    assert floor.admission.free == 6


@pytest.mark.requirement("F37")
async def test_f37_a_call_that_may_have_killed_a_worker_and_has_ended_delays_no_other_call() -> (
    None
):
    floor = Floor(concurrency=8)
    before, ended, late, after = Work(), Work(is_suspect=True), Work(is_suspect=True), Work()
    late.worth_it = False
    for one in (before, ended, late, after):
        floor.offer(one)
    floor.admission.withdraw(ended)
    floor.admission.done(before)

    assert floor.started == [before, after]
    assert (floor.admission.free, floor.admission.waiting) == (7, 0)


@pytest.mark.requirement("F37")
async def test_f37_a_call_that_waits_for_a_person_delays_no_other_call() -> None:
    floor = Floor(concurrency=8)
    suspect, after = Work(is_suspect=True), Work()
    for one in (suspect, after):
        floor.offer(one)
    with floor.admission.lent(suspect):
        assert floor.started == [suspect, after]


@pytest.mark.requirement("F37")
async def test_f37_other_calls_are_not_delayed_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The running call may wait for one of them."""
    monkeypatch.setattr("operations.calls.suspects.HOLD_SECONDS", 0.01)
    floor = Floor(concurrency=8)
    before, suspect, after = Work(), Work(is_suspect=True), Work()
    for one in (before, suspect, after):
        floor.offer(one)
    assert floor.started == [before]
    with time_limit(20):
        while floor.started != [before, after]:
            await asyncio.sleep(0.001)
    floor.admission.done(after)
    floor.admission.done(before)
    assert floor.started == [before, after, suspect]
    floor.admission.done(suspect)


def test_the_line_is_bounded_in_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("operations.calls.serving.admission.MAX_WAITING_BYTES", 100)
    floor = Floor(concurrency=1, max_waiting=10)
    assert floor.offer(Work()) is None
    assert floor.offer(Work(size=80)) is None
    refusal = "1 call running and 1 waiting on this worker"
    assert floor.offer(Work(size=30)) == refusal


def test_a_call_that_ended_while_it_waited_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("operations.calls.serving.admission.MAX_WAITING_BYTES", 100)
    floor = Floor(concurrency=1, max_waiting=1)
    first, ended, fresh = Work(), Work(size=80), Work(size=80)
    for work in (first, ended):
        floor.offer(work)
    floor.admission.withdraw(ended)

    assert floor.offer(fresh) is None
    floor.admission.done(first)
    assert floor.started == [first, fresh]


def test_an_expired_request_occupies_no_slot() -> None:
    floor = Floor(concurrency=1, max_waiting=10)
    first, stale, fresh = Work(), Work(), Work()
    for work in (first, stale, fresh):
        floor.offer(work)
    stale.worth_it = False
    floor.admission.done(first)

    assert floor.started == [first, fresh]


def test_one_principal_has_its_own_bound() -> None:
    floor = Floor(concurrency=10, per_principal=1)
    first = Work(principal="a")
    assert floor.offer(first) is None
    assert floor.offer(Work(principal="a")) == "Too many calls on this worker: you have 1 of 1"
    assert floor.offer(Work(principal="b")) is None
    floor.admission.done(first)
    assert floor.offer(Work(principal="a")) is None


def test_one_identity_has_one_bound_however_its_credential_is_written() -> None:
    floor = Floor(concurrency=10, per_principal=2)
    names = ("a", "a ", " a", "b")
    one, two, three, other = works = [Work(principal=name) for name in names]
    for work in works:
        assert floor.offer(work) is None

    assert floor.identified(one, "id:a") is None
    # Sent twice, counted once.
    assert floor.identified(one, "id:a") is None
    assert floor.identified(two, "id:a") is None
    assert floor.identified(three, "id:a") is not None
    assert floor.identified(other, "id:b") is None
    # A rejected call was not counted, and ends like the others.
    floor.admission.done(three)
    late = Work(principal="a")
    assert floor.offer(late) is None
    assert floor.identified(late, "id:a") is not None
    for work in (one, two, other, late):
        floor.admission.done(work)
    for name in (*names, "id:a", "id:b"):
        again = [Work(principal=name) for _ in range(3)]
        assert [floor.offer(work) is None for work in again] == [True, True, False]
        for work in again[:2]:
            floor.admission.done(work)


def test_an_id_is_remembered_and_its_reply_is_cached_while_there_is_room() -> None:
    recent = Recent(max_ids=3, max_bytes=8 * (WEIGHT + 10))
    for name in ("a", "b", "c", "d"):
        recent.add(name)
        recent.finish(name, name.encode() * 9, "box")
    assert recent.last_reply("d", "box") == b"d" * 9
    assert not recent.add("a")
    for index in range(20):
        recent.add(f"x{index}")
        recent.finish(f"x{index}", b"x" * 10, "box")
        assert len(recent) <= 6
    assert recent.last_reply("a", "box") is None
    assert {recent.add(f"x{index}") for index in (17, 18, 19)} == {False}
    assert recent.add("a")


def test_a_reply_too_large_to_cache_is_not_cached_but_its_id_is() -> None:
    recent = Recent(max_bytes=4 * WEIGHT)
    recent.add("a")
    recent.finish("a", b"a", "box")

    assert not recent.add("a")
    assert recent.last_reply("a", "box") is None


@pytest.mark.no_cover
@pytest.mark.requirement("R42")
def test_r42_the_reply_cache_stays_within_its_bound() -> None:
    recent = Recent(max_ids=20_000, max_bytes=4 * 1024 * 1024)
    tracemalloc.start()
    try:
        for _ in range(100_000):
            # As from a broker: every string is a new object.
            request_id, reply_to = new_request_id(), f"_INBOX.{new_request_id()}"
            recent.add(request_id)
            recent.finish(request_id, b"x" * 200, reply_to)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert held < 4 * 1024 * 1024 + 40_000 * 200


@pytest.mark.requirement("R11")
def test_r11_a_cached_reply_goes_only_to_its_caller() -> None:
    recent = Recent()
    recent.add("a")
    recent.finish("a", b"secret", "box.alice")

    assert recent.last_reply("a", "box.alice") == b"secret"
    assert recent.last_reply("a", "box.bob") is None


@dataclass(eq=False)
class Entry:
    name: str
    expires_at: float


class Table:
    """Deadlines, and those that have expired."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.expired: list[str] = []
        self.deadlines: DeadlineTable[Entry] = DeadlineTable(self.entries, self._expire)

    def add(self, name: str, seconds: float) -> None:
        entry = Entry(name, asyncio.get_running_loop().time() + seconds)
        self.entries[name] = entry
        if entry.expires_at < self.deadlines.next:
            self.deadlines.schedule(entry.expires_at)

    def _expire(self, entry: Entry) -> None:
        del self.entries[entry.name]
        self.expired.append(entry.name)


async def test_deadlines_expire_in_time_unless_removed() -> None:
    table = Table()
    loop = asyncio.get_running_loop()
    now = loop.time()
    table.add("late", 0.2)
    table.add("soon", 0.05)
    table.add("gone", 0.1)
    table.add("never", NEVER)
    del table.entries["gone"]
    with time_limit(20):
        while len(table.expired) < 2:
            await asyncio.sleep(0.01)

    assert table.expired == ["soon", "late"]
    assert loop.time() - now > 0.18


async def test_deadlines_that_are_cleared_do_not_expire() -> None:
    table = Table()
    table.add("a", 0.01)
    table.deadlines.clear()
    await asyncio.sleep(0.05)

    assert table.expired == []


async def test_a_producer_waits_for_room_in_items_and_in_bytes() -> None:
    pace = Pace(2)
    for size in (1, 1):
        await pace.room()
        pace.sent(size)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(pace.room(), 0.02)
    pace.grant(3)
    await asyncio.wait_for(pace.room(), scaled(20))
    pace.sent(MAX_UNREAD_BYTES)
    pace.grant(100)
    await asyncio.wait_for(pace.room(), scaled(20))


@pytest.mark.requirement("R45")
def test_r45_ids_have_128_bits_and_do_not_repeat() -> None:
    ids = {new_request_id() for _ in range(10_000)}

    assert len(ids) == 10_000
    assert all(len(one) == 32 and int(one, 16) >= 0 for one in ids)
