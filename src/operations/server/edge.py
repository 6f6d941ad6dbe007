"""What every endpoint of one app shares, and the steps every request takes.

    who asks -> is there room -> read -> call -> reply

Rule 1: each step can refuse, and then no later one happens.
Rule 2: an endpoint gives a `Reply`, sends its response itself and gives none, or raises; turning errors into
        responses happens here alone.
Rule 3: the request's own task does the work. When its time is over, or its client has left, the task is cancelled;
        the answer is given in time even if the work goes on.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from time import time
from typing import Any, TypeAlias

import msgspec
from starlette.requests import HTTPConnection
from starlette.types import Receive, Scope, Send

from operations._rates import Gate, Rate
from operations._sign_ins import RefusedError, SignIns, address_of, resolved, shown_in
from operations._watch import Ahead, Watch
from operations._words import in_seconds
from operations.access import Identity
from operations.context import CLOSED, NOTHING, Door, OperationContext
from operations.errors import CallError, map_error, timed_out, timeout_error
from operations.gateway import Gateway
from operations.registry import OperationRegistry
from operations.server.faults import (
    ClientLeftError,
    Header,
    malformed,
    refused_credential,
    slow_body,
    unsupported,
)
from operations.server.identity import IdentityResolver
from operations.server.limits import Limits, read_body
from operations.server.replies import Reply, error_reply
from operations.server.sessions import COOKIE, Sessions
from operations.specs import OperationSpec

logger = logging.getLogger("operations.server")

IDENTITY = "operations.identity"
"""Where the scope of a request holds who asks, for apps mounted here."""

BY_COOKIE = "operations.by_cookie"
"""Set in the scope of a request whose sender is known by a session alone."""

REQUEST_ID = "operations.request_id"

_COOKIE = COOKIE.encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How an app treats its requests."""

    timeout: float = 30
    """Seconds a call may take, unless the request says otherwise (`Operations-Timeout`, milliseconds)."""

    max_timeout: float = 600
    """The most a request may say."""

    heartbeat: float = 15
    """Seconds of silence on a stream before a comment is sent, so that nobody on the way gives up."""

    expose_errors: bool = False
    """Show outsiders the text of unexpected exceptions."""

    limits: Limits = field(default_factory=Limits)


class Visit:
    """One request on its way."""

    __slots__ = (
        "_context", "caller", "headers", "identity", "is_answered", "receive", "scope", "seconds", "send", "spec",
        "started", "watch",
    )  # fmt: skip

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, insist: Callable[["Visit"], None]
    ) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.started = time()
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.watch = Watch(lambda: insist(self))
        self.identity: Identity | None = None
        self._context: OperationContext | None = None

        self.spec: OperationSpec | None = None
        """The operation that is called, once that is known."""

        self.caller = ""
        """By whom limits are counted, once that is known."""

        self.seconds: float | None = None
        """How long it may take, once that is known."""

        self.is_answered = False
        """Whether the answer was given while the work was still under way."""

    @property
    def context(self) -> OperationContext:
        """The context of the call that the request makes; before it is admitted, one for nobody."""
        if self._context is None:
            self._context = OperationContext()
        return self._context

    def identified(self, identity: Identity | None) -> None:
        """Note who asks."""
        self.identity = identity
        self.caller = caller_of(self.scope, identity)

    def admitted(self, context: OperationContext) -> None:
        """Note what the request's call knows."""
        self._context = context


def caller_of(scope: Scope, identity: Identity | None) -> str:
    """By whom limits are counted: an identity, or an address."""
    if identity is not None:
        return f"id:{identity.id}"
    return f"at:{address_of(scope.get('client'))}"


Endpoint: TypeAlias = Callable[[Visit], Awaitable[Reply | None]]


