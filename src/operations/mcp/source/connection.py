"""The connection to one server, with reconnection.

    idle --needed--> opening --negotiated--> open --lost--> pausing --> opening ...
                                              |---idle or lazy---> idle

Rule 1: one task, the owner, enters and leaves the SDK's contexts. All other tasks request a session from it.
Rule 2: after a lost connection the owner reconnects, at once and then with growing, jittered pauses. Calls wait for at
        most `reconnect_timeout`; after that they fail at once until the server is available again.
Rule 3: cancel scopes and exception groups stay inside the owner. A failure becomes one `CallError`.
"""

import asyncio
import contextvars
import logging
import math
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from copy import copy
from pathlib import Path
from traceback import format_exception
from typing import Any, Literal

import anyio
import httpx2
from mcp import MCPError
from mcp.shared.memory import create_client_server_memory_streams
from pydantic import ValidationError

from operations.base.errors import CallError, ErrorCode
from operations.base.logs import LogThrottle
from operations.base.redaction import Redactor
from operations.base.retry import Backoff
from operations.base.tasks import cancel_tasks, start_task
from operations.base.text import printable, visible
from operations.contract.context import OperationContext
from operations.mcp.config import MCPClientConfig
from operations.mcp.shared import failures
from operations.mcp.shared.extensions import declared_to
from operations.mcp.shared.interaction import CallerAuth, CallsInFlight, caller_id
from operations.mcp.shared.sdk import Dispatcher, RelaySession, lowlevel_server
from operations.mcp.source.http import open_sse, open_streamable
from operations.mcp.source.oauth import SignInRequiredError
from operations.mcp.source.stdio import Child, open_stdio

logger = logging.getLogger("operations.mcp")

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 15.0
"""Upper bounds of the pauses between attempts, in seconds."""

_STABLE_SECONDS = 5.0
"""A lost connection that was open for this many seconds, or served a call, is reopened at once; others after a
pause."""

_PIPE_SECONDS = 2.0
"""Seconds for reading the last messages of a process after it has exited."""

MAX_CALLERS = 100
"""The largest number of callers with their own connection; beyond it, the least recently used idle one is closed."""

_SLOW = "if it only needs more time (a first start may download packages), increase connect_timeout"


