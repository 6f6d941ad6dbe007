"""The only path for requests from outside this process: the steps that they take at every entry point of a server.

    identify -> admit (rate, concurrency, sizes) -> context (deadline, caller channel, trace)
             -> registry.execute | registry.subscribe -> public outcome

Every entry point (HTTP, MCP, WebSocket, workers, the command line) is a codec in front of these steps: it translates
and decides nothing. A step that rejects a request ends it. Nothing here depends on a web framework: requests are plain
ASGI.

Rule 1: limits apply to a caller across all entry points together.
Rule 2: an operation that a caller may not call appears not to exist, unless its scopes are advertised.
Rule 3: every credential is checked. After too many wrong credentials from an address, responses to further wrong ones
        are delayed. A valid credential is never rejected because of the failed attempts of others.
Rule 4: fail closed: an exception while checking a credential rejects the request.
Rule 5: sessions, streams and sockets end when the credential that opened them expires or is revoked.
"""

import asyncio
import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final, cast

from msgspec import json, structs, to_builtins

from operations.base.concurrency import ConcurrencyLimiter, Slot
from operations.base.errors import CallError, ErrorCode, map_error
from operations.base.json.values import to_json
from operations.base.rates import RateLimiter
from operations.base.text import printable
from operations.base.time_limit import MAX_SECONDS
from operations.base.types import JSONObject
from operations.contract.access import Identity, access_denied, check_access
from operations.contract.channel import CallerChannel
from operations.contract.context import OperationContext
from operations.contract.specs import OperationSpec
from operations.front.config import ServerConfig
from operations.front.credentials import AuthThrottle, CredentialMonitor, ended_by
from operations.front.limits import Limits
from operations.front.public_errors import Challenge, RequestError, public_wire
from operations.front.search import (
    MAX_BATCH,
    Batch,
    Gateway,
    OperationCall,
    SchemaRequest,
    Search,
)
from operations.registry.registry import OperationRegistry

logger = logging.getLogger("operations.server")

_CONCURRENT: Final = 8
"""The largest number of concurrent calls of a batch."""


def _release(slot: Slot, _task: object) -> None:
    slot.release()


class OpenStreams:
    """The streams that a server ends when it shuts down, and whether it does."""

    def __init__(self) -> None:
        self._ends: dict[object, tuple[Callable[[], None], bool]] = {}
        self.grace: float | None = None
        """Seconds that running calls have to finish; None unless the server shuts down."""
        self.on_close: Callable[[], None] = lambda: None
        """Called when the server begins to shut down."""

    @property
    def is_closing(self) -> bool:
        """Whether the server shuts down."""
        return self.grace is not None

    @contextmanager
    def watching(self, end: Callable[[], None], *, is_idle: bool = False) -> Generator[None]:
        """Call `end` if the server shuts down before the block ends.

        Args:
            end: Ends the stream.
            is_idle: End the stream as soon as the shutdown begins: it belongs to no call, or finishes its calls itself.
        """
        token = object()
        self._ends[token] = end, is_idle
        if is_idle and self.is_closing:
            end()
        try:
            yield
        finally:
            del self._ends[token]

    def idle(self) -> AbstractContextManager[asyncio.Event]:
        """End the block by cancellation when the server begins to shut down; the yielded event is set then."""
        return ended_by(lambda end: self.watching(end, is_idle=True))

    def open(self) -> None:
        """Let new streams stay open, because the server has started."""
        self.grace = None

    def close(self, grace: float = 0) -> None:
        """End all streams. If calls have a grace period, end only idle streams; new idle streams end at once."""
        self.grace = grace
        self.on_close()
        for end, is_idle in tuple(self._ends.values()):
            if is_idle or not grace:
                end()

    @property
    def is_open(self) -> bool:
        """Whether a stream is open."""
        return bool(self._ends)


