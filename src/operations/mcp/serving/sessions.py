"""The open sessions of clients of 2025, limited per caller and in total.

Rule 1: a caller without identity counts by its address.
Rule 2: a caller at its limit loses its own oldest idle session. If no session is left, the oldest idle one of a caller
        without identity ends, so that anonymous clients cannot lock out others.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import monotonic

from operations.errors import CallError, ErrorCode
from operations.front.limits import Limits


@dataclass(slots=True)
class Session:
    """One open session."""

    caller: str
    owner: str | None
    """The id of the identity that opened it; None for a caller without identity."""
    used_at: float
    in_flight: int = 0


class SessionTable:
    """Knows the open sessions, least recently used first.

    Args:
        idle_timeout: Seconds after which the SDK ends an idle session.
        end: Ends a session of the SDK.
    """

    def __init__(
        self, idle_timeout: float, end: Callable[[str, str | None], Awaitable[None]]
    ) -> None:
        self._idle_timeout = idle_timeout
        self._end = end
        self._open: OrderedDict[str, Session] = OrderedDict()

    async def make_room(self, caller: str, limits: Limits) -> None:
        """End idle sessions so that a caller can open another.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if there is no room.
        """
        self._forget_expired()
        mine = [key for key, session in self._open.items() if session.caller == caller]
        if len(mine) >= limits.sessions_per_caller:
            await self._evict(lambda session: session.caller == caller)
        if len(self._open) >= limits.sessions:
            await self._evict(lambda session: session.owner is None)

    async def _evict(self, may_end: Callable[[Session], bool]) -> None:
        for key, session in self._open.items():
            if not session.in_flight and may_end(session):
                del self._open[key]
                await self._end(key, session.owner)
                return
        raise CallError(ErrorCode.RESOURCE_EXHAUSTED, "Too many open sessions", retryable=True)

    def opened(self, session_id: str, caller: str, owner: str | None) -> None:
        """Note a new session."""
        self._open[session_id] = Session(caller, owner, monotonic())

    def begin(self, session_id: str) -> None:
        """Note a request in a session."""
        session = self._open.get(session_id)
        if session is not None:
            session.in_flight += 1

    def finish(self, session_id: str, *, ended: bool) -> None:
        """Note the end of a request in a session, and whether the session ended with it."""
        session = self._open.get(session_id)
        if session is None:
            return
        session.in_flight -= 1
        session.used_at = monotonic()
        self._open.move_to_end(session_id)
        if ended:
            del self._open[session_id]

    def _forget_expired(self) -> None:
        since = monotonic() - self._idle_timeout
        for key, session in list(self._open.items()):
            if session.used_at > since:
                break
            if not session.in_flight:
                del self._open[key]
