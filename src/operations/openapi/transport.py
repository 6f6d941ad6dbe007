"""The seam between operations and HTTP: one method, so that a test, an ASGI application or another client fits.

Rule: a transport sends what it is given. It follows no redirect, keeps no cookie, reads no proxy from the
environment, and hands back the body as it arrives, with its content coding still on.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec


class HTTPRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request, complete."""

    method: str

    url: str
    """Absolute and already encoded; to be sent as it is."""

    headers: Mapping[str, str] = {}
    body: bytes | None = None

    timeout: float | None = None
    """Seconds until the whole answer has arrived; for a stream, until its head has."""

    is_stream: bool = False

    public_only: bool = False
    """Whether the address connected to must be a public one."""

    def __repr__(self) -> str:
        # Query, headers and body may hold secrets.
        return f"<HTTPRequest {self.method} {self.url.partition('?')[0]}>"


class HTTPResponse(Protocol):
    """The head of an answer, and its body to come."""

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
        """Lower-case names, several values joined by `, `."""
        ...

    def chunks(self) -> AsyncGenerator[bytes]:
        """The body, not decoded, piece by piece.

        Raises:
            CallError: `UNAVAILABLE` if the connection is lost, `TIMEOUT` if it takes too long.
        """
        ...


class HTTPTransport(Protocol):
    """Sends requests."""

    def send(self, request: HTTPRequest) -> AbstractAsyncContextManager[HTTPResponse]:
        """Send `request`; the answer lives for the length of the block, and leaving early closes it.

        Raises:
            CallError: `UNAVAILABLE` if nobody answers, `TIMEOUT` if it takes too long, `ACCESS_DENIED` if
                `request.public_only` and the host has no public address.
        """
        ...

    async def aclose(self) -> None:
        """Let go of every connection. Harmless when repeated."""
        ...
