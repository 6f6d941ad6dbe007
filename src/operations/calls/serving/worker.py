"""A worker: consumes the requests of its group from a target and runs them on a registry.

Rule 1: `serve_calls` yields when the worker receives requests. At the end of its block, running requests are finished.

`CallServer` connects its parts, which know only those before them:

    AdmissionQueue  the slots, and the calls that wait for them
    Replies         the jobs without a last reply, and their replies
    Claims          asks the caller of a request that waited whether it may start
    JobRunner       runs the jobs that have a slot
    Presence        reports to callers
    WorkerInbox     passes received events to the parts before
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from typing import Any, cast

import msgspec

from operations.base.deadline import NEVER
from operations.base.errors import CallError, ErrorCode, TransportError
from operations.base.tasks import cancel_tasks, shielded, shutdown_event
from operations.base.types import options_of
from operations.calls.protocol.events import RequestPayload
from operations.calls.protocol.services import Presence, service_operations
from operations.calls.protocol.states import Outages
from operations.calls.serving.admission import AdmissionQueue
from operations.calls.serving.claims import Claims
from operations.calls.serving.execution import JobRunner
from operations.calls.serving.inbox import WorkerInbox
from operations.calls.serving.jobs import Job, WorkerConfig, watch_callers, watch_loop_lag
from operations.calls.serving.replies import Replies
from operations.calls.serving.runs import run_verbs
from operations.front.limits import Limits
from operations.pubsub.base import Delivery, EventTarget, Receiver, WorkerStats, usable
from operations.pubsub.delivery import Recent
from operations.registry.registry import OperationRegistry

_CLOSING = 1.0
"""Seconds for cancelled handlers to end, and for last replies, when a worker stops."""

_REPLY_SECONDS = 20.0
"""Seconds before an outage was noticed in which replies may not have arrived: a silent connection is closed later."""


class CallServer(Receiver):
    """A running worker, created by `serve_calls`.

    Attributes:
        registry: The operations that it serves.
        target: Transports the requests and replies.
        group: The worker group.
        mailbox: The address of this worker.
        jobs: The requests without a last reply, by their keys.
        counters: Counts the calls.
        backlog: The number of requests that may wait at a broker that stores them.
        is_serving: Whether it accepts requests.
        grace: Seconds that running calls have to finish when the worker stops.
        reason_to_stop: The error for calls that end with the worker, instead of `UNAVAILABLE`.
    """

    def __init__(
        self, registry: OperationRegistry, target: EventTarget, config: WorkerConfig
    ) -> None:
        self.registry = registry
        self.target = target
        self.group = config.group
        self.backlog: int | None = config.concurrency + config.max_waiting
        self.is_serving, self.grace = False, config.grace
        self.reason_to_stop: CallError | None = None
        self._config = config
        self._queue = queue = AdmissionQueue(config)
        self._replies = replies = Replies(target, config, queue)
        self._claims = claims = Claims(target, replies, config.heartbeat)
        self._runner = JobRunner(registry, config, queue, replies, claims)
        self.mailbox, self.jobs, self.counters = replies.mailbox, replies.jobs, replies.counters
        self._services = OperationRegistry(
            [
                *service_operations(registry, target),
                *run_verbs(registry, expose=replies.exposes_errors),
            ]
        )
        self._presence = Presence(
            registry, target, config, replies.mailbox, lambda: replies.is_leaving
        )
        self._inbox = WorkerInbox(
            registry,
            self._services,
            target,
            config,
            queue,
            replies,
            claims,
            self._presence,
            self.stats,
        )
        self._outages = Outages()
        self._loop = asyncio.get_running_loop()
        self._watching: list[asyncio.Task[Any]] = []
        self._accepting, self._listening = AsyncExitStack(), AsyncExitStack()

    @property
    def malformed(self) -> int:
        """Messages that are not events."""
        return self._inbox.malformed

    @property
    def ignored(self) -> int:
        """Events of unknown types."""
        return self._inbox.ignored

    @property
    def duplicates(self) -> int:
        """Requests that had already been received."""
        return self._inbox.duplicates

    @property
    def queue_buckets(self) -> list[int]:
        """Calls by the time that they waited before they started; see `BUCKETS`."""
        return self._runner.queue_buckets

    def limit(self, limits: Limits) -> None:
        """Change the rate of each caller and of wrong credentials; a front that is shared has limits of its own."""
        self._runner.limit(limits)

    # ---------------------------------------------------------------------------------------- lifetime

    @property
    def active(self) -> int:
        """The number of calls that run now."""
        return self._queue.running

    @property
    def waiting(self) -> int:
        """The number of calls that wait for a slot."""
        return self._queue.waiting

    def stats(self) -> WorkerStats:
        """Return the counters as operators see them."""
        now = {"running": self.active, "waiting": self.waiting, "leaving": self._replies.is_leaving}
        return msgspec.structs.replace(self.counters, **now)

    async def start(self) -> None:
        """Listen, and consume requests from the target.

        Raises:
            TransportError: If the broker cannot be reached.
        """
        await self.listen()
        consuming = await self.target.consume(self.group, self)
        self._accepting.push_async_callback(consuming.aclose)
        self._presence.accepts = True
        if not self.target.direct:
            await self._presence.announce()
        advertised = await self.target.advertise(self.group, self.stats)
        if advertised is not None:
            self._accepting.push_async_callback(advertised.aclose)

    def capacity(self) -> int:
        """Return the number of requests that can start now."""
        return self._queue.free

    async def listen(self) -> None:
        """Subscribe to aborts, credit and probes, and announce this worker to the callers.

        Raises:
            TransportError: If the broker cannot be reached.
        """
        addresses = (self.mailbox, self.target.control(self.group))
        listening = await self.target.listen(addresses, self)
        self._listening.push_async_callback(listening.aclose)
        self._claims.connected_at = self._loop.time()
        # Callers must know a worker before it can receive their calls, to be able to detect that it is lost.
        self._replies.is_leaving = False
        revision = self.registry.revision
        self._presence.note_specs()
        if not self.target.direct:
            await self._presence.announce(arrived=True)
        self.is_serving = True
        self._watching = [
            self._replies.spawn(watch_loop_lag(self.jobs)),
            self._replies.spawn(self._presence.watch_specs(revision)),
        ]
        if not self.target.direct:
            watching = watch_callers(
                self.target, self.jobs, self._outages, self._config.patience, self._give_up
            )
            self._watching.append(self._replies.spawn(watching))

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, or until the peer of this worker disconnects; then drain.

        A second signal ends the process at once.
        """
        with shutdown_event() as shutdown:
            # Only the server side of a WebSocket has `wait_closed`, because its connection is not restored.
            wait_closed = getattr(self.target, "wait_closed", asyncio.Event().wait)
            ends = self._replies.spawn(shutdown.wait()), self._replies.spawn(wait_closed())
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cancel_tasks(*ends)
            await self.aclose()

    @shielded
    async def aclose(self) -> None:
        """Stop accepting requests, wait `grace` seconds for running calls, and end the rest with `UNAVAILABLE`.

        The error is retryable except for mutations that have started. Waiting requests are rejected at once.
        """
        was_serving, self.is_serving = self.is_serving, False
        async with AsyncExitStack() as ending:
            # A step that is cancelled ends early, but all later steps follow.
            ending.push_async_callback(self._services.aclose)
            ending.push_async_callback(self._end_tasks)
            # Requests that arrive until then are rejected in the background.
            ending.push_async_callback(self._stop_listening)
            ending.callback(self._give_up_all)
            await self._drain(was_serving)

    async def _drain(self, was_serving: bool) -> None:
        with suppress(TransportError):
            await self._accepting.aclose()
        self._replies.is_leaving, self._presence.accepts = True, False
        if was_serving and not self.target.direct:
            if self.target.is_connected:
                await self._presence.announce()
            for job in [job for job in self.jobs.values() if not (job.begun or job.is_acquiring)]:
                self._give_up(job, "the worker stops")
        with suppress(TimeoutError):
            async with asyncio.timeout(self.grace):
                await self._replies.wait_until_idle()
                had_calls = self._replies.finished_at > self._outages.lost_at - _REPLY_SECONDS
                if was_serving and had_calls and not self.target.direct:
                    # Callers that reconnect ask for their replies, and which of their requests did not start here.
                    await self._outages.settle()

    def _give_up_all(self) -> None:
        self._replies.is_leaving = True
        for job in tuple(self.jobs.values()):
            self._give_up(job, "the worker stops")
        for task in self._watching:
            task.cancel()

    async def _end_tasks(self) -> None:
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSING):
                    # The last step of a task may be to send a reply in the background.
                    while last := {*self._runner.running, *self._replies.background}:
                        await asyncio.wait(last)
        finally:
            for task in tuple(self._replies.background):
                task.cancel()
            self._replies.clear_deadlines()
        await asyncio.gather(*self._replies.background, return_exceptions=True)

    async def _stop_listening(self) -> None:
        with suppress(TransportError):
            await self._listening.aclose()
        # Free the cached replies of a closed worker that is still referenced. Until here callers may ask for them.
        self._replies.recent = Recent()

    def _give_up(self, job: Job, reason: str) -> None:
        """Cancel a job that will not be finished here."""
        if job.claim is not None:
            # Another worker will consume it from the queue.
            self._replies.drop(job)
        error = CallError(ErrorCode.UNAVAILABLE, reason, retryable=job.is_safe_to_retry)
        self._replies.stop(job, self.reason_to_stop or error)
        if not job.begun:  # the caller may ask this worker to drop the request
            self._replies.recent.forget(job.key)

    # ---------------------------------------------------------------------------------------- receiving

    def receive(self, delivery: Delivery) -> None:
        """Process an event that arrived through the target."""
        self._inbox.receive(delivery)

    async def serve(self, request: RequestPayload, reply_to: str) -> None:
        """Run a request that did not arrive through the target; return when its last reply was sent.

        Cancelling this aborts the request.
        """
        await self._inbox.serve(request, reply_to)

    def lost(self, reason: str) -> None:
        """Handle a lost connection. If the connection is the caller itself, stop its calls."""
        self._outages.lost()
        # Until the connection is restored, no request counts as new.
        self._claims.connected_at = NEVER
        if self.target.direct:
            for job in tuple(self.jobs.values()):
                self._replies.stop(job, CallError(ErrorCode.ABORTED, reason))

    def restored(self) -> None:
        """Handle a restored connection: announce this worker again."""
        self._outages.restored()
        self._claims.connected_at = self._loop.time()
        if not self.target.direct:
            self._replies.spawn(self._presence.announce(arrived=True))


@options_of(WorkerConfig)
@asynccontextmanager
async def serve_calls(
    config: WorkerConfig, registry: OperationRegistry, target: EventTarget
) -> AsyncGenerator[CallServer]:
    """Serve the operations of a registry to callers of a group for the duration of an `async with` block.

    The worker receives requests when the block starts. At its end, it stops accepting requests and finishes running
    ones. `services.list`, `services.describe`, `services.schema` and `services.check` are served too. Call it as
    `serve_calls(registry, target, **options)`, with the fields of `WorkerConfig`.

    Raises:
        TransportError: If the broker cannot be reached.
    """
    if not isinstance(cast("object", registry), OperationRegistry):
        raise TypeError(f"serve_calls takes an OperationRegistry, not {registry!r}")
    async with aclosing(CallServer(registry, usable(target), config)) as server:
        await server.start()
        yield server
