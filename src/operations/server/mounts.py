"""Applications of other protocols beside the operations: `/mcp` and `/ws`.

Rule 1: who asks is found out here, in the same way as for every other request, and passed on in the scope.
"""

import asyncio

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from operations.errors import CallError
from operations.server.doors import route_path
from operations.server.edge import IDENTITY, Edge, Visit


class HTTPMount(BaseRoute):
    """An ASGI application at one path, for every method."""

    def __init__(self, path: str, app: ASGIApp, edge: Edge) -> None:
        self._path = path
        self._app = app
        self._edge = edge

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Whether a request is for the application."""
        is_ours = scope["type"] == "http" and route_path(scope) == self._path
        return (Match.FULL if is_ours else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Identify the caller, then let the application answer."""

        async def endpoint(visit: Visit) -> None:
            await self._edge.identify(visit)
            self._edge.rate.spend(visit.caller)
            await self._app(scope, visit.receive, send)

        await self._edge.serve(scope, receive, send, endpoint)


class SocketMount(BaseRoute):
    """An ASGI application for WebSockets at one path; at any other there are none."""

    def __init__(self, path: str, app: ASGIApp, edge: Edge) -> None:
        self._path = path
        self._app = app
        self._edge = edge

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Every socket: nothing else here speaks to them."""
        return (Match.FULL if scope["type"] == "websocket" else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Identify the caller, then let the application talk."""
        if route_path(scope) == self._path and await self._may_enter(scope):
            await self._app(scope, receive, send)
        else:
            # Closing before accepting is how ASGI refuses a handshake (403).
            await send({"type": "websocket.close", "code": 1008})

    async def _may_enter(self, scope: Scope) -> bool:
        try:
            async with asyncio.timeout(self._edge.settings.timeout):
                scope[IDENTITY] = await self._edge.identity_of(scope, dict(scope["headers"]))
        except (CallError, TimeoutError):
            return False
        return True
