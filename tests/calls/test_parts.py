"""The small parts that callers and workers are made of."""

import asyncio
from dataclasses import dataclass

import anyio
import pytest

from operations.calls.admission import Admission, Limits
from operations.calls.deadlines import Deadlines
from operations.calls.handler import MAX_UNREAD_BYTES, Pace
from operations.calls.ids import new_request_id
from operations.calls.recent import Recent


@dataclass(eq=False)
class Work:
    size: int = 1
    principal: str = "p"
    worth_it: bool = True


class Floor:
    """Admission, and what it started."""

    def __init__(self, **limits: int) -> None:
        self.started: list[Work] = []
        self.admission: Admission[Work] = Admission(Limits(**limits), self._start)

    def _start(self, work: Work) -> bool:
        if work.worth_it:
            self.started.append(work)
        return work.worth_it


def test_so_many_run_so_many_wait_and_the_rest_is_refused() -> None:
    floor = Floor(concurrency=2, queue=1)
    work = [Work() for _ in range(4)]

    reasons = [floor.admission.offer(one) for one in work]

    assert [reason is None for reason in reasons] == [True, True, True, False]
    assert floor.started == work[:2]
    floor.admission.done(work[0])
    assert floor.started == work[:3]
    assert floor.admission.running == 2
    assert floor.admission.waiting == 0


def test_the_line_is_bounded_in_bytes_too() -> None:
    floor = Floor(concurrency=1, queue=10, queue_bytes=100)
    assert floor.admission.offer(Work()) is None
    assert floor.admission.offer(Work(size=80)) is None
    assert floor.admission.offer(Work(size=30)) is not None


def test_what_is_not_worth_starting_does_not_take_a_place() -> None:
    floor = Floor(concurrency=1, queue=10)
    first, stale, fresh = Work(), Work(), Work()
    for work in (first, stale, fresh):
        floor.admission.offer(work)
    stale.worth_it = False
    floor.admission.done(first)

    assert floor.started == [first, fresh]


def test_one_principal_has_its_own_bound() -> None:
    floor = Floor(concurrency=10, per_principal=1)
    first = Work(principal="a")
    assert floor.admission.offer(first) is None
    assert floor.admission.offer(Work(principal="a")) is not None
    assert floor.admission.offer(Work(principal="b")) is None
    floor.admission.done(first)
    assert floor.admission.offer(Work(principal="a")) is None


def test_an_id_is_remembered_and_its_last_word_as_long_as_there_is_room() -> None:
    recent = Recent(max_ids=3, max_bytes=80)
    for name in ("a", "b", "c"):
        recent.add(name)
        recent.finish(name, name.encode() * 9)
    assert recent.last_word("c") == b"c" * 9
    recent.add("d")
    assert "a" not in recent
    assert len(recent) == 3
    for _ in range(20):
        recent.add("x")
        recent.finish("x", b"x" * 10)
        assert len(recent) <= 3


def test_a_word_too_large_to_keep_is_not_kept_but_its_id_is() -> None:
    recent = Recent(max_bytes=80)
    recent.add("a")
    recent.finish("a", b"a" * 60)

    assert "a" in recent
    assert recent.last_word("a") is None


async def test_deadlines_expire_in_time_unless_discarded() -> None:
    expired: list[str] = []
    deadlines: Deadlines[str] = Deadlines(expired.append)
    loop = asyncio.get_running_loop()
    now = loop.time()
    deadlines.add(now + 0.2, "late")
    deadlines.add(now + 0.05, "soon")
    slot = deadlines.add(now + 0.1, "never")
    deadlines.discard(slot, "never")
    with anyio.fail_after(2):
        while len(expired) < 2:
            await asyncio.sleep(0.01)

    assert expired == ["soon", "late"]
    assert 0.19 < loop.time() - now < 0.5


async def test_deadlines_that_are_cleared_do_not_expire() -> None:
    expired: list[str] = []
    deadlines: Deadlines[str] = Deadlines(expired.append)
    deadlines.add(asyncio.get_running_loop().time() + 0.01, "a")
    deadlines.clear()
    await asyncio.sleep(0.05)

    assert expired == []


async def test_a_producer_waits_for_room_in_items_and_in_bytes() -> None:
    pace = Pace(2)
    for size in (1, 1):
        await pace.room()
        pace.sent(size)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(pace.room(), 0.02)
    pace.grant(3)
    await asyncio.wait_for(pace.room(), 1)
    pace.sent(MAX_UNREAD_BYTES)
    pace.grant(100)
    await asyncio.wait_for(pace.room(), 1)


async def test_a_reader_that_does_not_count_is_sent_everything() -> None:
    pace = Pace(None)
    for _ in range(1000):
        await pace.room()
        pace.sent(1_000_000)


@pytest.mark.requirement("R45")
def test_r45_ids_have_128_bits_and_do_not_repeat() -> None:
    ids = {new_request_id() for _ in range(10_000)}

    assert len(ids) == 10_000
    assert all(len(one) == 32 and int(one, 16) >= 0 for one in ids)
