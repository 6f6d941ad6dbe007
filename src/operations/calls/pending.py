"""The calls this process waits for: `call` and `subscribe` over any event target.

Rule 1: a call ends exactly once: with an answer, an error, its time, or the end of this map. The first one wins.
Rule 2: a call whose worker is lost ends at once, or runs again where that is safe (`watch`).
Rule 3: whoever stops waiting says so: the worker is told to stop.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from math import isnan
from time import time
from typing import Any, Self

import msgspec

from operations.access import Identity
from operations.calls.deadlines import NEVER, Deadlines
from operations.calls.events import RequestPayload
from operations.calls.failure_detector import FailureDetector
from operations.calls.incoming import Incoming
from operations.calls.outgoing import Outgoing
from operations.calls.pending_call import PendingCall
from operations.calls.responder import Responder
from operations.calls.states import Expects
from operations.calls.streams import CallStream, StreamEntry
from operations.context import OperationContext, new_request_id
from operations.envelopes import ResponseEnvelope
from operations.errors import (
    CallError,
    ErrorCode,
    NotSentError,
    TransportError,
    timed_out,
    timeout_error,
)
from operations.pubsub.base import EventTarget, Subscription, usable
from operations.pubsub.memory import MemoryTarget
from operations.types import JSONObject

DEFAULT_GROUP = "operations"
DEFAULT_TIMEOUT = 30.0
DEFAULT_WINDOW = 256
"""Items of a subscription that may be under way before its consumer has read any."""

_FAREWELL = 1.0
"""Seconds for the last messages when the map is closed."""


class PendingRequestMap:
    """Calls operations of a worker group over an event target, and remembers who waits for what.

    Use it as an async context manager, or let it open at the first call and `aclose` it. A registry takes it as its
    `remote`.

    Args:
        target: Where events go; by default a `MemoryTarget` of its own.
        group: The worker group that is called.
        timeout: Seconds a call may take unless it says otherwise.
        idle_timeout: Seconds a subscription may go without an item unless it says otherwise.
        credential: A token for the workers' resolver, sent with every call that brings none.
        send_identity: Put the caller's identity into requests; by default on trusted targets only, for nobody
            else believes it.
        heartbeat: Seconds after which a worker that has not answered is asked whether it still has the call.
        silence: Seconds without any sign after which a worker that is connected counts as lost.
    """

    def __init__(
        self,
        target: EventTarget | None = None,
        *,
        group: str = DEFAULT_GROUP,
        timeout: float = DEFAULT_TIMEOUT,
        idle_timeout: float | None = DEFAULT_TIMEOUT,
        credential: str | None = None,
        send_identity: bool | None = None,
        heartbeat: float = 1.0,
        silence: float = 15.0,
    ) -> None:
        self.target: EventTarget = MemoryTarget() if target is None else usable(target)
        self.group = group
        self.timeout = timeout
        self.idle_timeout = idle_timeout
        self.mailbox = self.target.mailbox()
        self.pending: dict[str, PendingCall] = {}
        self._local = self.target.local
        self._credential = credential
        self._send_identity = self.target.trusted if send_identity is None else send_identity
        self._deadlines: Deadlines[PendingCall] = Deadlines(self.pending, self._expire)
        self._watch = FailureDetector(self, heartbeat=heartbeat, silence=silence)
        self._outgoing = Outgoing(self.target, self.mailbox, lambda: self._watch.is_settling)
        self._incoming = Incoming(self, self._watch, self._outgoing)
        self._responder = Responder(
            self.target, group, self.mailbox, self.pending, self._incoming.receive
        )
        self.address_of = self._responder.address_of
        """Return the address for replies to a request; raise `ValueError` if a reply needs one and none is known."""
        self._closers: list[Callable[[], Awaitable[None]]] = []
        self._subscription: Subscription | None = None
        self._opening: asyncio.Lock | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watching: asyncio.Task[Any] | None = None
        self._closed = False

    # ---------------------------------------------------------------------------------------- lifetime

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def open(self) -> None:
        """Start to listen for answers. Called by the first call if nobody did.

        Raises:
            TransportError: If the broker cannot be reached.
            CallError: `ABORTED` if it is closed, or was while it opened.
        """
        if self._opening is None:
            self._opening = asyncio.Lock()
        async with self._opening:
            if self._subscription is None and not self._closed:
                callers = self.target.topic(f"{self.group}.callers")
                subscription = await self.target.listen((self.mailbox, callers), self._incoming)
                if self._closed:
                    await subscription.aclose()
                else:
                    self._subscription = subscription
                    # Whoever calls from here on need not look whether somebody listens.
                    self._loop = asyncio.get_running_loop()
                    if not self.target.direct:
                        self._watching = self.spawn(self._watch.run())
        if self._closed:
            raise CallError(ErrorCode.ABORTED, "the calls were closed", retryable=False)

    async def aclose(self) -> None:
        """End everything that waits, with `ABORTED`, and stop listening. Closing twice is harmless."""
        self._closed = True
        if self._opening is not None:
            # What is being opened is closed by whoever opens it: even later, where the broker is slow.
            with suppress(TimeoutError):
                async with asyncio.timeout(_FAREWELL), self._opening:
                    pass
        for request_id, call in tuple(self.pending.items()):
            self.stop(call)
            self.end(request_id, CallError(ErrorCode.ABORTED, "the calls were closed"))
        closers, self._closers = self._closers, []
        await asyncio.gather(*(close() for close in closers))
        if self._watching is not None:
            self._watching.cancel()
        # What was to be said is said, but nobody waits for it for ever.
        self._deadlines.clear()
        farewells = tuple(self._tasks)
        try:
            if farewells:
                await asyncio.wait(farewells, timeout=_FAREWELL)
            for task in farewells:
                task.cancel()
            await asyncio.gather(*farewells, return_exceptions=True)
        finally:
            subscription, self._subscription = self._subscription, None
            if subscription is not None:
                await subscription.aclose()

    def __len__(self) -> int:
        return len(self.pending)

    @property
    def pending_count(self) -> int:
        """How many calls and subscriptions have not ended."""
        return len(self.pending)

    @property
    def ignored(self) -> int:
        """How many events were for calls that are not open, or of unknown types."""
        return self._incoming.ignored

    @property
    def malformed(self) -> int:
        """How many messages were no events."""
        return self._incoming.malformed

    # ---------------------------------------------------------------------------------------- calling

    async def call(
        self,
        operation_id: str,
        input: Any = None,
        context: OperationContext | None = None,
        *,
        timeout: float | None = None,
        identity: Identity | None = None,
        credential: str | None = None,
        metadata: JSONObject | None = None,
        replayable: bool | None = None,
    ) -> ResponseEnvelope[Any]:
        """Run a query or mutation on one worker of the group.

        Args:
            operation_id: The `namespace.name` to run.
            input: Its input.
            context: The call this one is part of: its identity, metadata and remaining time are taken over.
            timeout: Seconds until `TIMEOUT`; never more than the context's remaining time.
            identity: Who calls; believed on trusted targets only.
            credential: A token that the workers' resolver verifies.
            metadata: Goes along, for example trace context.
            replayable: Whether the operation may run again after a loss; by default the workers are asked.

        Raises:
            CallError: As the operation gave it, or `TIMEOUT`, `UNAVAILABLE`, `ABORTED`, `RESOURCE_EXHAUSTED`;
                `VALIDATION_ERROR` also for a timeout that is not a number.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop or self._closed:
            await self._ready()
        limit = self.timeout
        if timeout is not None:
            _enforce_number("timeout", timeout)
            limit = timeout
        if context is not None:
            limit = _remaining(context, limit)
        if not limit > 0:
            _enforce_number("timeout", limit)
            message = f"{operation_id} was not sent: its time had run out"
            raise timeout_error(message, None if context is None else context.deadline)
        payload = self._request(operation_id, input, context, limit, identity, credential, metadata)
        request_id = payload.request_id
        now = loop.time()
        call = PendingCall(payload, replayable, now + limit, limit)
        future: asyncio.Future[ResponseEnvelope[Any]] = loop.create_future()
        call.future = future
        self.pending[request_id] = call
        if call.expires_at < self._deadlines.next:
            self._deadlines.schedule(call.expires_at)
        try:
            if self._local is not None:
                self._local.enqueue_object(self.group, payload, self.mailbox)
                call.sent_at = call.seen_at = now
            else:
                await self._outgoing.send(self.group, call)
            return await future
        except BaseException as error:
            self.pending.pop(request_id, None)
            # Its deadline may have come while it was being sent: then nobody has looked at this.
            if not future.cancel() and not future.cancelled():
                future.exception()
            if isinstance(error, asyncio.CancelledError):
                self.stop(call)
            if isinstance(error, NotSentError):
                raise CallError(ErrorCode.UNAVAILABLE, str(error)) from error
            raise

    def subscribe(
        self,
        operation_id: str,
        input: Any = None,
        context: OperationContext | None = None,
        *,
        idle_timeout: float | None = None,
        identity: Identity | None = None,
        credential: str | None = None,
        metadata: JSONObject | None = None,
        window: int = DEFAULT_WINDOW,
    ) -> CallStream:
        """Open a subscription on one worker of the group: an async iterator of envelopes.

        Nothing is sent before it is iterated. A slow reader slows the producer: no more than `window` items
        are ever under way.

        Raises:
            CallError: When iterated; as `call`, and `TIMEOUT` when no item came for `idle_timeout` seconds.
        """
        idle = self.idle_timeout if idle_timeout is None else idle_timeout

        async def start() -> StreamEntry:
            await self._ready()
            if idle is not None:
                _enforce_number("idle_timeout", idle)
            limit = _remaining(context, NEVER)
            payload = self._request(
                operation_id, input, context, limit, identity, credential, metadata
            )
            payload = msgspec.structs.replace(
                payload,
                credit=window,
                idle_timeout=None if idle is None else idle * 1000,
            )
            expires_at = asyncio.get_running_loop().time() + limit
            call = PendingCall(payload, False, expires_at, limit, Expects.MANY)
            call.stream = StreamEntry(payload.request_id, window)
            self.pending[payload.request_id] = call
            if expires_at < self._deadlines.next:
                self._deadlines.schedule(expires_at)
            try:
                await self._outgoing.send(self.group, call)
            except BaseException as error:
                self.pending.pop(payload.request_id, None)
                if isinstance(error, asyncio.CancelledError):
                    self.stop(call)
                raise
            return call.stream

        return CallStream(self, operation_id, start, idle)

    def abort(self, request_id: str) -> None:
        """End a pending call with `ABORTED` and tell its worker to stop; nothing if it is not pending."""
        call = self.pending.get(request_id)
        if call is not None:
            self.stop(call)
            self.end(request_id, CallError(ErrorCode.ABORTED, "the call was aborted"))

    # ---------------------------------------------------------------------------------------- answering

    async def close_with(self, close: Callable[[], Awaitable[None]]) -> None:
        """Await `close` when this map is closed.

        Raises:
            CallError: `ABORTED` if it is closed already; `close` was awaited then.
        """
        if self._closed:
            await close()
            raise CallError(ErrorCode.ABORTED, "the calls were closed", retryable=False)
        self._closers.append(close)

    def serve(self, request: RequestPayload, reply_to: str) -> None:
        """Remember the address for replies to a request. Needed on targets with queues (Redis, NATS)."""
        self._responder.serve(request, reply_to)

    async def respond(self, request_id: str, envelope: Any, *, sequence: int | None = None) -> None:
        """Publish the reply to a request; with a `sequence`, as one item of a subscription.

        Raises:
            TypeError: If it is anything but an envelope.
            ValueError: If the target has queues and the request is unknown, so that the reply has no address.
            TransportError: If it cannot be sent.
        """
        await self._responder.respond(request_id, envelope, sequence)

    async def emit_error(
        self,
        request_id: str,
        code: str,
        message: str,
        details: Any = None,
        *,
        retryable: bool | None = None,
    ) -> None:
        """Publish an error as the reply to a request; by default only `UNAVAILABLE` is retryable.

        Raises:
            ValueError: As `respond`.
            TransportError: If it cannot be sent.
        """
        error = CallError(code, message, details, retryable=retryable)
        await self._responder.fail(request_id, error)

    async def complete(self, request_id: str, *, sequence: int | None = None) -> None:
        """Publish the end of a subscription.

        Raises:
            ValueError: As `respond`.
            TransportError: If it cannot be sent.
        """
        await self._responder.complete(request_id, sequence)

    # ---------------------------------------------------------------------------------------- sending

    async def _ready(self) -> None:
        if self._subscription is None or self._closed:
            try:
                await self.open()
            except TransportError as error:
                raise CallError(ErrorCode.UNAVAILABLE, str(error)) from error
        elif self._loop is not asyncio.get_running_loop():
            raise CallError(
                ErrorCode.UNAVAILABLE,
                "these calls belong to another event loop: open a PendingRequestMap on this one",
                retryable=False,
            )

    def _request(
        self,
        operation_id: str,
        input: Any,
        context: OperationContext | None,
        limit: float,
        identity: Identity | None,
        credential: str | None,
        metadata: JSONObject | None,
    ) -> RequestPayload:
        bounded = limit != NEVER
        parent = None
        if context is not None:
            parent = context.request_id
            identity = context.identity if identity is None else identity
            if context.metadata:
                metadata = {**context.metadata, **(metadata or {})}
        value = self._outgoing.prepared(operation_id, input)
        if metadata is not None:
            metadata = self._outgoing.prepared(operation_id, metadata)
        return RequestPayload(
            request_id=new_request_id(),
            operation_id=operation_id,
            input=value,
            parent_request_id=parent,
            deadline=(time() + limit) * 1000 if bounded else None,
            timeout_ms=limit * 1000 if bounded else None,
            # What nobody will believe need not be told to everyone who can read the broker.
            identity=identity if self._send_identity else None,
            # One that is empty is one all the same, and refused: nobody becomes anonymous by mistake.
            credential=self._credential if credential is None else credential,
            metadata=metadata,
            reply_to=self.mailbox or None,
        )

    async def resend(self, call: PendingCall) -> None:
        """Send a lost call again, to whichever worker takes it."""
        try:
            await self._outgoing.send_again(self.group, call)
        except CallError as error:
            self.end(call.payload.request_id, error)

    def stop(self, call: PendingCall) -> None:
        """Tell the worker to stop, in the background."""
        farewell = self._outgoing.tell_to_stop(self.group, call)
        if farewell is not None:
            self.spawn(farewell)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Run something in the background until this map is closed."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ---------------------------------------------------------------------------------------- ending

    def _expire(self, call: PendingCall) -> None:
        self.stop(call)
        payload = call.payload
        error = timed_out(payload.operation_id, call.limit, "answer", deadline=payload.deadline)
        self.end(payload.request_id, error)

    def end(self, request_id: str, error: CallError) -> None:
        """End a pending call with `error`; nothing if it has ended."""
        call = self.pending.pop(request_id, None)
        if call is not None:
            call.fail(error)

    def drop(self, request_id: str) -> None:
        """Forget a subscription whose reader left, and tell its worker to stop."""
        call = self.pending.pop(request_id, None)
        if call is not None and not self._closed:
            self.stop(call)


def _remaining(context: OperationContext | None, limit: float) -> float:
    if context is None or context.deadline is None:
        return limit
    return min(limit, context.deadline / 1000 - time())


def _enforce_number(name: str, seconds: object) -> None:
    if not isinstance(seconds, (int, float)) or isnan(seconds):
        # Nothing comes before or after it: the call would never end.
        reason = f"{name} is not a number: give seconds, or None for the default"
        raise CallError(ErrorCode.VALIDATION_ERROR, reason)
