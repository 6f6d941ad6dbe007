"""The SDK's client with our changes; the only module that uses private names of the SDK.

Every other module uses the SDK's public names. `tests/test_dependencies.py` lists the private names used here and fails
if the SDK is upgraded to another minor version, so that each of them is checked again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from math import inf
from typing import Any, Final, TypeAlias, cast

import anyio
import mcp_types as types
from mcp.client._probe import negotiate_auto
from mcp.client.session import ClientSession
from mcp.server.connection import Connection
from mcp.server.context import ServerRequestContext
from mcp.shared.dispatcher import CallOptions, DispatchContext, ProgressFnT
from mcp.shared.inbound import encode_header_value, x_mcp_header_map
from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher
from mcp.shared.transport_context import TransportContext
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from operations.base.logs import LogThrottle
from operations.base.tasks import start_task
from operations.base.types import JSONObject
from operations.mcp.shared.failures import Kind, sealed
from operations.mcp.shared.repairs import mended
from operations.mcp.source.plain_calls import METHODS, PlainCalls

logger = logging.getLogger("operations.mcp")

_NOT_SENT: tuple[Kind, str] = ("closed", "disconnected before the request was sent")
_HANDSHAKES: Final[dict[str, type[types.Result]]] = {
    "initialize": types.InitializeResult,
    "server/discover": types.DiscoverResult,
}

_MOST_REQUESTS: Final = 1000
"""The largest number of requests of one server that are answered at a time; further ones are dropped."""

_CANCEL_SECONDS: Final = 0.5
"""Seconds for writing the message that cancels a request."""


class Dispatcher(JSONRPCDispatcher[TransportContext]):
    """A dispatcher that reports when its connection has ended, and which requests were not sent.

    Args:
        name: The name of the server, for the log.
        read_stream: The messages of the server.
        write_stream: The messages to the server.

    Attributes:
        ended: Set when the connection has ended.
    """

    def __init__(self, name: str, read_stream: Any, write_stream: Any) -> None:
        super().__init__(read_stream, write_stream)
        self.ended = asyncio.Event()
        self.version: str | None = None
        """The only revision to negotiate; None for the newest that both sides support."""

        self._name = name
        self._answering = 0
        self._drops, self._cancels = LogThrottle(), LogThrottle()

    @property
    def is_open(self) -> bool:
        """Whether the connection is open."""
        return not self._closed

    async def run(self, *args: Any, **options: Any) -> None:
        """Read until the connection ends."""
        try:
            await super().run(*args, **options)
        finally:
            self.ended.set()

    async def send_raw_request(
        self,
        method: str,
        params: Mapping[str, Any] | None,
        opts: CallOptions | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Send a request and return its result, which is repaired if it is that of a handshake.

        Raises:
            MCPError: As the SDK raises it; a marked one (`failures.sealed`) if the request was not sent.
        """
        if not self.is_open:
            raise sealed(*_NOT_SENT)
        if self.version is not None and method == "initialize":
            # The SDK would offer only the newest revision.
            params = {**(params or {}), "protocolVersion": self.version}
        if self.version is not None and method == "server/discover":
            # The SDK would wait for ten seconds only.
            opts = {**(opts or {}), "timeout": inf}
        result = await super().send_raw_request(method, params, opts, **options)
        model = _HANDSHAKES.get(method)
        return result if model is None else mended(result, model)

    async def _dispatch(self, item: Any, *args: Any, **options: Any) -> None:
        is_request = isinstance(getattr(item, "message", None), types.JSONRPCRequest)
        if is_request and self._answering >= _MOST_REQUESTS:
            text = "dropped a request of %s: too many of its requests are open"
            logger.log(self._drops.level(), text, self._name)
            return
        # A message that the SDK cannot handle, such as a progress of 10^400, must not end the connection.
        try:
            await super()._dispatch(item, *args, **options)
        except Exception:
            logger.debug("dropped a message", exc_info=True)

    async def _handle_request(self, *args: Any, **options: Any) -> None:
        self._answering += 1
        try:
            await super()._handle_request(*args, **options)
        finally:
            self._answering -= 1

    async def _final_write(
        self, write: Callable[[], Awaitable[None]], *, shield: bool, timeout: float, describe: str
    ) -> None:
        # The SDK would let a call wait five seconds longer for a server that does not read, and log a line for each.
        with anyio.move_on_after(min(timeout, _CANCEL_SECONDS), shield=shield) as scope:
            await write()
        if scope.cancelled_caught:
            text = "%s does not read its input: it may continue a cancelled call"
            logger.log(self._cancels.level(), text, self._name)

    async def _write(self, message: Any, metadata: Any = None) -> None:
        try:
            await super()._write(message, metadata)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            # The stream has no buffer, so that a failure means that the message was not sent.
            if isinstance(message, types.JSONRPCRequest):
                raise sealed(*_NOT_SENT) from None
            raise


_MAX_PROGRESS = 100
"""The largest number of undelivered progress reports of one call."""

OnProgress: TypeAlias = Callable[[float, float | None, str | None], Awaitable[None]]
"""`(progress, total, message)`."""


def _bounded(on_progress: OnProgress) -> OnProgress:
    """Return an `on_progress` callback that drops reports if they arrive faster than the caller reads them."""
    waiting = 0

    async def report(done: float, total: float | None, message: str | None) -> None:
        nonlocal waiting
        if waiting < _MAX_PROGRESS:
            waiting += 1
            try:
                await on_progress(done, total, message)
            finally:
                waiting -= 1

    return report


