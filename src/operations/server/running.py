"""Running an app under uvicorn, listening where it is safe to.

Rule 1: 127.0.0.1 unless told otherwise. Listening to a network without knowing who asks is refused unless that, too,
        is said.
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette

from operations.front.http import RequestPipeline
from operations.front.limits import Limits
from operations.server.protocol import BoundedProtocol

logger = logging.getLogger("operations.server")
_uvicorn_logger = logging.getLogger("uvicorn.error")

GRACE = 10
"""Seconds that calls under way have to finish when the server stops."""

_KEEP_ALIVE = 5
_BACKLOG = 2048


class InsecureBindError(ValueError):
    """The server would have listened to a network without anybody having to say who they are."""


def build_server(
    app: Starlette,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    allow_anonymous: bool = False,
    trusted_proxies: str | None = None,
) -> uvicorn.Server:
    """Return a uvicorn server for an application, ready to run.

    Args:
        app: The application.
        host: The address to listen on.
        port: 0 for any that is free.
        allow_anonymous: Listen to a network even though nobody can sign in.
        trusted_proxies: Addresses whose `X-Forwarded-*` headers are believed, separated by commas; none by default.

    Raises:
        InsecureBindError: If the address is not this machine's own, nobody can sign in, and that was not allowed.
    """
    # Other applications, such as the API of the demo, have no pipeline.
    pipeline: RequestPipeline | None = getattr(app.state, "pipeline", None)
    limits = Limits() if pipeline is None else pipeline.front.limits
    if not is_loopback(host) and (pipeline is None or pipeline.resolve is None):
        if not allow_anonymous:
            raise InsecureBindError(
                f"{host} can be reached by others, but the app has no identity resolver: "
                "pass identity= to create_app, or allow_anonymous=True"
            )
        logger.warning("listening on %s without authentication", host)
    _uvicorn_logger.addFilter(_is_notable)
    return uvicorn.Server(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            http=BoundedProtocol,
            # A small compressed message can become a large one.
            ws_per_message_deflate=False,
            ws_max_size=limits.body_bytes,
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=trusted_proxies is not None,
            forwarded_allow_ips=trusted_proxies,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=GRACE,
            backlog=_BACKLOG,
        )
    )


def _is_notable(record: logging.LogRecord) -> bool:
    """Hide, unless debugging, the error that uvicorn logs for every handshake that was answered with a status."""
    is_handshake = record.msg == "ASGI callable returned without completing handshake."
    return not is_handshake or _uvicorn_logger.isEnabledFor(logging.DEBUG)


@asynccontextmanager
async def running(
    app: Starlette,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    allow_anonymous: bool = False,
    trusted_proxies: str | None = None,
) -> AsyncGenerator[str]:
    """Serve on this event loop for the duration of an `async with` block; yield the address.

    Args:
        app: The application.
        host: The address to listen on.
        port: 0 for any that is free.
        allow_anonymous: As for `build_server`.
        trusted_proxies: As for `build_server`.

    Raises:
        InsecureBindError: As `build_server`.
        OSError: If the port is taken.
    """
    server = build_server(
        app,
        host=host,
        port=port,
        allow_anonymous=allow_anonymous,
        trusted_proxies=trusted_proxies,
    )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets with an explicit protocol number.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
        # Without signal handlers: the loop belongs to somebody else.
        task = asyncio.create_task(server._serve([listener]))  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        try:
            while not server.started and not task.done():  # noqa: ASYNC110 - nothing to await
                await asyncio.sleep(0.005)
            if task.done():
                task.result()
            name = f"[{host}]" if ":" in host else host
            yield f"http://{name}:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
