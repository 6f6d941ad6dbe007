"""The requests of a worker: time limits, flow control, lost callers, and the access log."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from time import time
from typing import Annotated, Any
from weakref import WeakKeyDictionary

import msgspec
from msgspec import Meta

from operations.base.concurrency import Slot
from operations.base.deadline import NEVER
from operations.base.errors import CallError, ErrorCode, TransportError, timed_out, timeout_error
from operations.base.types import Count, Seconds
from operations.calls.protocol.events import CallOffered, OfferPayload, RequestPayload, encode_event
from operations.calls.protocol.states import Outages
from operations.contract.access import Identity
from operations.contract.channel import NOTHING
from operations.contract.specs import OperationSpec, OperationType
from operations.front.credentials import CredentialResolver
from operations.front.front import Front
from operations.front.limits import Limits, call_seconds, caller_key
from operations.pubsub.base import Claim, EventTarget
from operations.registry.registry import OperationRegistry

logger = logging.getLogger("operations")
access_log = logging.getLogger("operations.access")

DEFAULT_GROUP = "operations"

DEFAULT_TIMEOUT = 30.0
"""The time limit in seconds of a call that sets none; for a subscription, of each item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Settings of `serve_calls`."""

    group: str = DEFAULT_GROUP
    """The worker group, which shares one queue: each request goes to one worker, so all should serve the same
    operations."""

    name: str = ""
    """The name of this worker in reports."""

    version: str = ""
    """The version of this worker in reports, for example `1.4.0`; also used for the service discovery of NATS."""

    concurrency: Count = 1024
    """The number of concurrent calls."""

    max_waiting: Annotated[int, Meta(ge=0)] = 16_384
    """The number of calls that may wait for a slot; further calls are rejected with `RESOURCE_EXHAUSTED`."""

    per_principal: Count | None = None
    """The largest number of running and waiting calls of one caller: of one credential, else of one identity, else of
    one mailbox."""

    front: Front | None = None
    """Limits and rules that are shared with the other entry points of a server."""

    limits: Limits | None = None
    """The rate of each caller, and of wrong credentials. The other limits have no effect: the worker and its target
    have their own."""

    address: str = ""
    """The address of the callers, for limits."""

    resolve: CredentialResolver | None = None
    """Returns the identity that a `credential` belongs to."""

    heartbeat: Seconds = 1
    """Seconds that a request may wait at the broker. A request that waited longer starts only if its caller confirms
    it, unless its operation is replayable."""

    silence: Seconds | None = None
    """Seconds for which this worker may be connected without responding, before its callers count it as lost; by
    default 15, or what a caller sets. Set it for handlers that block the interpreter for longer."""

    patience: Annotated[float, Meta(ge=0)] = 10
    """Seconds that a started mutation continues while its caller is disconnected from the broker. Queries and
    subscriptions are cancelled at once."""

    grace: Annotated[float, Meta(ge=0)] = 10
    """Seconds that running calls have to finish when the worker stops."""

    expose_errors: bool | None = None
    """Show callers the text of unexpected exceptions; by default on trusted targets only."""


MAX_UNREAD_BYTES = 4 * 1024 * 1024
"""The largest size of the unread items of one subscription, in bytes."""


class Pace:
    """Limits the unread items and bytes of a subscription."""

    def __init__(self, window: int) -> None:
        self._window = self._credit = window
        self._sent = 0
        self._unread: deque[int] = deque()
        self._unread_bytes = 0
        self._more: asyncio.Event = asyncio.Event()

    def grant(self, credit: int) -> None:
        """Set the total number of items that may be sent, which also confirms the items that were read."""
        if credit <= self._credit:
            return
        self._credit = credit
        read = credit - self._window
        while self._unread and self._sent - len(self._unread) < read:
            self._unread_bytes -= self._unread.popleft()
        self._more.set()

    def sent(self, size: int) -> None:
        """Record that an item was sent."""
        self._sent += 1
        self._unread.append(size)
        self._unread_bytes += size

    @property
    def is_full(self) -> bool:
        """Whether no more items may be sent until the reader has read some."""
        return self._sent >= self._credit or self._unread_bytes >= MAX_UNREAD_BYTES

    async def room(self) -> None:
        """Wait until another item may be sent."""
        while self.is_full:
            self._more.clear()
            await self._more.wait()


class Job(msgspec.Struct, eq=False):
    """A request in a worker."""

    request: RequestPayload
    reply_to: str

    key: str
    """The request id with its sender, so that clients cannot refer to requests of other clients."""

    size: int
    """The size of the request in bytes."""

    registry: OperationRegistry
    """The registry that runs it."""

    spec: OperationSpec | None
    """None if the worker does not know the operation."""

    replayable: bool
    """Whether the operation may run again."""

    is_stream: bool
    """Whether the request has many replies, by its operation or by the caller's expectation."""

    arrived_at: float

    queued_at: float
    """When the broker received the request, by the loop's clock."""

    ends_at: float
    """The deadline, by the loop's clock."""

    idle: float
    """The idle timeout of a subscription, in seconds."""

    expires_at: float
    """The earlier of the deadline and the end of the idle timeout."""

    identity: Identity | None
    """The caller: the owner of the credential, None until it is verified. Without a credential, the identity of the
    connection or, on a trusted target, of the request."""

    pace: Pace | None = None

    claim: Claim | None = None
    """Removes the request from its queue; None after that."""

    is_stale: bool = False
    """Whether it waited so long that it starts only if its caller confirms it."""

    confirmed: "asyncio.Future[None] | None" = None
    """Done when the caller has confirmed the request; None if the caller was not asked."""

    task: "asyncio.Task[None] | None" = None

    is_started: bool = False
    """Whether its task has started. A task that is cancelled before never starts."""

    begun: bool = False
    """Whether the operation was started."""

    answered: bool = False
    """Whether its last reply was sent; later actions of the handler are not reported to the caller."""

    replied: asyncio.Event | None = None
    """Set when its last reply was sent, for requests that arrived through a call handler."""

    heard_at: float = 0.0
    """When the caller was last known to be connected, by the loop's clock; 0 if it was not checked yet."""

    absent_since: float = NEVER
    """When the caller was first found to be disconnected, by the loop's clock."""

    counted: Mapping[str, Slot] = NOTHING
    """The slots of its caller, by the names of the caller. Used by `AdmissionQueue`."""

    began_at: float = 0.0
    """When it received a slot, by the loop's clock; 0 if it did not."""

    code: str = ""
    """The code of the error with which it ended."""

    items: int | None = None
    """The number of items that were sent; None if there are none."""

    is_lent: bool = False
    """Whether another call has its slot, while it waits for a person."""

    @property
    def principal(self) -> str:
        """The caller, if it is known on arrival."""
        if self.request.credential is not None:
            return f"by:{self.request.credential}"
        return caller_key(self.identity, self.reply_to)

    @property
    def is_suspect(self) -> bool:
        """Whether it may have killed a worker."""
        return self.request.attempt > 1

    @property
    def is_acquiring(self) -> bool:
        """Whether the request is being removed from its queue."""
        return self.is_started and self.claim is not None

    @property
    def is_offered(self) -> bool:
        """Whether the request waits for the confirmation of its caller."""
        return self.confirmed is not None and not self.confirmed.done()

    @property
    def is_mutation(self) -> bool:
        """Whether the operation is, or may be, a mutation."""
        return self.spec is None or self.spec.type is OperationType.MUTATION

    @property
    def is_safe_to_retry(self) -> bool:
        """Whether a caller can safely repeat the call; repeating a mutation that has started could run it twice."""
        return not self.begun or not self.is_mutation or self.replayable

    def offer(self, worker: str) -> bytes:
        """Return the event that asks the caller whether this worker may start a request that waited."""
        payload = OfferPayload(
            request_id=self.request.request_id,
            worker=worker,
            attempt=self.request.attempt,
            resends=self.request.resends,
        )
        return encode_event(CallOffered(payload=payload))

    def timeout_error(self) -> CallError:
        """Return the error of a job that exceeded its time limit."""
        if self.expires_at < self.ends_at:
            return timeout_error(f"no item came for {self.idle:g} seconds")
        seconds = self.expires_at - self.arrived_at
        return timed_out(self.request.operation_id, seconds, deadline=self.request.deadline)


