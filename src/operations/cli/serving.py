"""The doors of `operations serve`, on one ASGI application."""

import asyncio
from collections.abc import Collection
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from importlib import import_module
from typing import Any

from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from operations._host_rules import LOOPBACK
from operations.access import Identity
from operations.calls import CallGraph, serve_calls
from operations.cli.callers import callers_by_hash, credential_resolver
from operations.cli.hub import Hub
from operations.config import ConfigFile
from operations.config.model import JWTEntry
from operations.front.front import Front
from operations.front.http import CREDENTIAL, IDENTITY, PIPELINE
from operations.front.identity import (
    CredentialResolver,
    client_address,
)
from operations.mcp import RegistryServer, to_mcp
from operations.pubsub.websocket import accept_websocket
from operations.registry import OperationRegistry
from operations.server import APIKeys, IdentityResolver, Limits, create_app
from operations.server.console import console_app
from operations.types import JSONObject

_TOKENS = "operations.server.tokens"
"""Imported when the config has `[access.jwt]`: it has an extra of its own."""


_REMEMBERED = 2_000
"""Calls that the console can show."""


def build_app(
    hub: Hub, *, doors: Collection[str], host: str, title: str = "operations"
) -> Starlette:
    """One application with the doors that were asked for.

    Raises:
        ConfigError: If a key is not where the config says.
    """
    config = hub.file.config
    limits = config.limits
    resources: list[AbstractAsyncContextManager[Any]] = []
    mcp = websocket = None
    if "mcp" in doors:
        server = mcp_server(hub, name=title)
        # Host and Origin are judged once, for every door, by the application around it.
        mcp = server.asgi_app(path=None, hosts=None, stateless=config.serve.mcp.stateless)
        resources.append(mcp.running())
    if "websocket" in doors:
        websocket = WebSocketEntry(hub.registry, credential_resolver(hub.file))
    return create_app(
        hub.registry,
        identity=resolvers(hub.file) or None,
        title=title,
        allowed_hosts=(*LOOPBACK, host, *config.serve.allowed_hosts),
        allowed_origins=config.serve.allowed_origins,
        root_path=config.serve.root_path,
        scopes_supported=config.serve.scopes_supported,
        limits=Limits(
            **hub.file.options(limits, ("limits",)),
            body_bytes=limits.request_bytes,
            calls=limits.concurrency,
            calls_per_caller=limits.per_caller,
        ),
        timeout=limits.timeout,
        expose_errors=config.serve.expose_errors,
        mcp=mcp,
        websocket=websocket,
        console=console_app() if "console" in doors else None,
        graph=CallGraph(limit=_REMEMBERED) if "console" in doors else None,
        resources=resources,
    )


def mcp_server(hub: Hub, **settings: Any) -> RegistryServer:
    """Return the MCP server of a hub, with the settings of its file."""
    config = hub.file.config
    table = asdict(config.serve.mcp)
    del table["stateless"]  # an option of the HTTP application
    return to_mcp(
        hub.registry,
        timeout=config.limits.timeout,
        expose_errors=config.serve.expose_errors,
        **table,
        **settings,
    )


def resolvers(file: ConfigFile) -> list[IdentityResolver]:
    """Who may sign in, and how.

    Raises:
        ConfigError: If a key is not where the config says.
    """
    access = file.config.access
    found: list[IdentityResolver] = []
    if access.keys:
        found.append(APIKeys(callers_by_hash(file)))
    if access.jwt is not None:
        found.append(_tokens(access.jwt, file))
    return found


def _tokens(entry: JWTEntry, file: ConfigFile) -> IdentityResolver:
    def identity(claims: JSONObject) -> Identity:
        scopes = claims.get(entry.scope_claim, ())
        return Identity(claims["sub"], scopes.split() if isinstance(scopes, str) else scopes)

    key = None
    if entry.secret is not None:
        key = file.secret(entry.secret)
    elif entry.public_key is not None:
        key = file.resolve(entry.public_key).read_text(encoding="utf-8")
    resolver: IdentityResolver = import_module(_TOKENS).JWTs(
        issuer=entry.issuer,
        audience=entry.audience,
        jwks=entry.jwks_url,
        key=key,
        algorithms=entry.algorithms,
        identity=identity,
        leeway=entry.leeway,
    )
    return resolver


class WebSocketEntry:
    """The call protocol on WebSockets: whoever connects can call, as whom they signed in.

    It stands in an app of `create_app`, and what that allows a caller holds for all doors together.
    """

    def __init__(self, registry: OperationRegistry, resolve: CredentialResolver) -> None:
        self._registry = registry
        self._resolve = resolve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection until it closes."""
        front: Front = scope[PIPELINE].front
        socket = WebSocket(scope, receive, send)
        await socket.accept()
        identity: Identity | None = scope.get(IDENTITY)

        async with (
            accept_websocket(
                _Socket(socket, front.limits.body_bytes),
                identity=identity,
                max_values=front.limits.values,
            ) as target,
            serve_calls(
                self._registry,
                target,
                front=front,
                address=client_address(scope),
                resolve=self._resolve,
                expose_errors=front.expose_errors,
                grace=0,
            ),
        ):
            # When the credential of the connection expires or is revoked, the connection ends.
            revoked = asyncio.Event()
            with front.credentials.watching(scope.get(CREDENTIAL), revoked.set):
                ends = [
                    asyncio.ensure_future(end) for end in (target.wait_closed(), revoked.wait())
                ]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                for end in ends:
                    end.cancel()


class _Socket:
    """A WebSocket of Starlette, as the call protocol needs it.

    Args:
        socket: The accepted socket.
        max_bytes: The largest message that is received. Our own server checks it first; others may not.
    """

    def __init__(self, socket: WebSocket, max_bytes: int) -> None:
        self._socket = socket
        self._max_bytes = max_bytes
        self._sending = asyncio.Lock()

    async def send(self, text: bytes) -> None:
        try:
            # One at a time: a server lets all that wait go on as soon as the client has read a little.
            async with self._sending:
                await self._socket.send_text(text.decode())
        except (WebSocketDisconnect, RuntimeError) as error:
            raise EOFError(str(error)) from error

    async def receive(self) -> bytes:
        try:
            message = (await self._socket.receive_text()).encode()
        except (WebSocketDisconnect, RuntimeError, KeyError) as error:
            # A KeyError is a binary frame: not this protocol.
            raise EOFError(str(error)) from error
        if len(message) > self._max_bytes:
            await self._socket.close(1009)
            raise EOFError(f"a message of more than {self._max_bytes} bytes")
        return message

    async def close(self) -> None:
        if self._socket.client_state is WebSocketState.CONNECTED:
            await self._socket.close()
