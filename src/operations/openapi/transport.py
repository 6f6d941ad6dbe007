"""The seam between operations and HTTP: one method, so that a test, an ASGI application or another client fits.

Rule: a transport sends what it is given. It follows no redirect, keeps no cookie, reads nothing from the environment
unless it is told to, and hands back the body as it arrives, with its content coding still on.
"""

import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from operations.openapi.files import StreamedBody


class TLSFiles(NamedTuple):
    """PEM files for connections by TLS."""

    ca_file: str | Path | None = None
    """The certificate authorities to trust instead of the system's."""

    certificate: str | Path | None = None
    """The certificate to present to servers that may receive credentials."""

    key: str | Path | None = None
    """The certificate's private key; None if it is in the same file."""

    def context(self, *, presents_certificate: bool) -> ssl.SSLContext | None:
        """Return the settings for a connection, or None for the defaults.

        Raises:
            ValueError: If a file cannot be used.
        """
        certificate = self.certificate if presents_certificate else None
        if self.ca_file is None and certificate is None:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:
            raise ValueError(
                f"ca_file {str(self.ca_file)!r} cannot be used: {_why(error)}"
            ) from error
        if certificate is not None:
            try:
                # Without a password, a key that needs one must fail, not ask a person.
                context.load_cert_chain(certificate, self.key, password=lambda: "")
            except OSError as error:
                raise ValueError(
                    f"client_certificate {str(certificate)!r} cannot be used: {_why(error)}"
                ) from error
        return context


def _why(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return "it is not a valid PEM file, or certificate and key do not belong together"
    return error.strerror or type(error).__name__


class HTTPRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request, complete."""

    method: str

    url: str
    """Absolute and already encoded; to be sent as it is."""

    headers: Mapping[str, str] = {}
    body: bytes | StreamedBody | None = None

    timeout: float | None = None
    """Seconds until the whole response has arrived; for a stream, until its head has; while a streamed body is sent,
    between two pieces of it."""

    is_stream: bool = False

    public_only: bool = False
    """Whether the address connected to must be a public one."""

    def __repr__(self) -> str:
        # Query, headers and body may hold secrets.
        return f"<HTTPRequest {self.method} {self.url.partition('?')[0]}>"


class HTTPResponse(Protocol):
    """The head of a response, and its body to come."""

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
        """Send `request`; the response lives for the length of the block, and leaving early closes it.

        Raises:
            CallError: `UNAVAILABLE` if the server does not respond, `TIMEOUT` if it takes too long, `ACCESS_DENIED` if
                `request.public_only` and the host has no public address.
        """
        ...

    async def aclose(self) -> None:
        """Let go of every connection. Harmless when repeated."""
        ...
