"""`create_app` serves a registry as an ASGI application, with the call protocol on WebSockets.

access log -> root path -> Host and Origin -> operations, fixed paths, MCP, WebSockets, console
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, NoReturn
from weakref import finalize

from starlette.applications import Starlette
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from operations.base.types import options_of
from operations.calls import serve_calls
from operations.contract.access import Identity
from operations.front.access_log import AccessLog
from operations.front.config import ServerConfig
from operations.front.credentials import CredentialResolver, credential_ended
from operations.front.front import Front
from operations.front.guard import HostGuard
from operations.front.limits import client_address
from operations.front.pipeline import RequestPipeline
from operations.front.request import CREDENTIAL, IDENTITY
from operations.recorder.graph import CallGraph
from operations.registry.registry import OperationRegistry
from operations.server.cards import card_paths
from operations.server.console import console_paths
from operations.server.entries import WEBSOCKET_PATHS
from operations.server.gateway import GATEWAY_PATHS
from operations.server.routes import OperationPaths, Router
from operations.server.runs import RUN_PATHS
from operations.server.signin.identity import SessionResolver, Sessions, any_of
from operations.server.system import Pages
from operations.telemetry.metrics import CallMetrics, front_metrics, run_metrics

_REMEMBERED = 2_000
"""The number of calls that the console can show."""


@options_of(ServerConfig)
def create_app(config: ServerConfig, registry: OperationRegistry) -> Starlette:
    """Serve a registry over HTTP: `create_app(registry, **options)`, with the fields of `ServerConfig`.

    The ASGI server determines the address; `operations.server.http11.running` listens on 127.0.0.1 by default.
    Operations that are registered later are served too. The application does not close the registry.
    """
    sessions = Sessions()
    pipeline = _pipeline(config, registry, sessions)
    streams, metrics = pipeline.front.open_streams, CallMetrics(registry, time_all=False)
    mcp = _mcp_app(config, registry, pipeline) if config.mcp else None
    graph = config.graph
    if graph is None and config.console:
        graph = CallGraph(limit=_REMEMBERED)

    async def limits() -> bytes:
        return front_metrics(pipeline.front)

    metrics.sources.append((None, limits))
    if (runs := registry.run_store) is not None:
        metrics.sources.append((None, partial(run_metrics, runs)))
    pages = Pages(config, sessions, metrics, graph)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        async with AsyncExitStack() as stack:
            metrics.open()
            stack.callback(metrics.close)
            if graph is not None:
                unobserve()
                stack.callback(registry.record(graph))
            if mcp is not None:
                await stack.enter_async_context(mcp.running())
            for resource in config.resources:
                await stack.enter_async_context(resource)
            streams.open()
            yield
            streams.close()

    paths = {**GATEWAY_PATHS, **pages.paths}
    paths |= {} if registry.run_store is None else RUN_PATHS
    paths |= {} if mcp is None else card_paths(config, mcp.service)
    paths |= WEBSOCKET_PATHS if config.websocket else {}
    paths |= console_paths() if config.console else {}
    router = Router(
        pipeline,
        paths,
        mcp=mcp,
        websocket=WebSocketEntry(pipeline.front, config.resolve) if config.websocket else None,
    )
    served: ASGIApp = _guarded(OperationPaths(router, pipeline), config)
    root = config.root_path.rstrip("/")
    app = _App(AccessLog(_RootPath(served, root) if root else served), router, lifespan)
    app.state.pipeline, app.state.sessions, app.state.metrics = pipeline, sessions, metrics
    if graph is not None:
        # Not every server runs the lifespan.
        unobserve = finalize(app, registry.record(graph))
    return app


@options_of(ServerConfig)
def create_probe_app(config: ServerConfig, registry: OperationRegistry) -> Starlette:
    """Serve `/healthz`, `/readyz` and `/metrics` for a process without an HTTP API, such as a worker."""
    sessions = Sessions()
    pipeline, metrics = _pipeline(config, registry, sessions), CallMetrics(registry)
    pages = Pages(config, sessions, metrics)
    paths = {path: pages.paths[path] for path in ("/healthz", "/readyz", "/metrics")}
    router = Router(pipeline, paths)
    app = _App(AccessLog(_guarded(router, config)), router)
    app.state.pipeline, app.state.metrics = pipeline, metrics
    return app


def _pipeline(
    config: ServerConfig, registry: OperationRegistry, sessions: Sessions
) -> RequestPipeline:
    given = config.identity
    resolver = given if given is None or callable(given) else any_of(*given)
    resolve = None if resolver is None else SessionResolver(resolver, sessions)
    return RequestPipeline(Front(registry, config), resolve)


def _guarded(app: ASGIApp, config: ServerConfig) -> ASGIApp:
    return HostGuard(app, hosts=config.accepted_hosts, origins=config.allowed_origins)


def _mcp_app(config: ServerConfig, registry: OperationRegistry, pipeline: RequestPipeline) -> Any:
    """Return the application that serves MCP."""
    from operations.mcp import MCPApp, RegistryServer  # noqa: PLC0415 - needs an extra

    server = RegistryServer(registry, config.mcp_settings)
    return MCPApp(server, server.service, pipeline, is_guarded=False, path=None)


class _App(Starlette):
    """Serves requests without Starlette's routing and error handling, which they do not need.

    Args:
        serve: Serves requests.
        router: Receives the events of the lifespan, after the middleware that users add.
        lifespan: Runs while the application is served.
    """

    def __init__(self, serve: ASGIApp, router: Router, lifespan: Any = None) -> None:
        super().__init__(lifespan=lifespan)
        self._serve = serve
        router.lifespan = self.router

    def build_middleware_stack(self) -> ASGIApp:
        app = self._serve
        for kind, args, options in reversed(self.user_middleware):
            app = kind(app, *args, **options)
        return app

    def add_exception_handler(self, *_: Any, **__: Any) -> NoReturn:
        """Raise `TypeError`, because no exception leaves the code that serves requests."""
        raise TypeError(
            "exception handlers have no effect here: change errors in a middleware of the registry"
            " (registry.use), or responses in a middleware of the application (add_middleware)"
        )

    def add_route(self, *_: Any, **__: Any) -> NoReturn:
        """Raise `TypeError`, because the application serves only its registry."""
        raise TypeError(
            "routes have no effect here: mount it in an application of your own, beside your routes"
        )

    mount = host = add_route


class _RootPath:
    """ASGI middleware that sets the application's prefix behind a proxy, whether the proxy strips it or not."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app = app
        self._root = root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve with the root path in the scope."""
        if scope["type"] in ("http", "websocket"):
            root, path = self._root, scope["path"]
            scope["root_path"] = root
            if path in (root, "") and scope["type"] == "http":
                # The console's addresses are relative to the final slash.
                await RedirectResponse(root + "/")(scope, receive, send)
                return
            if not path.startswith(root + "/"):
                scope["path"] = root + path
                if "raw_path" in scope:
                    scope["raw_path"] = root.encode() + scope["raw_path"]
        await self._app(scope, receive, send)


# ------------------------------------------------------------ the call protocol on WebSockets


class WebSocketEntry:
    """Serves the call protocol on WebSockets.

    Args:
        front: The operations to serve, and their limits.
        resolve: Returns the identity for a credential inside a call.
    """

    def __init__(self, front: Front, resolve: CredentialResolver | None) -> None:
        from operations.pubsub.websocket import accept_websocket  # noqa: PLC0415 - needs an extra
        from operations.pubsub.websocket.target import ANNOUNCED  # noqa: PLC0415 - needs an extra

        self._accept = accept_websocket
        self._announces = ANNOUNCED.lower().encode()
        self._front = front
        self._resolve = resolve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection until it closes."""
        front = self._front
        socket = WebSocket(scope, receive, send)
        # Announce the limit, so that clients of this library reject larger messages themselves and the connection stays
        # open.
        announced = (self._announces, b"%d" % front.limits.body_bytes)
        await socket.accept(headers=[announced])
        identity: Identity | None = scope.get(IDENTITY)
        adapter = _Socket(socket, front.limits.body_bytes)

        async with (
            self._accept(
                adapter,
                identity=identity,
                max_values=front.limits.values,
            ) as target,
            serve_calls(
                front.registry,
                target,
                front=front,
                address=client_address(scope),
                resolve=self._resolve,
                expose_errors=front.expose_errors,
                grace=0,
            ) as server,
        ):
            # Close the connection when its credential expires or is revoked, or the server shuts down.
            revoked, stopping = asyncio.Event(), asyncio.Event()

            def revoke() -> None:
                server.reason_to_stop, server.grace = credential_ended(), 0
                revoked.set()

            with (
                front.credentials.watching(scope.get(CREDENTIAL), revoke),
                front.open_streams.watching(stopping.set, is_idle=True),
            ):
                await _first_of(target.wait_closed(), revoked.wait(), stopping.wait())
                if stopping.is_set() and not revoked.is_set():
                    adapter.closing_code = _SERVICE_RESTART
                    server.grace = front.open_streams.grace or 0
                    await _first_of(server.aclose(), revoked.wait())


