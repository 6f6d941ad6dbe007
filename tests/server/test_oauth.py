"""A hub that requires tokens of an authorization server, used by standard OAuth clients, and by our own."""

import asyncio
import json
import shutil
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import aiohttp
import httpx2
import pytest
from mcp import Client
from mcp.client.auth import OAuthClientProvider
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.auth import (
    AuthorizationCodeResult,
    OAuthClientInformationFull,
    OAuthClientMetadata,
    OAuthToken,
)
from pydantic import AnyUrl
from tests.authorization_server import AuthorizationServer
from tests.mcp_clients.matrix import MatrixError, prepare, sign_in_with_typescript
from tests.mcp_serving.support import serving
from tests.servers import free_port

from operations import CallError, OperationContext, OperationRegistry
from operations.hub import open_hub
from operations.mcp import MCPClientConfig, OAuthLogin, connect_mcp, sign_in
from operations.server import create_app
from operations.server.running import running
from operations.server.tokens import JWTs


def build() -> OperationRegistry:
    registry = OperationRegistry()

    @registry.operation("task.mine", scopes=["task:read"])
    async def mine(context: OperationContext) -> str:
        return context.identity.id if context.identity else "nobody"

    @registry.operation("task.erase", scopes=["task:erase"])
    async def erase() -> str:
        return "erased"

    @registry.operation("task.count")
    async def count() -> int:
        return 3

    return registry


MESSAGE = {"jsonrpc": "2.0", "id": 1}


@dataclass
class Hub:
    url: str
    issuer: AuthorizationServer

    @property
    def mcp(self) -> str:
        return f"{self.url}/mcp"


@asynccontextmanager
async def protected_hub(**options: Any) -> AsyncGenerator[Hub]:
    issuer = AuthorizationServer(scopes="task:read", **options)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with AsyncExitStack() as stack:
        issuer.url = await stack.enter_async_context(serving(issuer.app))
        registry = build()
        app = create_app(
            registry,
            identity=JWTs(issuer=issuer.url, audience=url, jwks_url=f"{issuer.url}/jwks"),
            anonymous=False,
            public_url=url,
            authorization_servers=[issuer.url],
            scopes_supported=["task:read", "task:erase"],
            mcp=True,
        )
        await stack.enter_async_context(running(app, port=port))
        yield Hub(url, issuer)


async def browse(address: str) -> str:
    """Open an address as a browser does, and return the address that it ends at."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(address, allow_redirects=False) as answer,
    ):
        return answer.headers["location"]


class Memory:
    """The token storage of the SDK, in memory."""

    tokens: OAuthToken | None = None
    client: OAuthClientInformationFull | None = None

    async def get_tokens(self) -> OAuthToken | None:
        return self.tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self.tokens = tokens

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self.client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self.client = client_info


async def test_metadata_and_challenges_lead_to_the_authorization_server() -> None:
    async with protected_hub() as hub, aiohttp.ClientSession(hub.url) as session:
        where = f'resource_metadata="{hub.url}/.well-known/oauth-protected-resource"'
        for path in ("", "/mcp"):
            async with session.get(f"/.well-known/oauth-protected-resource{path}") as answer:
                metadata = await answer.json()
            assert metadata["resource"] == hub.url
            assert metadata["authorization_servers"] == [hub.issuer.url]
            assert metadata["scopes_supported"] == ["task:erase", "task:read"]
        for method, path in (
            ("POST", "/mcp"),
            ("POST", "/call"),
            ("GET", "/task/count"),
            ("GET", "/task/nothing"),
            ("GET", "/openapi.json"),
            ("GET", "/ws"),
        ):
            async with session.request(method, path) as answer:
                assert answer.status == 401, path
                assert answer.headers["www-authenticate"] == f"Bearer {where}"
        async with session.get("/healthz") as answer:
            assert answer.status == 200
        async with session.get("/session") as answer:
            assert (await answer.json())["identity"] is None
        token = {"authorization": f"Bearer {hub.issuer.access_token(hub.url, 'task:read')}"}
        async with session.post("/task/erase", headers=token) as answer:
            assert answer.status == 403
            challenge = answer.headers["www-authenticate"]
            assert challenge == f'Bearer error="insufficient_scope", scope="task:erase", {where}'
        # MCP clients request the scopes that this challenge names.
        for version in ("2025-11-25", "2026-07-28"):
            called = {"method": "tools/call", "params": {"name": "task__erase", "arguments": {}}}
            headers = {**token, "mcp-protocol-version": version}
            async with session.post("/mcp", headers=headers, json={**MESSAGE, **called}) as answer:
                assert answer.status == 403
                assert answer.headers["www-authenticate"] == challenge
        elsewhere = {"authorization": f"Bearer {hub.issuer.access_token('http://other')}"}
        async with session.post("/task/count", headers=elsewhere) as answer:
            assert answer.status == 401
            assert answer.headers["www-authenticate"] == f'Bearer error="invalid_token", {where}'


async def test_the_official_python_client_signs_in_and_calls() -> None:
    async with protected_hub() as hub:
        result: dict[str, str] = {}

        async def redirect(address: str) -> None:
            result.update(
                (k, v[0]) for k, v in parse_qs(urlsplit(await browse(address)).query).items()
            )

        async def callback() -> AuthorizationCodeResult:
            return AuthorizationCodeResult(**result)

        provider = OAuthClientProvider(
            hub.mcp,
            OAuthClientMetadata(redirect_uris=[AnyUrl("http://127.0.0.1:1/callback")]),
            Memory(),
            redirect_handler=redirect,
            callback_handler=callback,
        )
        async with (
            httpx2.AsyncClient(auth=provider) as http,
            Client(streamable_http_client(hub.mcp, http_client=http)) as client,
        ):
            names = [tool.name for tool in (await client.list_tools()).tools]
            mine = await client.call_tool(next(name for name in names if "mine" in name), {})

        assert mine.content[0].text == "ann"  # type: ignore[union-attr]
        assert hub.issuer.grants == ["authorization_code"]


MINE = """
from operations import OperationContext, operation

