"""Send the messages of a client: requests, aborts and credit.

Rule 1: whether a request that may have started is sent again is decided by the failure detector; `redirects` handles a
        request that no worker has started.
Rule 2: the deadline of a call also limits the time for sending it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from math import isnan
from time import time
from typing import Any, cast

from msgspec.structs import replace

from operations.authority.grants import Delegate
from operations.base.deadline import NEVER
from operations.base.errors import (
    CallError,
    ErrorCode,
    NoReceiverError,
    NotPermittedError,
    NotSentError,
    QueueFullError,
    TooLargeError,
    TransportError,
)
from operations.base.json.values import JSONValueError, as_json, reject_masked
from operations.base.tasks import start_task
from operations.base.types import JSONObject
from operations.calls.protocol.events import (
    AbortPayload,
    CallAborted,
    CallRequested,
    RequestPayload,
    encode_event,
    enforce_limits,
    milliseconds,
)
from operations.calls.protocol.states import KnownWorkers, Outages, PendingCall, StreamEntry
from operations.calls.serving.jobs import quietly
from operations.calls.source.open_calls import OpenCalls
from operations.calls.suspects import SuspectCalls
from operations.contract.access import Identity
from operations.contract.context import OperationContext, new_request_id
from operations.pubsub.base import EventTarget
from operations.registry.remotes import checked_digest, checked_operation
from operations.schema.explain import invalid_json

logger = logging.getLogger("operations")

CONNECT_SECONDS = 10.0
"""Seconds that a new call waits for a broker that cannot be reached."""

MAX_WAITING = 1000
"""The largest number of calls that wait for a broker; further calls fail at once."""

MAX_WAITING_BYTES = 2 * 1024 * 1024
"""The largest total size of these calls, in bytes."""

MAX_ABORTS = 10_000
"""The largest number of unsent abort messages; the workers of further calls stop at the deadline."""

_REFUSALS: dict[type[NotSentError], tuple[ErrorCode, bool]] = {
    TooLargeError: (ErrorCode.RESOURCE_EXHAUSTED, False),
    QueueFullError: (ErrorCode.RESOURCE_EXHAUSTED, True),
    NotPermittedError: (ErrorCode.UNAVAILABLE, False),
}
"""The codes of requests that were not sent, and whether they may be sent later; by default `UNAVAILABLE`, true."""

_CLOSING = 1.0
"""Seconds for sending the last messages when the client is closed."""


class Outbox:
    """Sends the messages of one client: requests, aborts and credit.

    Args:
        target: Transports the messages.
        group: The worker group.
        mailbox: The address for replies.
        open_calls: The calls of the client.
        workers: The workers that the client knows.
        outages: The outages of the connection.
        undelivered: Handles a request for which the broker has no worker: its key, the worker and the reason.
        credential: A token for the workers' resolver, sent with every call that has none.
        delegate: Returns a token on behalf of the caller of each call, instead of `credential`.
        send_identity: Whether to put the caller's identity into requests; by default on trusted targets only.

    Attributes:
        group: The worker group of further requests.
    """

    def __init__(
        self,
        target: EventTarget,
        group: str,
        mailbox: str,
        open_calls: OpenCalls,
        workers: KnownWorkers,
        outages: Outages,
        *,
        undelivered: Callable[[str, str, str], None],
        credential: str | None,
        delegate: Delegate | None,
        send_identity: bool | None,
    ) -> None:
        self._target = target
        self.group = group
        self._mailbox = mailbox
        self._open = open_calls
        self._workers = workers
        self._outages = outages
        self._undelivered = undelivered
        self._workers_address = target.control(group)
        self._credential = credential
        self._delegate = delegate
        self._sends_identity = target.trusted if send_identity is None else send_identity
        self._waiting = 0
        self._waiting_bytes = 0
        self._suspects = SuspectCalls(
            lambda call: self.spawn(self.send_again(call)), open_calls.is_open
        )
        open_calls.on_removed = self._release
        self._aborts: deque[PendingCall] = deque(maxlen=MAX_ABORTS)
        self._is_aborting = False
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Run a coroutine in the background, until the outbox is closed."""
        return start_task(self._tasks, work)

    async def aclose(self) -> None:
        """Wait for the last messages, and end all tasks."""
        last = tuple(self._tasks)
        try:
            if last:
                await asyncio.wait(last, timeout=_CLOSING)
        finally:
            for task in last:
                task.cancel()
        await asyncio.gather(*last, return_exceptions=True)

    # ---------------------------------------------------------------------------------------- requests

    def request(
        self,
        operation_id: str,
        input: Any,
        context: OperationContext | None,
        limit: float,
        identity: Identity | None,
        credential: str | None,
        metadata: JSONObject | None,
    ) -> RequestPayload:
        """Return the request of a new call that may take `limit` seconds.

        Raises:
            CallError: `VALIDATION_ERROR` if the input or the metadata is not JSON.
        """
        bounded = limit != NEVER
        parent = None
        if context is not None:
            parent = context.request_id
            identity = context.identity if identity is None else identity
            if context.metadata:
                metadata = {**context.metadata, **(metadata or {})}
        if credential is None:
            # An empty credential is sent and then rejected, so that no caller becomes anonymous by mistake.
            credential = self._credential
            # Not used for listings, for calls of the operator, and for calls that an operation makes for an unknown
            # caller.
            if (
                self._delegate is not None
                and context is not None
                and not context.trusted
                and (context.authority is None or context.identity is not None)
            ):
                credential = self._delegate(checked_operation(operation_id, input), context)
        try:
            value = as_json(input)
            if value is not input:
                reject_masked(value, input)
            metadata = None if metadata is None else as_json(metadata)
        except (TypeError, ValueError, RecursionError) as error:
            raise not_json(operation_id, error) from error
        return RequestPayload(
            request_id=new_request_id(),
            operation_id=operation_id,
            input=value,
            parent_request_id=parent,
            deadline=milliseconds(time() + limit) if bounded else None,
            timeout_ms=milliseconds(limit) if bounded else None,
            # On other targets workers ignore it, and other clients may be able to read it.
            identity=identity if self._sends_identity else None,
            credential=credential,
            metadata=metadata,
            reply_to=self._mailbox or None,
            checked=None if context is None else checked_digest(operation_id, input, context),
        )

    def _encoded(self, call: PendingCall) -> bytes:
        """Return the request of a call, if it can be sent now.

        Raises:
            CallError: `UNAVAILABLE`, `RESOURCE_EXHAUSTED` or `VALIDATION_ERROR`.
        """
        if call.sends:
            call.payload = replace(call.payload, resends=call.sends)
        try:
            body = encode_event(CallRequested(payload=call.payload))
        except (TypeError, ValueError, RecursionError) as error:
            raise not_json(call.payload.operation_id, error) from error
        enforce_limits(body, self._target, "request")
        if call.payload.attempt > 1:
            # It was accepted before its worker was lost.
            return body
        is_much = self._waiting > 0 and self._waiting_bytes + len(body) > MAX_WAITING_BYTES
        if (is_much or self._waiting >= MAX_WAITING) and not self._target.is_connected:
            reason = "too many calls are waiting for the broker"
            raise CallError(ErrorCode.UNAVAILABLE, reason, begun=False)
        return body

    async def send(self, call: PendingCall) -> None:
        """Send a request to the group; return early if the call ends.

        Raises:
            CallError: `UNAVAILABLE`, `RESOURCE_EXHAUSTED` or `VALIDATION_ERROR`; the request was not delivered.
        """
        body, target = self._encoded(call), self._target
        size = len(body)
        call.sends += 1
        outages, workers, worker = self._outages, self._workers, call.to
        if call.payload.attempt > 1 and not target.direct:
            worker = worker or workers.first()
        if target.chooses_worker:
            worker = worker or workers.choose()
            workers.occupy(call, worker)
        call.departures = workers.departures if workers.is_complete else -1
        restorations = outages.restorations
        # A broker drops a message whose key it has already received.
        key = call.payload.request_id
        if call.sends > 1:
            key = f"{key}-{call.sends}"
        self._waiting += 1
        self._waiting_bytes += size
        loop = asyncio.get_running_loop()
        task = call.sender = cast("asyncio.Task[Any]", asyncio.current_task(loop))
        cancellations = task.cancelling()
        # A call that was lost waits for its deadline.
        patience = CONNECT_SECONDS
        if call.payload.attempt > 1:
            patience = max(0.0, call.expires_at - loop.time())
        try:
            try:
                call.receipt = await target.enqueue(
                    self.group,
                    body,
                    key=key,
                    reply_to=self._mailbox,
                    wait=patience,
                    worker=worker,
                )
            except NoReceiverError as error:
                self._undelivered(key, worker, str(error))
                return
            except NotSentError as error:
                code, retryable = _REFUSALS.get(type(error), (ErrorCode.UNAVAILABLE, True))
                raise CallError(code, str(error), retryable=retryable, begun=False) from error
            except TransportError as error:
                logger.debug("%s may not have been sent: %s", key, error)
            if worker or target.chooses_worker:
                # Only this worker can have the request.
                call.worker = worker or None
        except asyncio.CancelledError:
            # Other code may have cancelled the task as well.
            if call.interrupted is not task or task.cancelling() > cancellations + 1:
                raise
        finally:
            if call.sender is task:
                call.sender = None
            if call.interrupted is task:
                call.interrupted = None
                task.uncancel()
            self._waiting -= 1
            self._waiting_bytes -= size
        if outages.restorations != restorations:
            # The request may have been sent over a new connection, with other workers present.
            call.departures = -1
        call.sent_at = call.seen_at = loop.time()

    # ---------------------------------------------------------------------------------------- resending

    async def resend(self, call: PendingCall, *, may_have_begun: bool = True) -> None:
        """Send a call again, to any worker."""
        call.misses = call.probes = 0
        call.sent_at = 0.0
        call.worker = None
        call.is_claimed = False
        call.dropped_by = frozenset()
        attempt = call.payload.attempt + may_have_begun
        call.payload = replace(call.payload, attempt=attempt)
        if attempt > 1:
            self._suspects.add(call)
        else:
            await self.send_again(call)

    async def send_again(self, call: PendingCall, pause: float = 0.0) -> None:
        """Send a call that was not delivered again after a pause, unless it ends before; end it if that fails."""
        await asyncio.sleep(pause)
        if self._open.is_open(call):
            limit = None
            if call.expires_at != NEVER:
                limit = milliseconds(call.expires_at - asyncio.get_running_loop().time())
            call.payload = replace(call.payload, timeout_ms=limit)
            try:
                await self.send(call)
            except CallError as error:
                self._open.end(call.payload.request_id, error)

    def redirect(self, call: PendingCall) -> bool:
        """Let a call be sent to another worker; return False if all other versions have refused it."""
        call.to = self._workers.find_other(call.refused) if call.refused else ""
        return bool(call.to) or not call.refused

    # ---------------------------------------------------------------------------------------- ending

    def abort(self, call: PendingCall, error: CallError) -> None:
        """Ask the worker to stop and end the call with `error`."""
        self.ask_to_stop(call)
        self._open.end(call.payload.request_id, error)

    def _release(self, call: PendingCall, has_failed: bool) -> None:
        """Stop sending a call that has ended, and free its place at a worker and among the suspects."""
        self._suspects.release(call)
        if call.occupies:
            self._workers.release(call, has_failed=has_failed)
        if call.sender is not None:
            call.interrupt()

    def ask_to_stop(self, call: PendingCall) -> None:
        """Ask the worker that has the call, or all workers, to stop it. Runs in the background."""
        # One task sends all aborts, so that many cancelled calls do not start many tasks.
        self._aborts.append(call)
        if not self._is_aborting:
            self._is_aborting = True
            self.spawn(self._send_aborts())

    async def _send_aborts(self) -> None:
        try:
            while self._aborts:
                call = self._aborts.popleft()
                event = CallAborted(payload=AbortPayload(request_id=call.payload.request_id))
                await self.post(call.worker or self._workers_address, encode_event(event))
                if call.receipt and not call.is_claimed:
                    await quietly(self._target.withdraw(self.group, call.receipt))
        finally:
            self._is_aborting = False

    def grant(self, worker: str | None, stream: StreamEntry) -> None:
        """Send credit after an item was read, if the worker needs it. Runs in the background."""
        # A worker without an address does not support credit.
        if worker is not None and (credit := stream.grant()) is not None:
            self.spawn(self.post(worker, credit))

    async def post(self, address: str, body: bytes) -> None:
        """Send a message and ignore failures: aborted calls have deadlines, and credit is sent again."""
        await quietly(self._target.send(address, body))


def not_json(operation_id: str, error: Exception) -> CallError:
    """Return the error for an input that is not JSON."""
    found = error if isinstance(error, JSONValueError) else JSONValueError(f"is not JSON: {error}")
    return invalid_json(operation_id, found)


def remaining(context: OperationContext | None, limit: float) -> float:
    """Return the time limit of a call in seconds: `limit`, or the remaining time of its context."""
    return limit if context is None else min(limit, context.remaining)


def enforce_number(name: str, seconds: object) -> None:
    """Raise `VALIDATION_ERROR` if a timeout is not a number."""
    if not isinstance(seconds, (int, float)) or isnan(seconds):
        # With NaN, the call would never end, because comparisons with NaN are false.
        reason = f"{name} is not a number: give seconds, or None for the default"
        raise CallError(ErrorCode.VALIDATION_ERROR, reason)


def closed_error() -> CallError:
    """Return the error of calls on a closed map."""
    return CallError(ErrorCode.ABORTED, "the calls were closed", retryable=False)
