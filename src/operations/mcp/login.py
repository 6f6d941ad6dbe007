"""Sign in to an MCP server through a browser; the tokens are stored for every later process."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import cast
from urllib.parse import parse_qs, urlsplit

from mcp.shared.auth import AuthorizationCodeResult, OAuthClientInformationFull
from pydantic import AnyUrl

from operations._mcp_config import MCPClientConfig, OAuthLogin
from operations.errors import OperationsError
from operations.mcp.client import MCPClient
from operations.mcp.oauth import TokenFile, build_provider, token_path

SIGN_IN_SECONDS = 300
"""How long a person has to sign in."""

_MAX_REQUEST = 16 * 1024


async def sign_in(name: str, config: MCPClientConfig, show: Callable[[str], object]) -> MCPClient:
    """Sign in to a server through a browser, store the tokens, and return the server's closed client.

    Args:
        name: Of the server.
        config: How to reach it; it has a `login`.
        show: Gets the address that the person opens.

    Raises:
        ValueError: If the server does not use OAuth.
        CallError: `UNAVAILABLE` if signing in or connecting failed.
    """
    login = config.login
    if login is None:
        raise ValueError(f'{name} does not sign in through a browser: set auth = "oauth"')
    file = TokenFile(token_path(config, login))
    async with _Callback(login.redirect_port) as callback:
        if login.client_id is None:
            # An earlier registration names another port, which strict servers reject.
            file.path.unlink(missing_ok=True)
        else:
            await file.set_client_info(_registered(login, callback.address))

        async def redirect(url: str) -> None:
            show(url)

        provider = build_provider(config, login, file, callback.address, redirect, callback.wait)
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


class _Callback:
    """Listens on this machine for the browser that comes back from the authorization server."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._result: asyncio.Future[AuthorizationCodeResult] = (
            asyncio.get_running_loop().create_future()
        )

    async def __aenter__(self) -> "_Callback":
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self._port, limit=_MAX_REQUEST
        )
        port = self._server.sockets[0].getsockname()[1]
        self.address = f"http://127.0.0.1:{port}/callback"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()
        self._result.cancel()

    async def wait(self) -> AuthorizationCodeResult:
        """Return what the authorization server sent."""
        return await self._result

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n", 1)[0].decode("latin-1")
            _, target, _ = line.split(" ", 2)
            parts = urlsplit(target)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            if parts.path == "/callback" and not self._result.done():
                self._finish(query)
            text = "You are signed in." if "code" in query else "Signing in failed."
            body = f"<!doctype html><title>operations</title><p>{text} You can close this window.".encode()
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/html; charset=utf-8\r\nconnection: close\r\n"
                + f"content-length: {len(body)}\r\n\r\n".encode()
                + body
            )
            await writer.drain()
        except (ValueError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    def _finish(self, query: dict[str, str]) -> None:
        if "code" in query:
            result = AuthorizationCodeResult(
                code=query["code"], state=query.get("state"), iss=query.get("iss")
            )
            self._result.set_result(result)
        elif "error" in query:
            reason = query.get("error_description") or query["error"]
            self._result.set_exception(OperationsError(f"Signing in was rejected: {reason!a}"))