_SERVICE_RESTART = 1012


async def _first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait until one of several coroutines ends, and cancel the others."""
    tasks = [asyncio.Task(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


class _Socket:
    """Adapts a WebSocket of Starlette to the call protocol.

    Args:
        socket: The accepted socket.
        max_bytes: The largest accepted message. Our own server already checks this; other servers may not.
    """

    def __init__(self, socket: WebSocket, max_bytes: int) -> None:
        self.closing_code = 1000
        self._socket = socket
        self._max_bytes = max_bytes
        self._sending = asyncio.Lock()

    async def send(self, text: bytes) -> None:
        try:
            # Send one message at a time: when the client reads a little, a server resumes all waiting senders.
            async with self._sending:
                await self._socket.send_text(text.decode())
        except (WebSocketDisconnect, RuntimeError) as error:
            raise EOFError(str(error)) from error

    async def receive(self) -> bytes:
        try:
            event = await self._socket.receive()
        except RuntimeError as error:
            raise EOFError(str(error)) from error
        if event["type"] == "websocket.disconnect":
            raise EOFError(event.get("reason") or "")
        # Binary frames are not part of the protocol. Like any malformed message, they must not end the connection.
        text: str | None = event.get("text")
        message = event.get("bytes") or b"" if text is None else text.encode()
        if len(message) > self._max_bytes:
            await self._socket.close(1009)
            raise EOFError(f"a message of more than {self._max_bytes} bytes")
        return message

    async def close(self) -> None:
        if self._socket.client_state is WebSocketState.CONNECTED:
            try:
                await self._socket.close(self.closing_code)
            except (WebSocketDisconnect, RuntimeError) as error:
                raise EOFError(str(error)) from error
