"""The errors of Redis: which of them a retry can fix, and their text for messages."""

import asyncio
from ssl import SSLError
from typing import Any

from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterError,
    NoPermissionError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from operations.base.errors import NotSentError, TransportError
from operations.pubsub.config import NOT_PERMITTED

CONNECTION_ERRORS = (RedisError, OSError, EOFError, asyncio.IncompleteReadError)

_NOT_PERMITTED = ("has no permissions", "user executing the script can't", "ACL failure in script")
"""Parts of the errors of Redis and Valkey for commands, and for the commands of a script."""


class UnsupportedServerError(TransportError):
    """The server is not supported."""


class WrongServerError(NotSentError):
    """A command was not executed: the server is a replica, is loading, or has lost the shard or the connection."""


def is_wrong_server(error: BaseException) -> bool:
    """Return whether an error means that another server, or the same server later, can execute the command."""
    return isinstance(error, (BusyLoadingError, ReadOnlyError, AskError, ClusterError)) or any(
        word in str(error) for word in ("READONLY", "LOADING", "MASTERDOWN")
    )


def is_final(error: BaseException | None) -> bool:
    """Return whether an attempt to connect failed for a reason that a retry cannot fix."""
    final = (UnsupportedServerError, AuthenticationError, NoPermissionError, SSLError)
    while error is not None:
        is_temporary = is_wrong_server(error) or "maxmemory" in str(error)
        if isinstance(error, (*final, ResponseError)) and not is_temporary:
            return True
        error = error.__cause__ or error.__context__
    return False


def refusal(error: Exception) -> str:
    """Return the reason why Redis rejected a command."""
    if hasattr(error, "slot_id"):
        # The text is only the slot and the address.
        return f"the shard has moved, slot {error}"
    # The error of a script also contains its digest and a line number.
    if any(text in str(error) for text in _NOT_PERMITTED):
        return NOT_PERMITTED
    return "it has no free memory (maxmemory)" if "'maxmemory'" in str(error) else str(error)


def shown(command: tuple[Any, ...]) -> str:
    """Return the first two words of a command for messages, which never include its payload or script."""
    return command[0] if command[0] == "EVAL" else " ".join(str(word) for word in command[:2])
