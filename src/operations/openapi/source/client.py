"""Send the requests of one service: signing, retries, redirects and limits.

Rule 1: a redirect is followed only if configured, and only within its origin.
Rule 2: a host that only a document names must be public. A host that does not respond is not tried on every call.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from time import monotonic
from typing import Any

import msgspec

from operations.base.errors import CallError, DocumentError, ErrorCode, timed_out
from operations.base.retry import CircuitBreaker
from operations.base.slots import Bulkhead
from operations.base.text import without_secrets
from operations.base.types import JSONObject
from operations.contract.context import OperationContext
from operations.contract.events import trace_context
from operations.io.files import Counter, StreamedBody, Target, save
from operations.io.hosts import Origin, TrustedHosts, enforce_public, joined_url, origin_of
from operations.io.http.client import (
    DEFAULT_HEADERS,
    REDIRECTS,
    REPEATABLE,
    Draft,
    HTTPRequest,
    HTTPResponse,
    HTTPTransport,
    enforce_unowned,
    header_key,
    merged_headers,
    redirected,
    written_names,
)
from operations.io.http.decoding import decoded, over_limit, read_whole
from operations.openapi.reading.expected import ANY_JSON
from operations.openapi.source.config import HTTPServiceConfig
from operations.openapi.source.decoding import JSONReader
from operations.openapi.source.responses import (
    WholeResponse,
    read_data,
    read_error,
    read_in_time,
    with_response,
)
from operations.openapi.source.retries import HTTPCall, OpenResponse, is_lost
from operations.openapi.source.security import (
    NOTHING,
    RequestCredentials,
    Security,
    SecurityPlan,
    TokenRefusedError,
)
from operations.sources.credentials import oauth_error

_MAX_ORIGINS = 1000
_UNREADABLE = frozenset({ErrorCode.EXECUTION_ERROR, ErrorCode.RESOURCE_EXHAUSTED})
"""The errors for a body that arrived but cannot be read."""

_MAX_REDIRECTS = 5
_SHORT_WAIT = 0.5
"""Seconds after which a response that did not arrive by the caller's own deadline is a failure of the upstream."""

_MAX_TOKEN_BYTES = 1 << 20
_ACCEPT = {"Accept": "application/json, application/yaml;q=0.9, */*;q=0.5"}
_NO_SCHEMES: JSONObject = {}


