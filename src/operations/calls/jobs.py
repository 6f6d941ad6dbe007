"""The requests in a worker: their times and callers, how far they may run ahead, which lost their callers, and counts.

The counts name no operation, caller or input.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from operator import is_not
from time import time
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from operations._pipeline.plan import BUCKETS
from operations.access import Identity
from operations.calls.events import RequestPayload
from operations.calls.states import NEVER
from operations.errors import (
    CallError,
    ErrorCode,
    NotSentError,
    TransportError,
    timed_out,
    timeout_error,
)
from operations.front import CredentialResolver, Front
from operations.front.limits import Limits, call_seconds
from operations.pubsub.base import Claim, EventTarget, WorkerStats
from operations.registry import OperationRegistry
from operations.specs import OperationSpec, OperationType
from operations.types import Count, Seconds

logger = logging.getLogger("operations")
access_log = logging.getLogger("operations.access")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """How `serve_calls` serves a registry."""

    group: str = "operations"
    """The workers that share one queue: each request goes to one of them, so all should serve the same operations."""

    name: str = ""
    """The name of this worker in the view of operators."""

    version: str = ""
    """The version of this worker for operators, for example `1.4.0`; also in the service discovery of NATS."""

    concurrency: Count = 1024
    """Calls that run at a time."""

    queue: Annotated[int, Meta(ge=0)] = Limits().queue
    """Calls that wait for a slot; further calls are rejected with `RESOURCE_EXHAUSTED`."""

    per_principal: Count | None = None
    """Calls of one caller at a time, running and waiting: of one credential, of one identity, and of one mailbox if
    there is neither."""

    front: Front | None = None
    """Limits and rules that are shared with the other entry points of a server."""

    address: str = ""
    """The address of the callers, for these limits."""

    resolve: CredentialResolver | None = None
    """Returns the identity that a `credential` belongs to."""

    heartbeat: Seconds = 1
    """Seconds a request may wait at the broker. An older one of an operation that is not replayable begins only if its
    caller confirms it."""

    patience: Annotated[float, Meta(ge=0)] = 10
    """Seconds that a mutation that has begun goes on while its caller is disconnected from the broker. Queries and
    subscriptions are cancelled at once."""

    grace: Annotated[float, Meta(ge=0)] = 10
    """Seconds that running calls have to finish when the worker stops."""

    expose_errors: bool | None = None
    """Show callers the text of unexpected exceptions; by default on trusted targets only."""

    @property
    def limits(self) -> Limits:
        """The limits of a worker, which lets calls wait instead of rejecting them at once."""
        most = self.concurrency + self.queue
        return Limits(
            calls=self.concurrency,
            queue=self.queue,
            calls_per_caller=most if self.per_principal is None else self.per_principal,
        )


MAX_UNREAD_BYTES = 4 * 1024 * 1024
"""The limit for unread items of one subscription."""


class Pace:
    """How far a subscription may run ahead of its reader: so many items, and so many bytes."""

    def __init__(self, window: int | None) -> None:
        self._window = window or 0
        self._credit = window
        self._sent = 0
        self._unread: deque[int] = deque()
        self._unread_bytes = 0
        self._more: asyncio.Event = asyncio.Event()

    def grant(self, credit: int) -> None:
        """Accept the total number of items that may be sent, which also confirms those that were read."""
        if self._credit is None or credit <= self._credit:
            return
        self._credit = credit
        read = credit - self._window
        while self._unread and self._sent - len(self._unread) < read:
            self._unread_bytes -= self._unread.popleft()
        self._more.set()

    def sent(self, size: int) -> None:
        """An item went out."""
        self._sent += 1
        if self._credit is not None:
            self._unread.append(size)
            self._unread_bytes += size

    @property
    def is_full(self) -> bool:
        """Whether the reader has to read before one more item may go out."""
        return self._credit is not None and (
            self._sent >= self._credit
            or (self._unread_bytes >= MAX_UNREAD_BYTES and bool(self._unread))
        )

    async def room(self) -> None:
        """Wait until one more item may go out."""
        while self.is_full:
            self._more.clear()
            await self._more.wait()


DEFAULT_TIMEOUT = 30.0
"""Seconds for a request without a time limit; for each item if it is a subscription."""


class Job(msgspec.Struct, eq=False):
    """A request in a worker."""

    request: RequestPayload
    reply_to: str

    key: str
    """Its id with its sender: clients cannot refer to the requests of others."""

    size: int
    """Bytes it holds while it waits."""

    registry: OperationRegistry
    """The registry that runs it."""

    spec: OperationSpec | None
    """None if the operation is unknown here."""

    replayable: bool
    """Whether the operation may run again."""

    is_stream: bool
    """Whether it has many replies: by its operation, or because its caller expects them."""

    arrived_at: float

    queued_at: float
    """When the broker received the request, by the loop's clock."""

    ends_at: float
    """Its deadline, by the loop's clock."""

    idle: float
    """Seconds for each item of a subscription."""

    expires_at: float
    """The earlier one of the deadline and the end of the idle time."""

    identity: Identity | None
    """The caller, if the request has no credential: that of the connection or, on a trusted target, of the request."""

    pace: Pace | None = None

    claim: Claim | None = None
    """Removes the request from its queue; None once that was done."""

    is_stale: bool = False
    """Whether it waited so long that it begins only if its caller confirms it."""

    confirmed: "asyncio.Future[None] | None" = None
    """Done when the caller has confirmed it; None if it is not asked."""

    task: "asyncio.Task[None] | None" = None

    is_started: bool = False
    """Whether its task runs. A task that is cancelled before never does."""

    begun: bool = False
    """Whether the operation was started."""

    answered: bool = False
    """Whether its last reply was sent. The caller does not see what its handler does afterwards."""

    replied: asyncio.Event | None = None
    """Set when its last reply was sent, for requests that the program itself received."""

    absent_since: float = NEVER
    """When the caller was first found to have left, by the loop's clock."""

    caller: str = ""
    """The key by which the limits of a server count the caller, once it is known."""

    counted_as: tuple[str, ...] = ()
    """For admission."""

    began_at: float = 0.0
    """When it got a slot, by the loop's clock; 0 if it did not."""

    code: str = ""
    """The code of the error with which it ended."""

    identity_id: str | None = None
    """The caller, once it is known."""

    @property
    def principal(self) -> str:
        """The caller, if it is known when the request arrives."""
        if self.request.credential is not None:
            return f"by:{self.request.credential}"
        return f"at:{self.reply_to}" if self.identity is None else principal_of(self.identity)

    @property
    def is_offered(self) -> bool:
        """Whether it waits for the confirmation of its caller."""
        return self.confirmed is not None and not self.confirmed.done()

    @property
    def is_mutation(self) -> bool:
        """Whether the operation changes something, or may do so."""
        return self.spec is None or self.spec.type is OperationType.MUTATION

    @property
    def is_safe_to_retry(self) -> bool:
        """Whether the call can be sent again if it ends here: retrying a mutation that has begun could run it twice."""
        return not self.begun or not self.is_mutation or self.replayable

    def timeout_error(self) -> CallError:
        """Return the error of a job whose time has run out."""
        if self.expires_at < self.ends_at:
            return timeout_error(f"no item came for {self.idle:g} seconds")
        seconds = self.expires_at - self.arrived_at
        return timed_out(self.request.operation_id, seconds, deadline=self.request.deadline)


