"""`create_app`: a registry as an ASGI application.

access log -> Host and Origin -> operations, gateway, pages, what is mounted
"""

from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Mount
from starlette.types import ASGIApp

from operations._words import enforce_lists
from operations.calls.graph import CallGraph
from operations.registry import OperationRegistry
from operations.server.doors import Doors, Nothing
from operations.server.edge import Edge, Settings
from operations.server.gateway import GatewayDoors
from operations.server.hosts import LOOPBACK, HostGuard
from operations.server.identity import IdentityResolver, any_of
from operations.server.limits import Limits
from operations.server.mounts import HTTPMount, SocketMount
from operations.server.overview import Overview
from operations.server.pages import Pages, Ready
from operations.server.routes import OperationPaths
from operations.telemetry.access_log import AccessLog
from operations.telemetry.metrics import CallMetrics


def create_app(
    registry: OperationRegistry,
    *,
    identity: IdentityResolver | Sequence[IdentityResolver] | None = None,
    title: str = "operations",
    version: str = "1.0.0",
    allowed_hosts: Collection[str] = LOOPBACK,
    allowed_origins: Collection[str] = (),
    limits: Limits | None = None,
    timeout: float = 30,
    expose_errors: bool = False,
    mcp: ASGIApp | None = None,
    websocket: ASGIApp | None = None,
    console: ASGIApp | None = None,
    graph: CallGraph | None = None,
    ready: Ready | None = None,
    resources: Iterable[AbstractAsyncContextManager[Any]] = (),
) -> Starlette:
    """Serve a registry over HTTP.

    Whoever runs it decides where it listens; `operations.server.running` does so on 127.0.0.1.

    Args:
        registry: What to serve. Operations registered later are served too. It is not closed here.
        identity: Who asks; several are tried in turn. Without it nobody can sign in, and only open operations work.
        title: Of the API, in its document.
        version: Of the API, in its document.
        allowed_hosts: Names this server answers to; `*` for any. By default those of this machine alone.
        allowed_origins: `scheme://host[:port]` of pages elsewhere that may use this server (CORS).
        limits: On sizes, times and rates.
        timeout: Seconds a call may take.
        expose_errors: Show outsiders the text of unexpected exceptions. For development.
        mcp: An ASGI application to serve at `/mcp`.
        websocket: An ASGI application to serve WebSockets at `/ws`.
        console: An ASGI application to serve at `/`, for every path that is nothing else.
        graph: Records calls from now on; each caller sees its own at `/calls`.
        ready: Whether everything needed is there, for `/readyz`.
        resources: Entered when the server starts, left when it stops.

    A mounted application finds the caller's identity in `scope["operations.identity"]`; a credential that does not
    hold never reaches it.
    """
    enforce_lists(allowed_hosts=allowed_hosts, allowed_origins=allowed_origins)
    for name, door in (("mcp", mcp), ("websocket", websocket), ("console", console)):
        if door is not None and not callable(door):
            hint = (
                ": pass to_mcp(registry).asgi_app(path=None, hosts=None)" if name == "mcp" else ""
            )
            raise TypeError(f"{name} is an ASGI application, not {type(door).__name__}{hint}")
    settings = Settings(timeout=timeout, expose_errors=expose_errors, limits=limits or Limits())
    edge = Edge(registry, _one(identity), settings)
    metrics = CallMetrics(registry)
    registry.observe(metrics)
    if graph is not None:
        registry.observe(graph)
    pages = Pages(edge, metrics, title=title, version=version, ready=ready)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        async with AsyncExitStack() as stack:
            for resource in resources:
                await stack.enter_async_context(resource)
            yield
            pages.is_up = False

    routes: list[BaseRoute] = [
        Doors(edge, {**GatewayDoors(edge).doors, **Overview(edge, graph).doors, **pages.doors}),
    ]
    if mcp is not None:
        routes.append(HTTPMount("/mcp", mcp, edge))
    if websocket is not None:
        routes.append(SocketMount("/ws", websocket, edge))
    routes.append(Mount("/", console) if console is not None else Nothing(edge))

    def front(inside: ASGIApp) -> ASGIApp:
        app: ASGIApp = OperationPaths(inside, edge)
        if allowed_origins:
            app = _cors(app, allowed_origins)
        return AccessLog(HostGuard(app, hosts=allowed_hosts, origins=allowed_origins))

    app = _App(front, routes=routes, lifespan=lifespan)
    app.router.redirect_slashes = False
    app.state.edge = edge
    return app


class _App(Starlette):
    """What stands in front also stands in front of Starlette's own error handling, which calls do not need.

    Middleware that is added goes around all of it.
    """

    def __init__(self, front: Callable[[ASGIApp], ASGIApp], **options: Any) -> None:
        super().__init__(**options)
        self._front = front

    def build_middleware_stack(self) -> ASGIApp:
        added, self.user_middleware = self.user_middleware, []
        app = self._front(super().build_middleware_stack())
        self.user_middleware = added
        for kind, args, options in reversed(added):
            app = kind(app, *args, **options)
        return app


def _cors(app: ASGIApp, origins: Collection[str]) -> ASGIApp:
    return CORSMiddleware(
        app,
        allow_origins=[origin.rstrip("/") for origin in origins],
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=[
            "authorization",
            "content-type",
            "last-event-id",
            "operations-meta",
            "operations-timeout",
            "traceparent",
            "tracestate",
            "x-api-key",
        ],
        expose_headers=["operations-meta", "x-request-id"],
    )


def _one(
    identity: IdentityResolver | Sequence[IdentityResolver] | None,
) -> IdentityResolver | None:
    if identity is None or callable(identity):
        return identity
    return any_of(*identity)
