"""What all calls of a registry share."""

import asyncio
import inspect
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

from operations.authority import Authority
from operations.base.errors import retrieve_exception
from operations.base.text import enforce_lists, printable
from operations.base.threads import ThreadPool
from operations.contract.context import OperationContext
from operations.contract.events import CallEvent, Observer, notify
from operations.contract.specs import OutputPolicy, enforce_policy
from operations.recorder.recorder import Recorder
from operations.registry.counters import CallCounters
from operations.registry.middleware import Middleware, StreamMiddleware
from operations.schema import Change

logger = logging.getLogger("operations")

_GRACE = 0.05
"""Seconds that a cancelled handler has to clean up before its caller stops waiting."""

_LEFT_BEHIND_SECONDS = 1.0
"""Seconds that closing waits for cancelled handlers to end."""


class CallServices:
    """What all calls of a registry share.

    Attributes:
        output: The default output policy.
        calls: Patterns of operations that handlers may call on the authority of their operation, unless it declares
            its own.
        authority: Stores budgets and approvals.
        threads: Runs `def` handlers.
        middleware: Wraps queries and mutations, the outermost first.
        stream_middleware: Wraps subscriptions.
        observers: Receive the call events.
        counters: Set while calls are counted.
        recorder: Hands what happens to calls to sinks.
    """

    def __init__(
        self,
        *,
        output: OutputPolicy | None,
        max_threads: int,
        calls: Collection[str],
        authority: Authority | None,
    ) -> None:
        enforce_policy(output)
        enforce_lists(calls=calls)
        self.output: OutputPolicy = output or "cast"
        self.calls = tuple(calls)
        self.authority = authority or Authority()
        self.threads = ThreadPool(max_threads)
        self.middleware: tuple[Middleware, ...] = ()
        self.stream_middleware: tuple[StreamMiddleware, ...] = ()
        self.recorder = Recorder()
        self.observers = self.recorder.observers
        self.counters: CallCounters | None = None
        self._left_behind: set[asyncio.Task[Any]] = set()

    def use(self, middleware: Middleware | StreamMiddleware) -> None:
        """Add a middleware that wraps every call of its kind; the first one added is the outermost."""
        if not callable(middleware):
            raise TypeError(f"{middleware!r} is not a middleware: it cannot be called")
        # The kind of a callable object is that of its method.
        candidates = (middleware, getattr(middleware, "__call__", None))  # noqa: B004
        if any(map(inspect.isasyncgenfunction, candidates)):
            self.stream_middleware += (cast("StreamMiddleware", middleware),)
        else:
            self.middleware += (cast("Middleware", middleware),)

    def remove_middleware(self, middleware: Middleware | StreamMiddleware) -> None:
        """Remove a middleware; calls that are running keep it."""
        self.middleware = tuple(m for m in self.middleware if m != middleware)
        self.stream_middleware = tuple(m for m in self.stream_middleware if m != middleware)

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Send all call events to `observer`; call the returned function to stop."""
        if not callable(observer):
            raise TypeError(f"{observer!r} is not an observer: it cannot be called")
        return listed(self.observers, observer)

    @property
    def observed(self) -> bool:
        """Whether there are observers."""
        return bool(self.observers)

    def notify(self, event: CallEvent, further: Sequence[Observer] = ()) -> None:
        """Send an event to the observers and to those in `further`."""
        notify((*self.observers, *further), event, self.recorder.failures)

    def keep(self, task: "asyncio.Task[Any]") -> None:
        """Keep a reference to a cancelled task until it ends, and retrieve its exception."""
        self._left_behind.add(task)
        task.add_done_callback(self._left_behind.discard)
        task.add_done_callback(retrieve_exception)

    async def stop(self, work: "asyncio.Task[Any]", context: OperationContext) -> None:
        """Cancel `work` and its nested calls. Wait briefly; `keep` tracks work that is still running."""
        if not work.cancelling():
            # Cancel only once: a second cancellation would interrupt the cleanup.
            work.cancel()
        context.abort_nested()
        self.keep(work)
        await asyncio.wait({work}, timeout=_GRACE)

    async def aclose(self) -> None:
        """Wait up to a second for cancelled handlers, and close the thread pool."""
        if self._left_behind:
            await asyncio.wait(tuple(self._left_behind), timeout=_LEFT_BEHIND_SECONDS)
        self.threads.close()


def listed(observers: list[Observer], observer: Observer) -> Callable[[], None]:
    """Append an observer; return a function that removes it, and does nothing when it is called again."""
    observers.append(observer)

    def stop() -> None:
        if observer in observers:
            observers.remove(observer)

    return stop


class ChangeLog:
    """Logs the first change of each kind to the results of one operation; `meta.changes` has all of them."""

    def __init__(self, operation_id: str) -> None:
        self._operation_id = operation_id
        self._logged: set[str] = set()

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been logged."""
        return not self._logged

    def note(self, changes: Sequence[Change]) -> None:
        """Log changes of kinds that have not been logged yet."""
        for change in changes:
            if change.kind not in self._logged:
                self._logged.add(change.kind)
                logger.warning(
                    "%s: %s: %s %s. More of this kind is not logged: see meta.changes",
                    self._operation_id,
                    "a result does not match its output schema"
                    if change.kind == "mismatch"
                    else f"part of a result was {change.kind}",
                    # Property names may come from a third party: escape line breaks, so that they cannot forge a log
                    # line.
                    printable(change.path) or "(root)",
                    printable(change.message),
                )
