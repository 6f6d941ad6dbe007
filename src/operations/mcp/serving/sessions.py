"""The open sessions of clients of 2025, limited per caller and in total.

Rule 1: a caller without identity counts by its address.
Rule 2: a caller at its limit loses its own oldest idle session. If no session is left, the oldest idle one of a caller
        without identity ends, so that anonymous clients cannot lock out others.
Rule 3: a session ends when the last credential that was shown in it expires or is revoked. A renewed one keeps it open.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import monotonic

from operations.errors import CallError, ErrorCode
from operations.front.identity import Credential, CredentialMonitor
from operations.front.limits import Limits


@dataclass(slots=True)
class Session:
    """One open session."""

    caller: str
    owner: str | None
    """The id of the identity that opened it; None for a caller without identity."""
    used_at: float
    credential: Credential | None
    stop_watch: Callable[[], None]
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
        self._ending: set[asyncio.Future[None]] = set()

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
                self._forget(key)
                await self._end(key, session.owner)
                return
        raise CallError(ErrorCode.RESOURCE_EXHAUSTED, "Too many open sessions", retryable=True)

    def opened(
        self,
        session_id: str,
        caller: str,
        owner: str | None,
        credential: Credential | None,
        monitor: CredentialMonitor,
    ) -> None:
        """Note a new session."""
        stop = monitor.watch(credential, lambda: self._revoke(session_id))
        self._open[session_id] = Session(caller, owner, monotonic(), credential, stop)

    def is_open(self, session_id: str, caller: str) -> bool:
        """Return whether a caller has this session."""
        session = self._open.get(session_id)
        return session is not None and session.caller == caller

    def begin(
        self, session_id: str, credential: Credential | None, monitor: CredentialMonitor
    ) -> None:
        """Note a request in a session."""
        session = self._open.get(session_id)
        if session is None:
            return
        session.in_flight += 1
        known = session.credential
        if credential is None or known is None or known.key == credential.key:
            return
        if credential.identity.id == session.owner:
            session.stop_watch()
            session.credential = credential
            session.stop_watch = monitor.watch(credential, lambda: self._revoke(session_id))

    def finish(self, session_id: str, *, ended: bool) -> None:
        """Note the end of a request in a session, and whether the session ended with it."""
        session = self._open.get(session_id)
        if session is None:
            return
        session.in_flight -= 1
        session.used_at = monotonic()
        self._open.move_to_end(session_id)
        if ended:
            self._forget(session_id)

    def clear(self) -> None:
        """Forget all sessions."""
        for session_id in tuple(self._open):
            self._forget(session_id)

    def _forget(self, session_id: str) -> Session | None:
        session = self._open.pop(session_id, None)
        if session is not None:
            session.stop_watch()
        return session

    def _revoke(self, session_id: str) -> None:
        """End a session whose credential is no longer valid."""
        session = self._forget(session_id)
        if session is not None:
            ending = asyncio.ensure_future(self._end(session_id, session.owner))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    def _forget_expired(self) -> None:
        since = monotonic() - self._idle_timeout
        for key, session in list(self._open.items()):
            if session.used_at > since:
                break
            if not session.in_flight:
                self._forget(key)
