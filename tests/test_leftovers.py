"""The check after every test of a fault: it finds all leftovers, and nothing else."""

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest
from tests.calls.operations_under_test import build_registry
from tests.conftest import PROJECT
from tests.leftovers import Leftovers, counted_at_closing
from tests.limits import scaled

from operations.base.errors import CallError
from operations.calls import PendingRequestMap, serve_calls
from operations.pubsub.memory import MemoryTarget

pytest_plugins = ("pytester",)


async def an_exception(*, is_left: bool) -> None:
    task = asyncio.create_task(failing())
    await asyncio.wait({task})
    if not is_left:
        task.exception()


async def failing() -> None:
    raise CallError("X", "nobody looks at this")


async def a_task(*, is_left: bool) -> None:
    task = asyncio.create_task(asyncio.sleep(60))
    if not is_left:
        task.cancel()


KEPT: list[Any] = []


async def a_large_piece(*, is_left: bool) -> None:
    KEPT.append(bytearray(b"x") * 25_000_000)
    if not is_left:
        KEPT.clear()


async def many_small_pieces(*, is_left: bool) -> None:
    KEPT.extend([number] for number in range(300_000))
    if not is_left:
        KEPT.clear()


async def a_ring_of_pieces(*, is_left: bool) -> None:
    """An object that only the garbage collector frees."""
    ring: list[Any] = [[number] for number in range(300_000)]
    ring.append(ring)
    if is_left:
        KEPT.append(ring)


def found_after(leave: Any, *, is_left: bool) -> list[str]:
    """Return the leftovers that are found after a test that leaves something, or nothing."""
    loop = asyncio.new_event_loop()
    leftovers = Leftovers(loop)
    loop.run_until_complete(leave(is_left=is_left))
    found = leftovers.collect()
    KEPT.clear()
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    return found


@pytest.mark.parametrize("is_left", [True, False])
@pytest.mark.parametrize(("leave", "word"), [(an_exception, "never retrieved"), (a_task, "sleep")])
def test_tasks_and_exceptions_are_found(leave: Any, word: str, is_left: bool) -> None:
    found = found_after(leave, is_left=is_left)

    assert [word in text for text in found] == [True] * is_left


def print_found_memory() -> None:
    kinds = (a_large_piece, many_small_pieces, a_ring_of_pieces)
    print(json.dumps([found_after(each, is_left=left) for each in kinds for left in (True, False)]))


def test_memory_is_found() -> None:
    """In a process of its own, because memory that earlier tests freed may hide the growth."""
    code = "from tests.test_leftovers import print_found_memory; print_found_memory()"
    child = subprocess.run(
        [sys.executable, "-c", code],
        cwd=PROJECT,
        capture_output=True,
        timeout=scaled(200),
        check=True,
    )
    found: list[list[str]] = json.loads(child.stdout)

    assert [len(texts) for texts in found] == [1, 0] * 3
    assert all("KB" in text for texts in found for text in texts)


@pytest.mark.parametrize("is_left", [True, False])
async def test_a_call_that_waits_when_its_map_is_closed_is_found(is_left: bool) -> None:
    target = MemoryTarget()
    with counted_at_closing() as waiting:
        async with serve_calls(build_registry(), target), PendingRequestMap(target) as calls:
            seconds = 60 if is_left else 0
            call = asyncio.create_task(calls.call("slow.sleep", {"seconds": seconds}))
            await asyncio.sleep(0)
            if not is_left:
                await call
        await asyncio.gather(call, return_exceptions=True)

    assert waiting == ["slow.sleep"] * is_left


def test_every_fault_test_is_checked_for_leaks(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{PROJECT}:{PROJECT / 'src'}")
    pytester.makeini("[pytest]\nanyio_mode = auto\nmarkers = requirement")
    pytester.makeconftest("from tests.conftest import *")
    pytester.makepyfile("""
        import asyncio
        import pytest

        KEPT = []

        @pytest.mark.requirement("R34", "F5")
        def test_memory():
            KEPT.append(bytearray(b"x") * 25_000_000)

        @pytest.mark.requirement("F4")
        async def test_task():
            KEPT.append(asyncio.create_task(asyncio.sleep(60)))

        @pytest.mark.requirement("F4")
        async def test_nothing():
            await asyncio.create_task(asyncio.sleep(0))

        @pytest.mark.requirement("F4")
        async def test_failing():
            KEPT.append(asyncio.create_task(asyncio.sleep(60)))
            assert False

        @pytest.mark.requirement("R34")
        async def test_no_fault():
            KEPT.append(asyncio.create_task(asyncio.sleep(60)))
    """)
    result = pytester.runpytest_subprocess()

    result.assert_outcomes(passed=4, failed=1, errors=2)
    result.stdout.fnmatch_lines(["ERROR*test_memory*", "ERROR*test_task*"])
