"""Fixed paths: a table from path to what is there."""

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

from operations.server.edge import Edge, Endpoint, Visit
from operations.server.faults import not_found, wrong_method
from operations.server.replies import Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """What stands at one path."""

    methods: tuple[str, ...]
    endpoint: Endpoint

    is_stream: bool = False
    """Whether it stays open: then it has no deadline of its own."""

    is_probe: bool = False
    """Whether it answers anybody at any time: no credential and no limit is looked at."""


class Doors(BaseRoute):
    """Exactly these paths."""

    def __init__(self, edge: Edge, doors: Mapping[str, Door]) -> None:
        self._edge = edge
        self._doors = doors

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Whether a path is one of them."""
        is_ours = scope["type"] == "http" and route_path(scope) in self._doors
        return (Match.FULL if is_ours else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        door = self._doors[route_path(scope)]

        async def endpoint(visit: Visit) -> Reply | None:
            if not door.is_probe:
                await self._edge.enter(visit, is_stream=door.is_stream)
            if scope["method"] not in door.methods:
                raise wrong_method(door.methods)
            return await door.endpoint(visit)

        await self._edge.serve(scope, receive, send, endpoint)


class Nothing(BaseRoute):
    """Whatever is left: there is nothing there."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Always."""
        return (Match.FULL if scope["type"] == "http" else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Say so."""

        async def endpoint(visit: Visit) -> Reply:
            raise not_found()

        await self._edge.serve(scope, receive, send, endpoint)


def route_path(scope: Scope) -> str:
    """The path below where this app is mounted."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root + "/") else path