class ServiceClient:
    """Sends the requests of one service: signs, sends, retries, follows redirects and reads responses.

    Args:
        config: The operator's settings.
        trusted: The hosts that may have any address and may receive credentials.
        base: The base of relative token URLs.
        schemes: The document's security schemes, in the form of 3.x.
        requirement: The document's own security requirement.

    Attributes:
        config: The operator's settings.
        security: Signs the requests.
        bulkhead: Limits concurrent calls.
        closings: How often the client was closed. A call that began before the client was closed is not retried
            afterwards.
    """

    def __init__(
        self,
        config: HTTPServiceConfig,
        trusted: TrustedHosts,
        base: str = "",
        schemes: JSONObject = _NO_SCHEMES,
        requirement: Any = None,
    ) -> None:
        self.config = config
        self.security = Security(
            config, schemes, requirement, base=base, is_trusted=self.is_trusted, fetch=self.fetch
        )
        self.bulkhead = Bulkhead(config.namespace, config.concurrency or config.connections)
        self.closings = 0
        self._trusted = trusted
        self._transport: HTTPTransport | None = config.transport
        self._is_owner = config.transport is None
        self._origins: dict[str, tuple[Origin, bool]] = {}
        self._breakers: dict[Origin, CircuitBreaker] = {}

    async def aclose(self) -> None:
        """Close the transport, if the client created it. Running calls fail; later calls open it again."""
        self.closings += 1
        if self._is_owner and self._transport is not None:
            transport, self._transport = self._transport, None
            await transport.aclose()

    def is_trusted(self, url: str) -> bool:
        """Return whether the host of `url` may receive credentials."""
        try:
            return origin_of(url) in self._trusted
        except ValueError:
            return False

    def enforce_reachable(self, url: str, *, is_named: bool = False) -> tuple[Origin, bool]:
        """Return the origin of `url`, and whether the operator configured it (`is_named`: this URL, not the origin).

        Raises:
            CallError: `ACCESS_DENIED` if only a third party names the host and it is not public; `EXECUTION_ERROR` if
                `url` is not valid.
        """
        known = self._origins.get(url)
        if known is None:
            try:
                origin = origin_of(url)
            except ValueError as error:
                raise CallError(
                    ErrorCode.EXECUTION_ERROR,
                    f"There is no address to send this to ({error}): set base_url.",
                ) from None
            known = (origin, origin in self._trusted)
            if len(self._origins) > _MAX_ORIGINS:
                self._origins.clear()
            self._origins[url] = known
        if is_named:
            return known[0], True
        if not known[1]:
            enforce_public(known[0].host)
        return known

    async def send(
        self, request: HTTPRequest, origin: Origin, call: HTTPCall | None = None, *, repeats: bool
    ) -> tuple[OpenResponse, HTTPResponse]:
        """Send a request; return its response, and the context manager that closes it.

        Args:
            request: The request.
            origin: The origin of the request's URL.
            call: The call, if the request belongs to one.
            repeats: Whether the caller sends the request again if its connection is lost.

        Raises:
            CallError: The errors of the transport; `UNAVAILABLE` without an attempt if the last attempts failed.
        """
        breaker = self._breaker(origin)
        is_probe, began = breaker.enter(), monotonic()
        opened = (self._transport or self.transport).send(request)
        try:
            response = await opened.__aenter__()
        except BaseException as error:
            # Otherwise a client with very short deadlines could keep others from the upstream.
            is_patient = monotonic() - began >= min(self.config.timeout * 0.9, _SHORT_WAIT)
            is_repeated = repeats and is_lost(error)
            has_failed = not is_repeated and _is_failure(error, call, is_patient=is_patient)
            breaker.record(False if has_failed else None, is_probe=is_probe)
            raise
        breaker.succeed()
        return opened, response

    async def _wait(self, url: str) -> None:
        """Wait for a free slot of the source.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if no slot becomes free, `UNAVAILABLE` if the circuit breaker is open.
        """
        self._breaker(self.enforce_reachable(url)[0]).enforce_closed()
        await self.bulkhead.enter()

    async def _leave(self, call: HTTPCall) -> None:
        """Close the response of a call, and release its slot."""
        try:
            if call.opened is not None:
                await call.opened.__aexit__(None, None, None)
        finally:
            call.opened = None
            self.bulkhead.leave()

    def _breaker(self, origin: Origin) -> CircuitBreaker:
        breaker = self._breakers.get(origin)
        if breaker is None:
            if len(self._breakers) > _MAX_ORIGINS:
                self._breakers.clear()
            breaker = self._breakers[origin] = CircuitBreaker(str(origin))
        return breaker

    @property
    def transport(self) -> HTTPTransport:
        """The transport, which is created when first needed."""
        transport = self._transport
        if transport is None:
            from operations.io.http.aiohttp import AiohttpTransport  # noqa: PLC0415 - needs an extra

            transport = self._transport = AiohttpTransport(self.config, self.config.connections)
        return transport

    async def exchange(
        self, draft: Draft, context: OperationContext, target: Target | None = None
    ) -> WholeResponse:
        """Send a request and read the whole response, or save its body to `target`.

        Raises:
            CallError: `EXECUTION_ERROR` for an error status, and the errors of the transport.
        """
        call = self._call(draft, context, target)
        while True:
            if not self.bulkhead.try_enter():
                await self._wait(draft.base)
            try:
                request, response = await self._respond(call, is_stream=target is not None)
                secrets = call.signature.secrets
                whole = WholeResponse(request.url, response.status, response.headers, b"", secrets)
                try:
                    if target is not None:
                        saved = await self._save(response, target, context)
                        return msgspec.structs.replace(whole, saved=saved)
                    content = await self._read(request, response)
                    return msgspec.structs.replace(whole, content=content)
                except CallError as error:
                    if error.code not in _UNREADABLE:
                        raise
                    # With the status, because the server has processed the request.
                    raise with_response(error, whole, 0) from None
            except CallError as error:
                pause = call.pause_after(error, self.closings)
                if pause is None:
                    raise
            finally:
                await self._leave(call)
            await asyncio.sleep(pause)

    async def _read(self, request: HTTPRequest, response: HTTPResponse) -> bytes:
        """Return the body of the response."""
        if request.method == "HEAD":
            return b""
        if isinstance(request.body, StreamedBody):
            return await read_in_time(response, self.config)
        return await read_whole(response, self.config.max_response_bytes)

    @asynccontextmanager
    async def stream(
        self, draft: Draft, context: OperationContext, retries: int = 0
    ) -> AsyncGenerator[tuple[HTTPResponse, AsyncIterator[bytes], list[str]]]:
        """Send a request; yield the head of a successful response, its bytes as they arrive, and the credentials.

        Args:
            draft: The request.
            context: The context of the call.
            retries: How often the caller has already repeated it.

        Raises:
            CallError: As `exchange` does.
        """
        call = self._call(draft, context, retries=retries)
        while True:
            if not self.bulkhead.try_enter():
                await self._wait(draft.base)
            try:
                try:
                    _, response = await self._respond(call, is_stream=True)
                except CallError as error:
                    pause = call.pause_after(error, self.closings)
                    if pause is None:
                        raise
                else:
                    async with aclosing(decoded(response)) as body:
                        yield response, body, call.signature.secrets
                    return
            finally:
                await self._leave(call)
            await asyncio.sleep(pause)

    async def fetch(
        self, method: str, url: str, headers: dict[str, str], body: bytes | None, is_named: bool
    ) -> Any:
        """Fetch JSON from a token provider, outside of any operation; `is_named` if the operator configured its URL.

        Raises:
            CallError: `UNAVAILABLE` if the provider does not respond.
            TokenRefusedError: If the provider rejects the request.
        """
        response = await self._whole(
            method, url, headers, body, _MAX_TOKEN_BYTES, is_named=is_named
        )
        if response.status != 200:
            # The rest of the response is not reported, because it concerns the operator's credentials.
            code = oauth_error(response.content)
            message = f"The provider of tokens responded with HTTP {response.status}{code and f' ({code})'}."
            if response.status == 429 or response.status >= 500:
                raise CallError(ErrorCode.UNAVAILABLE, message)
            raise TokenRefusedError(message)
        return read_data(response, ANY_JSON, JSONReader())

    async def download(self, url: str, headers: Mapping[str, str] | None = None) -> bytes:
        """Fetch a document from an address that the operator configured, or from the same folder.

        Args:
            url: The address.
            headers: Headers in addition to `Accept`.

        Raises:
            DocumentError: If it cannot be fetched, or is too large.
        """
        shown, headers = without_secrets(url), merged_headers(_ACCEPT, headers or {})
        try:
            limit = self.config.max_document_bytes
            response = await self._whole("GET", url, headers, None, limit)
        except CallError as error:
            raise DocumentError(f"{shown} cannot be fetched: {error.message}") from error
        if response.status in REDIRECTS:
            there = without_secrets(joined_url(url, response.headers.get("location", "")))
            raise DocumentError(f"{shown} has moved: import {there} instead")
        if response.status != 200:
            raise DocumentError(f"{shown} responded with HTTP {response.status}")
        return response.content

    async def fetch_unsigned(self, url: str) -> WholeResponse:
        """Send a GET without credentials to an address that a response names; return any response.

        Raises:
            CallError: `ACCESS_DENIED` if it is not public and no configured host, and the errors of the transport.
        """
        return await self._whole("GET", url, {}, None, self.config.max_response_bytes)

    async def _whole(
        self,
        method: str,
        url: str,
        headers: dict[str, str],
        body: bytes | None,
        limit: int,
        *,
        is_named: bool = False,
    ) -> WholeResponse:
        """Send a request outside of any operation; return the whole response."""
        origin, is_trusted = self.enforce_reachable(url, is_named=is_named)
        # The server may have closed an unused connection, so only requests that may be repeated use one.
        repeats = method in REPEATABLE and self.config.retries > 0
        request = HTTPRequest(
            method=method,
            url=url,
            headers=merged_headers(DEFAULT_HEADERS, headers),
            body=body,
            timeout=self.config.timeout,
            public_only=not is_trusted,
            new_connection=not repeats,
        )
        end, closings = monotonic() + self.config.timeout, self.closings
        while True:
            try:
                opened, response = await self.send(request, origin, repeats=repeats)
                try:
                    content = await read_whole(response, limit)
                    return WholeResponse(url, response.status, response.headers, content)
                finally:
                    await opened.__aexit__(None, None, None)
            except CallError as error:
                if not repeats or not is_lost(error) or closings != self.closings:
                    raise
            repeats, left = False, end - monotonic()
            request = msgspec.structs.replace(request, timeout=left, new_connection=True)

    def _call(
        self,
        draft: Draft,
        context: OperationContext,
        target: Target | None = None,
        retries: int = 0,
    ) -> HTTPCall:
        seconds = self.config.timeout
        if context.deadline is not None:
            seconds = min(seconds, context.remaining)
        is_repeatable = target is None or target.is_repeatable
        if isinstance(draft.body, StreamedBody):
            draft.body.progress = context.progress
            is_repeatable = is_repeatable and draft.body.is_repeatable
        return HTTPCall(
            self.config,
            draft,
            context,
            end=monotonic() + seconds,
            closings=self.closings,
            is_repeatable=is_repeatable,
            repeats_at_once=retries == 0 < self.config.retries
            and is_repeatable
            and draft.method in REPEATABLE,
            retries=retries,
        )

    async def _respond(
        self, call: HTTPCall, *, is_stream: bool
    ) -> tuple[HTTPRequest, HTTPResponse]:
        """Send the request of a call once and follow its redirects; `_leave` closes the response.

        Raises:
            CallError: `EXECUTION_ERROR` for an error status, and the errors of the transport.
        """
        origin, is_trusted = self.enforce_reachable(call.draft.base)
        if is_trusted:
            plan: SecurityPlan = call.draft.security
            # An idempotency key among the configured headers must be the same for every attempt.
            call.signature = plan.credentials or await self.security.sign(
                plan, call.context, call.signature.configured
            )
        else:
            self.security.warn(origin)
        request = self._request(call, origin, is_stream=is_stream, public_only=not is_trusted)
        for redirects in range(_MAX_REDIRECTS):
            try:
                opened, response = await self.send(
                    request, origin, call, repeats=call.repeats_at_once
                )
            except CallError as error:
                if redirects:
                    # The server has received the first request.
                    error.begun = None
                raise
            call.opened, status = opened, response.status
            if 200 <= status < 300 or (not is_stream and call.draft.declares_redirect(status)):
                return request, response
            onward, location = None, response.headers.get("location")
            if self.config.follow_redirects and status in REDIRECTS and location:
                onward = redirected(request, status, location, call.end - monotonic())
            if onward is None:
                raise await self._error(call, request, response)
            call.opened = None
            await opened.__aexit__(None, None, None)
            request = onward
        raise CallError(ErrorCode.EXECUTION_ERROR, "Too many redirects.")

    def _request(
        self, call: HTTPCall, origin: Origin, *, is_stream: bool, public_only: bool
    ) -> HTTPRequest:
        """Return the signed request of a call, for the time that is left.

        Raises:
            CallError: `TIMEOUT` if no time is left, or an error if the body is too large.
        """
        draft = call.draft
        if draft.body is not None:
            self._enforce_size(draft.body)
        seconds = call.end - monotonic()
        if seconds <= 0:
            raise timed_out(f"{draft.method} {origin}", self.config.timeout, "respond")
        trace = trace_context(call.context.metadata) if call.context.metadata else {}
        if trace and not any(name.lower() in trace for name in draft.headers):
            draft.headers = {**draft.headers, **trace}
        url, headers = _signed(draft, call.signature)
        return HTTPRequest(
            method=draft.method,
            url=url,
            headers=headers,
            body=draft.body,
            timeout=max(seconds, 0.001),
            is_stream=is_stream,
            public_only=public_only,
            new_connection=call.was_lost,
        )

    async def _error(
        self, call: HTTPCall, request: HTTPRequest, response: HTTPResponse
    ) -> CallError:
        """Return the error of an unsuccessful response; the token that a 401 refuses is not used again."""
        if response.status == 401:
            for source in call.signature.tokens:
                source.refuse(request.headers.get("Authorization", ""))
        limit, secrets = self.config.max_error_bytes, call.signature.secrets
        is_temporary = response.status in call.temporary_statuses
        return await read_error(response, limit, call.end, secrets, is_temporary)

    def _enforce_size(self, body: bytes | StreamedBody) -> None:
        if isinstance(body, StreamedBody):
            size, limit = body.size or 0, self.config.max_file_bytes
        else:
            size, limit = len(body), self.config.max_request_bytes
        if size > limit:
            raise over_limit("The request", limit)

    async def _save(self, response: HTTPResponse, target: Target, context: OperationContext) -> int:
        """Save a body; return its size."""
        length = response.headers.get("content-length", "")
        is_coded = bool(response.headers.get("content-encoding"))
        async with aclosing(decoded(response)) as chunks, target.open() as write:
            total = int(length) if length.isdigit() and not is_coded else None
            counter = Counter(total, context.progress, "saved")
            limit, seconds = self.config.max_file_bytes, self.config.timeout
            return await save(chunks, write, counter, limit, seconds)


