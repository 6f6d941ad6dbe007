"""Keep one source of a hub open: connect in the background, retry with jitter, replace, disable and close it.

Rule 1: a source that fails does not affect any other.
Rule 2: when a source disconnects, its operations stay registered, and calls fail with `UNAVAILABLE`. They are removed
        when the source is closed.
Rule 3: to replace a source, the new one is opened first. The old one is closed some seconds after its last call has
        finished, and at the latest after the time limit of a call.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

from anyio import move_on_after

from operations.base.errors import OperationsError, RegistrationError
from operations.base.retry import Backoff
from operations.contract.specs import Operation
from operations.front.limits import call_seconds
from operations.hub.source import Source
from operations.io.reconnect import ReconnectingTask
from operations.registry.registry import OperationRegistry
from operations.sources.contract import Opened, Skipped

logger = logging.getLogger("operations.hub")

FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0
"""Upper bounds of the first pause and of any pause between two attempts, in seconds."""

QUIET_SECONDS = 5.0
"""Seconds without a call after which a replaced source is closed."""

_LOOK_SECONDS = 0.2

Open = Callable[[Source], Awaitable[Opened]]
"""Opens a source. Raises `OperationsError`, `OSError` or `ValueError` if that fails."""


class Supervisor:
    """Keeps one source open until it is closed.

    Args:
        source: The source, whose state is updated.
        open: Opens the source.
        registry: The registry for its operations.
        owner: Returns the label of the source that an operation id belongs to.
        drain_seconds: Seconds that running calls have to finish when the source is replaced or disabled.
    """

    def __init__(
        self,
        source: Source,
        open: Open,
        registry: OperationRegistry,
        *,
        owner: Callable[[str], str],
        drain_seconds: float,
    ) -> None:
        self.source = source
        self._open = open
        self._registry = registry
        self._owner = owner
        self._drain_seconds = drain_seconds
        self._connecting = ReconnectingTask(
            self._connection,
            self._use,
            pauses=Backoff(FIRST_PAUSE, LONGEST_PAUSE),
            stable_after=0,
            on_failure=self._failed,
        )
        self._given_warnings = source.warnings
        self._attempts = 0
        self.connected = asyncio.Event()
        """Set when the source has been connected once."""
        self._attempted = asyncio.Event()
        self._closing = asyncio.Event()
        self._retired: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start connecting in the background."""
        self.source.is_enabled = True
        if not self._closing.is_set():
            self._connecting.start(name=f"source {self.source.label}")

    async def attempted(self) -> None:
        """Wait until the first attempt has succeeded or failed."""
        await self._attempted.wait()

    def request(self, *, is_changed: bool = False) -> None:
        """Connect at once if the source is disconnected; replace it if it is connected.

        Args:
            is_changed: Whether the settings have changed, so that a running attempt is abandoned.
        """
        if self._closing.is_set():
            return
        self._attempted.clear()
        self._connecting.wake(abandon=is_changed)
        self.start()

    async def open_again(self) -> None:
        """As `request`, but wait for the result."""
        self.request()
        await self._attempted.wait()

    async def disable(self) -> None:
        """Close the source and remove its operations, after its running calls have finished."""
        await self._stop()
        source = self.source
        source.is_enabled = False
        source.failure = source.made_of = None
        self._let_go()

    async def aclose(self) -> None:
        """Close the source and everything that it replaced, without waiting for calls."""
        self._closing.set()
        # It closes while an attempt to replace it ends: both may take seconds.
        self._let_go()
        await self._stop()
        self._let_go()
        if self._retired:
            await asyncio.wait(self._retired)

    @property
    def is_closed(self) -> bool:
        """Whether the source and its predecessors are closed."""
        return not self._connecting.is_running and self.source.opened is None and not self._retired

    async def _stop(self) -> None:
        # It may have been started again in the meantime; the last request is effective.
        while self._connecting.is_running:
            await self._connecting.aclose()
        self.source.opens_at = None
        # No further attempt follows: wake the callers that wait for one.
        self._attempted.set()

    @asynccontextmanager
    async def _connection(self) -> AsyncGenerator[None]:
        """Open the source and register its operations. It stays open until it is replaced."""
        source, loop = self.source, asyncio.get_running_loop()
        source.opens_at = None
        began = loop.time()
        self._attempts += 1
        try:
            opened = await self._open(source)
            try:
                self._register(opened)
            except BaseException:
                await opened.aclose()
                raise
        except asyncio.CancelledError:
            if self._closing.is_set() or cast("Any", asyncio.current_task()).cancelling():
                raise
            # A library cancelled its own wait; this task was not cancelled.
            raise OperationsError("connecting was interrupted") from None
        old, source.opened = source.opened, opened
        source.seconds = loop.time() - began
        if source.failure is not None:
            logger.info("%s is connected", source.label)
        source.failure = None
        self.connected.set()
        if old is not None:
            self._retire(old)
        yield

    async def _use(self, _: None) -> None:
        """Let the source be: it restores its own connections, and is opened again only on request."""
        self._attempted.set()

    def _failed(self, error: Exception, _was_open: bool) -> None:
        source = self.source
        reason = str(error) or type(error).__name__
        if not isinstance(error, (OperationsError, OSError, ValueError)):
            logger.error("%s could not be opened", source.label, exc_info=error)
            reason = f"{type(error).__name__}: {error}"
        if reason != source.failure:
            # Commands report the failures of their first attempts themselves.
            level = logging.WARNING if self._attempts > 1 else logging.INFO
            logger.log(level, "%s cannot be opened and will be retried: %s", source.label, reason)
        source.failure = reason
        source.opens_at = self._connecting.next_attempt
        self._attempted.set()

    def _register(self, opened: Opened) -> None:
        """Replace the registered operations of a source by its current ones.

        Raises:
            RegistrationError: If another source has one of the ids; the registry is then unchanged.
        """
        registry, source = self._registry, self.source
        before = {} if source.opened is None else _by_id(source.opened)
        taken = [
            operation_id
            for operation_id in _by_id(opened)
            if registry.registered(operation_id) is not None
            and (operation_id not in before or registry.imported(before[operation_id]) is None)
        ]
        source.warnings = (*self._given_warnings, *opened.warnings)
        if taken and not source.of.is_late:
            raise RegistrationError(
                f"{taken[0]} is already registered by {self._owner(taken[0])}: rename one of them"
            )
        if taken:
            # The operator may not control the ids of workers: register the operations whose ids are free.
            source.warnings += tuple(self._conflicts(taken))
            cast("Any", opened.operations).leave_out(taken)
        operations = _by_id(opened)
        imported = [registry.restricted(new, before.get(key)) for key, new in operations.items()]
        registry.register_all(imported, replace=True)
        for operation_id in before.keys() - operations.keys():
            registry.remove_imported(before[operation_id])
        opened.attach(registry)

    def _conflicts(self, taken: list[str]) -> list[Skipped]:
        """Return warnings about ids that are not imported because another source has them, one per source."""
        by_owner: dict[str, list[str]] = {}
        for operation_id in taken:
            by_owner.setdefault(self._owner(operation_id), []).append(operation_id)
        name = self.source.name
        remedy = f'set namespace = "{name}" in [{self.source.of.table}.{name}] to have both'
        return [
            Skipped(
                ", ".join(ids[:3]) + (f" and {len(ids) - 3} more" if len(ids) > 3 else ""),
                f"not imported, because {owner} has the same: {remedy}",
            )
            for owner, ids in by_owner.items()
        ]

    def _let_go(self) -> None:
        """Remove the operations of the source, and close it later."""
        opened, self.source.opened = self.source.opened, None
        if opened is not None:
            opened.detach(self._registry)
            for operation in opened.operations:
                self._registry.remove_imported(operation)
            self._retire(opened)

    async def _quiet(self, opened: Opened) -> None:
        """Wait until an open source has had no call for some seconds, or is closed.

        Some seconds, because a call may be about to start or wait before a retry.
        """
        loop = asyncio.get_running_loop()
        since = loop.time()
        while not self._closing.is_set():
            # Asked before the time is compared: a blocked event loop is not a pause between calls.
            if opened.calls():
                since = loop.time()
            elif loop.time() - since >= QUIET_SECONDS:
                return
            with move_on_after(_LOOK_SECONDS):
                await self._closing.wait()

    def _retire(self, opened: Opened) -> None:
        """Close an open source after its running calls have finished; it no longer updates the registry."""
        opened.detach(self._registry)
        if opened.close is None:
            return
        limits = (call_seconds(each, self._drain_seconds) for each in opened.operations)
        seconds = max(limits, default=self._drain_seconds)

        async def close() -> None:
            try:
                with move_on_after(seconds):
                    await self._quiet(opened)
            finally:
                try:
                    await asyncio.shield(asyncio.ensure_future(opened.aclose()))
                except Exception:
                    logger.exception("%s did not close cleanly", self.source.label)

        task = asyncio.Task(close(), name=f"closing {self.source.label}")
        self._retired.add(task)
        task.add_done_callback(self._retired.discard)


def _by_id(opened: Opened) -> dict[str, Operation]:
    return {operation.spec.id: operation for operation in opened.operations}
