"""The client of the call protocol: `call` and `subscribe` over any event target.

Rule 1: a call ends exactly once: by a reply, an error, its deadline, or the closing of this map, whichever is first.
Rule 2: a request that certainly was not delivered is sent again for some time. The failure detector handles a request
        that may have been delivered.
Rule 3: when a caller stops waiting, its worker is asked to stop.

`PendingRequestMap` connects its parts, which know only those before them:

    OpenCalls        the calls that have not ended, with their deadlines
    Outbox           sends requests, aborts and credit
    FailureDetector  finds lost workers, and sends their calls again
    Redirects        sends the requests that no worker has started elsewhere
    ClientInbox      passes received events to the parts before
    Responder        sends replies to requests that the program serves itself
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any, Self

import msgspec

from operations.authority.grants import Delegate
from operations.base.deadline import NEVER
from operations.base.errors import (
    CallError,
    ErrorCode,
    TransportError,
    retrieve_exception,
    timed_out,
    timeout_error,
)
from operations.base.tasks import shielded
from operations.base.text import enforce_durations, in_seconds
from operations.base.types import JSONObject
from operations.calls.protocol.events import milliseconds
from operations.calls.protocol.states import KnownWorkers, Outages, PendingCall, StreamEntry
from operations.calls.serving.jobs import DEFAULT_GROUP, DEFAULT_TIMEOUT
from operations.calls.source.failure_detector import FailureDetector
from operations.calls.source.inbox import ClientInbox
from operations.calls.source.open_calls import OpenCalls
from operations.calls.source.redirects import Redirects
from operations.calls.source.responder import Responder
from operations.calls.source.runs import RemoteRuns
from operations.calls.source.sending import Outbox, closed_error, enforce_number, remaining
from operations.contract.access import Identity
from operations.contract.context import OperationContext
from operations.contract.envelopes import ResponseEnvelope
from operations.pubsub.base import Delivery, EventTarget, Subscription, usable
from operations.pubsub.memory import MemoryTarget
from operations.pubsub.signing import SIGNING_ADVICE
from operations.registry.runs import Run, RunPage, StartOptions
from operations.registry.streams import Subscription as EnvelopeStream

DEFAULT_WINDOW = 256
"""The number of unread items of a subscription that a worker may send."""

_PROMPT = 1.0
"""Seconds within which a broker that can be reached confirms a subscription."""

_CLOSING = 1.0
"""Seconds to wait for a connection attempt when the map is closed."""


class PendingRequestMap:
    """Calls operations of a worker group over an event target, and tracks the calls that have not ended.

    Use it as an async context manager, or let it open at the first call and close it with `aclose`. It can be the
    `remote` of a registry.

    Args:
        target: Transports the events; by default a new `MemoryTarget`.
        group: The worker group.
        timeout: The time limit of a call in seconds, even if its context allows more; by default the remaining time
            of the context, or else 30.
        idle_timeout: The default time limit between two items of a subscription, in seconds.
        credential: A token for the workers' resolver, sent with every call that has none.
        delegate: Returns a token on behalf of the caller of each call, instead of `credential`.
        send_identity: Put the caller's identity into requests; by default on trusted targets only, because other
            workers ignore it.
        heartbeat: Seconds after which a worker that has not replied is asked whether it still has the call.
        silence: Seconds after which a connected worker that does not respond counts as lost.

    Attributes:
        target: Transports the events.
        group: The worker group.
        mailbox: The address for replies to the calls of this map.
        pending: The calls and subscriptions that have not ended, by request id.
        specs_changed: Set when the workers serve other operations than before.
    """

    def __init__(
        self,
        target: EventTarget | None = None,
        *,
        group: str = DEFAULT_GROUP,
        timeout: float | None = None,
        idle_timeout: float | None = DEFAULT_TIMEOUT,
        credential: str | None = None,
        delegate: Delegate | None = None,
        send_identity: bool | None = None,
        heartbeat: float = 1.0,
        silence: float = 15.0,
    ) -> None:
        enforce_durations(
            timeout=timeout, idle_timeout=idle_timeout, heartbeat=heartbeat, silence=silence
        )
        self.target = target = MemoryTarget() if target is None else usable(target)
        self.group = group
        self.mailbox = mailbox = target.mailbox()
        self.timeout = timeout
        self.idle_timeout = idle_timeout
        self._callers_topic = target.topic(f"{group}.callers")
        self._workers = workers = KnownWorkers()
        self._open = open_calls = OpenCalls(self._expire)
        outages = Outages()
        self._outbox = outbox = Outbox(
            target,
            group,
            mailbox,
            open_calls,
            workers,
            outages,
            undelivered=self.undelivered,
            credential=credential,
            delegate=delegate,
            send_identity=send_identity,
        )
        self._detector = detector = FailureDetector(
            target,
            group,
            mailbox,
            open_calls,
            outbox,
            workers,
            outages,
            call=self.call,
            heartbeat=heartbeat,
            silence=silence,
        )
        self._redirects = Redirects(target, group, open_calls, outbox, workers, detector)
        self._inbox = ClientInbox(target, open_calls, outbox, workers, detector, self._redirects)
        self._responder = Responder(target, mailbox, self._callers_topic, open_calls, self.receive)
        self.pending = open_calls.by_id
        self.specs_changed = workers.specs_changed
        self._runs = RemoteRuns(self)
        self._closers: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._subscription: Subscription | None = None
        self._opening: asyncio.Lock | None = None
        self._opener: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._detecting: asyncio.Task[Any] | None = None
        self._closed = self._was_unreachable = False

    def __len__(self) -> int:
        return len(self.pending)

    @property
    def pending_count(self) -> int:
        """The number of calls and subscriptions that have not ended."""
        return len(self.pending)

    @property
    def ignored(self) -> int:
        """Events for calls that are not open, and events of unknown types."""
        return self._inbox.ignored

    @property
    def malformed(self) -> int:
        """Messages that are not events."""
        return self._inbox.malformed

    # ---------------------------------------------------------------------------------------- lifetime

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def open(self) -> None:
        """Subscribe to replies. The first call does this if necessary.

        Raises:
            TransportError: If the broker cannot be reached.
            CallError: `ABORTED` if the map is closed.
        """
        if self._opening is None:
            self._opening = asyncio.Lock()
        async with self._opening:
            if self._subscription is None and not self._closed:
                loop = asyncio.get_running_loop()
                addresses, began_at = (self.mailbox, self._callers_topic), loop.time()
                try:
                    subscription = await self.target.listen(addresses, self)
                except TransportError:
                    self._was_unreachable = True
                    raise
                if self._closed:
                    await subscription.aclose()
                else:
                    self._subscription = subscription
                    # From here on the subscription is known to be active.
                    self._loop = loop
                    if self._was_unreachable or loop.time() - began_at > _PROMPT:
                        # The workers may be reconnecting as well.
                        self._detector.restored()
                    if not self.target.direct:
                        self._detecting = self._outbox.spawn(self._detector.run())
        if self._closed:
            raise closed_error()

    @shielded
    async def aclose(self) -> None:
        """End every pending call with `ABORTED` and stop listening. Closing twice is harmless."""
        self._closed = True
        async with AsyncExitStack() as ending:
            # A step that is cancelled ends early, but all later steps follow.
            ending.push_async_callback(self._stop_listening)
            ending.push_async_callback(self._end_tasks)
            ending.push_async_callback(self._close_handlers)
            ending.callback(self._abort_all)
            if self._opening is not None:
                # An `open` that is still running closes its own subscription.
                with suppress(TimeoutError):
                    async with asyncio.timeout(_CLOSING), self._opening:
                        pass

    def _abort_all(self) -> None:
        for call in tuple(self.pending.values()):
            self._outbox.abort(call, CallError(ErrorCode.ABORTED, "the calls were closed"))

    async def _close_handlers(self) -> None:
        # At the same time, because each may wait for its running requests. If cancelled, `_end_tasks` ends them.
        await asyncio.gather(
            *(asyncio.shield(self._outbox.spawn(close())) for close in self._closers)
        )

    async def _end_tasks(self) -> None:
        if self._detecting is not None:
            self._detecting.cancel()
        self._workers.have_reported.set()
        self._open.clear_deadlines()
        await self._outbox.aclose()

    async def _stop_listening(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await subscription.aclose()

    async def close_with(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Await `close` when this map is closed.

        Raises:
            CallError: `ABORTED` if the map is already closed; `close` was then awaited.
        """
        if self._closed:
            await close()
            raise closed_error()
        self._closers.append(close)

    @property
    def workers_by_specs(self) -> dict[str, str]:
        """The address of one worker for each version of the group's operations, by the digest of their specs."""
        return self._workers.by_specs

    async def has_workers(self) -> bool:
        """Return whether any worker of the group is connected to the broker.

        Raises:
            TransportError: If that cannot be known now.
        """
        return (
            self.target.is_connected if self.target.direct else await self._detector.find_workers()
        )

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
        key: str | None = None,
    ) -> ResponseEnvelope[Any]:
        """Run a query or mutation on one worker of the group.

        Args:
            operation_id: The `namespace.name` to run.
            input: Its input.
            context: The context of the parent call, which provides identity, metadata and remaining time.
            timeout: The time limit in seconds, at most the remaining time of the context.
            identity: The caller; only trusted targets use it.
            credential: A token that the workers' resolver verifies.
            metadata: Sent with the request, for example trace context.
            replayable: Whether the operation may run again if its worker is lost; by default the spec decides.
            key: Names the step of a run that the call is; its handler reads it as `context.key`.

        Raises:
            CallError: The operation's own error, or `TIMEOUT`, `UNAVAILABLE`, `ABORTED`, `RESOURCE_EXHAUSTED`;
                `VALIDATION_ERROR` also for a timeout that is not a number.
        """
        if timeout is None:
            timeout = self.timeout
        else:
            enforce_number("timeout", timeout)
        if context is None or context.deadline is None:
            limit = DEFAULT_TIMEOUT if timeout is None else timeout
        else:
            limit = remaining(context, NEVER if timeout is None else timeout)
        if not limit > 0:
            enforce_number("timeout", limit)
            message = f"{operation_id} was not sent: its time had run out"
            raise timeout_error(message, None if context is None else context.deadline)
        loop = asyncio.get_running_loop()
        if self._loop is not loop or self._closed:
            limit -= await self._ready(operation_id, limit)
        payload = self._outbox.request(
            operation_id, input, context, limit, identity, credential, metadata
        )
        if key is not None:
            payload = msgspec.structs.replace(payload, key=key)
        future: asyncio.Future[ResponseEnvelope[Any]] = loop.create_future()
        now = loop.time()
        call = PendingCall(payload, replayable, now + limit, limit, now, future=future)
        self._open.add(call)
        try:
            if replayable is None and self._detector.asks_peer:
                # Before the request, which may kill the peer.
                await self._detector.ask_peer()
            await self._outbox.send(call)
            return await future
        except BaseException as error:
            self._forget(call, error)
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
        worker: str = "",
    ) -> EnvelopeStream:
        """Open a subscription on one worker of the group: an async iterator of envelopes.

        The request is sent when the iteration starts. A slow reader slows the producer: the worker sends at most
        `window` unread items. `worker` is the address of a specific worker to call.

        Raises:
            CallError: When iterated; as `call`, and `TIMEOUT` if no item arrives for `idle_timeout` seconds.
        """
        idle = self.idle_timeout if idle_timeout is None else idle_timeout

        async def items() -> AsyncGenerator[ResponseEnvelope[Any], None]:
            limit = remaining(context, NEVER)
            if idle is not None:
                enforce_number("idle_timeout", idle)
            limit -= await self._ready(operation_id, limit if idle is None else min(limit, idle))
            payload = self._outbox.request(
                operation_id, input, context, limit, identity, credential, metadata
            )
            payload = msgspec.structs.replace(
                payload, credit=window, idle_timeout=None if idle is None else milliseconds(idle)
            )
            now = asyncio.get_running_loop().time()
            stream = StreamEntry(payload.request_id, window)
            call = PendingCall(
                payload,
                replayable=False,
                expires_at=now + limit,
                limit=limit,
                made_at=now,
                stream=stream,
                to=worker,
            )
            self._open.add(call)
            try:
                await self._outbox.send(call)
            except BaseException as error:
                self._forget(call, error)
                raise
            try:
                while (envelope := await stream.read(idle)) is not None:
                    self._outbox.grant(call.worker, stream)
                    yield envelope
            finally:
                if self._open.remove(payload.request_id) is not None:
                    # The reader has stopped, or no item came in time.
                    self._outbox.ask_to_stop(call)

        return EnvelopeStream(items())

    async def start(
        self,
        operation_id: str,
        input: Any = None,
        context: OperationContext | None = None,
        *,
        key: str | None = None,
        delay: float = 0,
        at: float | None = None,
        priority: int = 100,
        lane: str | None = None,
        retention: float | None = None,
    ) -> Run:
        """Start a run at a worker of the group, and return its handle once the run is stored.

        The arguments are those of `OperationRegistry.start`. A start with a key is repeated if its worker is lost.

        Raises:
            CallError: As `call`; `OPERATION_NOT_FOUND` if the workers have no store of runs.
        """
        context = context or OperationContext()
        options = StartOptions(
            key=key, delay=delay, at=at, priority=priority, lane=lane, retention=retention
        )
        state = await self._runs.start(operation_id, input, context, options)
        return Run(self._runs, state, context)

    async def run(self, run_id: str, context: OperationContext | None = None) -> Run:
        """Return the handle of a run that the workers of the group keep.

        Raises:
            CallError: As `call`; `RUN_NOT_FOUND`.
        """
        context = context or OperationContext()
        return Run(self._runs, await self._runs.state(run_id, context), context)

    async def runs(
        self,
        context: OperationContext | None = None,
        *,
        status: str | None = None,
        operation: str | None = None,
        limit: int = 50,
        after: str | None = None,
    ) -> RunPage:
        """List the runs that the caller may see, the newest first. The arguments are those of `OperationRegistry.runs`.

        Raises:
            CallError: As `call`.
        """
        return await self._runs.page(
            context or OperationContext(),
            status=status,
            operation=operation,
            limit=limit,
            after=after,
        )

    def abort(self, request_id: str) -> None:
        """End a pending call with `ABORTED` and ask its worker to stop; does nothing if it is not pending."""
        call = self.pending.get(request_id)
        if call is not None:
            self._outbox.abort(call, CallError(ErrorCode.ABORTED, "the call was aborted"))

    async def _ready(self, operation_id: str, limit: float) -> float:
        """Open the map if necessary; return the seconds that this took, at most `limit`."""
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        if self._subscription is None or self._closed:
            opener = self._opener
            if opener is None or opener.done():
                # A task of its own: it may take time to give up, and the next call profits from it.
                opener = self._opener = self._outbox.spawn(self.open())
                opener.add_done_callback(retrieve_exception)
            await asyncio.wait([opener], timeout=limit)
            if not opener.done():
                reason = f"no connection was possible within {in_seconds(limit)}"
                raise timeout_error(f"{operation_id} was not sent: {reason}")
            if self._closed or opener.cancelled():
                raise closed_error()
            try:
                opener.result()
            except TransportError as error:
                raise CallError(ErrorCode.UNAVAILABLE, str(error), begun=False) from error
        elif self._loop is not loop:
            raise CallError(
                ErrorCode.UNAVAILABLE,
                "these calls belong to another event loop: open a PendingRequestMap on this one",
                retryable=False,
            )
        elapsed = loop.time() - started_at
        if elapsed >= limit:
            raise timeout_error(f"{operation_id} was not sent: its time had run out")
        return elapsed

    # ---------------------------------------------------------------------------------------- receiving

    def receive(self, delivery: Delivery) -> None:
        """Process an event that arrived through the target."""
        self._inbox.receive(delivery)

    def undelivered(self, key: str, worker: str = "", reason: str = "") -> None:
        """Handle a request for which the broker has no worker, with its reason."""
        self._redirects.undelivered(key, worker, reason)

    def lost(self, reason: str) -> None:
        """Handle a lost connection. If the connection is the peer itself, its calls are lost as well."""
        self._inbox.lost(reason)

    def restored(self) -> None:
        """Handle a restored connection. Workers may need more time to reconnect."""
        self._detector.restored()

    # ---------------------------------------------------------------------------------------- replies

    def address_of(self, request_id: str, reply_to: str | None) -> str:
        """Return the address for replies to a request that names `reply_to`.

        Raises:
            ValueError: If there is none, and the target delivers replies only to the caller's own mailbox.
        """
        return self._responder.address_of(request_id, reply_to)

    async def respond(
        self,
        request_id: str,
        envelope: Any,
        *,
        sequence: int | None = None,
        reply_to: str | None = None,
    ) -> None:
        """Publish the reply to a request; with a `sequence`, as one item of a subscription.

        Args:
            request_id: The id of the request.
            envelope: The result.
            sequence: The position of an item, counted from 0.
            reply_to: The `replyTo` of the request. Needed on targets with queues (Redis, NATS).

        Raises:
            TypeError: If `envelope` is not an envelope.
            ValueError: If the reply has no address.
            TransportError: If it cannot be sent.
        """
        await self._responder.respond(request_id, envelope, sequence=sequence, reply_to=reply_to)

    async def emit_error(
        self,
        request_id: str,
        code: str,
        message: str,
        details: Any = None,
        *,
        retryable: bool | None = None,
        reply_to: str | None = None,
    ) -> None:
        """Publish an error as the reply to a request; by default only `UNAVAILABLE` is retryable.

        Raises:
            ValueError: As `respond`.
            TransportError: If it cannot be sent.
        """
        error = CallError(code, message, details, retryable=retryable)
        await self._responder.emit_error(request_id, error, reply_to=reply_to)

    async def complete(
        self, request_id: str, *, sequence: int | None = None, reply_to: str | None = None
    ) -> None:
        """Publish the end of a subscription.

        Raises:
            ValueError: As `respond`.
            TransportError: If it cannot be sent.
        """
        await self._responder.complete(request_id, sequence=sequence, reply_to=reply_to)

    # ---------------------------------------------------------------------------------------- ending

    def _forget(self, call: PendingCall, error: BaseException) -> None:
        """Remove a call that failed; if its caller was cancelled, ask the worker to stop."""
        self._open.remove(call.payload.request_id)
        future = call.future
        # If the deadline passed while the request was being sent, the exception of the future was not retrieved.
        if future is not None and not future.cancel() and not future.cancelled():
            future.exception()
        if isinstance(error, asyncio.CancelledError):
            self._outbox.ask_to_stop(call)

    def _expire(self, call: PendingCall) -> None:
        payload = call.payload
        if self._detector.is_unserved(call):
            reason = "its worker was lost" if payload.attempt > 1 else "there is no worker"
            waited = f"none has returned within {in_seconds(call.limit)}"
            message = f"{payload.operation_id} could not run: {reason}, and {waited}"
            unavailable = CallError(ErrorCode.UNAVAILABLE, message)
            if payload.attempt == 1 and not call.sent_at:
                unavailable.begun = False
            self._outbox.abort(call, unavailable)
            return
        if not call.sent_at and self.target.problem:
            message = f"{payload.operation_id} could not be sent: {self.target.problem}"
            is_safe = self._detector.may_run_again(call) is True
            self._outbox.abort(call, CallError(ErrorCode.UNAVAILABLE, message, retryable=is_safe))
            return
        error = timed_out(payload.operation_id, call.limit, "answer", deadline=payload.deadline)
        if not self.target.direct and self._detector.is_unanswered(call):
            advice = f"Check that the workers are not blocked. {SIGNING_ADVICE}"
            error.message += f"; no worker responds to this client. {advice}"
        self._outbox.abort(call, error)
