"""The steps of one HTTP request: identify, admit, read, run, respond. HTTP and MCP requests share them.

Rule 1: an endpoint returns a `Reply`, or sends its response itself and returns None, or raises an error. Only this
        module turns errors into responses.
Rule 2: the work runs in the task of the request. The task is cancelled when its time limit expires or its client
        disconnects. The response is sent in time even if the work ignores the cancellation.
Rule 3: a slot is released when the response has been sent. Unread response bytes count against the caller.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from functools import partial
from time import monotonic, time
from typing import Any, Final, TypeAlias

from msgspec.structs import replace

from operations.base.concurrency import Slot
from operations.base.errors import (
    CallError,
    ErrorCode,
    cancelled_elsewhere,
    map_error,
    timed_out,
    timeout_error,
)
from operations.base.text import in_seconds
from operations.base.time_limit import TimeLimit
from operations.contract.access import Identity, with_check
from operations.contract.channel import NOTHING, CallerChannel
from operations.contract.context import OperationContext
from operations.contract.specs import Operation, OperationSpec
from operations.front.credentials import (
    Credential,
    InvalidCredentialError,
    Resolve,
    credentials_in,
)
from operations.front.front import Front
from operations.front.limits import UNCOUNTED_OUTPUT, call_seconds, caller_key, client_address
from operations.front.messages import (
    REQUEST_ID,
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

logger = logging.getLogger("operations.server")

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


class RequestState:
    """One request in the pipeline, and the steps that its endpoint takes."""

    __slots__ = (
        "answer_late", "caller", "context", "credential", "front", "headers", "identity", "is_answered",
        "is_withdrawn", "pipeline", "receive", "scope", "seconds", "send", "slot", "spec", "started", "timeout",
    )  # fmt: skip

    def __init__(
        self, pipeline: "RequestPipeline", scope: Scope, receive: Receive, send: Send
    ) -> None:
        self.pipeline = pipeline
        self.front = pipeline.front
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

    async def identify(self) -> None:
        """Identify the caller, also for mounted applications, within the time limit of the request.

        Raises:
            CallError: If the check takes too long or a limit is exceeded.
            RequestError: 401 if a credential is wrong.
        """
        scope = self.scope
        if _AUTH_ERROR in scope:
            raise scope[_AUTH_ERROR]
        if self.pipeline.resolve is None and self.front.credentials.admits_anonymous:
            # Clients cannot authenticate.
            scope.setdefault(IDENTITY, None)
        if IDENTITY not in scope:
            scope[IDENTITY] = await self._authenticate()
        self.credential = scope.get(CREDENTIAL)
        self.identity = scope[IDENTITY]
        self.caller = caller_key(self.identity, client_address(scope))

    async def _authenticate(self) -> Identity | None:
        timeout, ahead = self.timeout, PeekableReceive(self.receive)
        self.seconds = self._seconds(self.front.timeout)
        timeout.start(self.seconds, ahead.peek)
        try:
            identity = await self.pipeline.authenticate(self.scope)
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

    async def enter(self, *, is_stream: bool = False) -> None:
        """Identify and admit the request.

        Raises:
            CallError: If it is rejected.
        """
        await self.identify()
        self.admit(is_stream=is_stream)

    def admit(
        self,
        *,
        is_stream: bool = False,
        keeps_time: bool = False,
        operation: Operation | None = None,
    ) -> None:
        """Admit the identified request, and set the context of its call.

        A stream has no deadline unless the request sets one.

        Args:
            is_stream: Whether it stays open.
            keeps_time: Whether `start_work` will enforce the deadline, so that the registry need not.
            operation: The called operation, if it is already known; see also `call_operation`.

        Raises:
            CallError: If it is rejected.
        """
        front = self.front
        front.rate.spend(self.caller)
        headers = self.headers
        trace = headers.get(b"traceparent")
        default = None
        if not is_stream:
            default = call_seconds(operation, front.timeout)
        self.seconds = seconds = self._seconds(default)
        deadline, ends_at = (None, None) if seconds is None else self._ends(seconds)
        self.context = OperationContext(
            identity=self.identity,
            deadline=deadline,
            metadata=NOTHING if trace is None else _trace(trace, headers),
            channel=CallerChannel(
                deadline=deadline, ends_at=ends_at, serves_anonymous=front.serves_anonymous
            )
            if keeps_time
            else front.entry,
            registry=front.registry,
        )

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

    def take_slot(self, *, is_stream: bool = False) -> None:
        """Take a slot that the request holds until its response has been sent.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if no slot is free.
        """
        front = self.front
        self.slot = (front.streams if is_stream else front.calls).hold(self.caller)

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


Endpoint: TypeAlias = Callable[[RequestState], Awaitable[Reply | None]]


class RequestPipeline:
    """Serves HTTP requests for one front.

    Args:
        front: The shared limits and rules.
        resolve: Returns the identity of a scope; None if clients cannot authenticate.
    """

    def __init__(self, front: Front, resolve: Resolve | None = None) -> None:
        self.front = front
        self.resolve = resolve

    async def serve(self, scope: Scope, receive: Receive, send: Send, endpoint: Endpoint) -> None:
        """Run all steps for one request and send the response."""
        state = RequestState(self, scope, receive, send)
        timeout = state.timeout
        try:
            try:
                reply = await endpoint(state)
            except CallError as error:
                reply = state.failure(error)
            except ClientDisconnectedError:
                reply = None
            except asyncio.CancelledError:
                if not (timeout.timed_out or timeout.disconnected):
                    if (stopped := state.stopped()) is None:
                        raise
                    reply = state.failure(stopped)
                elif timeout.stop():
                    raise
                else:
                    reply = state.cancelled()
            except Exception as error:  # noqa: BLE001 - the caller gets a response in any case
                unexpected = map_error(error)
                unexpected.__cause__ = error
                reply = state.failure(unexpected)
            timeout.stop()
            if reply is not None and not state.is_answered:
                scope[REQUEST_ID] = state.context.request_id
                await state.respond(reply)
        finally:
            state.close()

    async def authenticate(self, scope: Scope) -> Identity | None:
        """Return the identity of a request, and store its credential in the scope.

        Raises:
            RequestError: 401 if the credential is wrong, or if the server requires one and the request has none.
            CallError: `UNAVAILABLE` if the credential could not be checked, `RESOURCE_EXHAUSTED` if a limit is
                exceeded.
        """
        resolve = self.resolve
        if resolve is None:
            self._enforce_known(scope, None)
            return None
        shown = credentials_in(scope["headers"])
        scope[RESOURCE] = challenge_of(scope, self.front).resource
        try:
            identity = await self.front.auth.authenticate(
                client_address(scope), shown, lambda: resolve(scope)
            )
        except InvalidCredentialError as error:
            logger.info("rejected a credential: %s", error)
            logger.debug("rejected a credential", exc_info=error.reason)
            challenge = challenge_of(scope, self.front)
            raise challenge.invalid(error.headers, error.advice) from error.reason
        self._enforce_known(scope, identity)
        if identity is None:
            return None
        credential: Credential | None = scope.get(CREDENTIAL)
        if credential is None:
            key = (identity.account, hash(shown) if shown else id(scope))
            # A copy, so that the credential and the scope do not refer to each other.
            asked = {name: value for name, value in scope.items() if name != STATE}
            credential = Credential(identity, lambda: resolve(asked), key)
            scope[CREDENTIAL] = credential
        return with_check(identity, credential.is_valid)

    def _enforce_known(self, scope: Scope, identity: Identity | None) -> None:
        if identity is None and not self.front.credentials.admits_anonymous and OPEN not in scope:
            raise challenge_of(scope, self.front).missing()


def _trace(traceparent: bytes, headers: dict[bytes, bytes]) -> dict[str, Any]:
    """Return the W3C trace context of a request."""
    trace = {"traceparent": traceparent.decode("latin-1")}
    state = headers.get(b"tracestate")
    if state is not None:
        trace["tracestate"] = state.decode("latin-1")
    return trace