class Served(msgspec.Struct, frozen=True, eq=False):
    """The settings with which a worker serves an operation."""

    registry: OperationRegistry
    spec: OperationSpec | None
    replayable: bool
    is_stream: bool


def time_limits(
    request: RequestPayload, age: float, served: Served, front: Front | None
) -> tuple[float, float]:
    """Return the remaining time of a request, and the time limit of each item of a subscription, in seconds.

    Args:
        request: The request.
        age: Seconds that it waited at the broker.
        served: Its operation.
        front: Provides the time limits of external requests.
    """
    limit = None
    if request.timeout_ms is not None:
        limit = request.timeout_ms / 1000 - age
    elif age and request.idle_timeout is not None and age * 1000 >= request.idle_timeout:
        limit = 0.0
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
            # A caller that grants credit and sets no time limit expects no limit.
            idle = DEFAULT_TIMEOUT
        return NEVER if limit is None else limit, idle
    if limit is None:
        default = DEFAULT_TIMEOUT if front is None else front.timeout
        limit = call_seconds(served.registry.get(request.operation_id), default)
    return limit, NEVER


def may_have_run(job: Job) -> CallError:
    """Return the error for a repeated request that must not run twice; its caller may have an outdated spec."""
    reason = f"{job.request.operation_id} may have run, and is not replayable"
    return CallError(ErrorCode.UNAVAILABLE, reason, retryable=False)