class LiveConnection:
    """Provides a live session.

    Args:
        name: The name of the server, for messages.
        config: The configuration of the server.
        callbacks: Returns the handlers of a session for the server's requests and notifications.
        on_open: Called in the owner task after each negotiation, before the session is used.
    """

    def __init__(
        self,
        name: str,
        config: MCPClientConfig,
        callbacks: Callable[[CallsInFlight, Redactor], dict[str, Any]],
        on_open: Callable[[RelaySession], Awaitable[None]],
    ) -> None:
        self.name = name
        self.config = config
        self.busy = 0
        """The number of blocks in `in_use`; a server is not stopped while there are any."""

        self.used = 0.0
        """When the last call ended, by the loop's clock."""

        self.away_since: float | None = None
        """The time since which requests fail although there is a session, which is how a lost HTTP server is
        detected."""

        self.on_away: Callable[[], None] = lambda: None
        """Called when requests begin to fail."""

        self._backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        self._losses, self._outputs = LogThrottle(), LogThrottle()

        self.redactor = failures.redactor_for(config)
        """Redacts the secrets of this server's configuration."""

        self.calls = CallsInFlight(name, config)
        """The calls whose responses this connection waits for."""

        self._callbacks = callbacks(self.calls, self.redactor)
        self._on_open = on_open
        self._owner: asyncio.Task[None] | None = None
        self._session: RelaySession | None = None
        self._wanted = asyncio.Event()
        self._changed = asyncio.Event()
        """Set, and replaced, when the session or the failure changes."""

        self.is_closed = False
        """Whether this connection was closed permanently."""

        self._has_worked = False
        self._has_served = False
        self._lost_at: float | None = None
        self._resumes_at = -math.inf
        self._opening: anyio.CancelScope | None = None
        self._failure: CallError | None = None

    # ------------------------------------------------------------ use

    @property
    def session(self) -> RelaySession | None:
        """The open session, if there is one."""
        session = self._session
        return session if session is not None and session.is_open else None

    @property
    def failure(self) -> CallError | None:
        """The reason why the connection was lost or could not be opened; None while it is open or not needed."""
        return None if self.session is not None else self._failure

    @property
    def next_attempt(self) -> float | None:
        """The time of the next attempt, by the loop's clock; None if the connection is open or being opened."""
        is_planned = self._resumes_at > asyncio.get_running_loop().time()
        return self._resumes_at if is_planned else None

    def start(self) -> None:
        """Start connecting; `acquire` waits for the session."""
        # Runs in its own context, so that incoming messages are not attributed to the call that connects.
        self._owner = asyncio.Task(
            self._own(), name=f"mcp {self.name}", context=contextvars.Context()
        )

    async def acquire(self) -> RelaySession:
        """Return an open session; wait for the connection if it may be opened in time.

        Raises:
            CallError: `UNAVAILABLE`, with the reason of the last failure, or because the connection is closed.
        """
        while (session := self.session) is None:
            is_closed = self.is_closed or self._owner is None
            # After closing, the reason of an earlier loss no longer matters: calls must not be retried.
            is_final = not self._has_worked if is_closed else self._is_too_late()
            if self._failure is not None and is_final:
                # A copy for each caller, because a raised error collects tracebacks.
                raise copy(self._failure)
            if is_closed:
                raise CallError(ErrorCode.UNAVAILABLE, f"{self.name} is closed", retryable=False)
            self._wanted.set()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._latest):
                    await self._changed.wait()
        return session

    @contextmanager
    def in_use(self) -> Generator[None]:
        """Keep the server running for the duration of this block."""
        self.busy += 1
        try:
            yield
        finally:
            self.busy -= 1

    def is_there(self) -> None:
        """Record that the server responded to a call."""
        if self.away_since is not None:
            self.away_since, self._resumes_at = None, -math.inf
            self._backoff.reset()
        self._has_served = True

    def plan_attempt(self) -> float:
        """Return the seconds to wait before the next attempt, which grow with each attempt."""
        pause = self._backoff.pause()
        self._resumes_at = asyncio.get_running_loop().time() + pause
        return pause

    def is_away(self) -> float:
        """Record that a request did not reach the server; return the loop time of the first such failure."""
        if self.away_since is None:
            self.away_since = asyncio.get_running_loop().time()
            self.on_away()
        return self.away_since

    async def aclose(self) -> None:
        """Close the connection. May be called from any task, and more than once."""
        self.is_closed = True
        self._wanted.set()
        if self._session is not None:
            self._session.finished.set()
        elif self._opening is not None:
            self._opening.cancel()
        if self._owner is not None:
            # Shielded: a cancelled caller returns at once, and closing continues.
            await asyncio.shield(asyncio.wait({self._owner}))

    # ------------------------------------------------------------ the owner task

    async def _own(self) -> None:
        """Open the connection, and reopen it after a pause when it is lost, until it is closed."""
        try:
            await self._live()
        finally:
            self.is_closed = True
            self._lost_at = None
            self._wake()

    async def _live(self) -> None:
        loop = asyncio.get_running_loop()
        attempts = 0
        while not self.is_closed:
            self._wanted.clear()
            began = loop.time()
            failure = await self._keep()
            was_open, self._session = self._session is not None, None
            self._has_worked = self._has_worked or was_open
            self._failure = failure
            if failure is None:
                # Closed intentionally: the next call opens it.
                attempts = 0
                self._backoff.reset()
                await self._wanted.wait()
            elif not self._has_worked:
                return
            else:
                if was_open:
                    # A server may exit after every call.
                    logger.log(
                        self._losses.level(), "%s; connecting again", printable(failure.message)
                    )
                if was_open and (self._has_served or loop.time() - began > _STABLE_SECONDS):
                    attempts = 0
                    self._backoff.reset()
                if self._lost_at is None:
                    self._lost_at = loop.time()
                self._wake()
                await self._pause(attempts)
                attempts += 1

    async def _pause(self, attempts: int) -> None:
        """Wait before the next attempt, except before the first; return early when the connection is closed."""
        pause = self.plan_attempt() if attempts else 0.0
        self._wake()
        with anyio.CancelScope(deadline=anyio.current_time() + pause) as self._opening:
            await anyio.sleep_forever()
        self._opening = None
        self._resumes_at = -math.inf

    @property
    def _latest(self) -> float | None:
        """The time until which calls wait for a lost server, by the loop's clock."""
        return None if self._lost_at is None else self._lost_at + self.config.reconnect_timeout

    def _is_too_late(self) -> bool:
        """Return whether the next attempt is too late for waiting callers."""
        earliest = max(self._resumes_at, asyncio.get_running_loop().time())
        return self._latest is not None and earliest >= self._latest

    async def _keep(self) -> CallError | None:
        """Run the connection until it ends; return None if it was closed intentionally, else the error."""
        child = Child(self.name, self.redactor.redact)
        try:
            with anyio.fail_after(self.config.connect_timeout) as self._opening:
                async with (
                    self._transport(child) as (read_stream, write_stream, *plain),
                    RelaySession(
                        Dispatcher(self.name, read_stream, write_stream),
                        *plain,
                        extensions=declared_to(self.config.extensions) or None,
                        **self._callbacks,
                    ) as session,
                ):
                    await session.negotiate(self.config.version)
                    await self._on_open(session)
                    self._opening.deadline = math.inf
                    self._hand_out(session)
                    async with self._ending_with(child, session):
                        if await self._is_left(session):
                            return None
        except TimeoutError:
            return self._unavailable(
                f"was not ready within {self.config.connect_timeout:g} s", child, advice=_SLOW
            )
        except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 - rule 3
            return self._explain(failures.root_cause(error), child)
        finally:
            self._opening = None
        return None if self.is_closed else self._unavailable("went away", child)

    async def _is_left(self, session: RelaySession) -> bool:
        """Wait for the end of `session`; return True if it should be closed, False if it was lost."""
        idle = math.inf if self.config.idle_timeout is None else self.config.idle_timeout
        loop = asyncio.get_running_loop()
        opened = loop.time()
        # Waiting tasks receive the session, even if a lazy server is stopped now.
        await asyncio.sleep(0)
        while not session.finished.is_set():
            is_only_listed = self.config.lazy and not self.used
            rest = 0.0 if is_only_listed else max(opened, self.used) + idle - loop.time()
            if rest <= 0 and self.busy == 0:
                # Until the next await, no call can receive this session.
                session.finished.set()
                return True
            with anyio.move_on_after(rest if rest > 0 else idle):
                await session.finished.wait()
        return self.is_closed

    @staticmethod
    @asynccontextmanager
    async def _ending_with(child: Child, session: RelaySession) -> AsyncGenerator[None]:
        """End the session soon after its process exits in this block.

        Processes that a server has started may hold its pipes open, so that the end of the pipes does not show its
        exit.
        """

        async def watch() -> None:
            await child.has_exited.wait()
            await anyio.sleep(_PIPE_SECONDS)
            child.went_away = True
            session.finished.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            yield
            tasks.cancel_scope.cancel()

    def _hand_out(self, session: RelaySession) -> None:
        self._session = session
        self._has_served = False
        self._lost_at = self._failure = None
        self._wake()

    def _wake(self) -> None:
        """Let waiting calls look at the new state."""
        self._changed.set()
        self._changed = asyncio.Event()

    # ------------------------------------------------------------ transports

    def _transport(self, child: Child) -> AbstractAsyncContextManager[Any]:
        failures.filter_logs()
        if self.config.kind == "stdio":
            return open_stdio(self.config, child)
        if self.config.kind == "memory":
            return _open_memory(self.config.server)
        opening = open_sse if self.config.kind == "sse" else open_streamable
        return opening(self.config, self.redactor)

    def _explain(self, error: BaseException, child: Child) -> CallError:
        if logger.isEnabledFor(logging.DEBUG):
            # The server's text may repeat a secret.
            text = self.redactor.redact("".join(format_exception(error)))
            logger.debug("%s failed: %s", self.name, visible(text))
        if self._session is not None:
            return self._unavailable("went away", child)
        if child.went_away:
            return self._unavailable("ended before it was ready", child)
        if isinstance(error, OSError):
            what, advice = _not_started(error, self.config)
            return self._unavailable(what, child, advice=advice)
        if isinstance(error, SignInRequiredError):
            advice = f"run `operations login {self.name}`, or call operations.mcp.sign_in"
            return self._unavailable("needs a person to sign in", child, advice=advice)
        if isinstance(error, MCPError | ValidationError | httpx2.HTTPError):
            found = failures.read_failure(error, self.name, self.redactor).error
            return self._reported(
                CallError(ErrorCode.UNAVAILABLE, found.message, found.details), child
            )
        return self._unavailable(f"failed: {self.redactor.redact(str(error))}", child)

    def _unavailable(self, what: str, child: Child, *, advice: str = "") -> CallError:
        details: dict[str, Any] = {"server": self.name}
        if child.exit_code is not None:
            details["exitCode"] = child.exit_code
        failure = CallError(ErrorCode.UNAVAILABLE, f"{self.name} {what}", details)
        return self._reported(failure, child, advice)

    def _reported(self, failure: CallError, child: Child, advice: str = "") -> CallError:
        """Return the error for a failure: with the full report for the code that connects first, else for callers."""
        if not self._has_worked and self._session is None:
            return failures.start_error(failure, self.config, child.facts, self.redactor, advice)
        if child.stderr:
            # The output of the server goes to the operator's log, not to the caller.
            output = "\n".join(child.stderr)
            logger.log(
                self._outputs.level(), "%s; its output:\n%s", printable(failure.message), output
            )
        return failure


