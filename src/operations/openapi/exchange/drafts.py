"""Requests before they are signed, as they are sent, and as a redirect repeats them."""

from typing import Any
from urllib.parse import urljoin

import msgspec

from operations._hosts import normal_url, origin_of
from operations.openapi.exchange.content_coding import ACCEPTED
from operations.openapi.exchange.security import NOTHING, Signature
from operations.openapi.files import StreamedBody
from operations.openapi.headers import header_key, merged_headers
from operations.openapi.transport import HTTPRequest

USER_AGENT = "alkdev-operations"
_OURS = {"User-Agent": USER_AGENT, "Accept-Encoding": ACCEPTED}
_UNIQUE = frozenset({*_OURS, "Accept", "Content-Type"})
"""Headers as they are spelled here: if there are no others, none is there twice."""

REDIRECTS = frozenset({301, 302, 303, 307, 308})


class Draft(msgspec.Struct, kw_only=True):
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
    """The operation's own security requirement; None for the document's."""

    keeps_redirects: bool = False
    """Whether the document declares redirects as answers."""


def signed_request(
    draft: Draft, signature: Signature, seconds: float, *, is_stream: bool, public_only: bool
) -> HTTPRequest:
    """Return the request that `draft` becomes."""
    headers = {**_OURS, **draft.headers}
    if not headers.keys() <= _UNIQUE:
        headers = merged_headers(headers)
    query, cookies = draft.query, draft.cookies
    if signature is not NOTHING:
        configured = {header_key(name) for name in signature.headers}
        headers = {k: v for k, v in headers.items() if header_key(k) not in configured}
        headers = merged_headers(headers, signature.headers)
        query = [*query, *signature.query]
        cookies = [*cookies, *signature.cookies]
        if cookies and "cookie" in configured:
            name = next(name for name in headers if header_key(name) == "cookie")
            cookies = [headers.pop(name), *cookies]
    if cookies:
        headers["Cookie"] = "; ".join(cookies)
    url = draft.base.rstrip("/") + draft.path
    if query:
        url += ("&" if "?" in url else "?") + "&".join(query)
    return HTTPRequest(
        method=draft.method,
        url=url,
        headers=headers,
        body=draft.body,
        timeout=max(seconds, 0.001),
        is_stream=is_stream,
        public_only=public_only,
    )


def redirected(
    request: HTTPRequest, status: int, location: str, seconds: float
) -> HTTPRequest | None:
    """Return the request that a redirect asks for, or None if it leads to another origin.

    Args:
        request: The request that was redirected.
        status: The response's status.
        location: Its Location header.
        seconds: The time that is left.
    """
    try:
        url = normal_url(urljoin(request.url, location))
        if origin_of(url) != origin_of(request.url):
            return None
    except ValueError:
        return None
    # As browsers do: "see other" is a GET, and so is a POST that was moved.
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
