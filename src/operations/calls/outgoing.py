"""Sending requests: what happens when a broker is away, a group is empty, or a message is too large.

Rule 1: what certainly was not delivered is tried again while there is reason to hope, and then fails with
        `UNAVAILABLE`.
Rule 2: what may have been delivered is never sent again from here. The watch finds out, and decides.
Rule 3: a call that ends is no longer sent, wherever that has got to: a deadline holds for sending, too.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from time import time
from typing import Any

import msgspec

from operations._json import JSONLimitError, as_json, enforce_bounds
from operations.calls.events import AbortPayload, CallAborted, CallRequested, encode_event
from operations.calls.json_copy import snapshot
from operations.calls.pending_call import PendingCall, Sending
from operations.errors import (
    CallError,
    ErrorCode,
    NobodyThereError,
    NotSentError,
    QueueFullError,
    TooLargeError,
    TransportError,
)
from operations.pubsub.base import EventTarget

logger = logging.getLogger("operations")

PATIENCE = 10.0
"""Seconds a new call waits for a broker that cannot be reached."""

MAX_WAITING = 1000
MAX_WAITING_BYTES = 2 * 1024 * 1024
"""Calls that may wait for a broker at a time, and what they may hold; beyond that they fail at once."""

MAX_FAREWELLS = 10_000
"""Calls whose workers are still to be told to stop. Beyond that they find out at the deadline."""

RETRY = 0.1
"""Seconds between attempts while workers may be on their way back."""


class Outgoing:
    """The sending side of a `PendingRequestMap`.

    Args:
        target: Where events go.
        mailbox: Where answers come.
        is_settling: Whether a reconnect was so recent that an empty group may be about to fill.
    """

    def __init__(self, target: EventTarget, mailbox: str, is_settling: Callable[[], bool]) -> None:
        self._target = target
        self._local = target.local
        self._mailbox = mailbox
        self._is_settling = is_settling
        self._waiting = 0
        self._waiting_bytes = 0
        self._farewells: deque[PendingCall] = deque(maxlen=MAX_FAREWELLS)
        self._is_saying = False

    async def send(self, group: str, call: PendingCall) -> None:
        """Give a request to the group; returns at once when the call ends meanwhile.

        Raises:
            CallError: `UNAVAILABLE`, `RESOURCE_EXHAUSTED` or `VALIDATION_ERROR`; then it was not delivered.
        """
        request = call.payload
        target = self._target
        if self._local is not None:
            try:
                self._local.enqueue_object(group, request, self._mailbox)
            except NotSentError as error:
                raise CallError(ErrorCode.UNAVAILABLE, str(error)) from error
            call.sent_at = call.seen_at = asyncio.get_running_loop().time()
            return
        try:
            body = encode_event(CallRequested(payload=request))
        except (TypeError, ValueError, RecursionError) as error:
            raise _not_json(request.operation_id, error) from error
        if len(body) > target.max_bytes:
            reason = f"the request is {len(body)} bytes, more than the {target.max_bytes} allowed"
            raise CallError(ErrorCode.RESOURCE_EXHAUSTED, reason)
        try:
            enforce_bounds(body, max_values=target.max_values)
        except JSONLimitError as error:
            raise CallError(ErrorCode.RESOURCE_EXHAUSTED, f"the request {error.reason}") from None
        if not target.is_connected and self._is_full(len(body)):
            raise CallError(ErrorCode.UNAVAILABLE, "too many calls wait for the broker already")
        key = request.request_id
        if call.attempt > 1:
            key = f"{key}-{call.attempt}"
        self._waiting += 1
        self._waiting_bytes += len(body)
        try:
            with Sending() as call.sending:
                await self._hand_over(group, body, key)
        finally:
            call.sending = None
            self._waiting -= 1
            self._waiting_bytes -= len(body)
        call.sent_at = call.seen_at = asyncio.get_running_loop().time()

    def _is_full(self, size: int) -> bool:
        return self._waiting >= MAX_WAITING or (
            self._waiting > 0 and self._waiting_bytes + size > MAX_WAITING_BYTES
        )

    def prepared(self, operation_id: str, input: Any) -> Any:
        """Return `input` as plain JSON; a copy if it is handed over within this process.

        Raises:
            CallError: `VALIDATION_ERROR` or `RESOURCE_EXHAUSTED`.
        """
        try:
            if self._local is None:
                return as_json(input)
            return snapshot(input, self._target.max_bytes, self._target.max_values)
        except TooLargeError as error:
            raise CallError(ErrorCode.RESOURCE_EXHAUSTED, f"the request: {error}") from error
        except (TypeError, ValueError, RecursionError) as error:
            raise _not_json(operation_id, error) from error

    async def _hand_over(self, group: str, body: bytes, key: str) -> None:
        try:
            await self._target.enqueue(group, body, key=key, reply_to=self._mailbox, wait=PATIENCE)
        except NobodyThereError as error:
            await self._insist(group, body, key, error)
        except TransportError as error:
            self._give_up(key, error)

    async def _insist(self, group: str, body: bytes, key: str, error: NobodyThereError) -> None:
        """Try again while the group may be about to come back."""
        while self._is_settling():
            await asyncio.sleep(RETRY)
            try:
                await self._target.enqueue(group, body, key=key, reply_to=self._mailbox, wait=RETRY)
            except NobodyThereError:
                continue
            except TransportError as other:
                self._give_up(key, other)
            return
        raise CallError(ErrorCode.UNAVAILABLE, str(error)) from error

    def _give_up(self, key: str, error: TransportError) -> None:
        if isinstance(error, TooLargeError):
            raise CallError(ErrorCode.RESOURCE_EXHAUSTED, str(error)) from error
        if isinstance(error, QueueFullError):
            raise CallError(ErrorCode.RESOURCE_EXHAUSTED, str(error), retryable=True) from error
        if isinstance(error, NotSentError):
            raise CallError(ErrorCode.UNAVAILABLE, str(error)) from error
        logger.debug("%s may not have been sent: %s", key, error)

    async def send_again(self, group: str, call: PendingCall) -> None:
        """Give a lost request to whichever worker takes it now.

        Raises:
            CallError: As `send`.
        """
        call.attempt += 1
        call.misses = 0
        call.worker = None
        limit = PATIENCE
        if call.payload.deadline is not None:
            limit = max(0.0, call.payload.deadline / 1000 - time())
        call.payload = msgspec.structs.replace(
            call.payload, attempt=call.attempt, timeout_ms=limit * 1000
        )
        await self.send(group, call)

    def tell_to_stop(self, group: str, call: PendingCall) -> Coroutine[Any, Any, None] | None:
        """Ask the worker to stop: the one that is known to have the call, or all of them.

        Gives what has to be run for that in the background, if nothing runs there yet: a storm of cancelled calls is
        said one after the other.
        """
        if self._local is not None:
            event = CallAborted(payload=AbortPayload(request_id=call.payload.request_id))
            self._local.publish_object(self._worker_of(group, call), event)
            return None
        self._farewells.append(call)
        if self._is_saying:
            return None
        self._is_saying = True
        return self._say_farewells(group)

    def _worker_of(self, group: str, call: PendingCall) -> str:
        return call.worker or self._target.topic(f"{group}.workers")

    async def _say_farewells(self, group: str) -> None:
        try:
            while self._farewells:
                call = self._farewells.popleft()
                request_id = call.payload.request_id
                event = CallAborted(payload=AbortPayload(request_id=request_id))
                try:
                    await self._target.send(self._worker_of(group, call), encode_event(event))
                except TransportError as error:
                    logger.debug("%s could not be aborted: %s", request_id, error)
        finally:
            self._is_saying = False


def _not_json(operation_id: str, error: Exception) -> CallError:
    reason = f"the input of {operation_id} is not JSON: {error}"
    return CallError(ErrorCode.VALIDATION_ERROR, reason)