def _signed(draft: Draft, signature: RequestCredentials) -> tuple[str, dict[str, str]]:
    """Return the URL and the headers of the signed request for `draft`."""
    headers, query, cookies = draft.headers, draft.query, draft.cookies
    if signature is not NOTHING:
        configured = signature.header_keys
        headers = {k: v for k, v in headers.items() if header_key(k) not in configured}
        headers |= signature.headers
        query, cookies = [*query, *signature.query], [*cookies, *signature.cookies]
        if cookies and "cookie" in configured:
            name = next(name for name in headers if header_key(name) == "cookie")
            # Functions may provide the configured headers, so that their names are known only now.
            owned = frozenset(written_names("cookie", [headers[name]]))
            enforce_unowned("cookie", "cookie", draft.cookies, owned)
            cookies = [headers.pop(name), *cookies]
    if cookies:
        headers = {**headers, "Cookie": "; ".join(cookies)}
    url = draft.base.rstrip("/") + draft.path
    if query:
        url += ("&" if "?" in url else "?") + "&".join(query)
    return url, headers


def _is_failure(error: BaseException, call: HTTPCall | None, *, is_patient: bool) -> bool:
    """Return whether `error` means that the upstream did not respond, although the caller waited long enough."""
    if isinstance(error, CallError):
        return error.code == ErrorCode.UNAVAILABLE or (
            is_patient and error.code == ErrorCode.TIMEOUT
        )
    # Cancelled: at the deadline, or because the caller was cancelled.
    return is_patient and call is not None and call.context.remaining <= 0