def _not_started(error: OSError, config: MCPClientConfig) -> tuple[str, str]:
    """Return why a program could not be started, and advice."""
    if config.cwd is not None and str(error.filename) == str(config.cwd):
        return "cannot be started: there is no such folder", "set cwd to an existing folder"
    if isinstance(error, FileNotFoundError):
        command = config.command or ""
        return (
            f"cannot be started: there is no program {Path(command).name}",
            "command is only the program: put its arguments into args"
            if " " in command
            else "install it, or give its full path: it is searched on PATH, without a shell",
        )
    return f"cannot be started: {error.strerror or error}", ""


@asynccontextmanager
async def _open_memory(server: Any) -> AsyncGenerator[Any]:
    """Run a server of this process in a task for the duration of the connection."""
    lowlevel = lowlevel_server(server)
    async with create_client_server_memory_streams() as (ours, theirs):
        options = lowlevel.create_initialization_options()
        running = asyncio.Task(lowlevel.run(*theirs, options))
        try:
            yield ours
        finally:
            with anyio.CancelScope(shield=True):
                await cancel_tasks(running)
            if not running.cancelled() and running.exception() is not None:
                logger.debug("the server in this process failed", exc_info=running.exception())


class Retries:
    """Decides whether a request is retried."""

    def __init__(self, connection: LiveConnection, replayable: bool) -> None:
        self._connection = connection
        self._is_safe = replayable
        self._was_repeated = False
        self._was_resent = False
        self._backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        self.has_refreshed = False

    @property
    def begun(self) -> Literal[False] | None:
        """False if the server certainly did not process any attempt."""
        return None if self._was_repeated else False

    async def allow(self, failure: failures.Failure) -> bool:
        """Wait if necessary, and return whether to retry the request."""
        if failure.unsent:
            failure.error.begun = self.begun
            return await self._wait()
        if not self._is_safe:
            # The request may have run, and a retry could run it twice.
            failure.error.retryable = False
        elif failure.error.code == ErrorCode.UNAVAILABLE and not self._was_repeated:
            self._was_repeated = True
            return True
        return False

    async def _wait(self) -> bool:
        connection, loop = self._connection, asyncio.get_running_loop()
        latest = connection.is_away() + connection.config.reconnect_timeout
        # The first retry is always made, without a pause.
        if self._was_resent:
            pause = self._backoff.pause()
            if loop.time() + pause > latest:
                return False
            await asyncio.sleep(pause)
        self._was_resent = True
        return True


