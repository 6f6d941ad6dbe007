"""The HTTP interface of imported operations: requests, responses, transports, and rules for headers.

Rule 1: a transport sends requests unchanged. It does not follow redirects, store cookies, or read environment variables
        unless configured, and it returns the body with its content coding.
Rule 2: an argument never sets a header, query parameter or cookie that belongs to the client or to configuration.
"""

import re
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import lru_cache
from typing import Any, Protocol
from urllib.parse import unquote_plus

import msgspec

from operations.base.errors import CallError, ErrorCode, invalid_argument
from operations.io.files import StreamedBody
from operations.io.hosts import joined_url, normal_url, origin_of


class Draft(msgspec.Struct, kw_only=True, gc=False):
    """A request before it is signed."""

    method: str
    base: str
    path: str

    query: list[str] = []
    """Encoded `name=value` pieces."""

    headers: dict[str, str] = {}
    cookies: list[str] = []
    body: bytes | StreamedBody | None = None

    security: Any = None
    """The `SecurityPlan` of the operation."""

    redirects: frozenset[str] = frozenset()
    """The redirects that the document declares as responses: statuses, or `3XX`."""

    def declares_redirect(self, status: int) -> bool:
        """Return whether the document declares this redirect as a response."""
        return not self.redirects.isdisjoint({str(status), f"{status // 100}XX"})


class HTTPRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A complete request."""

    method: str

    url: str
    """The absolute, encoded URL, which is sent unchanged."""

    headers: Mapping[str, str] = {}
    body: bytes | StreamedBody | None = None

    timeout: float | None = None
    """The time limit in seconds: for the whole response; for a stream, until its head arrives; for a streamed request
    body, between two pieces of the body."""

    is_stream: bool = False

    public_only: bool = False
    """Whether the connection must be to a public address."""

    new_connection: bool = False
    """Whether no unused connection may be used: one was lost, so the server may have closed the others as well."""

    def __repr__(self) -> str:
        # Query, headers and body may contain secrets.
        return f"<HTTPRequest {self.method} {self.url.partition('?')[0]}>"


class HTTPResponse(Protocol):
    """The head of a response, and its unread body.

    It may also have `def buffered(self) -> bytes | None`, which returns the whole undecoded body if it has already
    arrived, otherwise None. This is faster than `chunks`.
    """

    @property
    def status(self) -> int:
        """The status code."""
        ...

    @property
    def reason(self) -> str:
        """The reason phrase; may be empty."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers, with lower-case names; several values are joined by `, `."""
        ...

    def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the undecoded body in pieces.

        Raises:
            CallError: `UNAVAILABLE` if the connection is lost, `TIMEOUT` if it takes too long.
        """
        ...


class HTTPTransport(Protocol):
    """Sends requests."""

    def send(self, request: HTTPRequest) -> AbstractAsyncContextManager[HTTPResponse]:
        """Send `request`; the response is open until the context manager exits, which may happen early.

        Raises:
            CallError: `UNAVAILABLE` if the server does not respond, `TIMEOUT` if it takes too long, `ACCESS_DENIED` if
                `request.public_only` and the host has no public address.
        """
        ...

    async def aclose(self) -> None:
        """Close every connection. Closing twice is harmless."""
        ...


_OWNED = frozenset(
    {
        "accept", "accept-encoding", "authorization", "connection", "content-encoding", "content-length",
        "content-type", "cookie", "cookie2", "expect", "forwarded", "host", "http2-settings", "keep-alive",
        "origin", "proxy-authenticate", "proxy-authorization", "proxy-connection", "referer", "set-cookie",
        "te", "trailer", "transfer-encoding", "upgrade", "via", "x-http-method", "x-http-method-override",
        "x-method-override", "x-original-url", "x-real-ip", "x-rewrite-url",
    }
)  # fmt: skip
"""Headers that only the client or the configuration can set."""

_OWNED_PREFIXES = ("mcp-", "x-forwarded-", "proxy-", "sec-")
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_FORBIDDEN = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


_MARK = re.compile(r"[^0-9a-z]")
_SEPARATOR = re.compile(r"[&;]")


@lru_cache(maxsize=1024)
def header_key(name: str) -> str:
    """Return a header name as gateways compare it; many treat `X_Api.Key` as `X-Api-Key`."""
    return _MARK.sub("-", name.lower())


def name_key(place: str, name: str) -> tuple[str, str]:
    """Return a key that is equal for names of one place (`header`, `query`, `cookie`) that servers may confuse."""
    if place == "header":
        return place, header_key(name)
    # Some servers ignore case, treat `key[a]` as a part of `key`, and `api.key` or `api[key` as `api_key`.
    plain, bracket, rest = name.strip().lower().partition("[")
    if bracket and "]" not in rest:
        plain = f"{plain}_{rest}"
    return place, plain.replace(".", "_").replace(" ", "_")


def is_owned(name: str) -> bool:
    """Return whether arguments must not set the header `name`."""
    key = header_key(name)
    return key in _OWNED or key.startswith(_OWNED_PREFIXES) or _NAME.fullmatch(name) is None


def written_names(place: str, pieces: Iterable[str]) -> list[tuple[str, str]]:
    """Return the keys of all names in encoded `name=value` pieces of a query or a Cookie header."""
    # Some servers also accept `;` as a separator of query parameters.
    pairs = (pair for piece in pieces for pair in _SEPARATOR.split(piece))
    return [name_key(place, unquote_plus(pair.partition("=")[0])) for pair in pairs]


def enforce_unowned(
    argument: str, place: str, pieces: Iterable[str], owned: frozenset[tuple[str, str]]
) -> None:
    """Raise an error if an argument writes a name that configuration sets.

    Args:
        argument: The argument's name.
        place: `query` or `cookie`.
        pieces: The encoded `name=value` pieces that it writes there.
        owned: The keys of all configured names; see `name_key`.

    Raises:
        CallError: With code `VALIDATION_ERROR`.
    """
    for key in written_names(place, pieces):
        if key in owned:
            message = (
                f"{argument!r} may not set the {place} parameter {key[1]!r}: configuration sets it."
            )
            raise invalid_argument("/" + argument, message, place)


def merged_headers(*groups: Mapping[str, str]) -> dict[str, str]:
    """Merge groups of headers. Names are case-insensitive, and later headers override earlier ones."""
    merged: dict[str, tuple[str, str]] = {}
    for group in groups:
        for name, value in group.items():
            merged[name.lower()] = (name, value)
    return dict(merged.values())


DEFAULT_HEADERS = {"User-Agent": "alkdev-operations", "Accept-Encoding": "gzip, deflate"}
"""The content codings are those that the standard library decodes in bounded steps."""


def is_header_value(text: str) -> bool:
    """Return whether `text` is allowed in a header."""
    return _FORBIDDEN.search(text) is None


def is_header(name: str, value: str) -> bool:
    """Return whether name and value form exactly one valid header."""
    return _NAME.fullmatch(name) is not None and is_header_value(value)


def enforce_header(name: str, value: str) -> None:
    """Raise an error unless name and value form exactly one valid header.

    Raises:
        CallError: With code `VALIDATION_ERROR`, for a name or value that could inject another header.
    """
    if not is_header(name, value):
        raise CallError(
            ErrorCode.VALIDATION_ERROR,
            f"The header {name!r} may not contain control characters.",
        )


REDIRECTS = frozenset({301, 302, 303, 307, 308})

SAFE = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "QUERY"})
"""Methods whose requests change nothing (RFC 9110, 9.2.1)."""

REPEATABLE = SAFE | {"PUT", "DELETE"}
"""Methods whose requests may be sent again (RFC 9110, 9.2.2)."""


def redirected(
    request: HTTPRequest, status: int, location: str, seconds: float
) -> HTTPRequest | None:
    """Return the request for a redirect, or None if it has another origin.

    Args:
        request: The request that was redirected.
        status: The status of the response.
        location: The Location header of the response.
        seconds: The remaining time.
    """
    try:
        url = normal_url(joined_url(request.url, location))
        if origin_of(url) != origin_of(request.url):
            return None
    except ValueError:
        return None
    # As in browsers, "see other" is followed by a GET, and so is a moved POST.
    changes = {303} if request.method != "POST" else {301, 302, 303}
    keeps = status not in changes or request.method in {"GET", "HEAD"}
    body = request.body if keeps else None
    if isinstance(body, StreamedBody) and not body.is_repeatable:
        return None
    headers = request.headers
    if not keeps:
        headers = {k: v for k, v in headers.items() if k.lower() != "content-type"}
    return msgspec.structs.replace(
        request,
        method=request.method if keeps else "GET",
        url=url,
        headers=headers,
        body=body,
        timeout=max(seconds, 0.001),
    )