class Front:
    """The shared state of a server's entry points.

    Args:
        registry: The operations that are served.
        config: The limits, times and rules of the server; the fields that concern its paths have no effect here.
    """

    def __init__(self, registry: OperationRegistry, config: ServerConfig | None = None) -> None:
        if not isinstance(cast("object", registry), OperationRegistry):
            raise TypeError(f"pass an OperationRegistry, not a {type(registry).__name__}")
        config = config or ServerConfig()
        self.registry = registry
        self.gateway = Gateway(registry)
        self.max_timeout = MAX_SECONDS
        """The longest time limit that a request may set, in seconds."""
        self.heartbeat = config.heartbeat
        self.expose_errors = config.expose_errors
        self.scopes_supported = frozenset(config.scopes_supported)
        self.challenge = Challenge(
            resource=config.public_url.rstrip("/"),
            authorization_servers=tuple(config.authorization_servers),
            scopes_supported=self.scopes_supported,
        )
        self.calls = ConcurrencyLimiter()
        self.answers = ConcurrencyLimiter("answers being read")
        """Separate slots for answers of clients, because calls that wait for an answer may hold all other slots."""
        self.streams = ConcurrencyLimiter("open streams")
        self.sockets = ConcurrencyLimiter("open WebSockets")
        self.output = ConcurrencyLimiter("response bytes that were not read")
        self.rate = RateLimiter()
        self.auth = AuthThrottle(config.limits)
        self.credentials = CredentialMonitor(admits_anonymous=config.serves_anonymous)
        self.entry = CallerChannel(serves_anonymous=self.serves_anonymous)
        """The channel of a call from an entry point that returns only the result."""
        self.open_streams = OpenStreams()
        self.configure(config.limits, timeout=config.timeout)

    def configure(self, limits: Limits, *, timeout: float) -> None:
        """Change the limits while calls run."""
        self.limits = limits
        self.timeout = timeout
        self.gateway.max_query = limits.query_characters
        self.calls.configure(limits.calls, limits.calls_per_caller)
        self.answers.configure(limits.calls, limits.calls_per_caller)
        self.streams.configure(limits.streams, limits.streams_per_caller)
        self.sockets.configure(limits.streams, limits.streams_per_caller)
        self.output.configure(limits.output_bytes, limits.output_bytes_per_caller)
        self.rate.configure(limits.rate_per_caller, limits.burst)
        self.auth.configure(limits)

    def serves_anonymous(self) -> bool:
        """Return whether requests without a credential are served."""
        return self.credentials.admits_anonymous

    def admit(self, caller: str, *, is_stream: bool = False) -> Slot:
        """Count a call or a stream against the rate limit of its caller, and return a slot for it.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` beyond a limit.
        """
        self.rate.spend(caller)
        return (self.streams if is_stream else self.calls).hold(caller)

    def enforce_visible(
        self, spec: OperationSpec, identity: Identity | None, *, path: str = ""
    ) -> None:
        """Reject a caller that may not call an operation. `path` is what an HTTP client asked.

        Raises:
            CallError: `ACCESS_DENIED` if the operation's scopes are advertised, else the same error as for an unknown
                operation.
        """
        access = spec.access_control
        if check_access(access, identity, spec.id, authority=spec.authority):
            return
        scopes = {*access.required_scopes, *(access.required_scopes_any or ())}
        # For the operator only: callers cannot distinguish a hidden operation from an unknown one.
        caller = "a caller without identity" if identity is None else printable(identity.id)
        grant = None if identity is None else identity.grant
        if grant is not None and not grant.covers(spec.id, authority=spec.authority):
            logger.info("%s may not call %s: its grant does not cover it", caller, spec.id)
        else:
            needed = json.encode(access).decode()
            logger.info("%s may not call %s, which requires %s", caller, spec.id, needed)
        if not scopes or not scopes <= self.scopes_supported:
            raise self.registry.not_found(spec.id, OperationContext(identity=identity))
        denied = access_denied(spec.id)
        if identity is None:
            raise denied
        needed = " ".join(sorted(scopes))
        challenge = self.challenge.at(path).header(error="insufficient_scope", scope=needed)
        raise RequestError(403, denied.code, denied.message, headers=[challenge])

    async def answer(
        self, request: Search | SchemaRequest | Batch, context: OperationContext, caller: str
    ) -> JSONObject:
        """Answer a request to the gateway: search, describe an operation, or run several calls.

        Raises:
            CallError: If the request cannot be served.
        """
        if isinstance(request, Search):
            found = await self.gateway.search(context=context, **structs.asdict(request))
            return {"operations": to_builtins(found)}
        if isinstance(request, SchemaRequest):
            return self.gateway.schema(request.operation, context, output=request.output)
        return {"results": await self.batch(request.calls, context, caller)}

    async def batch(
        self, calls: Sequence[OperationCall], context: OperationContext, caller: str
    ) -> list[JSONObject]:
        """Run several calls independently; return `{"envelope": ...}` or `{"error": ...}` for each, in order.

        Each call counts as one request; the first was counted when the batch was admitted. The calls run one after the
        other in the slot of the batch, and a few at a time in further slots that are free.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if there are too many calls; none is run then.
        """
        if len(calls) > MAX_BATCH:
            message = f"a batch has at most {MAX_BATCH} calls, not {len(calls)}"
            # Without Retry-After, because a retry cannot succeed.
            raise RequestError(429, ErrorCode.RESOURCE_EXHAUSTED, message)
        try:
            self.rate.spend(caller, len(calls), paid=1)
        except CallError as error:
            if error.retryable:
                raise
            raise RequestError(429, error.code, error.message) from None
        waiting, results = iter(enumerate(calls)), [dict[str, Any]() for _ in calls]

        async def work() -> None:
            for number, call in waiting:
                results[number] = await self._outcome(call, context)

        async with asyncio.TaskGroup() as group:
            group.create_task(work())
            for _ in range(min(len(calls), _CONCURRENT, self.calls.free(caller) + 1) - 1):
                # The task inherits the slot, so that only its call returns the slot while it waits for a person.
                slot = self.calls.hold(caller)
                group.create_task(work()).add_done_callback(partial(_release, slot))
        return results

    async def _outcome(self, call: OperationCall, context: OperationContext) -> JSONObject:
        """Run one call of a batch."""
        try:
            self.find(call.operation, context.identity)
            envelope = await self.gateway.call(call.operation, call.input, context)
            return {"envelope": to_json(envelope.to_wire())}
        except Exception as error:  # noqa: BLE001 - a failed call must not end the others
            wire = public_wire(map_error(error), context.request_id, expose=self.expose_errors)
            return {"error": wire}

    def find(self, operation_id: str, identity: Identity | None) -> OperationSpec:
        """Return the spec of an operation that a caller may call.

        Raises:
            CallError: `OPERATION_NOT_FOUND` or `ACCESS_DENIED`.
        """
        spec = self.registry.get_spec(operation_id)
        if spec is None:
            raise self.registry.not_found(operation_id, OperationContext(identity=identity))
        self.enforce_visible(spec, identity)
        return spec
