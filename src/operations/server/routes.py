"""Route requests: one path per operation, fixed paths, mounted applications, and 404 for every other path.

    /{namespace}/{name}
        query          GET or HEAD with query parameters, or POST
        mutation       POST
        subscription   GET with query parameters, or POST; server-sent events

Rule 1: a path has exactly one spelling. Ids contain no characters that need escaping, so a path with an escape does not
        match an operation.
Rule 2: the registry checks access. If an operation is hidden from a caller, the request is treated like a request for
        an unknown path.
Rule 3: the caller is identified in the same way at every path, also at unknown ones, so that a response does not reveal
        whether the path exists.
Rule 4: a stream is `data: <item as JSON>` for each item, then `event: complete` or `event: error`. Changes of an item
        are comments, which clients ignore. A call that is rejected at once gets an error status instead. The handler
        ends when the client disconnects or its credential expires.
Rule 5: a stream can be resumed if its operation declares `meta={"resume": {"input": "after", "id": "id"}}`: events have
        the item's `id`, and `Last-Event-ID` becomes the input `after`. `"id": ""` stands for the whole item.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from operations._json import is_object
from operations.access import check_access
from operations.context import new_request_id
from operations.envelopes import HTTPResponseMeta, MCPResponseMeta, ResponseEnvelope, ResponseMeta
from operations.errors import CallError, ErrorCode, cancelled_elsewhere, map_error, timed_out
from operations.front import credential_ended
from operations.front.http import (
    IDENTITY,
    OPEN,
    PIPELINE,
    Endpoint,
    RequestPipeline,
    RequestState,
)
from operations.front.limits import caller_key, client_address, wait_for_disconnect
from operations.front.messages import (
    JSON,
    REQUEST_ID,
    SAFE,
    Reply,
    decode_json,
    error_reply,
    reject_handshake,
    route_path,
)
from operations.front.public_errors import (
    ClientDisconnectedError,
    Header,
    malformed,
    not_found,
    public_wire,
    wrong_method,
)
from operations.openapi.exporting import BINARY, has_path
from operations.openapi.exporting.query_arguments import QueryArguments
from operations.schema import validate_or_raise
from operations.specs import Operation, OperationSpec, OperationType
from operations.types import JSONObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One path and its endpoint."""

    methods: tuple[str, ...]
    endpoint: Endpoint

    is_stream: bool = False
    """Whether the response stays open, and therefore has no default deadline."""

    is_probe: bool = False
    """Whether the path serves every client, without identification and limits."""

    is_open: bool = False
    """Whether the path serves clients without a credential even if the server requires one."""

    @property
    def accepted(self) -> tuple[str, ...]:
        """The accepted methods: HEAD responds as GET does, without a body."""
        head = ("HEAD",) if "GET" in self.methods and not self.is_stream else ()
        return self.methods + head


class Selected(BaseRoute):
    """Serves the connections that a function selects with an ASGI application."""

    def __init__(self, selects: Callable[[Scope], bool], app: ASGIApp) -> None:
        self._selects = selects
        self._app = app

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match the selected connections."""
        return (Match.FULL if self._selects(scope) else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the application respond."""
        await self._app(scope, receive, send)


def is_http(scope: Scope) -> bool:
    """Return whether a connection is an HTTP request."""
    return bool(scope["type"] == "http")


def route_table(pipeline: RequestPipeline, routes: Mapping[str, Route]) -> BaseRoute:
    """Serve exactly these paths."""

    async def endpoint(state: RequestState) -> Reply | None:
        scope = state.scope
        route = routes[route_path(scope)]
        if route.is_open:
            scope[OPEN] = True
        if not route.is_probe:
            await state.enter(is_stream=route.is_stream)
        if scope["method"] not in route.accepted:
            raise wrong_method(route.accepted)
        return await route.endpoint(state)

    return Selected(
        lambda scope: is_http(scope) and route_path(scope) in routes,
        partial(pipeline.serve, endpoint=endpoint),
    )


