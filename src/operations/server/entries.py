"""The kinds of fixed paths: a page that its caller reads, a probe that every client reads, and requests with a body.

Rule: the caller is identified before the method is checked, so that a response does not reveal whether the path exists.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from operations.front.messages import Reply
from operations.front.pipeline import EntryPoint
from operations.front.public_errors import upgrade_required, wrong_method
from operations.front.request import RequestState, Target

_PAGE = Target()
_PROBE = Target(is_counted=False)


class FixedPath(EntryPoint, Protocol):
    """An entry point at a fixed path."""

    @property
    def is_open(self) -> bool:
        """Whether it serves clients without a credential even if the server requires one."""
        ...

    @property
    def is_probe(self) -> bool:
        """Whether it serves every client, without identification and limits."""
        ...


def enforce_method(state: RequestState, *methods: str) -> None:
    """Reject a request with another method; HEAD responds as GET does, without a body.

    Raises:
        RequestError: 405.
    """
    accepted = (*methods, "HEAD") if "GET" in methods else methods
    if state.scope["method"] not in accepted:
        raise wrong_method(accepted)


class Page:
    """A path without a body, which responds at once.

    Args:
        answer: Returns the response; None if it has sent one.
        methods: The methods, besides HEAD.
        is_open: See `FixedPath`.
        is_probe: See `FixedPath`.
    """

    def __init__(
        self,
        answer: Callable[[RequestState], Awaitable[Reply | None]],
        *methods: str,
        is_open: bool = False,
        is_probe: bool = False,
    ) -> None:
        self._answer = answer
        self._methods = methods or ("GET",)
        self.is_open = is_open
        self.is_probe = is_probe

    def place(self, _state: RequestState) -> Target:
        """Return that the request only counts against its caller."""
        return _PROBE if self.is_probe else _PAGE

    async def read(self, state: RequestState) -> None:
        """Check the method."""
        enforce_method(state, *self._methods)

    async def run(self, state: RequestState, _asked: Any) -> Reply | None:
        """Return the response."""
        return await self._answer(state)


async def _require_upgrade(_: RequestState) -> Reply:
    raise upgrade_required()


WEBSOCKET_PATHS: dict[str, FixedPath] = {"/ws": Page(_require_upgrade)}
"""Requests without a handshake at the path of the WebSocket."""
