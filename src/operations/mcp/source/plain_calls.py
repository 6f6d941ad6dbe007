"""Plain calls over streamable HTTP: one POST and one response, without the tasks and streams of the SDK.

Rule 1: a plain call handles only a response without other messages. If other messages arrive on its stream, such as
        progress or a question, or if the stream ends early, the SDK reads the whole stream instead.
Rule 2: limits and failures are those of `http`.
"""

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any, Final, cast

import aiohttp
import httpx2
import msgspec
from mcp import MCPError
from mcp_types import RequestId
from opentelemetry.propagate import inject

from operations.base.json.decoding import decode_json
from operations.base.json.values import MAX_DOCUMENT_DEPTH, JSONLimitError, JSONValueError
from operations.base.redaction import Redactor
from operations.base.retry import IDLE_SECONDS
from operations.base.tasks import start_task
from operations.base.types import JSONObject
from operations.io.http.connections import abort_connection, fail_if_closed
from operations.io.proxies import Proxies, proxy_status, reason_of, shown_proxy, tls_reason
from operations.mcp.config import MCPClientConfig
from operations.mcp.shared.failures import answered_id, refusal, sealed


def tls_context(config: MCPClientConfig, *, presents_certificate: bool = True) -> ssl.SSLContext:
    """Return the TLS context of a server."""
    return config.tls_context(presents_certificate=presents_certificate) or _default_tls_context()


@cache
def _default_tls_context() -> ssl.SSLContext:
    """Return the TLS context that connections share, because loading certificates is slow and takes a megabyte."""
    return httpx2.create_ssl_context()


def unreachable(reason: str, proxy: str | None) -> str:
    """Return the message for a server that cannot be reached, after its name."""
    way = "" if proxy is None else f" through {shown_proxy(proxy)}"
    advised = tls_reason(reason, "ca_file", "client_certificate", "http://")
    return f"cannot be reached{way}: {advised}"


METHODS: Final = frozenset({"tools/call", "resources/read", "prompts/get"})
"""The methods of plain calls."""

CONNECT_SECONDS: Final = 10.0
READ_SECONDS: Final = 300.0
"""The longest time in seconds between two bytes. Open streams send at least a comment in this time, or are reopened."""

_END_SECONDS: Final = 1.0
"""Seconds that a server has to end a stream after its result."""

_FIRST_ID: Final = 1_000_000_001
"""Higher than any request id of the SDK in the same session, so that the id of a request shows who sent it."""

EVENT_END: Final = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_DATA: Final = re.compile(rb"^data: ?(.*?)\r?$", re.MULTILINE)

_encode = msgspec.json.Encoder().encode


class _Response(aiohttp.ClientResponse):
    def close(self) -> None:
        abort_connection(self)
        super().close()


@dataclass(frozen=True, slots=True)
class OpenStream(httpx2.AsyncByteStream):
    """An event stream that the SDK should read. Its bytes begin with those that were already read."""

    received: bytes
    response: aiohttp.ClientResponse

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self.received
        try:
            async for part in self.response.content.iter_any():
                yield part
        except (aiohttp.ClientError, TimeoutError) as error:
            raise httpx2.ReadError(type(error).__name__) from error

    async def aclose(self) -> None:
        """Close the connection."""
        self.response.close()


