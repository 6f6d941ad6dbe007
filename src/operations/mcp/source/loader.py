"""Connect to several servers at once, and sign in to a server through a browser.

Rule: servers start concurrently and independently of each other.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, cast

import anyio
from mcp.shared.auth import AuthorizationCodeResult, OAuthClientInformationFull
from pydantic import AnyUrl

from operations.base.errors import CallError, ErrorCode, OperationsError
from operations.base.tasks import cancel_tasks
from operations.contract.specs import Operation
from operations.mcp.config import MCPClientConfig, OAuthLogin, read_servers
from operations.mcp.source.client import MCPClient
from operations.mcp.source.oauth import TokenStore, build_provider, token_path
from operations.registry.registry import OperationRegistry

logger = logging.getLogger("operations.mcp")


class MCPClientLoader:
    """Connects to several servers, and keeps the connections until it is closed.

    Args:
        wait: Seconds that `load` waits for slow servers. A slower server keeps connecting, and its operations appear in
            the registries when it is connected.
        max_starting: The number of servers that are started concurrently.
    """

    def __init__(self, *, wait: float = 10, max_starting: int = 64) -> None:
        self.failures: dict[str, CallError] = {}
        """The error of each server that could not be connected, by name; its `str` is the full report."""

        self._wait = wait
        self._slots = asyncio.Semaphore(max_starting)
        self._clients: dict[str, MCPClient] = {}
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._registries: list[OperationRegistry] = []
        self._closing: asyncio.Task[None] | None = None

    async def load(
        self, servers: "str | Path | Mapping[str, MCPClientConfig | Mapping[str, Any]]"
    ) -> list[MCPClient]:
        """Connect to every server of a mapping or an `mcp.json`; return the connected servers.

        A server that fails is reported in `failures` and in the log, and does not affect the others.

        Raises:
            ValueError: If a name is taken, or the document is not an `mcp.json`.
            OSError: If the file cannot be read.
        """
        configs = _configs(servers)
        taken = configs.keys() & (self._clients.keys() | self._starting.keys())
        if taken:
            raise ValueError(f"there is a server called {min(taken)} already")
        tasks: list[asyncio.Task[None]] = []
        for name, config in configs.items():
            self.failures.pop(name, None)
            task = asyncio.Task(self._start(name, config), name=f"mcp {name} starts")
            self._starting[name] = task
            tasks.append(task)
        if tasks:
            await asyncio.wait(tasks, timeout=self._wait)
        return [self._clients[name] for name in configs if name in self._clients]

    async def _start(self, name: str, config: MCPClientConfig | Mapping[str, Any]) -> None:
        try:
            async with self._slots:
                if not isinstance(config, MCPClientConfig):
                    config = MCPClientConfig.from_entry(config)
                client = MCPClient(name, config)
                await client.open()
            self._clients[name] = client
            for registry in self._registries:
                registry.register_all(client)
        except CallError as error:
            self._failed(name, error)
        except ValueError as error:
            self._failed(
                name, CallError(ErrorCode.UNAVAILABLE, f"{name}: {error}", retryable=False)
            )
        except Exception as error:
            logger.exception("the MCP server %s could not be started", name)
            self._failed(name, CallError(ErrorCode.UNAVAILABLE, f"{name}: {type(error).__name__}"))
        finally:
            self._starting.pop(name, None)

    def _failed(self, name: str, error: CallError) -> None:
        self.failures[name] = error
        logger.warning("the MCP server %s is not available: %s", name, error)

    @property
    def clients(self) -> list[MCPClient]:
        """The connected servers, by name."""
        return list(self._clients.values())

    @property
    def pending(self) -> list[str]:
        """The names of servers that are still connecting."""
        return list(self._starting)

    def get_client(self, name: str) -> MCPClient | None:
        """Return the connected server of this name, if there is one."""
        return self._clients.get(name)

    @property
    def operations(self) -> list[Operation]:
        """The operations of all connected servers."""
        return [operation for client in self._clients.values() for operation in client]

    def __iter__(self) -> Iterator[Operation]:
        return iter(self.operations)

    def register_all(self, registry: OperationRegistry) -> list[Operation]:
        """Register all operations, and those of slow servers when they are connected.

        Raises:
            RegistrationError: If an id is taken; no operation is added then.
        """
        return registry.register_all(self)

    def attach(self, registry: OperationRegistry) -> None:
        """Apply later changes of these operations to `registry`, which already has them."""
        if registry not in self._registries:
            self._registries.append(registry)
        for client in self._clients.values():
            client.attach(registry)

    async def aclose(self) -> None:
        """Disconnect from all servers concurrently.

        Closing twice is harmless, and cancel scopes do not interrupt it.
        """
        if self._closing is None or self._closing.done():
            self._closing = asyncio.Task(self._close(), name="mcp servers close")
        with anyio.CancelScope(shield=True):
            # Shielded from asyncio too: a cancelled caller returns at once, and closing continues.
            await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await cancel_tasks(*self._starting.values())
        clients, self._clients = list(self._clients.values()), {}
        await asyncio.gather(*(client.aclose() for client in clients))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


def _configs(
    servers: "str | Path | Mapping[str, MCPClientConfig | Mapping[str, Any]]",
) -> dict[str, MCPClientConfig | Mapping[str, Any]]:
    if isinstance(servers, Mapping):
        ready = {
            name: config for name, config in servers.items() if isinstance(config, MCPClientConfig)
        }
        rest = {name: config for name, config in servers.items() if name not in ready}
        return {**ready, **(read_servers(rest) if rest else {})}
    return dict(read_servers(servers))


# ------------------------------------------------------------ signing in

SIGN_IN_SECONDS = 300
"""Seconds that a person has to sign in."""


async def sign_in(name: str, config: MCPClientConfig, show: Callable[[str], object]) -> MCPClient:
    """Sign in to a server through a browser, store the tokens, and return the server's closed client.

    Args:
        name: The name of the server.
        config: The configuration of the server, with a `login`.
        show: Receives the URL that the person must open.

    Raises:
        ValueError: If the server does not use OAuth.
        CallError: `UNAVAILABLE` if signing in or connecting failed.
    """
    login = config.login
    if login is None:
        raise ValueError(f'{name} does not sign in through a browser: set auth = "oauth"')
    file = TokenStore(token_path(config, login))
    async with _callback(login.redirect_port) as (address, result):
        if login.client_id is None:
            # An earlier client registration has another port, which strict servers reject.
            file.clear()
        else:
            await file.set_client_info(_registered(login, address))

        async def redirect(url: str) -> None:
            show(url)

        provider = build_provider(config, login, file, address, redirect, lambda: result)
        client = MCPClient(
            name, replace(config, login=None, auth=provider, connect_timeout=SIGN_IN_SECONDS)
        )
        await client.open()
        await client.aclose()
        return client


def _registered(login: OAuthLogin, redirect_uri: str) -> OAuthClientInformationFull:
    secret = login.client_secret
    return OAuthClientInformationFull(
        client_id=cast("str", login.client_id),
        client_secret=secret,
        redirect_uris=[AnyUrl(redirect_uri)],
        token_endpoint_auth_method="none" if secret is None else "client_secret_basic",
    )


@asynccontextmanager
async def _callback(port: int) -> AsyncGenerator[tuple[str, asyncio.Future[Any]]]:
    """Listen on this machine for the redirect of the browser; yield the address and the future result."""
    from aiohttp import web  # noqa: PLC0415 - takes long to import

    result = asyncio.get_running_loop().create_future()

    async def receive(request: web.Request) -> web.Response:
        query = request.query
        if "code" in query and not result.done():
            found = AuthorizationCodeResult(
                code=query["code"], state=query.get("state"), iss=query.get("iss")
            )
            result.set_result(found)
        elif "error" in query and not result.done():
            reason = query.get("error_description") or query["error"]
            result.set_exception(OperationsError(f"Signing in was rejected: {reason!a}"))
        text = "You are signed in." if "code" in query else "Signing in failed."
        page = f"<!doctype html><title>operations</title><p>{text} You can close this window."
        return web.Response(text=page, content_type="text/html")

    app = web.Application()
    app.router.add_get("/callback", receive)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/callback", result
    finally:
        await runner.cleanup()
        result.cancel()
