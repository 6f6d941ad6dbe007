"""The HTTP transport with aiohttp: one pool for hosts that the operator configured, one for public addresses only."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing, suppress
from functools import lru_cache
from io import BytesIO
from typing import Any
from weakref import finalize

from operations.base.errors import CallError, ErrorCode, MissingExtraError, timed_out
from operations.base.retry import IDLE_SECONDS
from operations.io.files import StreamedBody
from operations.io.guard import notice_lost_hosts
from operations.io.hosts import enforce_public, is_public, not_public, origin_of
from operations.io.http.client import REPEATABLE, HTTPRequest, HTTPResponse
from operations.io.http.connections import abort_connection, fail_if_closed
from operations.io.proxies import (
    ConnectionConfig,
    Proxies,
    proxy_status,
    reason_of,
    shown_proxy,
    tls_reason,
)

try:
    import aiohttp
    from aiohttp.abc import AbstractResolver, ResolveResult
    from aiohttp.resolver import ThreadedResolver
    from yarl import URL
except ModuleNotFoundError as error:
    raise MissingExtraError("Calling an HTTP API", extra="openapi") from error


_NO_TIMEOUT = aiohttp.ClientTimeout(total=None)
_LONGEST_HEADER = 1 << 16
"""The largest size of a response header in bytes."""


def _socket(address: tuple[Any, ...]) -> socket.socket:
    """Return a socket for a connection, which notices a lost host even if a stream has no data for hours."""
    opened = socket.socket(*address[:3])
    notice_lost_hosts(opened)
    return opened


class AiohttpTransport:
    """Sends requests with aiohttp.

    Its pools open with the first request. Every event loop has its own pools.

    Args:
        config: The settings. Requests that must reach a public address do not use a proxy, because a proxy resolves
            names itself.
        connections: The largest number of open connections.
        resolver: Resolves names; for tests.
    """

    def __init__(
        self,
        config: ConnectionConfig,
        connections: int = 100,
        resolver: AbstractResolver | None = None,
    ) -> None:
        self._config = config
        self._connections = connections
        self._resolver = resolver
        self._proxies = Proxies(config.proxy, trust_env=config.trust_env)
        self._sessions: dict[
            asyncio.AbstractEventLoop, dict[tuple[bool, bool], aiohttp.ClientSession]
        ] = {}
        # At the end of the process there is no loop left on which they could close.
        finalize(self, _close_dropped, self._sessions).atexit = False

    def send(self, request: HTTPRequest) -> "_Exchange":
        """Send `request`; see `HTTPTransport.send`."""
        return _Exchange(self, request)

    async def aclose(self) -> None:
        """Close the pools of all event loops."""
        for loop in list(self._sessions):
            await self._close(loop)

    @property
    def is_new(self) -> bool:
        """Whether the running event loop has no pool yet."""
        return asyncio.get_running_loop() not in self._sessions

    async def close_left(self) -> None:
        """Close the pools of closed event loops; called before the first request of an event loop."""
        for loop in list(self._sessions):
            if loop.is_closed():
                await self._close(loop)

    async def _close(self, loop: asyncio.AbstractEventLoop) -> None:
        for session in self._sessions.pop(loop, {}).values():
            if loop is not asyncio.get_running_loop() and loop.is_running():
                closing = asyncio.run_coroutine_threadsafe(session.close(), loop)
                await asyncio.wrap_future(closing)
            else:
                await session.close()

    def session(self, *, public_only: bool, new_connection: bool) -> aiohttp.ClientSession:
        """Return the session of the running event loop for these requests."""
        sessions = self._sessions.setdefault(asyncio.get_running_loop(), {})
        session = sessions.get((public_only, new_connection))
        if session is None or session.closed:
            resolver = self._resolver or ThreadedResolver()
            session = sessions[public_only, new_connection] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=self._connections,
                    keepalive_timeout=None if new_connection else IDLE_SECONDS,
                    force_close=new_connection,
                    ssl=self._config.tls_context(presents_certificate=not public_only) or True,
                    resolver=_PublicResolver(resolver) if public_only else resolver,
                    # Not cached, because each connection must check the resolved address.
                    use_dns_cache=not public_only,
                    socket_factory=_socket,
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                trust_env=False,
                timeout=_NO_TIMEOUT,
                response_class=_Response,
                max_line_size=_LONGEST_HEADER,
                max_field_size=_LONGEST_HEADER,
                middlewares=(_sent_once,),
            )
        return session

    def proxy(self, request: HTTPRequest, url: URL) -> str | None:
        """Return the proxy for a request.

        Raises:
            CallError: If the proxy of the environment cannot be used.
        """
        if request.public_only or not self._proxies.is_used:
            return None
        return self._proxies.find(url.scheme, url.raw_host or "", url.port)


_closing: set[asyncio.Task[None]] = set()
"""Tasks that close pools; an event loop does not keep them alive."""


def _close_dropped(
    sessions: dict[asyncio.AbstractEventLoop, dict[tuple[bool, bool], aiohttp.ClientSession]],
) -> None:
    """Close the pools of a transport that was dropped, on their event loops; from any thread."""

    def close(session: aiohttp.ClientSession) -> None:
        task = asyncio.Task(session.close())
        _closing.add(task)
        task.add_done_callback(_closing.discard)

    for loop, pools in sessions.items():
        for session in pools.values():
            # A closed loop cannot close them.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(close, session)


class _Response(aiohttp.ClientResponse):
    def close(self) -> None:
        abort_connection(self)
        super().close()


class _LostError(aiohttp.ClientError):
    """A connection was lost; the cause is the error of aiohttp."""


async def _sent_once(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """Send a request once: aiohttp would repeat it after these errors, but the settings of the service decide."""
    try:
        return await handler(request)
    except aiohttp.ClientConnectorError:
        raise
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise _LostError from error


_AUTOMATIC = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
"""The headers that aiohttp would add by default."""

_WRITTEN_AT_ONCE = 1 << 18


def _is_complete(request: HTTPRequest) -> bool:
    """Return whether the request has all headers that aiohttp would add."""
    has_type = "Content-Type" in request.headers or request.method == "GET"
    return has_type and request.headers.keys() >= {"User-Agent", "Accept", "Accept-Encoding"}


async def _watched(
    body: StreamedBody, waiting: asyncio.Timeout, seconds: float | None
) -> AsyncGenerator[bytes]:
    """Yield a body; every sent piece restarts the time limit of the request."""
    loop = asyncio.get_running_loop()
    async with aclosing(body.chunks()) as chunks:
        async for chunk in chunks:
            yield chunk
            # A response may arrive before the whole body has been sent.
            with suppress(RuntimeError):
                if seconds is not None:
                    waiting.reschedule(loop.time() + seconds)


def _payload(body: bytes) -> aiohttp.Payload:
    """Return a body for aiohttp: a large body in pieces, so that it does not block the event loop."""
    if len(body) > _WRITTEN_AT_ONCE:
        return aiohttp.BytesIOPayload(BytesIO(body))
    return aiohttp.BytesPayload(body)


@lru_cache(maxsize=512)
def _parsed(url: str) -> URL:
    """Return `url` parsed; cached, because aiohttp stores derived values in it."""
    return URL(url, encoded=True)


class _Exchange:
    """Context manager for one request and its response. A class, because a generator is slower."""

    __slots__ = (
        "_body", "_content", "_end", "_proxy", "_request", "_response", "_transport", "headers", "reason", "status",
    )  # fmt: skip

    def __init__(self, transport: AiohttpTransport, request: HTTPRequest) -> None:
        self._body: AsyncGenerator[bytes] | None = None
        self._end: float | None = None
        """When the whole response must have arrived; None for a stream, whose time limit ends with its head."""
        self._proxy: str | None = None
        self._transport = transport
        self._request = request
        self._response: aiohttp.ClientResponse | None = None

    async def __aenter__(self) -> HTTPResponse:
        request, transport = self._request, self._transport
        url = _parsed(request.url)
        if request.public_only:
            # A numeric host is not resolved, so the resolver would not check it.
            enforce_public(url.raw_host or "")
        self._proxy = transport.proxy(request, url)
        if transport.is_new:
            await transport.close_left()
        session = transport.session(
            public_only=request.public_only, new_connection=request.new_connection
        )
        try:
            async with asyncio.timeout(request.timeout) as waiting:
                response = await self._sent(session, url, waiting)
        except BaseException as error:
            await self.__aexit__()
            if not isinstance(error, Exception):
                raise
            # Raised without its cause, whose text often contains the whole URL with its keys.
            raise _call_error(error, request, self._proxy) from None
        if not request.is_stream and not isinstance(request.body, StreamedBody):
            self._end = waiting.when()
        self._response = response
        self._content = response.content
        self.headers: Mapping[str, str] = _joined(response.raw_headers)
        self.reason = response.reason or ""
        self.status = response.status
        return self

    def _sent(
        self, session: aiohttp.ClientSession, url: URL, waiting: asyncio.Timeout
    ) -> Awaitable[aiohttp.ClientResponse]:
        request, headers = self._request, self._request.headers
        data: aiohttp.Payload | AsyncGenerator[bytes] | None = None
        if isinstance(request.body, StreamedBody):
            data = self._body = _watched(request.body, waiting, request.timeout)
            if request.body.size is not None:
                headers = {**headers, "Content-Length": str(request.body.size)}
        elif request.body:
            data = _payload(request.body)
        return session.request(
            request.method,
            url,
            headers=headers,
            data=data,
            # Suppressing them takes a tenth of the time of a call, so it is done only if one is missing.
            skip_auto_headers=None if _is_complete(request) else _AUTOMATIC,
            allow_redirects=False,
            proxy=self._proxy,
        )

    def buffered(self) -> bytes | None:
        content = self._content
        return content.read_nowait() if content.is_eof() and content.exception() is None else None

    async def chunks(self) -> AsyncGenerator[bytes]:
        content = self._content
        fail_if_closed(self._response, aiohttp.ClientError())
        try:
            while not content.at_eof():
                async with asyncio.timeout_at(self._end):
                    chunk = await content.readany()
                if chunk:
                    yield chunk
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _call_error(error, self._request) from None

    async def __aexit__(self, *exc_info: object) -> None:
        if self._body is not None:
            # The body may be running in the task that sends it, which then closes the file.
            with suppress(RuntimeError):
                await self._body.aclose()
        response = self._response
        # A completely received response has returned its connection to the pool; otherwise this closes the connection.
        if response is not None and not response.closed:
            response.close()


def _joined(raw: tuple[tuple[bytes, bytes], ...]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for name, value in raw:
        key = name.decode("latin-1").lower()
        try:
            text = value.decode()
        except UnicodeDecodeError:
            text = value.decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    return headers


class _PublicResolver(AbstractResolver):
    """Resolves names to public addresses only. The connection uses the checked address."""

    def __init__(self, inner: AbstractResolver) -> None:
        self._inner = inner

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        public = [entry for entry in found if is_public(entry["host"])]
        if found and not public:
            raise NotPublicError(host)
        return public

    async def close(self) -> None:
        await self._inner.close()


class NotPublicError(OSError):
    """A name has only addresses that are not public."""


def _call_error(error: Exception, request: HTTPRequest, proxy: str | None = None) -> CallError:
    """Return the error for a request without a complete response.

    It omits the request and the login of its proxy, which may contain secrets.
    """
    origin = origin_of(request.url)
    where = f"{request.method} {origin}"
    if isinstance(request.body, StreamedBody) and request.body.failure is not None:
        return request.body.failure
    if isinstance(error, _LostError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, NotPublicError):
            return not_public(origin.host)
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, TimeoutError):
        return timed_out(where, request.timeout, "respond")
    if (problem := _connect_problem(error, proxy)) is not None:
        return CallError(ErrorCode.UNAVAILABLE, f"{where}: {problem}.", begun=False)
    if isinstance(error, (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError)):
        reason = type(error).__name__
        if isinstance(error, OSError) and error.errno is not None:
            reason = tls_reason(reason_of(error), "ca_file", "client_certificate")
        # After a connection was made, the request may have arrived.
        is_connected = not isinstance(error, aiohttp.ClientConnectorError)
        return CallError(
            ErrorCode.UNAVAILABLE,
            f"{where}: the connection failed or was lost ({reason}).",
            retryable=request.method in REPEATABLE or not is_connected,
            begun=None if is_connected else False,
        )
    if isinstance(error, aiohttp.ClientError):
        # Without the message of aiohttp, which quotes data.
        problem = "the response was not valid HTTP, or longer than its Content-Length"
        return CallError(ErrorCode.EXECUTION_ERROR, f"{where}: {problem}.")
    return CallError(ErrorCode.EXECUTION_ERROR, f"{where}: the request could not be sent.")


def _connect_problem(error: Exception, proxy: str | None) -> str | None:
    """Return why no connection was made, if the reason is the name of the host, its certificate, or the proxy."""
    if proxy is not None:
        reason: str | None = None
        if isinstance(error, aiohttp.ClientHttpProxyError):
            reason = proxy_status(error.status)
        elif isinstance(
            error, (aiohttp.ClientProxyConnectionError, aiohttp.ClientConnectorDNSError)
        ):
            reason = reason_of(error)
        if reason is not None:
            return f"{shown_proxy(proxy)} cannot be used: {reason}"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        is_unknown = error.os_error.errno == socket.EAI_NONAME
        return "there is no such host" if is_unknown else reason_of(error)
    if isinstance(error, aiohttp.ClientSSLError):
        cause = error.__cause__ or error
        text = getattr(cause, "verify_message", "") or str(cause)
        return f"TLS failed: {tls_reason(text, 'ca_file', 'client_certificate', 'http://')}"
    return None
