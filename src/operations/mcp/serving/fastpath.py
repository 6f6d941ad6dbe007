"""The lean path: plain `tools/list` and `tools/call` requests, answered without the SDK's models and streams.

Rule 1: it answers only well-formed requests. All others, above all every mistake, go to the SDK unchanged.
Rule 2: its answers are the SDK's answers; a test compares them.
"""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Literal

import msgspec
from mcp import MCPError
from mcp_types import SERVER_INFO_META_KEY
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from operations._collector import build_from
from operations.context import NOTHING, CallerChannel
from operations.front.http import RequestState
from operations.front.messages import JSON, Reply
from operations.mcp.codec import is_imported, sent_meta
from operations.mcp.serving.channels import SILENT, can_answer
from operations.mcp.serving.service import Asker, LimitedCall, Service
from operations.observe import trace_context
from operations.types import JSONObject


class _Implementation(msgspec.Struct):
    name: str
    version: str


class _Meta(msgspec.Struct):
    version: str | None = msgspec.field(
        default=None, name="io.modelcontextprotocol/protocolVersion"
    )
    capabilities: dict[str, dict[str, Any]] | None = msgspec.field(
        default=None, name="io.modelcontextprotocol/clientCapabilities"
    )
    client: _Implementation | None = msgspec.field(
        default=None, name="io.modelcontextprotocol/clientInfo"
    )
    level: msgspec.Raw | None = msgspec.field(default=None, name="io.modelcontextprotocol/logLevel")
    progress: int | str | None = msgspec.field(default=None, name="progressToken")
    traceparent: Any = None
    tracestate: Any = None

    @property
    def trace(self) -> Mapping[str, Any]:
        """The trace context of the request."""
        if self.traceparent is None:
            return NOTHING
        return trace_context({"traceparent": self.traceparent, "tracestate": self.tracestate})


class _Params(msgspec.Struct, rename="camel"):
    name: str | None = None
    arguments: dict[str, Any] | None = None
    cursor: str | None = None
    meta: _Meta | None = msgspec.field(default=None, name="_meta")
    task: msgspec.Raw | None = None
    request_state: msgspec.Raw | None = None
    input_responses: msgspec.Raw | None = None


class PlainRequest(msgspec.Struct):
    """A request that the lean path may answer."""

    jsonrpc: Literal["2.0"]
    id: int | str
    method: Literal["tools/call", "tools/list"]
    params: _Params = msgspec.field(default_factory=_Params)


_decode = msgspec.json.Decoder(PlainRequest).decode
_encode = msgspec.json.Encoder().encode