def unknown_paths(pipeline: RequestPipeline) -> BaseRoute:
    """Respond to all other paths with 404."""

    async def endpoint(state: RequestState) -> Reply:
        await state.enter()
        raise not_found()

    return Selected(is_http, partial(pipeline.serve, endpoint=endpoint))


def http_mount(path: str, app: ASGIApp, pipeline: RequestPipeline) -> BaseRoute:
    """Serve an ASGI application at one path, with or without a trailing slash, for every method.

    The application shares the request pipeline of the server, which is in the scope.
    """

    async def endpoint(state: RequestState) -> None:
        await state.identify()
        state.front.rate.spend(state.caller)
        await app(state.scope, state.receive, state.send)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        scope[PIPELINE] = pipeline
        if getattr(app, "shares_pipeline", False):
            # The application runs the steps of the pipeline itself.
            await app(scope, receive, send)
        else:
            await pipeline.serve(scope, receive, send, endpoint)

    paths = (path, path + "/")
    return Selected(lambda scope: is_http(scope) and route_path(scope) in paths, serve)


def socket_mount(path: str, app: ASGIApp | None, pipeline: RequestPipeline) -> BaseRoute:
    """Serve an ASGI application for WebSockets at one path; handshakes at other paths receive 404.

    Args:
        path: The path of the application.
        app: The application; None if there is none.
        pipeline: Identifies the callers.
    """

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        front = pipeline.front
        try:
            try:
                async with asyncio.timeout(front.timeout):
                    scope[IDENTITY] = await pipeline.authenticate(scope)
            except TimeoutError:
                raise timed_out("The handshake", front.timeout) from None
            if app is None or route_path(scope) != path:
                raise not_found()
            slot = front.sockets.enter(caller_key(scope[IDENTITY], client_address(scope)))
        except CallError as error:
            reply = error_reply(error, new_request_id(), expose=front.expose_errors)
            await reject_handshake(reply, scope, send)
            return
        scope[PIPELINE] = pipeline
        with slot:
            await app(scope, receive, send)

    return Selected(lambda scope: bool(scope["type"] == "websocket"), serve)


_METHODS = {
    OperationType.QUERY: ("GET", "HEAD", "POST"),
    OperationType.MUTATION: ("POST",),
    OperationType.SUBSCRIPTION: ("GET", "POST"),
}


class _Path:
    """Serves one operation at its path.

    Args:
        operation: The operation.
        elsewhere: Serves callers that may not see the operation.
    """

    __slots__ = (
        "_arguments", "_elsewhere", "_id", "_is_open", "_methods", "_operation", "_spec", "endpoint",
    )  # fmt: skip

    def __init__(self, operation: Operation, elsewhere: ASGIApp) -> None:
        self._operation = operation
        self._spec = spec = operation.spec
        self._elsewhere = elsewhere
        self._is_open = spec.access_control.is_open
        self._id = spec.id
        self._methods = _METHODS[spec.type]
        self._arguments: QueryArguments | None = None
        self.endpoint: Endpoint = (
            self._stream if spec.type is OperationType.SUBSCRIPTION else self._call
        )

    async def _call(self, state: RequestState) -> Reply | None:
        is_visible = (self._is_open and state.is_anonymous()) or await self._is_visible(state)
        if not is_visible:
            await self._elsewhere(state.scope, state.receive, state.send)
            return None
        state.admit(keeps_time=True, operation=self._operation)
        context = state.context
        state.take_slot()
        value = await self._read(state)
        state.start_work()
        try:
            envelope = await state.front.registry.execute(self._id, value, context)
        except asyncio.CancelledError:
            if (error := state.cancelled_elsewhere(self._id)) is None:
                raise
            raise error from None
        return result_reply(
            envelope, context.request_id, with_meta=b"operations-meta" in state.headers
        )

    async def _stream(self, state: RequestState) -> None:
        if not await self._is_visible(state):
            await self._elsewhere(state.scope, state.receive, state.send)
            return
        state.admit(is_stream=True)
        value = await self._read(state)
        await serve_events(state, self._spec, value)

    async def _is_visible(self, state: RequestState) -> bool:
        """Identify the caller; return whether it may see the operation.

        Raises:
            CallError: If the credential is wrong, or if the caller may see the operation but not call it.
        """
        if self._is_open:
            await state.identify()
            return check_access(self._spec.access_control, state.identity, self._id)
        problem: CallError | None = None
        try:
            await state.identify()
        except CallError as error:
            # A wrong credential must not reveal the operation either.
            problem = error
        try:
            state.front.enforce_visible(self._spec, state.identity)
        except CallError as error:
            if error.code == ErrorCode.OPERATION_NOT_FOUND:
                return False
            problem = problem or error
        if problem is not None:
            raise problem
        return True

    async def _read(self, state: RequestState) -> Any:
        """Return the input of a call."""
        method = state.scope["method"]
        if method not in self._methods:
            raise wrong_method(self._methods)
        state.spec = spec = self._spec
        if method != "POST":
            return self._query(state.scope["query_string"])
        body = await state.read()
        if not body:
            return None
        value = decode_json(body, state.front.limits)
        if value is None:
            # No body means no input; null is a value like any other.
            validate_or_raise(spec.input_schema, None, subject=f"input of {spec.id}")
        return value

    def _query(self, query: bytes) -> Any:
        """Return the input in a query string."""
        if self._arguments is None:
            self._arguments = QueryArguments(self._spec.input_schema)
        try:
            return self._arguments.read(query)
        except ValueError as error:
            raise malformed(f"The query cannot be read: {error}") from None


