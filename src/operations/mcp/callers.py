"""Know which calls a connection carries, so that a server's questions and log messages reach the right caller.

Since 2026-07-28 a question is part of a result, and a log message comes on its request's own stream. Before, only
streamable HTTP ties such a message to a request; on other transports nothing does.

Rule 1: a message that the transport ties to a request belongs to that request's caller, while the request is in flight.
Rule 2: any other message belongs to the caller of all calls in flight, if that is one caller alone. Otherwise it
        belongs to no caller: a question is declined, and a log message stays here.
"""

import asyncio
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Final

from operations._mcp_config import MCPClientConfig
from operations.access import Identity
from operations.caller_tokens import TokenFunction
from operations.context import NO_CALL, OperationContext
from operations.errors import CallError, ErrorCode
from operations.front.timing import CallTimeout
from operations.mcp.serving.client import Client, client

MAX_MESSAGES: Final = 100
"""Log messages of one call that wait to be delivered."""

_SETTLE_SECONDS: Final = 1.0

_OWN_IDLE_SECONDS = 300.0
"""Seconds without a call after which a caller's own connection is closed, unless `idle_timeout` says otherwise."""

_tied: ContextVar["CallInFlight | None"] = ContextVar("operations_mcp_in_flight", default=None)
"""The call that a request is sent for; transports carry it to the tasks that handle what comes back on its stream."""


def caller_of(context: OperationContext) -> str:
    """Return the key of a call's caller: its identity, else its session, else this call alone."""
    identity, channel = context.identity, context.channel
    if identity is not None:
        return f"identity:{identity.key}"
    return f"session:{channel.session}" if channel.session else f"call:{id(channel)}"


class CallerAuth:
    """Finds the tokens of a caller's own connection, which also connects as this caller.

    Args:
        find: Returns the token of a call.
    """

    def __init__(self, find: TokenFunction) -> None:
        self.identity: Identity | None = None
        """As the caller's last call had it: a token that it showed earlier may have expired."""
        self._find = find

    def __call__(self, context: OperationContext) -> Any:
        """Return the token of a request, or an awaitable of it."""
        is_own = context is NO_CALL
        return self._find(OperationContext(identity=self.identity) if is_own else context)


def own_config(config: MCPClientConfig) -> MCPClientConfig:
    """Return the configuration of a connection that serves one caller."""
    auth, idle = config.auth, config.idle_timeout
    return replace(
        config,
        lazy=False,
        idle_timeout=_OWN_IDLE_SECONDS if idle is None else idle,
        auth=CallerAuth(auth) if callable(auth) else auth,
    )


def is_known(context: OperationContext) -> bool:
    """Return whether later calls of a call's caller can be recognised."""
    return context.identity is not None or context.channel.session != ""


class CallInFlight:
    """One request that waits for its response.

    Args:
        context: The call that it is sent for.
        timeout: The source's time limit.
    """

    def __init__(self, context: OperationContext, timeout: CallTimeout) -> None:
        self.context = context
        self.timeout = timeout
        self.caller = caller_of(context)

        self.client: Client = client.get()
        """What the MCP client of the call can do besides what a channel carries."""

        self.is_unanswered = False
        """Whether the call ended while its caller was asked."""

        self._questions: set[asyncio.Future[Any]] = set()
        self._messages: set[asyncio.Task[None]] = set()

    async def ask(self, question: Coroutine[Any, Any, Any]) -> Any:
        """Return the caller's answer; the time limit stops meanwhile.

        Raises:
            CallError: `ABORTED` if the call ended before the answer came.
        """
        asking = asyncio.ensure_future(question)
        self._questions.add(asking)
        try:
            with self.timeout.paused():
                await asyncio.wait({asking})
        finally:
            self._questions.discard(asking)
            asking.cancel()
        if asking.cancelled():
            raise CallError(ErrorCode.ABORTED, "the call ended before its question was answered")
        return asking.result()

    def tell(self, message: Coroutine[Any, Any, None]) -> None:
        """Deliver a log message; drop it if too many wait."""
        if len(self._messages) >= MAX_MESSAGES:
            message.close()
            return
        telling = asyncio.ensure_future(message)
        self._messages.add(telling)
        telling.add_done_callback(self._told)

    def _told(self, telling: asyncio.Task[None]) -> None:
        self._messages.discard(telling)
        if not telling.cancelled():
            telling.exception()

    async def settle(self) -> None:
        """Wait for messages that arrived before the response, so that they also reach the caller before it.

        Not for long: a caller that does not read must not seem to be a server that does not respond.
        """
        if self._messages:
            await asyncio.wait(tuple(self._messages), timeout=_SETTLE_SECONDS)

    def end(self) -> None:
        """Drop what was not answered or delivered."""
        self.is_unanswered = bool(self._questions)
        for each in (*self._questions, *self._messages):
            each.cancel()


class CallsInFlight:
    """The calls that one connection carries."""

    def __init__(self) -> None:
        self._calls: dict[CallInFlight, None] = {}

    @contextmanager
    def enter(self, call: CallInFlight) -> Generator[None]:
        """Count a call as in flight during this block; messages on its own stream are tied to it."""
        self._calls[call] = None
        token = _tied.set(call)
        try:
            yield
        finally:
            _tied.reset(token)
            del self._calls[call]
            call.end()

    def addressee(self) -> CallInFlight | None:
        """Return the call that the message handled in this task belongs to; None if it belongs to no caller."""
        tied = _tied.get()
        if tied is not None:
            return tied if tied in self._calls else None
        if len({call.caller for call in self._calls}) != 1:
            return None
        return next(reversed(self._calls))
