"""The HTTP client for servers with a URL, used by the SDK's transports.

Rule 1: a failed HTTP request affects only its call. The SDK would end the whole connection after a refused
socket; here the request gets an error response.
Rule 2: the size of a response is checked while it arrives. Compressed bodies are neither requested nor accepted.
Rule 3: hosts that a server names for OAuth discovery and tokens must be public, unless the operator configured them.
"""

import asyncio
import inspect
import logging
import re
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, TypeAlias, cast

import anyio
import httpx2
import mcp_types as types
import msgspec
from mcp import MCPError
from mcp.client.auth import OAuthFlowError
from mcp.client.auth.extensions.client_credentials import ClientCredentialsOAuthProvider
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage

from operations.base.errors import CallError
from operations.base.json.decoding import enforce_bounds
from operations.base.json.values import MAX_DOCUMENT_DEPTH, JSONLimitError
from operations.base.redaction import Redactor
from operations.base.types import JSONObject
from operations.contract.context import NO_CALL
from operations.io.hosts import TrustedHosts, enforce_public, is_public, not_public, origin_of
from operations.io.proxies import Proxies, proxy_status
from operations.io.sse import encoded_event
from operations.mcp.config import MCPClientConfig, MCPClientCredentials
from operations.mcp.shared import failures
from operations.mcp.shared.interaction import tied
from operations.mcp.shared.repairs import checked
from operations.mcp.source.oauth import TokenStore, stored_login
from operations.mcp.source.plain_calls import (
    CONNECT_SECONDS,
    EVENT_END,
    READ_SECONDS,
    OpenStream,
    PlainCalls,
    tls_context,
    unreachable,
)
from operations.sources.credentials import TokenFunction

logger = logging.getLogger("operations.mcp")

_FAREWELL_SECONDS = 2.0

_JSON = "application/json"
_SSE = "text/event-stream"


@asynccontextmanager
async def open_sse(config: MCPClientConfig, redactor: Redactor) -> AsyncGenerator[Any]:
    """Yield the two streams to the server at `config.url`, by the SSE transport of the 2024 protocol.

    Responses, and reports of failed messages, arrive on a separate stream.

    The SDK would stop sending after the first failed message, without a report.
    """
    merged, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)

    async def report(request: httpx2.Request, response: httpx2.Response) -> None:
        failed = _failed_message(request, response)
        if failed is not None:
            with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
                await merged.send(failed)

    def build(
        headers: dict[str, str] | None = None,
        timeout: httpx2.Timeout | None = None,
        auth: httpx2.Auth | None = None,
    ) -> httpx2.AsyncClient:
        return _Client(config, redactor, timeout, report)

    async with (
        merged,
        incoming,
        sse_client(cast("str", config.url), httpx_client_factory=build) as (answers, outgoing),
    ):

        async def merge() -> None:
            with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
                async with merged:
                    async for message in answers:
                        await merged.send(message)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(merge)
            yield incoming, outgoing
            tasks.cancel_scope.cancel()


def _failed_message(request: httpx2.Request, response: httpx2.Response) -> SessionMessage | None:
    """Return the JSON-RPC response for a failed message, from a response of `_error`; None if no call waits for it."""
    sent = _decode_sent(request.content)
    if not sent.method or sent.id is None:
        # A notification, or an answer, whose id is that of a request of the server.
        return None
    wire = {**msgspec.json.decode(response.content), "id": sent.id}
    return SessionMessage(types.JSONRPCError.model_validate(wire))


@asynccontextmanager
async def open_streamable(config: MCPClientConfig, redactor: Redactor) -> AsyncGenerator[Any]:
    """Yield the two streams to the server at `config.url`, by streamable HTTP, and its plain calls if there are any.

    Args:
        config: The configuration of the server.
        redactor: The redactor of the configuration, which receives fetched tokens.
    """
    url = cast("str", config.url)
    async with AsyncExitStack() as resources:
        client = _Client(config, redactor)
        auth = client.auth
        # OAuth needs several requests, and a login in the URL is sent by the SDK's client.
        if (auth is None or isinstance(auth, _Bearer)) and not httpx2.URL(url).userinfo:
            token = None if auth is None else auth.token
            client.plain = PlainCalls(config, redactor, token, client)
            resources.push_async_callback(client.plain.aclose)
        await resources.enter_async_context(client)
        incoming, outgoing = await resources.enter_async_context(
            streamable_http_client(
                url, http_client=client, max_sse_event_size=config.max_message_bytes
            )
        )
        yield incoming, outgoing, client.plain