@operation("task.mine", scopes=["task:read"])
async def mine(context: OperationContext) -> str:
    return context.identity.id if context.identity else "nobody"
"""


@pytest.mark.slow
@pytest.mark.requirement("R52")
async def test_the_official_typescript_client_signs_in_to_a_hub_and_refreshes_its_token(
    tmp_path: Path,
) -> None:
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("Node is not installed")
    try:
        await asyncio.to_thread(prepare, "typescript-1")
    except MatrixError as error:
        pytest.skip(f"npm cannot install the SDK here: {error}")
    issuer, port = AuthorizationServer(scopes="task:read"), free_port()
    (tmp_path / "tasks.py").write_text(MINE)
    async with serving(issuer.app) as issuer.url:
        (tmp_path / "operations.toml").write_text(
            f"""
modules = ["tasks.py"]
[serve]
public_url = "http://127.0.0.1:{port}"
scopes_supported = ["task:read"]
[access.jwt]
issuer = "{issuer.url}"
audience = "http://127.0.0.1:{port}"
jwks_url = "{issuer.url}/jwks"
[trace]
enabled = false
"""
        )
        async with (
            open_hub(tmp_path / "operations.toml") as hub,
            running(hub.app, port=port) as url,
        ):
            seen = await asyncio.to_thread(sign_in_with_typescript, f"{url}/mcp")

    assert seen == {"first": "ann", "again": "ann", "isRefreshed": True}
    assert issuer.grants == ["authorization_code", "refresh_token"]


def login(hub: Hub, store: Path) -> MCPClientConfig:
    return MCPClientConfig(
        url=hub.mcp, login=OAuthLogin(store=store), allowed_hosts=["127.0.0.1"], connect_timeout=10
    )


async def open_in_browser(address: str) -> None:
    async with aiohttp.ClientSession() as session:
        answer = await session.get(address)
        assert "signed in" in await answer.text()


async def test_our_client_signs_in_once_and_refreshes_its_tokens(tmp_path: Path) -> None:
    store = tmp_path / "tokens" / "hub.json"
    async with protected_hub() as hub:
        config = login(hub, store)
        with pytest.raises(CallError, match="operations login"):
            async with connect_mcp("hub", config):
                pass
        opened: list[asyncio.Task[None]] = []
        client = await sign_in(
            "hub", config, lambda url: opened.append(asyncio.create_task(open_in_browser(url)))
        )
        await asyncio.gather(*opened)
        assert client.server_info is not None
        assert (store.stat().st_mode & 0o777, store.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        assert hub.issuer.grants[0] == "authorization_code"

        # A later process finds an access token that has expired, and a refresh token that has not.
        store.write_text(json.dumps({**json.loads(store.read_text()), "expires_at": 1}))
        async with connect_mcp("hub", config) as again:
            registry = OperationRegistry(again)
            mine = await registry.execute("hub.task__mine", {}, OperationContext())
        assert mine.data == "ann"
        assert hub.issuer.grants[-1] == "refresh_token"
        assert hub.issuer.grants.count("authorization_code") == 1


@pytest.mark.parametrize(
    "stored",
    [
        {"tokens": {"refresh_token": "s3cret", "token_type": 5}},
        {"tokens": "s3cret"},
        {"tokens": {"access_token": "s3cret"}, "client": "s3cret", "metadata": "s3cret"},
    ],
)
async def test_a_damaged_token_file_asks_for_a_new_sign_in_and_shows_no_secret(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stored: Any
) -> None:
    store = tmp_path / "hub.json"
    store.write_text(json.dumps({**stored, "expires_at": "soon"}))
    async with protected_hub() as hub:
        with pytest.raises(CallError, match="operations login") as caught:
            async with connect_mcp("hub", login(hub, store)):
                pass
    assert "s3cret" not in str(caught.value) + caplog.text
