"""A real HTTP server in the test's own loop, and documents in one line."""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from operations import OperationRegistry
from operations.openapi import HTTPServiceConfig, from_openapi

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(
    handler: Handler, tls: ssl.SSLContext | None = None, *, port: int = 0
) -> AsyncGenerator[str]:
    """Answer every request with `handler`; gives the server's address."""
    application = web.Application(client_max_size=1 << 26)
    application.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(
        application, auto_decompress=False, shutdown_timeout=0.1, access_log=None
    )
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def writing(*parts: bytes | asyncio.Event, ends: bool = False) -> AsyncGenerator[str]:
    """Answer the first request of every connection with these bytes, and wait for the events between them."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for part in parts:
            if isinstance(part, asyncio.Event):
                await part.wait()
            else:
                writer.write(part)
        if not ends:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def document(path: str = "/thing", method: str = "get", /, **operation: Any) -> dict[str, Any]:
    """A document with one operation, called `call`; `components` and `security` go to its top."""
    outer: tuple[str, ...] = ("components", "servers")
    top = {key: operation.pop(key) for key in outer if key in operation}
    responses = {"200": {"description": "ok", "content": {"application/json": {}}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "test", "version": "1"},
        "paths": {path: {method: {"operationId": "call", "responses": responses, **operation}}},
        **top,
    }


@asynccontextmanager
async def imported(doc: dict[str, Any], **config: Any) -> AsyncGenerator[OperationRegistry]:
    """A registry with the operations of `doc` in the namespace `api`."""
    async with OperationRegistry() as registry:
        registry.register_all(from_openapi(doc, HTTPServiceConfig(namespace="api", **config)))
        yield registry