class Served(msgspec.Struct, frozen=True, eq=False):
    """How a worker serves an operation."""

    registry: OperationRegistry
    spec: OperationSpec | None
    replayable: bool
    is_stream: bool

    @classmethod
    def of(cls, registry: OperationRegistry, spec: OperationSpec | None) -> "Served":
        """Return how an operation is served; `spec` is None if it is not registered."""
        if spec is None:
            # It is unknown here, or a remote has it and knows whether it is replayable.
            return cls(registry, None, not registry.has_remote, False)
        return cls(registry, spec, spec.replayable, spec.type is OperationType.SUBSCRIPTION)


def time_limits(
    request: RequestPayload, served: Served, front: Front | None
) -> tuple[float, float]:
    """Return the seconds that a request may take, and those for each item of a subscription.

    Args:
        request: The request.
        served: Its operation.
        front: Its time limits count if the request is from outside.
    """
    limit = None
    if request.timeout_ms is not None:
        limit = request.timeout_ms / 1000
    elif request.deadline is not None:
        limit = request.deadline / 1000 - time()
    if limit is not None and front is not None:
        limit = min(limit, front.max_timeout)
    is_stream = served.is_stream or request.credit is not None
    if is_stream and (limit is None or request.idle_timeout is not None):
        idle = NEVER
        if request.idle_timeout is not None:
            idle = request.idle_timeout / 1000
        elif request.credit is None:
            # A caller that grants credit and sets no time limit wants none.
            idle = DEFAULT_TIMEOUT
        return NEVER if limit is None else limit, idle
    if limit is None:
        limit = DEFAULT_TIMEOUT
        if front is not None and served.spec is not None:
            limit = call_seconds(served.registry.get(request.operation_id), front.timeout)
    return limit, NEVER


def principal_of(identity: Identity) -> str:
    """Return the key by which calls of a known identity are counted."""
    return f"id:{identity.key}"


class RefusedError(Exception):
    """A call that was not started; its id may come again."""

    def __init__(self, error: CallError) -> None:
        super().__init__(str(error))
        self.error = error


def may_have_run(job: Job) -> CallError:
    """Return the error of a repeated request that must not run twice: its caller may have an outdated spec."""
    reason = f"{job.request.operation_id} may have run, and is not replayable"
    return CallError(ErrorCode.UNAVAILABLE, reason, retryable=False)


def aged(request: RequestPayload, age: float) -> RequestPayload:
    """Return a request without the time that it waited at the broker."""
    spent = age * 1000
    left = None
    if request.timeout_ms is not None:
        left = request.timeout_ms - spent
    elif request.idle_timeout is not None and spent >= request.idle_timeout:
        left = 0.0
    return request if left is None else msgspec.structs.replace(request, timeout_ms=left)


