"""How much one caller, and all callers together, may ask for.

Rule 1: a limit is judged before the work it protects from, and refuses at once: nothing queues here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.types import Receive

from operations._rates import GUESSES, GUESSES_PER_SECOND
from operations.errors import CallError, ErrorCode
from operations.server.faults import CLOSE, ClientLeftError, RequestError, malformed


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a server takes."""

    body_bytes: int = 4 * 1024 * 1024

    body_seconds: float = 15
    """For a whole body to arrive."""

    calls: int = 1000
    """At a time, from everybody."""

    calls_per_caller: int = 250
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


class Gate:
    """Counts what is under way, and keeps it within a bound for each caller and for all."""

    def __init__(self, most: int, most_per_caller: int) -> None:
        self._most = most
        self._most_per_caller = most_per_caller
        self._by_caller: dict[str, int] = {}
        self.total = 0

    def enter(self, caller: str) -> "_Place":
        """Take a place, which a `with` block gives back.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if there is none left.
        """
        mine = self._by_caller.get(caller, 0)
        if mine >= self._most_per_caller:
            raise _exhausted(f"Too many at a time: you have {mine}")
        if self.total >= self._most:
            raise _exhausted("Too many at a time")
        self._by_caller[caller] = mine + 1
        self.total += 1
        return _Place(self, caller)

    def leave(self, caller: str) -> None:
        """Note that a caller has one less under way."""
        self.total -= 1
        left = self._by_caller[caller] - 1
        if left:
            self._by_caller[caller] = left
        else:
            del self._by_caller[caller]


class _Place:
    """Room for one thing at a gate."""

    __slots__ = ("_caller", "_gate")

    def __init__(self, gate: Gate, caller: str) -> None:
        self._gate = gate
        self._caller = caller

    def __enter__(self) -> None:
        """Nothing to do: it was taken at the gate."""

    def __exit__(self, *exc_info: object) -> None:
        self._gate.leave(self._caller)


def _exhausted(message: str) -> CallError:
    return CallError(ErrorCode.RESOURCE_EXHAUSTED, message, retryable=True)


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
