"""One HTTP request: what is known of it, and its steps, which `front.pipeline` takes in order.

Rule 1: the work runs in the task of the request. The task is cancelled when its time limit expires or its client
        disconnects. The response is sent in time even if the work ignores the cancellation.
Rule 2: a slot is released when the response has been sent. Unread response bytes count against the caller.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from time import monotonic, time
from typing import Any, Final

from msgspec.structs import replace

from operations.base.concurrency import Slot
from operations.base.errors import (
    CallError,
    ErrorCode,
    cancelled_elsewhere,
    timed_out,
    timeout_error,
)
from operations.base.text import in_seconds
from operations.base.time_limit import TimeLimit
from operations.contract.access import Identity
from operations.contract.channel import NOTHING, CallerChannel
from operations.contract.context import OperationContext
from operations.contract.specs import Operation, OperationSpec
from operations.front.credentials import (
    Credential,
)
from operations.front.front import Front
from operations.front.limits import UNCOUNTED_OUTPUT, call_seconds, caller_key, client_address
from operations.front.messages import (
    Reply,
    check_json_body,
    decode_body,
    error_reply,
    read_body,
    route_path,
    send_parts,
)
from operations.front.public_errors import Challenge, ClientDisconnectedError, malformed, slow_body
from operations.front.timing import PeekableReceive, Receive, RequestTimeout, Scope, Send

IDENTITY: Final = "operations.identity"
"""Scope key of the caller's identity, for mounted applications."""

CREDENTIAL: Final = "operations.credential"
"""Scope key of the caller's `Credential`, if it has one."""

STATE: Final = "operations.state"
"""Scope key of the `RequestState`, for the handlers of the MCP SDK."""

OPEN: Final = "operations.open"
"""Scope key of paths that serve clients without a credential even if the server requires one."""

RESOURCE: Final = "operations.resource"
"""Scope key of the public address that was asked, if tokens are issued for it; empty otherwise."""

_AUTH_ERROR: Final = "operations.auth_error"


_working: ContextVar[int] = ContextVar("operations_working", default=0)
"""The id of the task of a request, in its work and in the tasks and callbacks that the work started."""


def challenge_of(scope: Scope, front: Front) -> Challenge:
    """Return the challenge for a request."""
    return front.challenge.at(route_path(scope))


class RequestTask(asyncio.Task[None]):
    """The task in which the server of this package runs a request. It records whether its own work cancelled it."""

    cancelled_itself = False

    def cancel(self, msg: Any = None) -> bool:
        """Cancel the task."""
        is_current = asyncio.current_task(self.get_loop()) is self
        self.cancelled_itself = is_current or _working.get() == id(self)
        return super().cancel(msg)