def set_after(sending: "asyncio.Task[Any] | None", replied: asyncio.Event | None) -> None:
    """Set `replied` when `sending` has ended; at once if there is nothing to send."""
    if replied is None:
        return
    if sending is None:
        replied.set()
    else:
        sending.add_done_callback(lambda _: replied.set())


async def quietly(sending: Awaitable[None]) -> None:
    """Send a message that its receiver asks for again if it does not arrive."""
    try:
        await sending
    except TransportError as error:
        logger.debug("a reply could not be sent: %s", error)


async def then(sending: Awaitable[None], callback: Callable[[], object]) -> None:
    """Call `callback` once a message is sent, or cannot be."""
    try:
        await sending
    finally:
        callback()


async def nothing() -> None:
    """Send nothing: the call has its reply already."""


def exhausted(reason: str) -> CallError:
    """Return the error of a request beyond the limits of a worker."""
    return CallError(ErrorCode.RESOURCE_EXHAUSTED, reason, retryable=True)


class WorkerCounters:
    """Counts the calls of one worker, and logs each to `operations.access` if that logger is enabled.

    Attributes:
        queue_buckets: Calls by the time that they waited before they began; see `BUCKETS`.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._clock = asyncio.get_running_loop().time
        self._started_at = int(time() * 1000)
        self.finished = self.failed = self.refused = 0
        self.seconds = self.queue_seconds = 0.0
        self.queue_buckets = [0] * (len(BUCKETS) + 1)

    def refuse(self, job: Job) -> None:
        """Count a call that is rejected."""
        self.refused += 1
        if access_log.isEnabledFor(logging.INFO):
            self.log(job, 0.0)

    def log(self, job: Job, ran: float) -> None:
        """Log a call that has ended."""
        waited = (job.began_at or self._clock()) - job.queued_at
        record = {
            "group": self._config.group,
            "operation": job.request.operation_id,
            "code": job.code or None,
            "ms": round(ran * 1000, 3),
            "queuedMs": round(waited * 1000, 3),
            "caller": job.identity_id,
            "requestId": job.request.request_id,
        }
        access_log.info("%s", msgspec.json.encode(record).decode())

    def stats(self, running: int, waiting: int, *, leaving: bool) -> WorkerStats:
        """Return the counters as operators see them."""
        return WorkerStats(
            name=self._config.name,
            version=self._config.version,
            started_at=self._started_at,
            concurrency=self._config.concurrency,
            running=running,
            waiting=waiting,
            finished=self.finished,
            failed=self.failed,
            refused=self.refused,
            seconds=round(self.seconds, 6),
            queue_seconds=round(self.queue_seconds, 6),
            leaving=leaving,
        )


async def is_there(target: EventTarget, address: str) -> bool:
    """Return whether a process listens at `address`; False for a malformed address.

    Raises:
        TransportError: If that cannot be known now.
    """
    try:
        return await target.is_present(address)
    except NotSentError:
        if target.is_connected:
            return False
        raise


_CHECK_CALLERS = 0.25
"""Seconds between two checks of the callers; a caller that misses two has left."""


async def abandoned_jobs(target: EventTarget, jobs: Mapping[str, Job]) -> AsyncGenerator[Job]:
    """Return the jobs of a worker whose callers have left, again in each check until they end."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(_CHECK_CALLERS)
        now = loop.time()
        # A job that has a claim is still in its queue.
        old = [
            job
            for job in jobs.values()
            if job.claim is None and now - job.arrived_at > _CHECK_CALLERS
        ]
        if not old or not target.is_connected:
            continue
        callers = list({job.reply_to for job in old})
        try:
            present = await asyncio.gather(*(is_there(target, caller) for caller in callers))
        except TransportError:
            continue
        gone = {caller for caller, there in zip(callers, present, strict=True) if not there}
        for job in old:
            if job.reply_to not in gone:
                job.absent_since = NEVER
            elif job.absent_since == NEVER:
                job.absent_since = now
            elif not job.answered:
                yield job


_BLOCKED = 1.0
"""Seconds for which the event loop may be blocked without a warning."""


async def watch_loop_lag(jobs: Mapping[str, Job]) -> None:
    """Warn when the event loop of a worker was blocked."""
    loop = asyncio.get_running_loop()
    tick = _BLOCKED / 4
    while True:
        before = loop.time()
        await asyncio.sleep(tick)
        lag = loop.time() - before - tick
        if lag > _BLOCKED:
            suspects = sorted({job.request.operation_id for job in jobs.values()})
            logger.warning(
                "the event loop was blocked for %.1f s; running then: %s",
                lag,
                ", ".join(suspects[:10]) or "nothing that still runs",
            )


async def spec_changes(registry: OperationRegistry, seconds: float) -> AsyncGenerator[None]:
    """Yield when operations were registered, replaced or removed; look every `seconds`."""
    known = registry.specs()
    while True:
        await asyncio.sleep(seconds)
        specs = registry.specs()
        if len(specs) != len(known) or any(map(is_not, specs, known)):
            known = specs
            yield
