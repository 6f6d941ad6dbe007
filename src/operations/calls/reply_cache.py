"""Replies of a worker to calls that have ended or never started, and its presence messages; sent in the background.

Rule 1: the last reply of a call is cached, and sent again only to the client that made the call.
Rule 2: sending never delays the worker. A client asks again for a reply that did not arrive.
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
from operations.calls.recent import Recent
from operations.errors import CallError, TransportError
from operations.pubsub.base import EventTarget

logger = logging.getLogger("operations")


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
        word = self._recent.last_word(request_id, reply_to)
        return None if word is None else self._spawn(self._send(reply_to, word))

    def refuse(self, request_id: str, reply_to: str, error: CallError) -> "asyncio.Task[Any]":
        """Reply in the background to a request that does not run. It may come again: forget its id."""
        self._recent.forget(request_id)
        return self.object_to(request_id, reply_to, error)

    def object_to(self, request_id: str, reply_to: str, error: CallError) -> "asyncio.Task[Any]":
        """Reply in the background to a malformed request, whatever its id stands for otherwise."""
        return self._spawn(self._send(reply_to, encode_error(request_id, error)))

    def account(self, probe: ProbePayload) -> None:
        """Say which calls are here, and repeat the last word on those that have ended."""
        self._spawn(self._account(probe))

    async def _account(self, probe: ProbePayload) -> None:
        held: list[str] = []
        for request_id in dict.fromkeys(probe.request_ids):
            job = self._jobs.get(request_id)
            word = self._recent.last_word(request_id, probe.reply_to)
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
