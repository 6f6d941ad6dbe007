"""The SDK's client session, relaying results as the server sent them.

The SDK checks every result against its models and a tool's own output schema, with a regular-expression engine that
can be made to run for ever. Here results pass as they are: one odd tool does not hide a listing, one odd block does
not hide a result, and the pipeline judges the data. The session still negotiates, stamps and correlates.

It leans on protected members: of `ClientSession` on `_stamp`, `_dispatcher`, `_client_info`, `_x_mcp_header_maps` and
`_build_capabilities`, of `JSONRPCDispatcher` on `_running`, `_closed`, `_dispatch` and `_write`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeAlias, cast

import anyio
import mcp_types as types
from mcp import MCPError
from mcp.client._probe import (
    negotiate_auto,
)
from mcp.client.session import ClientSession
from mcp.shared.dispatcher import CallOptions, ProgressFnT
from mcp.shared.inbound import x_mcp_header_map
from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher
from mcp.shared.transport_context import TransportContext
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS

from operations.mcp.failures import seal
from operations.mcp.plain import HANDOVER, METHODS, PlainCalls
from operations.types import JSONObject

logger = logging.getLogger("operations.mcp")

_MAX_PROGRESS = 100
"""Reports of one call that wait to be taken."""

OnProgress: TypeAlias = Callable[[float, float | None, str | None], Awaitable[None]]
"""`(progress, total, message)`."""


class Dispatcher(JSONRPCDispatcher[TransportContext]):
    """A dispatcher that says when its connection has ended, and which requests surely did not leave."""

    def __init__(self, read_stream: Any, write_stream: Any) -> None:
        super().__init__(read_stream, write_stream)
        self.ended = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether a request sent now could be answered."""
        return self._running

    async def run(self, *args: Any, **options: Any) -> None:
        """Read until the connection ends."""
        try:
            await super().run(*args, **options)
        finally:
            self.ended.set()

    async def send_raw_request(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Send a request and wait for its response; `MCPError` as the SDK, or sealed if nobody took it."""
        if self._closed:
            raise _not_taken()
        return await super().send_raw_request(*args, **options)

    async def _dispatch(self, *args: Any, **options: Any) -> None:
        """One message; one that trips the SDK up (a progress of 10^400) costs itself, not the connection."""
        try:
            await super()._dispatch(*args, **options)
        except Exception:
            logger.debug("dropped a message", exc_info=True)

    async def _write(self, message: Any, metadata: Any = None) -> None:
        try:
            await super()._write(message, metadata)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            # A stream without a buffer that breaks has not handed over what was being sent.
            if isinstance(message, types.JSONRPCRequest):
                raise _not_taken() from None
            raise


def _not_taken() -> MCPError:
    return MCPError(**seal("closed", "went away before it was asked"))


def _bounded(on_progress: OnProgress) -> OnProgress:
    """`on_progress` for a server that reports faster than anybody listens: what is too much is dropped."""
    waiting = 0

    async def tell(done: float, total: float | None, message: str | None) -> None:
        nonlocal waiting
        if waiting < _MAX_PROGRESS:
            waiting += 1
            try:
                await on_progress(done, total, message)
            finally:
                waiting -= 1

    return tell


class RelaySession(ClientSession):
    """One conversation with one server, from its negotiation to its end."""

    def __init__(
        self, dispatcher: Dispatcher, plain: PlainCalls | None = None, **callbacks: Any
    ) -> None:
        super().__init__(dispatcher=dispatcher, **callbacks)
        self.dispatcher = dispatcher
        self._plain = plain
        self._cancelling: set[asyncio.Task[None]] = set()

        self.finished = dispatcher.ended
        """Set when the conversation is over, for whatever reason."""

    @property
    def is_open(self) -> bool:
        """Whether a request sent now could be answered."""
        return self.dispatcher.is_open and not self.finished.is_set()

    @property
    def is_modern(self) -> bool:
        """Whether the revision spoken has no sessions: 2026-07-28 and later."""
        return self.protocol_version in MODERN_PROTOCOL_VERSIONS

    def _build_capabilities(self, version: str) -> types.ClientCapabilities:
        """From 2026-07-28 on a question comes as a result, which any caller can be shown and answer."""
        built = super()._build_capabilities(version)
        if built.elicitation is None and version in MODERN_PROTOCOL_VERSIONS:
            built.elicitation = types.ElicitationCapability(
                form=types.FormElicitationCapability(), url=types.UrlElicitationCapability()
            )
        return built

    async def negotiate(self, version: str) -> None:
        """Agree on a revision: the given one, or with `auto` the newest both speak.

        Raises:
            MCPError: If the server refuses.
            RuntimeError: If it answers with a revision nobody knows.
        """
        if version == "auto":
            await negotiate_auto(self)
        elif version in MODERN_PROTOCOL_VERSIONS:
            await self._discover()
        else:
            await self._handshake(version)

    async def _discover(self) -> None:
        """`server/discover`, for as long as whoever connects has patience: the SDK asks for ten seconds only."""
        while self.discover_result is None:
            try:
                await self.discover()
            except MCPError as error:
                if error.code != types.REQUEST_TIMEOUT:
                    raise

    async def _handshake(self, version: str) -> None:
        """`initialize`, offering a revision of our choice: the SDK offers the newest only."""
        offer = types.InitializeRequestParams(
            protocol_version=version,
            capabilities=self._build_capabilities(version),
            client_info=self._client_info,
        )
        result = await self.send_request(
            types.InitializeRequest(params=offer), types.InitializeResult
        )
        if result.protocol_version not in HANDSHAKE_PROTOCOL_VERSIONS:
            raise RuntimeError(f"the server speaks {result.protocol_version}, which is unknown")
        self.adopt(result)
        await self.send_notification(types.InitializedNotification())

    async def relay(
        self, method: str, params: JSONObject, on_progress: OnProgress | None = None
    ) -> JSONObject:
        """Send a request; its result, as it came. `params` may be altered.

        Raises:
            MCPError: If the server answers with an error, or not at all.
        """
        data: JSONObject = {"method": method, "params": params}
        options: CallOptions = {}
        self._stamp(data, options)
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
            options["headers"] = {**headers, HANDOVER: outcome.key}
        if on_progress is not None:
            options["on_progress"] = cast("ProgressFnT", _bounded(on_progress))
        return await self._dispatcher.send_raw_request(method, data["params"], options)

    def _cancel(self, request_id: int) -> None:
        """Tell a server before 2026-07-28 to stop; for others the end of the connection says so."""
        if self.is_modern or not self.is_open:
            return
        notice = self.dispatcher.notify("notifications/cancelled", {"requestId": request_id})
        task = asyncio.create_task(notice)
        self._cancelling.add(task)
        task.add_done_callback(self._cancelling.discard)

    def learn(self, tools: Iterable[JSONObject]) -> None:
        """Remember which arguments of `tools` travel as headers too (2026-07-28)."""
        if self.is_modern:
            for tool in tools:
                schema = cast("JSONObject", tool["inputSchema"])
                self._x_mcp_header_maps[tool["name"]] = x_mcp_header_map(schema)
