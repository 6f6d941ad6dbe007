"""The operations of a served registry or hub, called over HTTP.

    hub = operations.connect("http://127.0.0.1:8000", token=...)

Rule 1: the server validates. Its errors, with codes and details, and its envelopes, with `meta`, arrive unchanged.
Rule 2: the token is sent as a header, and never in a URL.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from math import isinf
from typing import Any
from urllib.parse import urlsplit

import msgspec

from operations.base.errors import CallError, ErrorCode
from operations.base.json.decoding import decode_json
from operations.base.json.values import MAX_RESPONSE_VALUES, object_of
from operations.contract.context import NO_CALL, OperationContext
from operations.contract.envelopes import LocalResponseMeta, ResponseEnvelope
from operations.io.http.aiohttp import AiohttpTransport
from operations.io.http.client import DEFAULT_HEADERS, HTTPRequest, HTTPResponse
from operations.io.http.decoding import decoded, read_whole
from operations.io.proxies import ConnectionConfig
from operations.io.sse import EventStreamDecoder
from operations.registry.registry import OperationRegistry

_MAX_BYTES = 64 << 20
"""The largest accepted response, and the largest item of a subscription."""


class HTTPRemote:
    """Runs operations at a server of this library.

    Args:
        url: The address of the server, as `operations serve` prints it.
        token: A key, a grant or another credential; None for no identity.
        timeout: Seconds for one call, if its context has no earlier deadline.
        connection: Proxies and certificates.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        timeout: float,
        connection: ConnectionConfig,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{parts.hostname or url!r} needs a scheme: http://HOST:PORT")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("the address has only a host and a path: give the credential as token")
        self._url = url.rstrip("/")
        self._timeout = timeout
        self._transport = AiohttpTransport(connection)
        self._headers = {**DEFAULT_HEADERS, "content-type": "application/json"}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"

    async def call(
        self, operation_id: str, input: Any, context: OperationContext
    ) -> ResponseEnvelope[Any]:
        """Run a query or mutation at the server. Raises its errors."""
        question = {"operation": operation_id, "input": input}
        async with self._answer("POST", "/call", question, context) as answer:
            content = await read_whole(answer, _MAX_BYTES)
        try:
            return ResponseEnvelope.decode(content)
        except ValueError:
            raise self._foreign() from None

    async def subscribe(
        self, operation_id: str, input: Any, context: OperationContext
    ) -> AsyncIterator[ResponseEnvelope[Any]]:
        """Open a subscription at the server. Raises its errors."""
        question = {"operation": operation_id, "input": input}
        decoder = EventStreamDecoder(max_event_bytes=_MAX_BYTES)
        async with self._answer("POST", "/subscribe", question, context, is_stream=True) as answer:
            async for chunk in answer.chunks():
                for event in decoder.feed(chunk):
                    if event.event == "complete":
                        return
                    data = _decoded(event.data)
                    if event.event == "error":
                        raise CallError.from_wire(object_of(data))
                    yield _item(data, event.meta, operation_id)
        message = "the stream ended early: the connection was lost"
        raise CallError(ErrorCode.UNAVAILABLE, message)

    async def ids(self) -> list[str]:
        """Return the ids of the operations that the server shows to this caller."""
        async with self._answer("GET", "/operations", None, NO_CALL) as answer:
            listing = object_of(_decoded(await read_whole(answer, _MAX_BYTES)))
        return [str(each["id"]) for each in listing.get("operations", ())]

    async def aclose(self) -> None:
        """Close the connections."""
        await self._transport.aclose()

    @asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        question: Any,
        context: OperationContext,
        *,
        is_stream: bool = False,
    ) -> AsyncGenerator[HTTPResponse]:
        """Send a request, and yield a successful response.

        Raises:
            CallError: The error of any other response.
        """
        seconds = min(context.remaining, self._timeout)
        headers = dict(self._headers)
        if not is_stream or not isinf(context.remaining):
            limit = context.remaining if is_stream else seconds
            headers["operations-timeout"] = str(max(1, int(limit * 1000)))
        headers |= {"operations-meta": "1"} if is_stream else {}
        request = HTTPRequest(
            method=method,
            url=self._url + path,
            headers=headers,
            body=None if question is None else msgspec.json.encode(question),
            timeout=seconds,
            is_stream=is_stream,
        )
        async with self._transport.send(request) as answer:
            if answer.status == 200:
                yield answer
                return
            content = b"".join([chunk async for chunk in decoded(answer, max_bytes=_MAX_BYTES)])
        try:
            wire = object_of(_decoded(content))
        except ValueError:
            wire = {}
        if "code" not in wire:
            raise self._foreign(answer.status)
        raise CallError.from_wire(wire)

    def _foreign(self, status: int | None = None) -> CallError:
        what = "its response is not an envelope" if status is None else f"it returned {status}"
        message = f"{self._url} is no server of operations: {what}"
        return CallError(ErrorCode.UNAVAILABLE, message, retryable=False)


def _decoded(text: bytes | str) -> Any:
    return decode_json(text, max_values=MAX_RESPONSE_VALUES)


def _item(data: Any, meta: str, operation_id: str) -> ResponseEnvelope[Any]:
    wire = {"data": data, "meta": _decoded(meta)} if meta else None
    if wire is not None:
        return ResponseEnvelope.from_wire(wire)
    return ResponseEnvelope(data, LocalResponseMeta(operation_id=operation_id, timestamp=0))


def connect(
    url: str,
    *,
    token: str | None = None,
    timeout: float = 30,
    connection: ConnectionConfig | None = None,
) -> OperationRegistry:
    """Return a registry whose operations run at a server of this library.

        hub = operations.connect("http://127.0.0.1:8000", token=key)
        hub.sync.task.create(title="Ship it")                      # without await
        await hub.execute("task.create", {"title": "Ship it"})     # with it

    Nothing is sent before the first call. Close it with `async with hub:`, `with hub.sync:` or `hub.sync.close()`.

    Args:
        url: The address that `operations serve` or `operations dev` prints.
        token: A key, a grant or another credential; None for no identity.
        timeout: Seconds for one call, if its context has no earlier deadline.
        connection: Proxies and certificates.

    Raises:
        ValueError: If the address has no scheme, or contains a credential.
    """
    remote = HTTPRemote(url, token, timeout, connection or ConnectionConfig())
    registry = OperationRegistry(remote=remote)
    registry.close_with(remote)
    return registry