class PlainCalls:
    """Sends plain calls to one server.

    Args:
        config: The configuration of the server.
        redactor: Receives the tokens that are sent.
        token: Returns the bearer token of a request, if the server requires one.
        client: The SDK's HTTP client for the same server.
    """

    def __init__(
        self,
        config: MCPClientConfig,
        redactor: Redactor,
        token: Callable[[], Awaitable[str | None]] | None,
        client: httpx2.AsyncClient,
    ) -> None:
        self._redactor = redactor
        self._token = token
        self._client = client
        self._max_bytes = config.max_message_bytes
        self._max_values = config.max_message_values
        self._headers = {
            **config.headers,
            "accept": "application/json, text/event-stream",
            "content-type": "application/json",
            "accept-encoding": "identity",
        }
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,
                keepalive_timeout=IDLE_SECONDS,
                # The certificates that the SDK's client trusts.
                ssl=tls_context(config),
            ),
            timeout=aiohttp.ClientTimeout(
                total=None,
                sock_connect=CONNECT_SECONDS,
                sock_read=max(READ_SECONDS, config.timeout or 0),
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            response_class=_Response,
        )
        self._proxies = Proxies(config.proxy, trust_env=config.trust_env)
        self._ids = count(_FIRST_ID)
        self._streams: dict[RequestId, OpenStream] = {}
        self._ending: set[asyncio.Task[None]] = set()

        self.url = cast("str", config.url)
        """The address of the server, after the redirects that the handshake followed."""

        self.session_id: str | None = None
        """The id of the session, from the server's response to the handshake."""

    @property
    def _proxy(self) -> str | None:
        return self._proxies.find_for(self.url) if self._proxies.is_used else None

    async def aclose(self) -> None:
        """Close the connections."""
        for ending in self._ending:
            ending.cancel()
        await self._http.close()

    @property
    def is_usable(self) -> bool:
        """Return whether a request can be sent as a plain call.

        Servers that set cookies may need them in later requests.
        """
        return not self._client.cookies

    def next_id(self) -> int:
        """Return the id of a new request."""
        return next(self._ids)

    def has_sent(self, request_id: Any) -> bool:
        """Return whether a request was sent as a plain call, so that the SDK must not send it again."""
        return isinstance(request_id, int) and request_id >= _FIRST_ID

    def take(self, request_id: RequestId) -> OpenStream | None:
        """Return the stream of a request that the SDK should read, and remove it."""
        return self._streams.pop(request_id, None)

    async def post(
        self, request_id: int, method: str, params: JSONObject, headers: Mapping[str, str]
    ) -> JSONObject | OpenStream:
        """Send a request; return its result, or the stream that the SDK should read.

        Raises:
            MCPError: If the server responds with an error or does not respond.
        """
        meta: JSONObject = {**params.get("_meta", {})}
        inject(meta)
        if meta:
            params = {**params, "_meta": meta}
        message = {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}
        sent = {**self._headers, **headers}
        if self.session_id is not None:
            sent["mcp-session-id"] = self.session_id
        if self._token is not None:
            token = await self._token()
            if token is not None:
                sent["authorization"] = f"Bearer {token}"
        self._redactor.learn(sent.get("authorization", ""))
        try:
            return await self._exchange(request_id, _encode(message), sent)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise sealed("unreachable", unreachable(reason_of(error), self._proxy)) from None
        except aiohttp.ClientHttpProxyError as error:
            raise sealed(
                "unreachable", unreachable(proxy_status(error.status), self._proxy)
            ) from None
        except JSONLimitError as error:
            raise sealed("too_large", f"answered with a message that {error.reason}") from None
        except (aiohttp.ClientError, TimeoutError) as error:
            what = f"broke the connection off: {type(error).__name__}"
            raise sealed("lost", what) from None

    async def _exchange(
        self, request_id: int, body: bytes, headers: dict[str, str]
    ) -> JSONObject | OpenStream:
        response = await self._http.post(
            self.url, data=body, headers=headers, allow_redirects=False, proxy=self._proxy
        )
        fail_if_closed(response, aiohttp.ClientPayloadError())
        keeps = False
        try:
            kind = response.headers.get("content-type", "").lower()
            if response.headers.get("content-encoding", "identity").lower() != "identity":
                what = "answered with a compressed body, which was not requested"
                raise sealed("too_large", what)
            status = response.status
            if status >= 400:
                had_session = "mcp-session-id" in headers
                text = await self._read(response)
                error = refusal(status, kind, text, self._redactor, had_session=had_session)
                raise MCPError(**error)
            if status == 200 and kind.startswith("text/event-stream"):
                keeps = True
                return await self._first_message(request_id, response)
            if status != 200 or not kind.startswith("application/json"):
                what = f"answered with HTTP status {status} and {kind or 'no content type'}"
                raise sealed("status", what, statusCode=status)
            return self._result(request_id, await self._read(response))
        finally:
            if not keeps:
                response.release()

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        parts: list[bytes] = []
        size = 0
        async for part in response.content.iter_any():
            size += len(part)
            if size > self._max_bytes:
                response.close()
                raise sealed("too_large", f"answered with more than {self._max_bytes} bytes")
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _first_message(
        self, request_id: int, response: aiohttp.ClientResponse
    ) -> JSONObject | OpenStream:
        """Return the result if it is the first message on a stream, else the whole stream."""
        received = bytearray()
        start = 0
        try:
            async for part in response.content.iter_any():
                searched = max(start, len(received) - 3)
                received += part
                while (end := EVENT_END.search(received, searched)) is not None:
                    data = b"\n".join(_DATA.findall(bytes(received[start : end.end()])))
                    start = searched = end.end()
                    if not data:
                        # A comment, or an event that has only an id.
                        continue
                    if len(data) <= self._max_bytes and answered_id(data) == request_id:
                        # Read to its end, so that its connection can be reused.
                        start_task(self._ending, _read_to_end(response))
                        return self._result(request_id, data)
                    return self._handed_over(request_id, bytes(received), response)
                if len(received) - start > self._max_bytes:
                    break
        except BaseException:
            response.close()
            raise
        return self._handed_over(request_id, bytes(received), response)

    def _handed_over(
        self, request_id: int, received: bytes, response: aiohttp.ClientResponse
    ) -> OpenStream:
        stream = self._streams[request_id] = OpenStream(received, response)
        return stream

    def _result(self, request_id: int, body: bytes) -> JSONObject:
        """Return the result in a response.

        Raises:
            MCPError: If the response is an error, or does not belong to this request.
        """
        try:
            message: Any = decode_json(
                body, max_values=self._max_values, max_depth=MAX_DOCUMENT_DEPTH
            )
        except JSONLimitError:
            raise
        except JSONValueError as error:
            raise sealed("malformed", f"answered with a message that {error.reason}") from None
        match message:
            case {"id": known, "result": dict()} if known == request_id:
                return cast("JSONObject", message["result"])
            case {"error": {"code": int() as code, "message": str() as text, **rest}}:
                raise MCPError(code, text, rest.get("data"))
            case _:
                what = "answered with a message that is not a response to the request"
                raise sealed("malformed", what)


async def _read_to_end(response: aiohttp.ClientResponse) -> None:
    """Read a stream to its end; close it if it does not end soon."""
    try:
        async with asyncio.timeout(_END_SECONDS):
            async for _ in response.content.iter_any():
                pass
    except (aiohttp.ClientError, TimeoutError):
        response.close()
    except asyncio.CancelledError:
        response.close()
        raise
    else:
        response.release()
