"""Fixed paths, mounted applications, and the response for every other path.

Rule 1: the caller is identified in the same way everywhere, also at paths where nothing is served: the response must
        not reveal whether something exists there.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from operations.errors import CallError, timed_out
from operations.front.http import (
    IDENTITY,
    OPEN,
    PIPELINE,
    Endpoint,
    RequestPipeline,
    RequestState,
)
from operations.front.http_errors import not_found, wrong_method
from operations.front.replies import Reply, error_reply, reject_handshake, route_path


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What is served at one path."""

    methods: tuple[str, ...]
    endpoint: Endpoint

    is_stream: bool = False
    """Whether it stays open and therefore has no deadline of its own."""

    is_probe: bool = False
    """Whether it answers everyone at any time, without identification and limits."""

    is_open: bool = False
    """Whether it also answers clients without a credential if the server requires one."""


class RouteTable(BaseRoute):
    """Serves exactly these paths."""

    def __init__(self, pipeline: RequestPipeline, routes: Mapping[str, Route]) -> None:
        self._pipeline = pipeline
        self._routes = routes

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match the paths of the table."""
        is_ours = scope["type"] == "http" and route_path(scope) in self._routes
        return (Match.FULL if is_ours else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        route = self._routes[route_path(scope)]

        async def endpoint(state: RequestState) -> Reply | None:
            if route.is_open:
                scope[OPEN] = True
            if not route.is_probe:
                await self._pipeline.enter(state, is_stream=route.is_stream)
            if scope["method"] not in route.methods:
                raise wrong_method(route.methods)
            return await route.endpoint(state)

        await self._pipeline.serve(scope, receive, send, endpoint)


class NotFound(BaseRoute):
    """Answers every path where nothing is served."""

    def __init__(self, pipeline: RequestPipeline) -> None:
        self._pipeline = pipeline

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match every HTTP request."""
        return (Match.FULL if scope["type"] == "http" else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond with 404."""

        async def endpoint(state: RequestState) -> Reply:
            await self._pipeline.enter(state)
            raise not_found()

        await self._pipeline.serve(scope, receive, send, endpoint)


class HTTPMount(BaseRoute):
    """Serves an ASGI application at one path, with or without a trailing slash, for every method.

    The application shares the pipeline of its host: it finds it in the scope.
    """

    def __init__(self, path: str, app: ASGIApp, pipeline: RequestPipeline) -> None:
        self._path = path
        self._app = app
        self._pipeline = pipeline

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match the path of the application."""
        is_ours = scope["type"] == "http" and route_path(scope) in (self._path, self._path + "/")
        return (Match.FULL if is_ours else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Identify the caller, then let the application respond."""
        scope[PIPELINE] = self._pipeline
        if getattr(self._app, "shares_pipeline", False):
            # It takes the steps itself, in one go with what it does.
            await self._app(scope, receive, send)
            return

        async def endpoint(state: RequestState) -> None:
            await self._pipeline.identify(state)
            self._pipeline.front.rate.spend(state.caller)
            await self._app(scope, state.receive, send)

        await self._pipeline.serve(scope, receive, send, endpoint)


class SocketMount(BaseRoute):
    """Serves an ASGI application for WebSockets at one path; handshakes elsewhere get 404.

    Args:
        path: Where the application is mounted.
        app: The application; None if there is none.
        pipeline: Identifies the callers.
    """

    def __init__(self, path: str, app: ASGIApp | None, pipeline: RequestPipeline) -> None:
        self._path = path
        self._app = app
        self._pipeline = pipeline

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match every WebSocket."""
        return (Match.FULL if scope["type"] == "websocket" else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Identify the caller, then let the application talk."""
        front = self._pipeline.front
        app = self._app if route_path(scope) == self._path else None
        try:
            try:
                async with asyncio.timeout(front.timeout):
                    scope[IDENTITY] = await self._pipeline.authenticate(scope)
            except TimeoutError:
                raise timed_out("The handshake", front.timeout) from None
            if app is None:
                raise not_found()
        except CallError as error:
            reply = error_reply(error, "-", expose=front.expose_errors)
            await reject_handshake(reply, scope, send)
            return
        scope[PIPELINE] = self._pipeline
        await app(scope, receive, send)