class OperationPaths:
    """ASGI middleware that serves every operation of a registry at its path, also those registered later.

    Runs before the router, because nearly all requests are for operations.
    """

    def __init__(self, app: ASGIApp, pipeline: RequestPipeline) -> None:
        self._app = app
        self._pipeline = pipeline
        self._paths: dict[str, _Path] = {}
        self._revision = -1

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve a call, or forward the request to the router."""
        path = self._find(route_path(scope)) if scope["type"] == "http" else None
        if path is None or b"%" in scope.get("raw_path", b""):
            return self._app(scope, receive, send)
        return self._pipeline.serve(scope, receive, send, path.endpoint)

    def _find(self, text: str) -> _Path | None:
        registry = self._pipeline.front.registry
        if self._revision != registry.revision:
            self._revision = registry.revision
            self._paths.clear()
        known = self._paths.get(text)
        if known is None:
            namespace, slash, name = text[1:].partition("/")
            is_path = slash and "/" not in name and "." not in namespace
            operation = registry.get(f"{namespace}.{name}") if is_path else None
            if operation is None or not has_path(operation.spec):
                # Not cached, because the number of unknown paths is unlimited.
                return None
            known = self._paths[text] = _Path(operation, self._app)
        return known


MAX_META = 7 * 1024
"""The largest meta of an envelope in a header, in bytes. Common clients read header lines of at most 8 KiB."""

_SANDBOX: Header = (b"content-security-policy", b"sandbox; default-src 'none'")
"""Prevents content of third parties from running as a page of this origin."""


def result_reply(envelope: ResponseEnvelope[Any], request_id: str, *, with_meta: bool) -> Reply:
    """Return the data of an envelope as a response: bytes with their content type, other data as JSON.

    Raises:
        CallError: If the envelope holds the error result of an MCP tool.
    """
    if isinstance(envelope.meta, MCPResponseMeta):
        envelope.raise_for_error()
    data = envelope.data
    headers = [JSON, (b"x-request-id", request_id.encode())]
    if envelope.meta.changes_count:
        headers.append((b"operations-changes", str(envelope.meta.changes_count).encode()))
    if with_meta:
        headers.append((b"operations-meta", _meta_text(envelope.meta)))
    if isinstance(data, bytes):
        headers[0] = (b"content-type", _media_type(envelope))
        headers.append(_SANDBOX)
        return Reply(200, data, headers)
    return Reply(200, msgspec.json.encode(data), headers)


def _media_type(envelope: ResponseEnvelope[Any]) -> bytes:
    kind = envelope.meta.content_type if isinstance(envelope.meta, HTTPResponseMeta) else ""
    is_writable = kind.isascii() and kind.isprintable()
    return (kind if kind and is_writable else BINARY).encode()


def _meta_text(meta: ResponseMeta, **more: str) -> bytes:
    """Return the part of `meta` that fits into a header: all of it, its changes, or their number; and `more`."""
    whole: JSONObject = msgspec.to_builtins(meta)
    changes = {key: whole[key] for key in ("changes", "changesCount") if key in whole}
    whole |= more
    source = {"source": meta.source, "omitted": True, **more}
    count = {"changesCount": meta.changes_count} if changes else {}
    # Headers are ASCII; JSON escapes other characters.
    texts = (json.dumps(part, separators=(",", ":")) for part in (whole, source | changes))
    fitting = (text for text in texts if len(text) <= MAX_META)
    return next(fitting, json.dumps(source | count, separators=(",", ":"))).encode()


# ------------------------------------------------------------ server-sent events

_MAX_ID = 1024


class Resuming:
    """Defines how the stream of an operation is resumed."""

    def __init__(self, spec: OperationSpec) -> None:
        rule: Any = spec.meta.get("resume")
        self._spec = spec
        self._rule: JSONObject | None = rule if isinstance(rule, dict) else None

    def resume(self, input: Any, headers: Mapping[bytes, bytes]) -> Any:
        """Return the input with the position at which the stream continues.

        Raises:
            RequestError: If the id of the last event is not text.
        """
        last = headers.get(b"last-event-id")
        given: Any = {} if input is None else input
        if self._rule is None or last is None or not is_object(given):
            return input
        name = str(self._rule.get("input", "after"))
        if name in given:
            return given
        try:
            text = last.decode()
        except UnicodeDecodeError:
            raise malformed("Last-Event-ID is not UTF-8") from None
        for parameter in QueryArguments(self._spec.input_schema).parameters:
            if parameter.name == name:
                return {**given, name: parameter.convert(text)}
        return {**given, name: text}

    def event_id(self, data: Any) -> bytes | None:
        """Return the event id of an item; None if it has no valid id."""
        if self._rule is None:
            return None
        name = self._rule.get("id", "id")
        held: Any = data if not name else data.get(name) if is_object(data) else None
        if held is None or isinstance(held, (dict, list)):
            return None
        text = held if isinstance(held, str) else msgspec.json.encode(held).decode()
        is_sendable = len(text) <= _MAX_ID and not any(c in text for c in "\0\r\n")
        return text.encode() if is_sendable else None


_AT_ONCE = 0.05
"""Seconds before the response begins, in which a failure still sets the HTTP status."""

_FAREWELL = 1.0
"""Seconds that a handler has to end after its client has disconnected."""

_HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream"),
    # Proxies must not buffer events.
    (b"x-accel-buffering", b"no"),
    *SAFE,
)
_COMPLETE = b"event: complete\ndata: {}\n\n"
_ALIVE = b": alive\n\n"


async def serve_events(state: RequestState, spec: OperationSpec, input: Any) -> None:
    """Open a subscription and send its items until it ends or the client disconnects.

    Raises:
        CallError: If the subscription failed before the response began.
        ClientDisconnectedError: If the client has disconnected.
    """
    # The stream itself detects that its client has disconnected.
    state.timeout.stop()
    resuming = Resuming(spec)
    input = resuming.resume(input, state.headers)  # noqa: A001 - the contract's word
    state.take_slot(is_stream=True)
    response = _Response(state, spec, resuming)
    subscription = state.front.registry.subscribe(spec.id, input, state.context)
    front, end = state.front, response.end
    with (
        front.credentials.watching(state.credential, lambda: end(credential_ended())),
        front.open_streams.watching(lambda: end(_shutting_down())),
    ):
        await response.run(subscription)


def _shutting_down() -> CallError:
    return CallError(ErrorCode.UNAVAILABLE, "The server is shutting down")


class _Response:
    """One response that is being sent."""

    def __init__(self, state: RequestState, spec: OperationSpec, resuming: Resuming) -> None:
        self._state = state
        self._spec = spec
        self._front = state.front
        self._send = state.send
        self._resuming = resuming
        self._started = False
        self._silent = True
        """Whether no item was sent since the last heartbeat."""
        self._ended: CallError | None = None
        self._pump_task: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    def end(self, error: CallError) -> None:
        """End the stream with an error."""
        self._ended = error
        if self._pump_task is not None:
            self._pump_task.cancel()

    async def run(self, items: Any) -> None:
        pump = self._pump_task = asyncio.create_task(self._pump(items))
        gone = asyncio.create_task(wait_for_disconnect(self._state.receive))
        try:
            if await _both_run(pump, gone, _AT_ONCE):
                async with self._turn:
                    await self._start()
            while await _both_run(pump, gone, self._front.heartbeat):
                if self._silent:
                    await self._write(_ALIVE)
                self._silent = True
            if pump.cancelled() and self._ended is None:
                self._ended = cancelled_elsewhere(self._spec.id)
        finally:
            gone.cancel()
            pump.cancel()
            await asyncio.wait({pump}, timeout=_FAREWELL)
            if not pump.done():
                self._front.registry.keep(pump)
        if self._ended is not None:
            if not self._started:
                raise self._ended
            await self._write(self._failure(self._ended), last=True)
            return
        if pump.cancelled() or not pump.done():
            raise ClientDisconnectedError
        pump.result()

    async def _pump(self, items: Any) -> None:
        try:
            async with aclosing(items):
                async for envelope in items:
                    await self._write(self._event(envelope))
                    # Yield to the event loop: a handler that never waits would block it.
                    await asyncio.sleep(0)
        except CallError as error:
            if not self._started:
                raise
            await self._write(self._failure(error), last=True)
        except Exception as error:
            unexpected = map_error(error)
            unexpected.__cause__ = error
            if not self._started:
                raise unexpected from error
            await self._write(self._failure(unexpected), last=True)
        else:
            await self._write(_COMPLETE, last=True)

    def _event(self, envelope: ResponseEnvelope[Any]) -> bytes:
        """Return the event for one item. Encoded JSON has no line breaks, so one `data` line is enough."""
        data, meta = envelope.raise_for_error().data, envelope.meta
        text = b"data: " + msgspec.json.encode(data) + b"\n\n"
        if (event_id := self._resuming.event_id(data)) is not None:
            text = b"id: " + event_id + b"\n" + text
        if b"operations-meta" in self._state.headers:
            more = {"encoding": "base64"} if isinstance(data, bytes) else {}
            return b": operations-meta " + _meta_text(meta, **more) + b"\n" + text
        count = meta.changes_count
        return b": operations-changes %d\n" % count + text if count else text

    def _failure(self, error: CallError) -> bytes:
        request_id = self._state.context.request_id
        wire = public_wire(error, request_id, expose=self._front.expose_errors)
        return b"event: error\ndata: " + msgspec.json.encode(wire) + b"\n\n"

    async def _start(self) -> None:
        if self._started:
            return
        self._started = True
        request_id = self._state.scope[REQUEST_ID] = self._state.context.request_id
        await self._send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [*_HEADERS, (b"x-request-id", request_id.encode())],
            }
        )
        # Some servers send the head only with the first bytes of the body.
        await self._send({"type": "http.response.body", "body": b"", "more_body": True})

    async def _write(self, text: bytes, *, last: bool = False) -> None:
        self._silent = False
        async with self._turn:
            await self._start()
            await self._state.send_part(text)
            if last:
                await self._send({"type": "http.response.body", "body": b""})


async def _both_run(pump: "asyncio.Task[None]", gone: "asyncio.Task[None]", seconds: float) -> bool:
    """Return whether both still run after some time; False as soon as one has ended."""
    done, _ = await asyncio.wait({pump, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    return not done
