"""What a handler can ask of an MCP client and of no other caller: functions for use inside a call served over MCP.

They know the call by a context variable, so that the core's contexts need not know MCP.
"""

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import cast

from operations.errors import CallError, ErrorCode
from operations.types import JSONObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """What the client of one call can do besides what a `CallerChannel` carries."""

    close_stream: Callable[[], Awaitable[None]] | None = None
    roots: Callable[[], Awaitable[JSONObject]] | None = None

    elicit_url: Callable[[JSONObject], Awaitable[JSONObject]] | None = None
    """Ask the person to open an address: the parameters of `elicitation/create` with the mode `url`."""


client: ContextVar[Client] = ContextVar("client", default=Client())  # noqa: B039 - it is frozen
"""The client of the call that runs here."""


async def release_stream() -> bool:
    """Close the HTTP stream of the call that runs here; its client comes back for the result by itself.

    For calls that take long behind proxies that do not like it. The call goes on. Gives whether there was a stream
    whose client can come back: over HTTP, for clients of 2025-11-25.
    """
    close = client.get().close_stream
    if close is None:
        return False
    await close()
    return True


async def list_roots() -> list[JSONObject]:
    """The folders and files the client works on: `{"uri": ..., "name": ...}` each.

    Raises:
        CallError: `UNAVAILABLE` if the call came from no MCP client, or from one that has none.
    """
    roots = client.get().roots
    if roots is None:
        raise CallError(
            ErrorCode.UNAVAILABLE, "this call's caller has no roots to list", retryable=False
        )
    return cast("list[JSONObject]", (await roots()).get("roots", []))
