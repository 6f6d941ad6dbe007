"""How much one caller, and all callers together, may ask for.

Rule 1: a limit is judged before the work it protects from, and refuses at once: nothing queues here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.types import Receive

from operations._rates import AT_A_TIME, AT_A_TIME_PER_CALLER
from operations._sign_ins import GUESSES, GUESSES_PER_SECOND
from operations.errors import ErrorCode
from operations.server.faults import CLOSE, ClientLeftError, RequestError, malformed


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a server takes."""

    body_bytes: int = 4 * 1024 * 1024

    body_seconds: float = 15
    """For a whole body to arrive."""

    calls: int = AT_A_TIME
    """At a time, from everybody."""

    calls_per_caller: int = AT_A_TIME_PER_CALLER
    """At a time. Who does not say who it is counts by its address."""

    streams: int = 10_000
    """Open at a time, from everybody."""

    streams_per_caller: int = 2_000

    rate_per_caller: float | None = None
    """Requests per second, on average; None for as many as it likes."""

    burst: int = 100
    """Requests beyond the rate that a caller has saved up after a silence."""

    guesses_per_address: float | None = GUESSES_PER_SECOND
    """Different wrong credentials per second that one address may show, on average; None for as many as it likes.
    Beyond that, what it has not shown before is refused unseen."""

    guesses: int = GUESSES
    """Wrong credentials that an address may show at once."""


async def read_body(receive: Receive, headers: Mapping[bytes, bytes], limits: Limits) -> bytes:
    """The body of a request. Whoever reads it sees to it that it does not take too long.

    Raises:
        RequestError: 413 as soon as it is known to be too large.
        ClientLeftError: If the client did not finish it.
    """
    length = headers.get(b"content-length")
    if length is not None:
        if not length.isdigit():
            raise malformed("Content-Length is no number")
        if len(length) > 18 or int(length) > limits.body_bytes:
            raise _too_large(limits)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limits.body_bytes:
            raise _too_large(limits)
        if not message.get("more_body", False):
            return b"".join((*chunks, chunk)) if chunks else chunk
        chunks.append(chunk)


def _too_large(limits: Limits) -> RequestError:
    return RequestError(
        413,
        ErrorCode.RESOURCE_EXHAUSTED,
        f"The body is larger than {limits.body_bytes} bytes",
        headers=[CLOSE],
    )
