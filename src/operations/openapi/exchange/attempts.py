"""Decide whether and when a request is sent again: after a redirect, a failure, or a rejection.

Rule 1: a request that may have been carried out is sent again only if its method is repeatable.
Rule 2: a request that the server rejected is sent again with any method: after a 401 with a new token, after a 429
        with `Retry-After`, and after a 503 if the operator allows it (`retry_refused`).
"""

from urllib.parse import urljoin

import msgspec

from operations._hosts import normal_url, origin_of
from operations._json import object_of
from operations._resilience import Backoff, CircuitOpenError, retry_after
from operations.errors import CallError, ErrorCode
from operations.openapi.files import StreamedBody
from operations.openapi.transport import (
    HTTPRequest,
)

REDIRECTS = frozenset({301, 302, 303, 307, 308})

REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "QUERY", "PUT", "DELETE"})
"""Methods whose requests may be sent again (RFC 9110, 9.2.2)."""

_FIRST_PAUSE = 0.2


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


class Attempts:
    """The attempts of one call.

    Args:
        method: Of the request.
        retries: How often the request may be repeated, without the repetition for a new token.
        retry_refused: Whether a 503 means that the request was not carried out.
    """

    __slots__ = ("_backoff", "_has_new_token", "_is_repeatable", "_left", "_retry_refused")

    def __init__(self, method: str, *, retries: int, retry_refused: bool) -> None:
        self._is_repeatable = method in REPEATABLE
        self._retry_refused = retry_refused
        self._left = retries
        self._has_new_token = False
        self._backoff: Backoff | None = None

    def pause_after(self, error: CallError, *, has_token: bool) -> float | None:
        """Return the seconds to wait before the request is sent again, or None if it must not be.

        Args:
            error: The error that the last attempt ended with.
            has_token: Whether that attempt used a token that can be renewed.
        """
        if isinstance(error, CircuitOpenError):
            return None
        details = object_of(error.details)
        status = details.get("statusCode")
        if status == 401 and has_token and not self._has_new_token:
            self._has_new_token = True
            return 0
        text = str(object_of(details.get("headers")).get("retry-after", ""))
        if self._left <= 0 or not self._may_repeat(error, status, is_dated=bool(text)):
            return None
        self._left -= 1
        if self._backoff is None:
            self._backoff = Backoff(_FIRST_PAUSE)
        return self._backoff.pause() + retry_after(text)

    def _may_repeat(self, error: CallError, status: object, *, is_dated: bool) -> bool:
        match status:
            case None:
                return self._is_repeatable and error.code == ErrorCode.UNAVAILABLE
            case 429:
                return self._is_repeatable or is_dated
            case 503:
                return self._is_repeatable or self._retry_refused
            case 502 | 504:
                return self._is_repeatable
            case _:
                return False