class Edge:
    """The shared part of an app.

    Args:
        registry: What is served.
        resolver: Who asks; None lets nobody sign in.
        settings: How requests are treated.
    """

    def __init__(
        self,
        registry: OperationRegistry,
        resolver: IdentityResolver | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.registry = registry
        self.gateway = Gateway(registry)
        self.settings = settings or Settings()
        self.resolver = resolver
        self.sessions = Sessions()
        limits = self.settings.limits
        self.calls = Gate(limits.calls, limits.calls_per_caller)
        self.streams = Gate(limits.streams, limits.streams_per_caller)
        self.rate = Rate(limits.rate_per_caller, limits.burst)
        self.sign_ins = SignIns(
            limits.guesses_per_address,
            limits.guesses,
            places=limits.calls,
            places_per_address=limits.calls_per_caller,
        )

    async def serve(self, scope: Scope, receive: Receive, send: Send, endpoint: Endpoint) -> None:
        """Take one request through all steps and send what comes out."""
        visit = Visit(scope, receive, send, self._answer_late)
        watch = visit.watch
        try:
            reply = await endpoint(visit)
        except CallError as error:
            reply = self.failure(error, visit)
        except ClientLeftError:
            reply = None
        except asyncio.CancelledError:
            if not (watch.is_late or watch.is_left) or watch.stop():
                raise
            reply = self._ended(visit)
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets an answer
            unexpected = map_error(error)
            unexpected.__cause__ = error
            reply = self.failure(unexpected, visit)
        watch.stop()
        if reply is not None and not visit.is_answered:
            scope[REQUEST_ID] = visit.context.request_id
            await reply.send(send)

    def _ended(self, visit: Visit) -> Reply | None:
        """The answer to a request that the watch ended: none where the client left."""
        if visit.watch.is_left:
            return None
        if visit.watch.is_reading:
            return self.failure(slow_body(), visit)
        return self.failure(_too_late(visit), visit)

    def _answer_late(self, visit: Visit) -> None:
        """Answer although the work is still under way: it was cancelled, and takes no notice."""
        visit.is_answered = True
        visit.context.abort_nested()
        reply = self.failure(_too_late(visit), visit)
        self.registry.keep(asyncio.ensure_future(reply.send(visit.send)))

    async def identify(self, visit: Visit) -> Identity | None:
        """Who asks; also noted in the scope. The request's time counts, and its client has to stay.

        Raises:
            CallError: If that takes too long, or too many are being asked for at a time.
            RequestError: 401 if a credential does not hold, or finding out failed.
        """
        identity = None
        if self.resolver is not None:
            watch, ahead = visit.watch, Ahead(visit.receive)
            visit.seconds = self._seconds(visit.headers, self.settings.timeout)
            watch.until(visit.seconds, ahead.look)
            identity = await self.identity_of(visit.scope, visit.headers)
            if watch.is_left:
                raise ClientLeftError
            if watch.is_late:
                raise _too_late(visit)
            watch.rest()
            visit.receive = ahead.receive
        visit.scope[IDENTITY] = identity
        visit.identified(identity)
        return identity

    async def identity_of(self, scope: Scope, headers: dict[bytes, bytes]) -> Identity | None:
        """Whose credential a request shows.

        Raises:
            RequestError: 401 if it does not hold, or finding out failed.
            CallError: `RESOURCE_EXHAUSTED` if too many from there did not hold, or are being asked for.
        """
        resolver = self.resolver
        if resolver is None:
            return None
        ended: list[Header] = []

        async def resolve() -> Identity | None:
            connection = HTTPConnection(scope)
            identity = await resolved(resolver(connection))
            if identity is None and _COOKIE in headers.get(b"cookie", b""):
                # No script can take the cookie of a session that is over away: the refusal does.
                ended.append((b"set-cookie", self.sessions.cookie("", secure=False)))
                identity = self.sessions(connection)
                scope[BY_COOKIE] = True
            return identity

        address = address_of(scope.get("client"))
        try:
            return await self.sign_ins.judge(address, shown_in(scope["headers"]), resolve)
        except RefusedError as refusal:
            logger.info("refused a credential: %s", refusal)
            logger.debug("refused a credential", exc_info=refusal.reason)
            raise refused_credential(ended) from refusal.reason

    async def enter(self, visit: Visit, *, is_stream: bool = False) -> None:
        """Find out who asks, and let the request in.

        Raises:
            CallError: If it may not come in.
        """
        await self.identify(visit)
        self.admit(visit, is_stream=is_stream)

    def admit(self, visit: Visit, *, is_stream: bool = False, keeps_time: bool = False) -> None:
        """Make the context of the call an identified request makes: who, until when, as part of what.

        A stream lasts as long as it lasts, unless the request says otherwise.

        Args:
            visit: The request.
            is_stream: Whether it stays open.
            keeps_time: Whether `run` will keep the deadline, so that the registry need not.

        Raises:
            CallError: If it may not come in.
        """
        self.rate.spend(visit.caller)
        headers = visit.headers
        trace = headers.get(b"traceparent")
        visit.seconds = seconds = self._seconds(
            headers, None if is_stream else self.settings.timeout
        )
        deadline = None if seconds is None else (visit.started + seconds) * 1000
        visit.admitted(
            OperationContext(
                identity=visit.identity,
                deadline=deadline,
                metadata=NOTHING if trace is None else _trace(trace, headers),
                door=Door(deadline=deadline) if keeps_time else CLOSED,
                registry=self.registry,
            )
        )

    def watch_work(self, visit: Visit) -> None:
        """From now on the request's work ends with its time, where its door keeps that, and with its client.

        Raises:
            CallError: `TIMEOUT` if there is no time left; reading has taken it all, say.
        """
        deadline = visit.context.door.deadline
        seconds = None if deadline is None else deadline / 1000 - time()
        if seconds is not None and seconds <= 0:
            had = in_seconds(visit.seconds or 0)
            message = f"{_called(visit)} was not started: its {had} had run out"
            raise timeout_error(message, deadline)
        visit.watch.until(seconds, visit.receive)

    def failure(self, error: CallError, visit: Visit) -> Reply:
        """An error as the response to a request."""
        return error_reply(
            error,
            visit.context.request_id,
            identity=visit.identity,
            spec=visit.spec,
            exposed=self.settings.expose_errors,
        )

    def _seconds(self, headers: dict[bytes, bytes], default: float | None) -> float | None:
        wanted = headers.get(b"operations-timeout")
        if wanted is None:
            return default
        if not wanted.isdigit() or len(wanted) > 12:
            raise malformed("Operations-Timeout is a number of milliseconds")
        return min(int(wanted) / 1000, self.settings.max_timeout)

    async def read_json(self, visit: Visit) -> Any:
        """The body as JSON; None where there is none.

        Raises:
            RequestError: If it is something else, or too much of it.
        """
        body = await self.read(visit)
        return decode_json(body) if body else None

    async def read(self, visit: Visit) -> bytes:
        """The body, which says it is JSON, or nothing.

        Raises:
            RequestError: 413, 408, 415.
        """
        headers = visit.headers
        limits = self.settings.limits
        visit.watch.until(limits.body_seconds)
        body = await read_body(visit.receive, headers, limits)
        if not body:
            return body
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise unsupported("Send the body without Content-Encoding")
        kind = headers.get(b"content-type", b"")
        if kind != b"application/json" and not _is_json(kind):
            # A page of another site can send whatever a form can, but not this type unasked.
            raise unsupported("Send the body as application/json")
        return body


def decode_json(body: bytes | str) -> Any:
    """A JSON text.

    Raises:
        RequestError: 400 if it is none.
    """
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(f"The body is not JSON: {error}") from None


def _too_late(visit: Visit) -> CallError:
    return timed_out(_called(visit), visit.seconds, deadline=visit.context.door.deadline)


def _called(visit: Visit) -> str:
    return visit.spec.id if visit.spec is not None else "The call"


def _is_json(content_type: bytes) -> bool:
    essence = content_type.partition(b";")[0].strip().lower()
    return essence == b"application/json" or (
        essence.startswith(b"application/") and essence.endswith(b"+json")
    )


def _trace(traceparent: bytes, headers: dict[bytes, bytes]) -> dict[str, Any]:
    """The W3C trace context of a request, for whoever follows calls."""
    trace = {"traceparent": traceparent.decode("latin-1")}
    state = headers.get(b"tracestate")
    if state is not None:
        trace["tracestate"] = state.decode("latin-1")
    return trace
