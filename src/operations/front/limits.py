"""Limits of callers and of requests, shared by all entry points: how many, how large, and how long.

Rule 1: a limit is checked before the work, and excess requests are rejected at once. Only calls at a worker wait for a
        slot.
Rule 2: memory is bounded: the state of the caller that was idle longest is removed first.
Rule 3: a slot is released when the work has ended and its response has been sent, not when the caller disconnects.
Rule 4: the task that serves a request is cancelled when its time limit expires or its client disconnects, and reads the
        reason. If the work ignores the cancellation, the response is sent without waiting for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from typing import Annotated, Any, Final

from msgspec import Meta

from operations.base.json.values import MAX_DEPTH, MAX_REQUEST_VALUES
from operations.base.time_limit import ANSWER_SECONDS
from operations.base.types import Count, Seconds
from operations.contract.access import Identity
from operations.contract.specs import Operation

UNCOUNTED_OUTPUT: Final = 32 * 1024
"""Response bytes that a connection may buffer without being counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a server, for all its entry points together."""

    body_bytes: Count = 4 * 1024 * 1024
    """The largest request body or WebSocket message, in bytes."""

    body_seconds: Seconds = 15
    """Time for a whole request body to arrive, in seconds."""

    values: Count = MAX_REQUEST_VALUES
    """JSON values in one request: every object, array, string, number and literal."""

    depth: Count = MAX_DEPTH
    """Nesting of the data in one request."""

    answer_seconds: Seconds = ANSWER_SECONDS
    """Time for a person to answer all questions of one call, in seconds. The timers of the server stop meanwhile."""

    query_characters: Count = 1_000
    """Length of a search query."""

    calls: Count = 1000
    """Concurrent calls from all callers."""

    calls_per_caller: Count = 250
    """Concurrent calls. A caller without identity counts by its address."""

    streams: Count = 10_000
    """Open streams from all callers; the same number of WebSockets is allowed in addition."""

    streams_per_caller: Count = 2_000
    """Open streams of one caller; the same number of WebSockets is allowed in addition."""

    rate_per_caller: Annotated[float, Meta(gt=0)] | None = None
    """Requests per second, on average; None for no limit."""

    burst: Count = 100
    """Requests that a caller may send at once after a pause."""

    failed_attempts_per_second: Annotated[float, Meta(gt=0)] | None = 0.2
    """Distinct wrong credentials per second from one address, on average; None for no limit. Beyond the limit, every
    credential is still checked, but the response to a wrong one is delayed and becomes RESOURCE_EXHAUSTED."""

    failed_attempts: Annotated[int, Meta(ge=0)] = 20
    """Wrong credentials that an address may send at once."""

    output_bytes: Count = 256 * 1024 * 1024
    """Response bytes that clients have not read yet, for all callers."""

    output_bytes_per_caller: Count = 64 * 1024 * 1024
    """Response bytes that one caller has not read yet."""

    sessions: Count = 2_000
    """Open MCP sessions."""

    sessions_per_caller: Count = 100
    """Open MCP sessions of one caller with an identity. Its oldest idle session ends when it opens another."""

    sessions_per_address: Count = 1_000
    """Open MCP sessions of callers without identity at one address, which may be that of a proxy for many clients."""


def caller_key(identity: Identity | None, address: str) -> str:
    """Return the key of a caller for limits: its identity, or else its address."""
    return f"id:{identity.limit_key}" if identity is not None else f"at:{address}"


def client_address(scope: Mapping[str, Any]) -> str:
    """Return the client address of an ASGI scope for limits; all addresses of an IPv6 /64 network count as one."""
    client = scope.get("client")
    host = str(client[0]) if client else ""
    return address_prefix(host) if ":" in host else host


@lru_cache(maxsize=1024)
def address_prefix(host: str) -> str:
    """Return the /64 network of an IPv6 address; other addresses unchanged."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if not isinstance(address, IPv6Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(IPv6Address(int(address) >> 64 << 64))


@lru_cache(maxsize=1024)
def site_prefix(host: str) -> str | None:
    """Return the /48 network of an IPv6 address, which one customer may have; None for other addresses."""
    try:
        address = ip_address(host)
    except ValueError:
        return None
    if not isinstance(address, IPv6Address):
        return None
    return f"{IPv6Address(int(address) >> 80 << 80)}/48"


def call_seconds(operation: Operation | None, default: float) -> float:
    """Return the default time limit of a call in seconds.

    This is the operation's own limit, or else the longer of the server's default and the limit of the operation's
    source; and the time that a call may wait for an approval.
    """
    if operation is None:
        return default
    hold = 0 if operation.approve is None else operation.approve.hold
    if operation.timeout is not None:
        return operation.timeout + hold
    return max(default, operation.source_timeout or 0) + hold