def set_after(sending: "asyncio.Task[Any] | None", replied: asyncio.Event | None) -> None:
    """Set `replied` when `sending` has ended; at once if there is no message to send."""
    if replied is None:
        return
    if sending is None:
        replied.set()
    else:
        sending.add_done_callback(lambda _: replied.set())


async def quietly(sending: Awaitable[None]) -> None:
    """Send a message and ignore failures, because its receiver requests it again."""
    try:
        await sending
    except TransportError as error:
        logger.debug("a message could not be sent: %s", error)


async def then(sending: Awaitable[None], callback: Callable[[], object]) -> None:
    """Call `callback` when a message was sent or could not be sent."""
    try:
        await sending
    finally:
        callback()


async def nothing() -> None:
    """Send no message, because the call already has its reply."""


def log_call(job: Job, group: str, now: float) -> None:
    """Log a call that has ended to `operations.access`."""
    began_at = job.began_at or now
    record = {
        "group": group,
        "operation": job.request.operation_id,
        "code": job.code or None,
        "ms": round((now - began_at) * 1000, 3),
        "queuedMs": round((began_at - job.queued_at) * 1000, 3),
        "caller": None if job.identity is None else job.identity.id,
        "requestId": job.request.request_id,
        "parentRequestId": job.request.parent_request_id,
    }
    access_log.info("%s", msgspec.json.encode(record).decode())


_BLOCKED = 1.0
"""Seconds for which the event loop may be blocked without a warning."""


_WATCHERS: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[asyncio.Event, Mapping[str, Job]]] = (
    WeakKeyDictionary()
)
"""The workers of each event loop, such as one for each WebSocket of a server; the first one watches the loop."""


async def watch_loop_lag(jobs: Mapping[str, Job]) -> None:
    """Warn when the event loop of a worker was blocked, once for all workers of the loop."""
    loop = asyncio.get_running_loop()
    watchers = _WATCHERS.setdefault(loop, {})
    is_first = asyncio.Event()
    watchers[is_first] = jobs
    try:
        if len(watchers) > 1:
            await is_first.wait()
        tick = _BLOCKED / 4
        while True:
            before = loop.time()
            await asyncio.sleep(tick)
            lag = loop.time() - before - tick
            if lag > _BLOCKED:
                suspects = sorted(
                    {
                        job.request.operation_id
                        for each in watchers.values()
                        for job in each.values()
                    }
                )
                logger.warning(
                    "the event loop was blocked for %.1f s; running then: %s",
                    lag,
                    ", ".join(suspects[:10]) or "no call that is still running",
                )
    finally:
        del watchers[is_first]
        for following in watchers:
            following.set()
            break


_CHECK_CALLERS = 0.25
"""Seconds between two checks of a caller that is missing; one that is missing in two checks has disconnected."""

_TRUST_CALLERS = 0.5
_MAX_TRUST = 2.0
_TRUST_SHARE = 8
"""Seconds for which a caller that probed its call, or was found at the broker, counts as connected: at least and at
most, and otherwise this fraction of the age of the call."""


def _trust(age: float) -> float:
    """Return for how many seconds the caller of a call of this age counts as connected."""
    return min(max(_TRUST_CALLERS, age / _TRUST_SHARE), _MAX_TRUST)


async def watch_callers(
    target: EventTarget,
    jobs: Mapping[str, Job],
    outages: Outages,
    patience: float,
    give_up: Callable[[Job, str], None],
) -> None:
    """Cancel the calls of disconnected callers with `give_up`; those that may be mutations after `patience` seconds."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(_CHECK_CALLERS)
        now = loop.time()
        # A job with a claim is still in its queue.
        old = [
            job
            for job in jobs.values()
            if job.claim is None
            and now - job.arrived_at > _CHECK_CALLERS
            and (job.absent_since != NEVER or now - job.heard_at > _trust(now - job.arrived_at))
        ]
        callers = list({job.reply_to for job in old})
        try:
            present = await asyncio.gather(*map(target.is_present, callers))
        except TransportError:
            continue
        gone = {caller for caller, there in zip(callers, present, strict=True) if not there}
        for job in old:
            is_gone = job.reply_to in gone
            job.heard_at = job.heard_at if is_gone else now
            job.absent_since = min(job.absent_since, now) if is_gone else NEVER
            # A short outage must not interrupt a mutation.
            wait = patience if job.begun and job.is_mutation else 0.0
            waited = now - job.absent_since
            is_over = waited > 0 and waited >= wait and not job.answered
            if is_over and outages.is_settled:
                # A caller that reconnects receives the error.
                give_up(job, "the caller was disconnected")
