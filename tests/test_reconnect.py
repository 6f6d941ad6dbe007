"""The contract of the loop that keeps connections, which transports and sources share."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from math import inf

import anyio
import pytest

from operations.base.retry import Backoff
from operations.io.reconnect import ReconnectingTask


class Peer:
    """The other end of a connection, which the test accepts, refuses and closes.

    Attributes:
        refuses: The error of every attempt; None to accept.
        attempts: The number of attempts.
        open: The number of open connections.
        tasks: The tasks that opened and closed connections.
        failures: The errors that were reported, and whether the connection was open.
    """

    def __init__(self) -> None:
        self.refuses: Exception | None = None
        self.attempts = self.open = 0
        self.tasks: list[object] = []
        self.failures: list[tuple[str, bool]] = []
        self._changed = asyncio.Condition()
        self._connections: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator["asyncio.Future[None]"]:
        self.attempts += 1
        await self._notify()
        if self.refuses is not None:
            raise self.refuses
        connection: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._connections.append(connection)
        self.tasks.append(asyncio.current_task())
        self.open += 1
        try:
            yield connection
        finally:
            self.open -= 1
            self.tasks.append(asyncio.current_task())

    async def use(self, connection: "asyncio.Future[None]") -> None:
        await self._notify()
        await connection

    def failed(self, error: Exception, was_open: bool) -> None:
        self.failures.append((str(error), was_open))

    def lose(self, reason: str = "lost") -> None:
        """Break the last connection."""
        self._connections[-1].set_exception(OSError(reason))

    def end(self) -> None:
        """Let the user of the last connection close it."""
        self._connections[-1].set_result(None)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def until(self, is_true: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(is_true)


@pytest.fixture
async def peer() -> Peer:
    return Peer()


@pytest.fixture(autouse=True)
async def time_limit() -> AsyncGenerator[None]:
    async with asyncio.timeout(30):
        yield


@asynccontextmanager
async def kept(
    peer: Peer,
    *,
    pauses: Backoff | None = None,
    stable_after: float = 2.0,
    is_final: Callable[[Exception], bool] = lambda _: False,
) -> AsyncGenerator[ReconnectingTask["asyncio.Future[None]"]]:
    task = ReconnectingTask(
        peer.connect,
        peer.use,
        pauses=pauses or Backoff(0.001, 0.001),
        stable_after=stable_after,
        is_final=is_final,
        on_failure=peer.failed,
    )
    try:
        yield task
    finally:
        await task.aclose()


def patient() -> Backoff:
    """Return pauses that no test waits for."""
    return Backoff(1e6, 1e6)


async def test_a_lost_connection_is_opened_again(peer: Peer) -> None:
    async with kept(peer) as task:
        await task.open()
        for connections in (2, 3):
            peer.lose()
            await peer.until(lambda expected=connections: len(peer.tasks) == 2 * expected - 1)  # type: ignore[misc]
        assert peer.open == 1
        assert task.failure is None
        assert task.next_attempt is None

    assert peer.failures == [("lost", True), ("lost", True)]


async def test_refused_attempts_are_repeated_until_one_succeeds(peer: Peer) -> None:
    peer.refuses = OSError("not there yet")
    async with kept(peer) as task:
        opening = asyncio.create_task(task.open())
        await peer.until(lambda: peer.attempts == 3)
        assert not opening.done()
        peer.refuses = None
        await opening
        assert peer.open == 1

    assert set(peer.failures) == {("not there yet", False)}


async def test_a_final_error_of_the_first_attempt_is_raised_and_ends_the_task(peer: Peer) -> None:
    peer.refuses = PermissionError("wrong password")
    async with kept(peer, is_final=lambda error: isinstance(error, PermissionError)) as task:
        with pytest.raises(PermissionError, match="wrong password"):
            await task.open()
        task.wake()
        with pytest.raises(PermissionError):
            await task.open()

    assert peer.attempts == 1
    assert peer.failures == []


async def test_no_error_is_final_after_the_first_connection(peer: Peer) -> None:
    async with kept(peer, is_final=lambda _: True) as task:
        await task.open()
        peer.refuses = PermissionError("wrong password")
        peer.lose()
        await peer.until(lambda: peer.attempts == 4)
        peer.refuses = None
        await peer.until(lambda: peer.open == 1)


async def test_a_connection_closed_on_purpose_is_opened_again_only_when_woken(peer: Peer) -> None:
    async with kept(peer) as task:
        await task.open()
        peer.end()
        await task.idle.wait()
        await asyncio.sleep(0)
        assert (peer.attempts, peer.open) == (1, 0)
        task.wake()
        await peer.until(lambda: peer.open == 1)
        assert not task.idle.is_set()

    assert peer.failures == []


async def test_waking_ends_a_pause(peer: Peer) -> None:
    async with kept(peer, pauses=patient()) as task:
        await task.open()
        peer.lose()
        while task.next_attempt is None:
            await asyncio.sleep(0)
        assert task.next_attempt > asyncio.get_running_loop().time()
        assert str(task.failure) == "lost"
        task.wake()
        await peer.until(lambda: peer.open == 1 and peer.attempts == 2)
        assert task.next_attempt is None
        assert task.failure is None


@pytest.mark.parametrize(("stable_after", "attempts"), [(0.0, 0), (inf, 3)])
async def test_pauses_start_again_after_a_stable_connection(
    peer: Peer, stable_after: float, attempts: int
) -> None:
    pauses = Backoff(0.001, 0.001)
    async with kept(peer, pauses=pauses, stable_after=stable_after) as task:
        await task.open()
        for connections in (2, 3, 4):
            peer.lose()
            await peer.until(lambda expected=connections: peer.attempts == expected)  # type: ignore[misc]
            await peer.until(lambda: peer.open == 1)

    assert pauses.attempt == attempts


async def test_opening_ends_after_its_time_limit_and_attempts_continue(peer: Peer) -> None:
    peer.refuses = OSError("not there yet")
    async with kept(peer) as task:
        with pytest.raises(TimeoutError):
            await task.open(0.01)
        peer.refuses = None
        await task.open()
        assert peer.open == 1


async def test_closing_ends_the_connection_in_the_task_that_opened_it(peer: Peer) -> None:
    async with kept(peer) as task:
        await task.open()
        await task.aclose()
        assert peer.open == 0
        await task.aclose()

    opened, closed = peer.tasks
    assert opened is closed is not asyncio.current_task()
    assert peer.failures == []


async def test_closing_ends_a_pause(peer: Peer) -> None:
    peer.refuses = OSError("not there yet")
    async with kept(peer, pauses=patient()) as task:
        with pytest.raises(TimeoutError):
            await task.open(0)
        while task.next_attempt is None:
            await asyncio.sleep(0)
        with anyio.fail_after(20):
            await task.aclose()

    assert peer.attempts == 1


async def test_a_step_after_each_pause_delays_the_next_attempt(peer: Peer) -> None:
    may_continue = asyncio.Event()
    task = ReconnectingTask(
        peer.connect, peer.use, pauses=Backoff(0.001, 0.001), after=may_continue.wait
    )
    await task.open()
    peer.lose()
    while task.failure is None or task.next_attempt is not None:
        await asyncio.sleep(0.001)
    assert peer.attempts == 1
    may_continue.set()
    await peer.until(lambda: peer.open == 1)
    await task.aclose()

    assert peer.attempts == 2


@pytest.mark.parametrize("ignores", [False, True])
async def test_an_abandoned_attempt_is_replaced_by_another_one(ignores: bool) -> None:
    """Also if a library ignores that its attempt was cancelled."""
    began, attempts, ended = asyncio.Event(), 0, list[int]()

    @asynccontextmanager
    async def connect() -> AsyncGenerator[int]:
        nonlocal attempts
        attempts += 1
        number = attempts
        if number == 1:
            began.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if not ignores:
                    raise
        yield number

    async def use(number: int) -> None:
        ended.append(number)

    task = ReconnectingTask(connect, use)
    task.start()
    await began.wait()
    task.wake(abandon=True)
    task.wake(abandon=True)
    while 2 not in ended:
        await asyncio.sleep(0)
    await task.idle.wait()
    await task.aclose()

    assert ended == ([1, 2] if ignores else [2])
    assert not task.is_running


async def test_closing_ends_an_attempt_that_was_abandoned(peer: Peer) -> None:
    began = asyncio.Event()

    @asynccontextmanager
    async def connect() -> AsyncGenerator[None]:
        began.set()
        await asyncio.Event().wait()
        yield

    async def use(_: None) -> None:
        raise AssertionError

    task = ReconnectingTask(connect, use, on_failure=peer.failed)
    task.start()
    await began.wait()
    task.wake(abandon=True)
    await task.aclose()

    assert not task.is_running
    assert peer.failures == []


async def test_waking_with_abandon_leaves_an_open_connection_alone(peer: Peer) -> None:
    async with kept(peer) as task:
        await task.open()
        task.wake(abandon=True)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (peer.attempts, peer.open) == (1, 1)


async def test_a_closed_task_can_be_started_again(peer: Peer) -> None:
    async with kept(peer) as task:
        await task.open()
        await task.aclose()
        assert not task.is_running
        task.start()
        await peer.until(lambda: peer.open == 1)
        assert task.is_running

    assert peer.attempts == 2


async def test_closing_ends_a_connection_whose_attempt_could_not_be_abandoned() -> None:
    began, used = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def connect() -> AsyncGenerator[None]:
        began.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        yield

    async def use(_: None) -> None:
        used.set()
        await asyncio.Event().wait()

    task = ReconnectingTask(connect, use)
    task.start()
    await began.wait()
    task.wake(abandon=True)
    await used.wait()
    await task.aclose()

    assert not task.is_running


@pytest.mark.parametrize("is_lost", [True, False])
async def test_a_task_that_was_closed_while_it_waited_waits_for_nothing(
    peer: Peer, is_lost: bool
) -> None:
    async with kept(peer, pauses=patient()) as task:
        await task.open()
        if is_lost:
            peer.lose()
        else:
            peer.end()
        while task.next_attempt is None and not task.idle.is_set():
            await asyncio.sleep(0)
        await task.aclose()
        assert task.next_attempt is None
        assert not task.idle.is_set()
