"""Requests that waited: whether this worker may start them, or another one may have.

Rule 1: a request is removed from the queue of its broker before it starts.
Rule 2: a request that waited longer than a heartbeat, or that was queued before the worker connected, may already have
        run. Unless its operation is replayable, it starts only if its caller confirms it. The same applies to every
        request on a target with signed messages, where other clients may repeat messages.
"""

import asyncio

from operations.base.errors import CallError, ErrorCode
from operations.calls.serving.jobs import Job
from operations.calls.serving.replies import Replies
from operations.pubsub.base import EventTarget
from operations.pubsub.signing import SignedTarget


class Claims:
    """Claims the requests of one worker before they start.

    Args:
        target: Transports the requests.
        replies: Ends the requests that another worker handles.
        heartbeat: Seconds for which a request that waits counts as new.

    Attributes:
        connected_at: When the worker was last connected, by the loop's clock; `NEVER` while it is not.
    """

    def __init__(self, target: EventTarget, replies: Replies, heartbeat: float) -> None:
        self.connected_at = 0.0
        self._target = target
        self._replies = replies
        self._heartbeat = heartbeat
        self._loop = asyncio.get_running_loop()

    async def prepare(self, job: Job) -> None:
        """Remove a request from its queue.

        If it waited long, or it is not certain which worker has removed it, ask its caller.
        """
        if (claim := job.claim) is not None:
            is_ours = await claim.acquire(alone=not job.replayable or job.request.attempt > 1)
            job.claim = None
            is_disputed = claim.is_disputed and not job.replayable
            if not job.answered and (not is_ours or (is_disputed and self._replies.is_leaving)):
                self._replies.drop(job)
            elif self._replies.is_leaving:
                # The caller sends it to another worker.
                self._replies.refuse(job, CallError(ErrorCode.UNAVAILABLE, "the worker stops"))
            waited = self._loop.time() - job.arrived_at
            job.is_stale |= is_disputed or (not job.replayable and self.is_stale(waited))
        if job.is_stale and not job.answered:
            job.confirmed = self._loop.create_future()
            await self._replies.send(job.reply_to, job.offer(self._replies.mailbox))
            await job.confirmed

    def is_stale(self, age: float) -> bool:
        """Return whether a request that waited for `age` seconds may be one that has run already."""
        if isinstance(self._target, SignedTarget):
            # Clients that can write to the broker could send the request to several workers.
            return True
        if self._target.broadcasts_replies:
            # Such a target stores no requests, and callers of the original protocol cannot confirm one.
            return False
        # A negative age is not known.
        is_recent = 0 <= age <= self._heartbeat
        return not is_recent or self._loop.time() - age < self.connected_at