# ------------------------------------------------------------ failures as responses


Report: TypeAlias = Callable[[httpx2.Request, httpx2.Response], Awaitable[None]]
"""Called with a message that failed, and the error response to it."""


class _Sent(msgspec.Struct):
    """The parts of our messages that identify a request."""

    method: str = ""
    id: Any = None


_decode_sent = msgspec.json.Decoder(_Sent).decode


class _Client(httpx2.AsyncClient):
    """A client with the headers, authentication and limits of a configuration.

    Args:
        config: The configuration of the server.
        redactor: The redactor of the configuration.
        timeout: Used instead of the configured timeout.
        report: Called with failed messages, which then count as delivered.
    """

    def __init__(
        self,
        config: MCPClientConfig,
        redactor: Redactor,
        timeout: httpx2.Timeout | None = None,
        report: Report | None = None,
    ) -> None:
        self._config = config
        self._redactor = redactor
        self._report = report
        self.plain: PlainCalls | None = None
        proxies = Proxies(config.proxy, trust_env=config.trust_env)
        self._proxy = proxies.find_for(cast("str", config.url))
        read = max(READ_SECONDS, config.timeout or 0)
        super().__init__(
            headers={**config.headers, "accept-encoding": "identity"},
            timeout=timeout or httpx2.Timeout(CONNECT_SECONDS, read=read),
            auth=_authentication(config),
            transport=_BoundedTransport(config, proxies),
        )

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        if request.method == "DELETE":
            # A request that ends a session: a stopped server must not delay closing.
            request.extensions["timeout"] = httpx2.Timeout(_FAREWELL_SECONDS).as_dict()
        if request.method != "POST":
            return await super().send(request, **options)
        # The request that follows a redirect has not been read.
        sent = _decode_sent(await request.aread())
        if self.plain is not None and sent.method and self.plain.has_sent(sent.id):
            return self._begun(self.plain.take(sent.id), request)
        response = await self._post(request, **options)
        if self._report is None or response.status_code < 400:
            return response
        await self._report(request, response)
        return httpx2.Response(202, request=request)

    def _begun(self, stream: OpenStream | None, request: httpx2.Request) -> httpx2.Response:
        """Return the response of a request that was sent as a plain call."""
        if stream is None:
            return _answer(request, "lost", "broke the connection off")
        events = _BoundedEvents(stream, self._config)
        return httpx2.Response(200, headers={"content-type": _SSE}, stream=events, request=request)

    async def _post(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request; return its response, or one that describes the failure if there is none."""
        try:
            response = await self._exchange(request, **options)
        except Exception as error:  # noqa: BLE001 - the SDK must receive a response for every request
            return self._failure(request, error)
        if response.status_code < 400:
            return response
        return await _refusal(request, response, self._redactor)

    async def _exchange(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request; return its response, with a JSON body read within the limits."""
        response = await super().send(request, **options)
        if self.plain is not None and response.is_success:
            self.plain.url = str(request.url)
        if self.plain is not None and "mcp-session-id" not in request.headers:
            self.plain.session_id = response.headers.get("mcp-session-id")
        self._redactor.learn(response.request.headers.get("authorization", ""))
        if not _is_json(response):
            return response
        await response.aread()
        _enforce_bounds(response.content, self._config)
        content = await checked(response.content)
        if content is response.content:
            return response
        return httpx2.Response(
            response.status_code,
            headers=response.headers,
            content=content,
            request=response.request,
        )

    def _failure(self, request: httpx2.Request, error: Exception) -> httpx2.Response:
        """Return the response for a request that has none."""
        match error:
            case httpx2.ConnectError() | httpx2.ConnectTimeout() | httpx2.PoolTimeout():
                return _answer(request, "unreachable", unreachable(str(error), self._proxy))
            case httpx2.ProxyError():
                status = str(error)[:3]
                reason = proxy_status(int(status)) if status.isdigit() else str(error)
                return _answer(request, "unreachable", unreachable(reason, self._proxy))
            case _Refused():
                return _answer(request, "too_large", str(error))
            case JSONLimitError():
                return _answer(request, "too_large", f"answered with a message that {error.reason}")
            case httpx2.TransportError():
                return _answer(request, "lost", f"broke the connection off: {type(error).__name__}")
            case MCPError():
                return _error(request, error.error.model_dump())
            case OAuthFlowError():
                return _answer(request, "status", f"rejected the sign-in: {error}")
            case _:
                # The response of a token server may contain secrets.
                logger.error("signing in failed", exc_info=error)
                return _answer(request, "status", f"was not called: {type(error).__name__}")


def _is_json(response: httpx2.Response) -> bool:
    return response.headers.get("content-type", "").lower().startswith(_JSON)


def _answer(
    request: httpx2.Request, kind: failures.Kind, message: str, **details: Any
) -> httpx2.Response:
    """Return a synthetic response, whose error the SDK passes to the call that waits for this request."""
    return _error(request, failures.seal(kind, message, **details))


def _error(request: httpx2.Request, error: JSONObject) -> httpx2.Response:
    content = msgspec.json.encode({"jsonrpc": "2.0", "id": None, "error": error})
    return httpx2.Response(502, headers={"content-type": _JSON}, content=content, request=request)


async def _refusal(
    request: httpx2.Request, response: httpx2.Response, redactor: Redactor
) -> httpx2.Response:
    """Return a response with the JSON-RPC error for an error status."""
    try:
        body = await response.aread()
    except httpx2.TransportError:
        body = b""
    finally:
        await response.aclose()
    had_session = "mcp-session-id" in request.headers
    kind = response.headers.get("content-type", "").lower()
    error = failures.refusal(response.status_code, kind, body, redactor, had_session=had_session)
    return _error(request, error)


# ------------------------------------------------------------ limits


class _Refused(httpx2.TransportError):
    """A rejected body."""


def _enforce_bounds(message: bytes, config: MCPClientConfig) -> None:
    enforce_bounds(message, max_values=config.max_message_values, max_depth=MAX_DOCUMENT_DEPTH)


def _without_login(url: httpx2.URL) -> str:
    return f"{url.scheme}://{url.netloc.decode()}"


class _BoundedTransport(httpx2.AsyncHTTPTransport):
    """Limits responses. Connects only to public addresses of hosts that the operator did not name."""

    def __init__(self, config: MCPClientConfig, proxies: Proxies) -> None:
        super().__init__(verify=tls_context(config))
        self._config = config
        urls = [cast("str", config.url)]
        if isinstance(config.auth, MCPClientCredentials):
            urls.append(config.auth.issuer)
        named = [_without_login(httpx2.URL(url)) for url in urls]
        self._trusted = TrustedHosts(named, config.allowed_hosts)
        self._proxies = proxies
        self._proxied: dict[str, httpx2.AsyncHTTPTransport] = {}
        # Connections are not reused, because they are identified by address, which hosts may share.
        self._public = httpx2.AsyncHTTPTransport(
            verify=tls_context(config, presents_certificate=False),
            limits=httpx2.Limits(max_keepalive_connections=0),
        )

    async def aclose(self) -> None:
        for transport in (self._public, *self._proxied.values()):
            await transport.aclose()
        await super().aclose()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if origin_of(_without_login(request.url)) not in self._trusted:
            response = await self._public.handle_async_request(await _at_public_address(request))
        elif (proxy := self._proxies.find_for(str(request.url))) is not None:
            response = await self._through(proxy).handle_async_request(request)
        else:
            response = await super().handle_async_request(request)
        encoding = response.headers.get("content-encoding", "identity").lower()
        if encoding != "identity":
            await response.aclose()
            raise _Refused("responded with a compressed body, which was not requested")
        stream = cast("httpx2.AsyncByteStream", response.stream)
        if response.headers.get("content-type", "").lower().startswith(_SSE):
            response.stream = _BoundedEvents(stream, self._config)
        else:
            response.stream = _BoundedStream(stream, self._config)
        return response

    def _through(self, proxy: str) -> httpx2.AsyncHTTPTransport:
        """Return the transport for requests that a proxy forwards."""
        if proxy not in self._proxied:
            self._proxied[proxy] = httpx2.AsyncHTTPTransport(
                verify=tls_context(self._config), proxy=proxy
            )
        return self._proxied[proxy]


async def _at_public_address(request: httpx2.Request) -> httpx2.Request:
    """Return `request` with its host resolved to a public address, so that the checked address is the one used.

    Raises:
        OAuthFlowError: If the host has no public address.
    """
    host, port = request.url.host, request.url.port
    try:
        enforce_public(host)
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(entry[4][0]) for entry in found if is_public(str(entry[4][0]))]
        if not addresses:
            raise not_public(host)
    except CallError as error:
        raise OAuthFlowError(error.message) from None
    except OSError as error:
        raise httpx2.ConnectError(f"{host} cannot be resolved", request=request) from error
    return httpx2.Request(
        request.method,
        request.url.copy_with(host=addresses[0]),
        headers=request.headers,
        stream=cast("httpx2.AsyncByteStream", request.stream),
        extensions={**request.extensions, "sni_hostname": host},
    )


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, config: MCPClientConfig) -> None:
        self._stream = stream
        self._config = config
        self._limit = config.max_message_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in self._stream:
            size += len(chunk)
            if size > self._limit:
                raise _Refused(f"answered with more than {self._limit} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


_FIELD = re.compile(rb"^(?:data: ?|(?:event|id|retry)\b.*|:.*)", re.MULTILINE)


class _BoundedEvents(_BoundedStream):
    """Repairs listings, and replaces each event with too many values by an error, before the SDK decodes them."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        event = bytearray()
        async for chunk in self._stream:
            # An event may end between two chunks.
            start = max(0, len(event) - 3)
            event += chunk
            while (end := EVENT_END.search(event, start)) is not None:
                yield await self._bounded(bytes(event[: end.end()]))
                del event[: end.end()]
                start = 0
            if len(event) > self._limit:
                # The SDK rejects it.
                yield bytes(event)
                event.clear()
        yield bytes(event)

    async def _bounded(self, event: bytes) -> bytes:
        try:
            _enforce_bounds(event, self._config)
        except JSONLimitError as error:
            request_id = failures.answered_id(_FIELD.sub(b"", event))
            message = failures.seal("too_large", f"sent a message that {error.reason}")
            wire = {"jsonrpc": "2.0", "id": request_id, "error": message}
            return b"" if request_id is None else encoded_event(msgspec.json.encode(wire))
        data = _FIELD.sub(b"", event).strip()
        repaired = await checked(data)
        return event if repaired is data else encoded_event(repaired)


# ------------------------------------------------------------ authentication


def _authentication(config: MCPClientConfig) -> httpx2.Auth | None:
    auth = config.auth
    if config.login is not None:
        return stored_login(config, config.login)
    if auth is None or isinstance(auth, httpx2.Auth):
        return auth
    if isinstance(auth, MCPClientCredentials):
        return ClientCredentialsOAuthProvider(
            server_url=cast("str", config.url),
            storage=TokenStore(),
            client_id=auth.client_id,
            client_secret=auth.client_secret,
            issuer=auth.issuer,
            scope=auth.scope,
        )
    return _Bearer(cast("str | TokenFunction", auth))


class _Bearer(httpx2.Auth):
    """A fixed token, or a function that returns a token for each request."""

    def __init__(self, token: str | TokenFunction) -> None:
        self._token = token

    async def token(self) -> str | None:
        """Return the token of a request.

        Raises:
            MCPError: If there is no token for the caller, or the function fails.
        """
        token: Any = self._token
        call = tied.get()
        try:
            if callable(token):
                token = token(NO_CALL if call is None else call.context)
            if inspect.isawaitable(token):
                token = await token
        except CallError as error:
            details = {"code": error.code, "retryable": error.retryable}
            raise failures.sealed("credential", error.message, **details) from error
        except Exception as error:
            # The text of an exception may contain a secret.
            logger.exception("a token could not be obtained")
            raise failures.sealed("status", f"was not called: {type(error).__name__}") from error
        if token is not None and not (isinstance(token, str) and token):
            raise failures.sealed("status", "was not called: the token is not text, or is empty")
        return token

    async def async_auth_flow(
        self, request: httpx2.Request
    ) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        token = await self.token()
        if token is not None:
            request.headers["authorization"] = f"Bearer {token}"
        yield request