def decode_plain(body: bytes) -> PlainRequest | None:
    """Return a request; None if it is not a well-formed call or listing of tools."""
    try:
        request = build_from(_decode, body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    if request.method == "tools/call" and request.params.name is None:
        return None
    return None if request.params.task is not None else request


class _MetaOnly(msgspec.Struct):
    meta: dict[str, Any] | None = msgspec.field(default=None, name="_meta")


class _MetaRequest(msgspec.Struct):
    params: _MetaOnly


_decode_meta = msgspec.json.Decoder(_MetaRequest).decode


def decode_meta(body: bytes, request: PlainRequest, service: Service) -> Mapping[str, Any]:
    """Return the `_meta` of a plain request that the server of its tool gets."""
    tool = service.catalog.tools.get(request.params.name or "")
    if request.params.meta is None or tool is None or not is_imported(tool.spec):
        return NOTHING
    return sent_meta(_decode_meta(body).params.meta)


def is_handshake_request(request: PlainRequest) -> bool:
    """Return whether a request is one of a client before 2026-07-28."""
    meta = request.params.meta
    return meta is None or meta.version is None


class FastPath:
    """Answers plain requests of clients since 2026-07-28.

    Args:
        service: What answers.
        run_interactive: Runs calls of clients that can be asked; see `RegistryServer.run_interactive`.
        server_info: How the server introduces itself in every answer since 2026-07-28.
    """

    def __init__(
        self,
        service: Service,
        run_interactive: Callable[..., Awaitable[JSONObject]],
        server_info: JSONObject,
    ) -> None:
        self._service = service
        self._run_interactive = run_interactive
        self._stamp = {SERVER_INFO_META_KEY: msgspec.Raw(_encode(server_info))}

    async def serve(self, state: RequestState, body: bytes) -> Reply | None:
        """Return the response to a POST if it is plain, else None."""
        headers = state.headers
        version = headers.get(b"mcp-protocol-version", b"").decode("latin-1")
        if version not in MODERN_PROTOCOL_VERSIONS or not _is_routable(state):
            return None
        request = decode_plain(body)
        if request is None or not self._is_plain(request, headers, version):
            return None
        meta = request.params.meta
        capabilities = meta.capabilities if meta is not None and meta.capabilities else NOTHING
        trace = NOTHING if meta is None else meta.trace
        sent = decode_meta(body, request, self._service)
        asker = Asker.of(state, version, capabilities, trace, sent)
        try:
            return self._reply(request, await self._answer(request, asker, state))
        except MCPError:
            # The SDK writes the protocol's own errors, which come before anything runs.
            state.timeout.pause()
            return None

    async def _answer(self, request: PlainRequest, asker: Asker, state: RequestState) -> JSONObject:
        params, service = request.params, self._service
        if request.method == "tools/list":
            return service.list_tools_encoded(asker, params.cursor)
        name, arguments = params.name or "", params.arguments or {}
        if can_answer(asker.capabilities):

            def run(channel: CallerChannel) -> Awaitable[JSONObject]:
                return service.call_tool(asker, name, arguments, channel)

            work = self._run_interactive(asker, run, SILENT, "tools/call", NOTHING, name, arguments)
            return await _until_disconnect(work, state)
        limited = service.limited_call(asker, state, name)
        work = service.call_tool(asker, name, arguments, SILENT, limited)
        if limited is None:
            return await _until_disconnect(work, state)
        state.answer_late = partial(self._answer_late, request, limited)
        limited.start()
        return await limited.run(work)

    async def _answer_late(self, request: PlainRequest, limited: LimitedCall) -> None:
        await self._reply(request, limited.late_result()).send(limited.state.send)

    def _reply(self, request: PlainRequest, result: JSONObject) -> Reply:
        noted = result.get("_meta")
        result["_meta"] = self._stamp if noted is None else {**noted, **self._stamp}
        message = {"jsonrpc": "2.0", "id": request.id, "result": result}
        return Reply(200, _encode(message), [JSON])

    def _is_plain(self, request: PlainRequest, headers: dict[bytes, bytes], version: str) -> bool:
        params = request.params
        meta = params.meta
        if (
            params.request_state is not None
            or params.input_responses is not None
            or meta is None
            or meta.progress is not None
            or meta.level is not None
            or meta.version != version
            or meta.capabilities is None
            or headers.get(b"mcp-method") != request.method.encode()
        ):
            return False
        if request.method == "tools/list":
            return True
        tool = self._service.catalog.tools.get(params.name or "")
        return (
            tool is not None
            and not tool.mirrors_headers
            and headers.get(b"mcp-name") == tool.name.encode()
        )


async def _until_disconnect(work: Awaitable[JSONObject], state: RequestState) -> JSONObject:
    """Return the result of work that ends with its client."""
    state.timeout.start(None, state.receive)
    result = await work
    state.timeout.pause()
    return result


def _is_routable(state: RequestState) -> bool:
    """Return whether the headers are those of a plain request, and none is repeated."""
    headers = state.headers
    accept = headers.get(b"accept", b"")
    if (
        len(headers) != len(state.scope["headers"])
        or b"mcp-session-id" in headers
        or not headers.get(b"content-type", b"").startswith(b"application/json")
        or b"application/json" not in accept
        or b"text/event-stream" not in accept
    ):
        return False
    for name in headers:  # noqa: SIM110 - a generator would take twice as long
        if name.startswith(b"mcp-param-"):
            return False
    return True