class RelaySession(ClientSession):
    """A client session that supports every revision of the protocol, and returns results as the server sent them.

    The SDK validates every result with its models and with the tool's own output schema, whose regular expressions can
    run forever. Here an invalid tool does not hide a listing, an invalid block does not hide a result, and the pipeline
    checks the data.
    """

    def __init__(
        self, dispatcher: Dispatcher, plain: PlainCalls | None = None, **callbacks: Any
    ) -> None:
        super().__init__(dispatcher=dispatcher, **callbacks)
        self.dispatcher = dispatcher
        self._plain = plain
        self._cancelling: set[asyncio.Task[None]] = set()

        self.finished = dispatcher.ended
        """Set when the session has ended."""

    @property
    def is_open(self) -> bool:
        """Whether the session is open."""
        return self.dispatcher.is_open and not self.finished.is_set()

    @property
    def is_modern(self) -> bool:
        """Whether the negotiated revision has no sessions: 2026-07-28 and later."""
        return self.protocol_version in MODERN_PROTOCOL_VERSIONS

    @property
    def offers(self) -> types.ServerCapabilities:
        """The capabilities of the server, which are known after the negotiation."""
        return cast("types.ServerCapabilities", self.server_capabilities)

    async def negotiate(self, version: str) -> None:
        """Agree on a revision: the given one, or with `auto` the newest that both sides support.

        Raises:
            MCPError: If the server rejects the negotiation.
            RuntimeError: If the server responds with an unknown revision.
        """
        if version == "auto":
            await negotiate_auto(self)
        else:
            self.dispatcher.version = version
            await (self.discover() if version in MODERN_PROTOCOL_VERSIONS else self.initialize())

    def learn(self, tools: Iterable[JSONObject]) -> None:
        """Store which arguments of `tools` are also sent as headers (2026-07-28)."""
        if self.is_modern:
            for tool in tools:
                schema = cast("JSONObject", tool["inputSchema"])
                self._x_mcp_header_maps[tool["name"]] = x_mcp_header_map(schema)

    async def relay(
        self,
        method: str,
        params: JSONObject,
        on_progress: OnProgress | None = None,
        extensions: JSONObject | None = None,
    ) -> JSONObject:
        """Send a request and return its result unchanged. `params` may be modified.

        Args:
            method: The method.
            params: Its parameters.
            on_progress: Receives progress reports.
            extensions: The extensions that the request declares, with their settings.

        Raises:
            MCPError: If the server responds with an error or does not respond.
        """
        data: JSONObject = {"method": method, "params": params}
        options: CallOptions = {}
        self._stamp(data, options)
        if extensions and self.is_modern:
            meta = data["params"]["_meta"]
            known = meta[types.CLIENT_CAPABILITIES_META_KEY]
            named = {**known.get("extensions", {}), **extensions}
            meta[types.CLIENT_CAPABILITIES_META_KEY] = {**known, "extensions": named}
        if method.startswith("tasks/"):
            options.setdefault("headers", {})["mcp-name"] = encode_header_value(params["taskId"])
        plain = self._plain
        if plain is not None and method in METHODS and plain.is_usable and self.protocol_version:
            request_id = plain.next_id()
            sent = data["params"]
            if on_progress is not None:
                sent = {**sent, "_meta": {**sent.get("_meta", {}), "progressToken": request_id}}
            headers = {"mcp-protocol-version": self.protocol_version, **options.get("headers", {})}
            try:
                outcome = await plain.post(request_id, method, sent, headers)
            except asyncio.CancelledError:
                self._cancel(request_id)
                raise
            if isinstance(outcome, dict):
                return outcome
            options["request_id"] = request_id
        if on_progress is not None:
            options["on_progress"] = cast("ProgressFnT", _bounded(on_progress))
        try:
            return await self.dispatcher.send_raw_request(method, data["params"], options)
        finally:
            handed_over = options.get("request_id")
            if plain is not None and handed_over is not None:
                unread = plain.take(handed_over)
                if unread is not None:
                    # The request was cancelled before the SDK began to read it.
                    unread.response.close()
                    self._cancel(handed_over)

    def _cancel(self, request_id: types.RequestId) -> None:
        """Cancel a request at a server before 2026-07-28; for newer servers, closing the connection cancels it."""
        if self.is_modern or not self.is_open:
            return
        notice = self.dispatcher.notify("notifications/cancelled", {"requestId": request_id})
        start_task(self._cancelling, notice)


def connection_of(request: ServerRequestContext[Any, Any]) -> Connection:
    """Return the connection of a request, which outlives it."""
    return request.session._connection  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]


def outbound_of(request: ServerRequestContext[Any, Any]) -> DispatchContext[Any]:
    """Return the channel for messages that belong to a request."""
    return request.session._request_outbound  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]


def lowlevel_server(server: Any) -> Any:
    """Return the low-level server of an `MCPServer`; a low-level server is returned unchanged.

    Raises:
        TypeError: If `server` is neither.
    """
    found = getattr(server, "_lowlevel_server", server)
    if not hasattr(found, "create_initialization_options"):
        kind = type(server).__name__
        raise TypeError(
            f"server must be an MCPServer or a low-level Server of the mcp package, not {kind};"
            " start or connect to other servers with command or url"
        )
    return found
