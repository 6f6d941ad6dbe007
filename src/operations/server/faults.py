"""Requests that fail as HTTP before they are calls."""

from collections.abc import Sequence

from operations.errors import CallError, ErrorCode

Header = tuple[bytes, bytes]

CLOSE: Header = (b"connection", b"close")


class RequestError(CallError):
    """A request that cannot be answered with a call, and the status that says so.

    Attributes:
        status: Of the response.
        headers: Sent with it.
    """

    def __init__(
        self, status: int, code: str, message: str, *, headers: Sequence[Header] = ()
    ) -> None:
        super().__init__(code, message)
        self.status = status
        self.headers = tuple(headers)


class ClientLeftError(Exception):
    """Nobody is there to be answered."""


def malformed(message: str) -> RequestError:
    """What was sent cannot be read."""
    return RequestError(400, ErrorCode.VALIDATION_ERROR, message)


def slow_body() -> RequestError:
    """The body takes too long to arrive."""
    return RequestError(408, ErrorCode.TIMEOUT, "The body took too long to arrive", headers=[CLOSE])


def unsupported(message: str) -> RequestError:
    """The body is of a kind nobody here reads."""
    return RequestError(415, ErrorCode.VALIDATION_ERROR, message)


def refused_credential(headers: Sequence[Header] = ()) -> RequestError:
    """A credential was shown and does not hold, or could not be judged."""
    return RequestError(
        401,
        ErrorCode.ACCESS_DENIED,
        "The credential is not valid",
        headers=[(b"www-authenticate", b'Bearer error="invalid_token"'), *headers],
    )


def wrong_method(allowed: Sequence[str]) -> RequestError:
    """The path is right, the method is not."""
    methods = ", ".join(allowed)
    return RequestError(
        405,
        ErrorCode.VALIDATION_ERROR,
        f"Use {methods} here",
        headers=[(b"allow", methods.encode())],
    )


def not_found() -> RequestError:
    """There is nothing at this path."""
    return RequestError(404, ErrorCode.OPERATION_NOT_FOUND, "There is nothing here")
