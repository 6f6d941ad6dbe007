"""`create_app`: a registry as an ASGI application.

access log -> root path -> Host and Origin -> operations, gateway, pages, mounted applications
"""

from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any
from weakref import finalize

from starlette.applications import Starlette
from starlette.routing import BaseRoute, Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from operations._host_rules import LOOPBACK
from operations._text import enforce_lists
from operations.calls.graph import CallGraph
from operations.front.front import Front
from operations.front.hosts import HostGuard
from operations.front.http import RequestPipeline
from operations.front.limits import Limits
from operations.registry import OperationRegistry
from operations.server.gateway import GatewayRoutes
from operations.server.identity import IdentityResolver, any_of
from operations.server.overview import Overview
from operations.server.pages import Pages, Ready
from operations.server.routes import OperationPaths
from operations.server.routing import HTTPMount, NotFound, RouteTable, SocketMount
from operations.server.sessions import SessionResolver, Sessions
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
    root_path: str = "",
    scopes_supported: Collection[str] = (),
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
        root_path: The prefix under which a proxy serves this app, such as `/hub`; the proxy may strip it or not.
        scopes_supported: Publicly known scopes. A caller that may not call an operation gets 401 or 403 if the
            operation requires only these; any other operation then looks as if it did not exist (404).
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
    enforce_lists(
        allowed_hosts=allowed_hosts,
        allowed_origins=allowed_origins,
        scopes_supported=scopes_supported,
    )
    for name, door in (("mcp", mcp), ("websocket", websocket), ("console", console)):
        if door is not None and not callable(door):
            hint = (
                ": pass to_mcp(registry).asgi_app(path=None, hosts=None)" if name == "mcp" else ""
            )
            raise TypeError(f"{name} is an ASGI application, not {type(door).__name__}{hint}")
    front = Front(
        registry,
        limits,
        timeout=timeout,
        expose_errors=expose_errors,
        scopes_supported=scopes_supported,
    )
    sessions = Sessions()
    resolver = _one(identity)
    pipeline = RequestPipeline(
        front, None if resolver is None else SessionResolver(resolver, sessions)
    )
    metrics = CallMetrics(registry, time_all=False)
    recording = None if graph is None else _Recording(registry, graph)
    pages = Pages(pipeline, sessions, metrics, title=title, version=version, ready=ready)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        async with AsyncExitStack() as stack:
            for counting in (metrics, recording):
                if counting is not None:
                    counting.open()
                    stack.callback(counting.close)
            for resource in resources:
                await stack.enter_async_context(resource)
            yield
            pages.is_up = False

    routes: list[BaseRoute] = [
        RouteTable(
            pipeline,
            {
                **GatewayRoutes(pipeline).routes,
                **Overview(pipeline, graph).routes,
                **pages.routes,
            },
        ),
    ]
    if mcp is not None:
        routes.append(HTTPMount("/mcp", mcp, pipeline))
    routes.append(SocketMount("/ws", websocket, pipeline))
    routes.append(Mount("/", console) if console is not None else NotFound(pipeline))

    def wrap(inside: ASGIApp) -> ASGIApp:
        app: ASGIApp = HostGuard(
            OperationPaths(inside, pipeline), hosts=allowed_hosts, origins=allowed_origins
        )
        root = root_path.rstrip("/")
        return AccessLog(_RootPath(app, root) if root else app)

    app = _App(wrap, routes=routes, lifespan=lifespan)
    app.router.redirect_slashes = False
    app.state.pipeline = pipeline
    if recording is not None:
        finalize(app, recording.close)
    return app


class _Recording:
    """Lets a graph observe a registry while the app exists."""

    def __init__(self, registry: OperationRegistry, graph: CallGraph) -> None:
        self._registry = registry
        self._graph = graph
        self._stop: Callable[[], None] | None = None
        self.open()

    def open(self) -> None:
        if self._stop is None:
            self._stop = self._registry.observe(self._graph)

    def close(self) -> None:
        if self._stop is not None:
            self._stop()
            self._stop = None


class _App(Starlette):
    """Runs our middleware before Starlette's own error handling, which calls do not need.

    Middleware that is added runs before all of it.
    """

    def __init__(self, wrap: Callable[[ASGIApp], ASGIApp], **options: Any) -> None:
        super().__init__(**options)
        self._wrap = wrap

    def build_middleware_stack(self) -> ASGIApp:
        added, self.user_middleware = self.user_middleware, []
        app = self._wrap(super().build_middleware_stack())
        self.user_middleware = added
        for kind, args, options in reversed(added):
            app = kind(app, *args, **options)
        return app


class _RootPath:
    """ASGI middleware that tells the application its prefix at a proxy, whether the proxy strips it or not."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app = app
        self._root = root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve with the root path in the scope."""
        if scope["type"] in ("http", "websocket"):
            root, path = self._root, scope["path"]
            scope["root_path"] = root
            if not path.startswith(root + "/"):
                scope["path"] = root + path
                if "raw_path" in scope:
                    scope["raw_path"] = root.encode() + scope["raw_path"]
        await self._app(scope, receive, send)


def _one(
    identity: IdentityResolver | Sequence[IdentityResolver] | None,
) -> IdentityResolver | None:
    if identity is None or callable(identity):
        return identity
    return any_of(*identity)