class CallerConnections:
    """The connections of single callers to one server (`per_caller`), least recently used first.

    Args:
        build: Returns a new connection for one caller.
    """

    def __init__(self, build: Callable[[], LiveConnection]) -> None:
        self._build = build
        self._open: OrderedDict[str, LiveConnection] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()
        """The tasks that close connections to make room for others."""

    def find(self, context: OperationContext) -> LiveConnection:
        """Return the connection of a call's caller; open one if there is none.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if too many callers have running calls.
        """
        caller = caller_id(context)
        connection = self._open.get(caller)
        if connection is None or connection.is_closed:
            if len(self._open) >= MAX_CALLERS:
                self._make_room()
            connection = self._open[caller] = self._build()
            connection.start()
        if isinstance(connection.config.auth, CallerAuth):
            connection.config.auth.identity = context.identity
        self._open.move_to_end(caller)
        return connection

    def _make_room(self) -> None:
        idle = next((key for key, each in self._open.items() if each.busy == 0), None)
        if idle is None:
            name = next(iter(self._open.values())).name
            message = f"{name} has running calls of {MAX_CALLERS} callers"
            raise CallError(ErrorCode.RESOURCE_EXHAUSTED, message, retryable=True)
        start_task(self._closing, self._open.pop(idle).aclose())

    async def aclose(self) -> None:
        """Close all connections."""
        open_ones = [connection.aclose() for connection in self._open.values()]
        await asyncio.gather(*open_ones, *self._closing)
