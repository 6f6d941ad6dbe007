"""Replies of a worker to calls that have ended or never started, and its presence messages; sent in the background.

Rule 1: the last reply of a call is cached while there is room, and sent again only to the client that made the call.
Rule 2: sending never delays the worker. A client asks again for a reply that did not arrive.
Rule 3: no request runs twice: an id is remembered until `max_ids` others have come after it, and never longer than
        twice that.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from operations.calls.events import (
    AlivePayload,
    CallAlive,
    ProbePayload,
    encode_error,
    encode_event,
)
from operations.calls.jobs import Job
from operations.errors import CallError, TransportError
from operations.pubsub.base import EventTarget
from operations.pubsub.bounded import BoundedSet

logger = logging.getLogger("operations")

MAX_IDS = 20_000
MAX_BYTES = 8 * 1024 * 1024

WEIGHT = 320
"""Bytes that a last reply takes besides its own: its id, whom it is for, and their places."""


class Recent:
    """Request ids, and the last event of those that ended.

    Args:
        max_ids: How many ids are remembered at least.
        max_bytes: What the last events may take; the elder half of them goes when the younger is full.
    """

    def __init__(self, max_ids: int = MAX_IDS, max_bytes: int = MAX_BYTES) -> None:
        self._ids = BoundedSet(max_ids)
        self._younger: dict[str, tuple[bytes, str]] = {}
        self._elder: dict[str, tuple[bytes, str]] = {}
        self._half = max_bytes // 2
        self._left = self._half
        self.add = self._ids.add
        """Remember that this request has come; False if it had."""
        self.forget = self._ids.discard
        """Let the request come again: it was refused, not run."""

    def __len__(self) -> int:
        return len(self._ids)

    def finish(self, request_id: str, body: bytes, reply_to: str) -> None:
        """Keep the last event of a call, unless it alone would take a quarter of the room."""
        weight = len(body) + len(reply_to) + WEIGHT
        if weight > self._half // 2:
            return
        if weight > self._left:
            self._elder, self._younger = self._younger, {}
            self._left = self._half
        self._left -= weight
        self._younger[request_id] = (body, reply_to)

    def last_reply(self, request_id: str, reply_to: str) -> bytes | None:
        """The last event of a call that ended, for the one it was sent to, while it is remembered."""
        word = self._younger.get(request_id) or self._elder.get(request_id)
        return word[0] if word is not None and word[1] == reply_to else None


class ReplyCache:
    """Sends and caches the last replies of one worker.

    Args:
        target: What carries it.
        group: Whose callers hear that the worker is there.
        mailbox: Where the worker is.
        jobs: What it has not answered yet.
        is_leaving: Whether it takes nothing new.
        spawn: Runs something in the background.
    """

    def __init__(
        self,
        target: EventTarget,
        group: str,
        mailbox: str,
        jobs: Mapping[str, Job],
        is_leaving: Callable[[], bool],
        spawn: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[Any]"],
    ) -> None:
        self._target = target
        self._group = group
        self._mailbox = mailbox
        self._jobs = jobs
        self._is_leaving = is_leaving
        self._spawn = spawn
        self._recent = Recent()
        self.is_new = self._recent.add
        """Whether this request comes for the first time. From now on it has come."""

    def conclude(self, request_id: str, reply_to: str, body: bytes) -> Awaitable[None]:
        """Send the event that ends a call, and keep it in case it does not arrive."""
        self._recent.finish(request_id, body, reply_to)
        return self._target.send(reply_to, body)

    def repeat(self, request_id: str, reply_to: str) -> "asyncio.Task[Any] | None":
        """Send the last reply of a call again to its caller, in the background; None if there is no reply."""
        word = self._recent.last_reply(request_id, reply_to)
        return None if word is None else self._spawn(self._send(reply_to, word))

    def refuse(self, request_id: str, reply_to: str, error: CallError) -> "asyncio.Task[Any]":
        """Reply in the background to a request that does not run. It may come again: forget its id."""
        self._recent.forget(request_id)
        return self.object_to(request_id, reply_to, error)

    def object_to(self, request_id: str, reply_to: str, error: CallError) -> "asyncio.Task[Any]":
        """Reply in the background to a malformed request, whatever its id stands for otherwise."""
        return self._spawn(self._send(reply_to, encode_error(request_id, error)))

    def account(self, probe: ProbePayload) -> None:
        """Say which calls are here, and repeat the last reply on those that have ended."""
        self._spawn(self._account(probe))

    async def _account(self, probe: ProbePayload) -> None:
        held: list[str] = []
        for request_id in dict.fromkeys(probe.request_ids):
            job = self._jobs.get(request_id)
            word = self._recent.last_reply(request_id, probe.reply_to)
            # To whoever made the call: for everybody else it does not exist.
            if job is not None and job.reply_to == probe.reply_to:
                held.append(request_id)
            elif word is not None:
                await self._send(probe.reply_to, word)
        leaving = self._is_leaving() and not held
        payload = AlivePayload(worker=self._mailbox, request_ids=held, leaving=leaving)
        await self._send(probe.reply_to, encode_event(CallAlive(payload=payload)))

    async def announce(self, *, leaving: bool) -> None:
        """Tell all callers of the group that this worker is there, or goes."""
        if self._target.direct:
            # A peer knows that it has one.
            return
        payload = AlivePayload(worker=self._mailbox, leaving=leaving)
        callers = self._target.topic(f"{self._group}.callers")
        await self._send(callers, encode_event(CallAlive(payload=payload)))

    async def _send(self, address: str, body: bytes) -> None:
        await undisturbed(self._target.send(address, body))


async def undisturbed(sending: Awaitable[None]) -> None:
    """Send what its receiver will ask for if it does not arrive."""
    try:
        await sending
    except TransportError as error:
        logger.debug("an answer could not be sent: %s", error)
