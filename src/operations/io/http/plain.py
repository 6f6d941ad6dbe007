"""One small request with the standard library, in the thread of the caller, for what must work without an extra.

The token endpoints of exchanges and the keys of issuers are read with it. All other requests are sent by an
`HTTPTransport`, on the event loop.

Rule 1: only an address that the operator configured is requested: a redirect is an error.
Rule 2: the response is bounded, and its size does not depend on what the server announces.
"""

from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from operations.base.json.decoding import decode_json
from operations.base.json.values import MAX_REQUEST_VALUES, object_of
from operations.base.types import JSONObject
from operations.io.proxies import reason_of, shown_proxy, usual_proxy

_MAX_RESPONSE: Final = 1 << 20


class StatusError(OSError):
    """Raised if the server responds with an error or a redirect.

    Attributes:
        status: The status of the response.
        content: Its body, as far as it could be read.
    """

    def __init__(self, status: int, content: bytes) -> None:
        super().__init__(f"HTTP status {status}")
        self.status = status
        self.content = content


class BrokenResponseError(OSError):
    """Raised if a response is not HTTP."""


class ProxyFailureError(ConnectionError):
    """Raised if a request fails on its way through a proxy."""


class _NoRedirects(HTTPRedirectHandler):
    """Refuses redirects, so that tokens are sent only to, and keys read only from, the configured address."""

    def redirect_request(
        self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> None:
        """Return nothing, so that the redirect is an error."""


def read_object(
    url: str, seconds: float, headers: Mapping[str, str], body: bytes | None = None
) -> JSONObject:
    """Send a request and return the JSON object in the response; empty if the response is other JSON.

    Args:
        url: The address; its scheme must be `http` or `https`.
        seconds: The time limit of each step.
        headers: The headers of the request.
        body: The body of a POST request; None sends a GET request.

    Raises:
        StatusError: If the response is an error or a redirect.
        OSError: If the address cannot be reached, or the response is not HTTP.
        JSONValueError: If the response is not JSON.
    """
    request = Request(url, body, dict(headers))  # noqa: S310 - the operator's address
    proxy = usual_proxy(request.full_url)
    proxies = ProxyHandler({} if proxy is None else {request.type: proxy})
    try:
        with build_opener(_NoRedirects, proxies).open(request, timeout=seconds) as response:
            content = response.read(_MAX_RESPONSE)
    except HTTPError as error:
        received = b""
        with error, suppress(OSError, HTTPException):
            received = error.read(_MAX_RESPONSE)
        raise StatusError(error.code, received) from None
    except URLError as error:
        if proxy is None:
            raise
        reason = reason_of(error.reason) if isinstance(error.reason, OSError) else error.reason
        raise ProxyFailureError(f"through {shown_proxy(proxy)}: {reason}") from error
    except HTTPException as error:
        raise BrokenResponseError(f"not HTTP: {type(error).__name__}") from error
    return object_of(decode_json(content, max_values=MAX_REQUEST_VALUES))
