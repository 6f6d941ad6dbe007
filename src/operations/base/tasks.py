"""Background tasks and graceful shutdown: keep and end tasks, let closing finish, and react to SIGTERM and SIGINT."""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import anyio


def enforce_asyncio() -> None:
    """Raise an error outside of asyncio, whose primitives handlers and transports use.

    Raises:
        RuntimeError: If no event loop of asyncio runs in this thread.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        message = (
            "operations runs on asyncio only, not on trio: no event loop of asyncio is running"
        )
        raise RuntimeError(message) from None


def start_task(
    tasks: set[asyncio.Task[Any]], work: Coroutine[Any, Any, Any]
) -> "asyncio.Task[Any]":
    """Run a coroutine in the background, with a reference to its task in `tasks` until it ends."""
    task = asyncio.Task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def cancel_tasks(*tasks: "asyncio.Task[Any] | None") -> None:
    """Cancel tasks, and wait until they have ended."""
    running = {task for task in tasks if task is not None}
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)


OwnerT = TypeVar("OwnerT")


def shielded(
    close: Callable[[OwnerT], Coroutine[Any, Any, None]],
) -> Callable[[OwnerT], Coroutine[Any, Any, None]]:
    """Let a method that closes an object finish in a cancelled scope of anyio, in which every `await` is cancelled."""

    @wraps(close)
    async def finish(owner: OwnerT) -> None:
        with anyio.CancelScope(shield=True):
            await close(owner)

    return finish


# ------------------------------------------------------------ signals

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_waiting: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}

_signalled: set[asyncio.AbstractEventLoop] = set()
"""The event loops that received a signal. An event may also be set without a signal, so the event alone does
not show this."""


def receives_signals() -> bool:
    """Return whether the current thread can handle signals: only the main thread can."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def shutdown_event() -> Generator[asyncio.Event]:
    """Yield an event that SIGTERM or SIGINT sets; a signal sets the events of all open blocks on this loop.

    A second signal ends the process at once. Enter the block before you report readiness: the signal may follow
    immediately. Outside the main thread, signals are left to the program.
    """
    loop = asyncio.get_running_loop()
    numbers = _SIGNALS if receives_signals() else ()
    events = _waiting.setdefault(loop, [])

    def set_all() -> None:
        if loop in _signalled:
            raise SystemExit(1)
        _signalled.add(loop)
        for waiting in events:
            waiting.set()

    event = asyncio.Event()
    events.append(event)
    if len(events) == 1:
        for number in numbers:
            loop.add_signal_handler(number, set_all)
    try:
        yield event
    finally:
        events.remove(event)
        if not events:
            del _waiting[loop]
            rest = signal.SIG_DFL if loop in _signalled else _ignore_first
            _signalled.discard(loop)
            for number in numbers:
                loop.remove_signal_handler(number)
                if event.is_set():
                    # A second signal exits during shutdown.
                    signal.signal(number, rest)


def _ignore_first(*_: object) -> None:
    """Ignore the first signal of a process that is shutting down for another reason; the next one ends it."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def exit_on_termination() -> Generator[None]:
    """Let SIGTERM cancel the current task, as Ctrl-C does with asyncio, and then exit with code 143.

    Otherwise the process would end without closing its connections or, as process 1 of a container, ignore the signal.
    A second signal ends the process at once.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    is_default = receives_signals() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    is_received = False

    def end(*_: object) -> None:
        nonlocal is_received
        is_received = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if task is not None:
            loop.call_soon_threadsafe(task.cancel)

    if is_default:
        signal.signal(signal.SIGTERM, end)
    try:
        yield
    except asyncio.CancelledError:
        if is_received:
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
    finally:
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