class Slots(StrEnum):
    """What a request takes until its response has been sent."""

    CALLS = "calls"
    STREAMS = "streams"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a request asks for, as far as its path and headers tell."""

    slots: Slots | None = None
    """None for a page, which only counts as a request. A stream has no deadline, and ends by itself when its client
    disconnects."""

    operation: Operation | None = None
    """The called operation, if the path names it; see also `RequestState.call_operation`."""

    keeps_time: bool = False
    """Whether the request ends at the deadline of its call, so that the registry need not end the call."""

    may_answer: bool = False
    """Whether its body may be an answer for which a call waits; such a request takes another slot if all are taken."""

    is_counted: bool = True
    """Whether it counts against the rate of its caller; False for a probe."""

    is_watched: bool = True
    """Whether the request ends with its client; False if the entry point watches each of its calls itself."""


class RequestState:
    """One request, which its entry point sees at each step."""

    __slots__ = (
        "answer_late", "caller", "context", "credential", "exhausted", "front", "headers", "identity", "is_answered",
        "is_withdrawn", "problem", "receive", "scope", "seconds", "send", "slot", "spec", "started", "timeout",
    )  # fmt: skip

    def __init__(self, front: Front, scope: Scope, receive: Receive, send: Send) -> None:
        self.front = front
        self.scope = scope
        self.receive = receive
        self.send = send
        self.started = monotonic()
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.timeout = RequestTimeout(self._answer_overdue)
        self.identity: Identity | None = None

        self.context = OperationContext()
        """The context of the call; without an identity until the request is admitted."""

        self.credential: Credential | None = None
        """The valid credential of the caller, if it sent one."""

        self.problem: CallError | None = None
        """Why the request is rejected, unless its entry point hides that its path exists."""

        self.exhausted: CallError | None = None
        """Why there is no slot for a call, if the request holds one for answers."""

        self.spec: OperationSpec | None = None
        """The called operation; None until it is known."""

        self.caller = ""
        """The key of the caller for limits; empty until it is known."""

        self.seconds: float | None = None
        """The time limit of the request in seconds; None until it is known."""

        self.slot: Slot | None = None
        """The slot that the request holds."""

        self.answer_late: Callable[[], Coroutine[Any, Any, None]] | None = None
        """Sends the response if the work does not end after a timeout; None for an ordinary error response."""

        self.is_answered = False
        """Whether the response was sent while the work was still running."""

        self.is_withdrawn = False
        """Whether the client cancelled the call with a message of its protocol, or its credential has ended."""

    # ------------------------------------------------------------ identify

    async def identify(self, authenticate: "Callable[[Scope], Awaitable[Identity | None]]") -> None:
        """Identify the caller, also for mounted applications, within the time limit of the request.

        If the check takes too long, a limit is exceeded or a credential is wrong, that becomes the `problem`.

        Args:
            authenticate: Returns the identity of a scope.
        """
        scope = self.scope
        try:
            if _AUTH_ERROR in scope:
                raise scope[_AUTH_ERROR]
            if IDENTITY not in scope:
                scope[IDENTITY] = await self._authenticated(authenticate)
        except CallError as error:
            self.problem = error
            return
        self.credential = scope.get(CREDENTIAL)
        self.identity = scope[IDENTITY]
        self.caller = caller_key(self.identity, client_address(scope))

    async def _authenticated(
        self, authenticate: "Callable[[Scope], Awaitable[Identity | None]]"
    ) -> Identity | None:
        timeout, ahead = self.timeout, PeekableReceive(self.receive)
        self.seconds = self._seconds(self.front.timeout)
        timeout.start(self.seconds, ahead.peek)
        try:
            identity = await authenticate(self.scope)
        except CallError as error:
            # Check this at every path, because an outer application may forward the request.
            self.scope[_AUTH_ERROR] = error
            raise
        finally:
            timeout.pause()
            self.receive = ahead.receive
        if timeout.disconnected:
            raise ClientDisconnectedError
        if timeout.timed_out:
            raise self._too_late()
        return identity

    # ------------------------------------------------------------ admit

    def admit(self, target: Target) -> None:
        """Admit the identified request: spend its rate, set the context of its call, and take its slot.

        A stream has no deadline unless the request sets one.

        Raises:
            CallError: If it is rejected.
        """
        front = self.front
        if target.is_counted:
            front.rate.spend(self.caller)
        headers = self.headers
        trace = headers.get(b"traceparent")
        is_stream = target.slots is Slots.STREAMS
        default = None if is_stream else call_seconds(target.operation, front.timeout)
        self.seconds = seconds = self._seconds(default)
        deadline, ends_at = (None, None) if seconds is None else self._ends(seconds)
        self.context = OperationContext(
            identity=self.identity,
            deadline=deadline,
            metadata=NOTHING if trace is None else _trace(trace, headers),
            channel=CallerChannel(
                deadline=deadline, ends_at=ends_at, serves_anonymous=front.serves_anonymous
            )
            if target.keeps_time
            else front.entry,
            registry=front.registry,
        )
        if target.slots is not None:
            try:
                self.slot = (front.streams if is_stream else front.calls).hold(self.caller)
            except CallError as error:
                if not target.may_answer:
                    raise
                # A call that waits for an answer of its client holds a slot, so answers have separate slots.
                self.slot = front.answers.enter(self.caller)
                self.exhausted = error

    def call_operation(self, spec: OperationSpec) -> None:
        """Set the operation that the admitted request calls, and apply its time limit."""
        self.spec = spec
        front = self.front
        seconds = self._seconds(call_seconds(front.registry.get(spec.id), front.timeout))
        if seconds != self.seconds and seconds is not None and self.seconds is not None:
            self.seconds = seconds
            deadline, ends_at = self._ends(seconds)
            channel = self.context.channel
            if channel.deadline is not None:
                channel = replace(channel, deadline=deadline, ends_at=ends_at)
            self.context = self.context.changed(deadline=deadline, channel=channel)

    def _ends(self, seconds: float) -> tuple[float, float]:
        """Return when the time limit ends: in milliseconds since the epoch, and by `monotonic`."""
        ends_at = self.started + seconds
        return (time() + ends_at - monotonic()) * 1000, ends_at

    def _seconds(self, default: float | None) -> float | None:
        """Return the time limit that the request sets, or else the default."""
        wanted = self.headers.get(b"operations-timeout")
        if wanted is None:
            return default
        if not wanted.isdigit() or len(wanted) > 12:
            raise malformed("Operations-Timeout is a number of milliseconds")
        return min(int(wanted) / 1000, self.front.max_timeout)

    # ------------------------------------------------------------ read, run, respond

    async def read(self) -> bytes:
        """Return the body, which must be empty or declared as JSON.

        Raises:
            RequestError: 413, 408, 415.
        """
        limits = self.front.limits
        self.timeout.start(limits.body_seconds)
        body = await read_body(self.scope, self.receive, self.headers, limits)
        if body:
            check_json_body(self.headers)
        return body

    async def read_json(self) -> Any:
        """Return the body as JSON; None if there is none.

        Raises:
            RequestError: If the body is not JSON or exceeds a limit.
        """
        body = await self.read()
        return decode_body(body, self.front.limits) if body else None

    def start_work(self) -> None:
        """Cancel the work when the request's time limit expires, if it has one, or when its client disconnects.

        Raises:
            CallError: `TIMEOUT` if no time is left, for example because reading the body took too long.
        """
        channel = self.context.channel
        seconds = None if channel.ends_at is None else channel.ends_at - monotonic()
        if seconds is not None and seconds <= 0:
            had = in_seconds(self.seconds or 0)
            message = f"{self._called} was not started: its {had} had run out"
            raise timeout_error(message, channel.deadline)
        self.watch_work(seconds)

    def watch_work(self, seconds: float | None, limit: TimeLimit | None = None) -> None:
        """Cancel the work after a time, which `limit` may extend, or when the client disconnects."""
        _working.set(id(asyncio.current_task()))
        self.timeout.start(seconds, self.receive, limit)

    async def send_part(self, part: bytes) -> None:
        """Send a part of a stream. A large part counts against the caller until the client has read it.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if the caller has too many unread bytes.
        """
        if len(part) <= UNCOUNTED_OUTPUT:
            await self.send({"type": "http.response.body", "body": part, "more_body": True})
            return
        with self.front.output.enter(self.caller, len(part)):
            await send_parts(self.send, part)
            await self.send({"type": "http.response.body", "body": b"", "more_body": True})

    async def respond(self, reply: Reply) -> None:
        """Send the whole response. A large one counts against the caller until the client has read it."""
        size = len(reply.body)
        if size <= UNCOUNTED_OUTPUT:
            await reply.send(self.send)
            return
        try:
            unread = self.front.output.enter(self.caller, size)
        except CallError as error:
            await self.failure(error).send(self.send)
            return
        with unread:
            await reply.send(self.send, in_parts=True)

    def failure(self, error: CallError) -> Reply:
        """Return the response to the request if it failed."""
        return error_reply(
            error,
            self.context.request_id,
            identity=self.identity,
            spec=self.spec,
            expose=self.front.expose_errors,
            challenge=challenge_of(self.scope, self.front).header(),
        )

    def cancelled_elsewhere(self, operation_id: str) -> CallError | None:
        """Return the error of a call that neither its time limit nor its client cancelled; None if one of them did.

        That is, the handler cancelled its own task, at once or later. Other servers, and middleware around this
        application, may cancel the task of a request themselves, and must see that it ended.
        """
        is_ended = self.timeout.timed_out or self.timeout.disconnected or self.is_withdrawn
        task = asyncio.current_task()
        if is_ended or not (isinstance(task, RequestTask) and task.cancelled_itself):
            return None
        task.uncancel()
        return cancelled_elsewhere(operation_id)

    def stopped(self) -> CallError | None:
        """Return the error of a call that the server of this package ends because it shuts down; None otherwise."""
        task = asyncio.current_task()
        if not (self.front.open_streams.is_closing and isinstance(task, RequestTask)):
            return None
        task.uncancel()
        # A mutation may have had an effect.
        is_repeatable = self.spec is not None and self.spec.replayable
        return CallError(
            ErrorCode.UNAVAILABLE, "The server is shutting down", retryable=is_repeatable
        )

    def cancelled(self) -> Reply | None:
        """Return the response to the cancelled request: a timeout error; None if the client has disconnected."""
        if self.timeout.disconnected:
            return None
        return self.failure(slow_body() if self.timeout.is_reading else self._too_late())

    def _answer_overdue(self) -> None:
        """Respond although the work still runs, because it ignores its cancellation."""
        self.is_answered = True
        self.context.abort_nested()
        if self.answer_late is None:
            self.answer_late = partial(self.failure(self._too_late()).send, self.send)
        self.front.registry.keep(asyncio.Task(self.answer_late()))

    def _too_late(self) -> CallError:
        return timed_out(self._called, self.seconds, deadline=self.context.channel.deadline)

    @property
    def _called(self) -> str:
        return self.spec.id if self.spec is not None else "The call"

    def close(self) -> None:
        """Release the request's resources and break its reference cycles, so that no garbage collection is needed."""
        # Other code may have cancelled the request, and its task may have other work to do.
        self.timeout.stop()
        if self.slot is not None:
            self.slot.release()
        self.answer_late, self.context = None, OperationContext()
        self.scope.pop(STATE, None)


def _trace(traceparent: bytes, headers: dict[bytes, bytes]) -> dict[str, Any]:
    """Return the W3C trace context of a request."""
    trace = {"traceparent": traceparent.decode("latin-1")}
    state = headers.get(b"tracestate")
    if state is not None:
        trace["tracestate"] = state.decode("latin-1")
    return trace
