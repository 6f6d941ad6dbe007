"""Requests that cannot become a call, and the status of their response."""

from collections.abc import Sequence
from typing import Any

from operations.errors import CallError, ErrorCode

Header = tuple[bytes, bytes]

CLOSE: Header = (b"connection", b"close")


class RequestError(CallError):
    """A request that cannot be answered with a call.

    Attributes:
        status: Of the response.
        headers: Sent with it.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        details: Any = None,
        *,
        headers: Sequence[Header] = (),
    ) -> None:
        super().__init__(code, message, details)
        self.status = status
        self.headers = tuple(headers)


class ClientDisconnectedError(Exception):
    """The client has disconnected, so no response is sent."""


def malformed(message: str) -> RequestError:
    """Return the error for a request that cannot be read."""
    return RequestError(400, ErrorCode.VALIDATION_ERROR, message)


def too_large(message: str, *, headers: Sequence[Header] = ()) -> RequestError:
    """Return the error for a request beyond a size limit."""
    return RequestError(413, ErrorCode.RESOURCE_EXHAUSTED, message, headers=headers)


def slow_body() -> RequestError:
    """Return the error for a body that arrives too slowly."""
    return RequestError(408, ErrorCode.TIMEOUT, "The body took too long to arrive", headers=[CLOSE])


def unsupported(message: str) -> RequestError:
    """Return the error for a body of an unsupported type."""
    return RequestError(415, ErrorCode.VALIDATION_ERROR, message)


def wrong_method(allowed: Sequence[str]) -> RequestError:
    """Return the error for a method that the path does not have."""
    methods = ", ".join(allowed)
    return RequestError(
        405,
        ErrorCode.VALIDATION_ERROR,
        f"Use {methods} here",
        headers=[(b"allow", methods.encode())],
    )


def not_found() -> RequestError:
    """Return the error for a path where nothing is served to this caller."""
    return RequestError(404, ErrorCode.OPERATION_NOT_FOUND, "There is nothing here")
