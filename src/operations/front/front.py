"""The steps that every external call takes, for all entry points of one server.

Rule 1: limits count per caller across all entry points together.
Rule 2: an operation that a caller may not call looks as if it did not exist, unless its scopes are advertised.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from operations._time_limits import MAX_SECONDS, held_slot
from operations.access import Identity, access_denied, check_access
from operations.context import ENTRY, NOTHING, CallerChannel, OperationContext
from operations.errors import CallError
from operations.front.identity import AuthThrottle, CredentialMonitor
from operations.front.limits import ConcurrencyLimiter, Limits, RateLimiter, Slot
from operations.front.public_errors import Challenge, RequestError, public_wire
from operations.front.search import BatchCall, Gateway
from operations.registry import OperationRegistry
from operations.specs import OperationSpec
from operations.types import JSONObject


class Front:
    """The shared state of a server's entry points.

    Args:
        registry: The operations that are served.
        limits: On sizes, times and rates.
        timeout: Seconds a call may take, unless the request asks for another time.
        max_timeout: The longest time a request may ask for, in seconds.
        expose_errors: Show callers the text of unexpected exceptions.
        scopes_supported: Scopes that are publicly known; operations that require only these are not hidden.
        anonymous: Whether requests without a credential are served.
        public_url: The address under which clients reach the server.
        authorization_servers: The addresses of the servers that issue tokens for `public_url`.
    """

    def __init__(
        self,
        registry: OperationRegistry,
        limits: Limits | None = None,
        *,
        timeout: float = 30,
        max_timeout: float = MAX_SECONDS,
        expose_errors: bool = False,
        scopes_supported: Collection[str] = (),
        anonymous: bool = True,
        public_url: str = "",
        authorization_servers: Collection[str] = (),
    ) -> None:
        self.registry = registry
        self.limits = limits = limits or Limits()
        self.gateway = Gateway(registry, admit=self.find, max_query=limits.query_characters)
        self.timeout = timeout
        self.max_timeout = max_timeout
        self.heartbeat = 15.0
        """Seconds without an item before a stream sends a comment, so that proxies keep the connection open."""
        self.expose_errors = expose_errors
        self.scopes_supported = frozenset(scopes_supported)
        self.anonymous = anonymous
        self.challenge = Challenge(
            resource=public_url.rstrip("/"),
            authorization_servers=tuple(authorization_servers),
            scopes_supported=self.scopes_supported,
        )
        self.calls = ConcurrencyLimiter(limits.calls, limits.calls_per_caller)
        self.answers = ConcurrencyLimiter(
            limits.calls, limits.calls_per_caller, "answers being read"
        )
        """Slots for answers of clients whose calls hold all other slots while they wait for them."""
        self.streams = ConcurrencyLimiter(limits.streams, limits.streams_per_caller, "open streams")
        self.sockets = ConcurrencyLimiter(
            limits.streams, limits.streams_per_caller, "open WebSockets"
        )
        self.output = ConcurrencyLimiter(
            limits.output_bytes, limits.output_bytes_per_caller, "response bytes that were not read"
        )
        self.rate = RateLimiter(limits.rate_per_caller, limits.burst)
        self.auth = AuthThrottle(limits)
        self.credentials = CredentialMonitor()

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

    def enter(self, caller: str, *, is_stream: bool = False) -> Slot:
        """Return a slot for a call or a stream.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if none is free.
        """
        slot = (self.streams if is_stream else self.calls).enter(caller)
        held_slot.set(slot.lent)
        return slot

    def admit(self, caller: str, *, is_stream: bool = False) -> Slot:
        """Count a call or a stream against its caller's rate, and return a slot for it.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` beyond a limit.
        """
        self.rate.spend(caller)
        return self.enter(caller, is_stream=is_stream)

    def context(
        self,
        identity: Identity | None,
        *,
        deadline: float | None,
        metadata: Mapping[str, Any] = NOTHING,
        channel: CallerChannel = ENTRY,
        trusted: bool = False,
        whole: bool = False,
    ) -> OperationContext:
        """Return the context of one call; `deadline` is in milliseconds since the epoch.

        Only the command line sets `trusted`, for the operator, and `whole`: it cannot come back with a cursor.
        """
        return OperationContext(
            identity=identity,
            deadline=deadline,
            metadata=metadata,
            channel=channel,
            trusted=trusted,
            whole=whole,
            registry=self.registry,
        )

    def timeout_of(self, spec: OperationSpec) -> float:
        """Return the seconds that a call of an operation may take, unless the request asks for another time.

        That is the operation's own limit, or the longer one of the default and of the source it was imported from.
        """
        operation = self.registry.get(spec.id)
        if operation is None:
            return self.timeout
        if operation.timeout is not None:
            return operation.timeout
        return max(self.timeout, operation.source_timeout or 0)

    def enforce_visible(self, spec: OperationSpec, identity: Identity | None) -> None:
        """Reject a caller that may not call an operation.

        Raises:
            CallError: `ACCESS_DENIED` if the operation's scopes are advertised, else `OPERATION_NOT_FOUND` exactly as
                for an operation that does not exist.
        """
        access = spec.access_control
        if check_access(access, identity, spec.id):
            return
        scopes = {*access.required_scopes, *(access.required_scopes_any or ())}
        if not scopes or not scopes <= self.scopes_supported:
            raise self.registry.not_found(spec.id, OperationContext(identity=identity))
        denied = access_denied(spec.id)
        if identity is None:
            raise denied
        needed = " ".join(sorted(scopes))
        challenge = self.challenge.header(error="insufficient_scope", scope=needed)
        raise RequestError(403, denied.code, denied.message, headers=[challenge])

    async def batch(
        self, calls: Sequence[BatchCall], context: OperationContext, caller: str
    ) -> list[JSONObject]:
        """Run several calls; each counts as one request, and the first is paid for.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if these are too many; then none is run.
        """
        try:
            self.rate.spend(caller, len(calls), paid=1)
        except CallError as error:
            if error.retryable:
                raise
            # Sending it again cannot help, so the response has no Retry-After.
            raise RequestError(429, error.code, error.message) from None

        def describe(error: CallError) -> JSONObject:
            return public_wire(error, context.request_id, expose=self.expose_errors)

        return await self.gateway.batch(calls, context, describe=describe)

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
