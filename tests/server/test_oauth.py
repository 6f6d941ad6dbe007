"""A hub that requires tokens of an authorization server, used by standard OAuth clients, and by our own."""

import asyncio
import io
import json
import shutil
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urljoin, urlsplit

import aiohttp
import httpx2
import jwt
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
from tests.mcp_clients.matrix import MatrixError, oidc_provider, prepare, sign_in_with_typescript
from tests.mcp_serving.support import serving
from tests.servers import free_port

from operations import CallError, OperationContext, OperationRegistry
from operations.__main__ import main
from operations.front.config import ServerConfig
from operations.front.front import Front
from operations.hub import open_hub
from operations.mcp import MCPClientConfig, OAuthLogin, connect_mcp, sign_in
from operations.server import create_app
from operations.server.http11.running import running
from operations.server.signin.tokens import JWTs


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


CALLBACK = "http://127.0.0.1:1/callback"


async def browse(address: str) -> str:
    """Open an address as a browser does, and return the address that leads back to the client."""
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
        while not address.startswith(CALLBACK):
            async with session.get(address, allow_redirects=False) as answer:
                assert answer.status in (302, 303), await answer.text()
                address = urljoin(address, answer.headers["location"])
    return address


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
        where_mcp = f'{where[:-1]}/mcp"'
        for path in ("", "/mcp"):
            async with session.get(f"/.well-known/oauth-protected-resource{path}") as answer:
                metadata = await answer.json()
            assert metadata["resource"] == f"{hub.url}{path}"
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
                expected = where_mcp if path == "/mcp" else where
                assert answer.headers["www-authenticate"] == f"Bearer {expected}"
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
                assert answer.headers["www-authenticate"] == challenge.replace(where, where_mcp)
        elsewhere = {"authorization": f"Bearer {hub.issuer.access_token('http://other')}"}
        async with session.post("/task/count", headers=elsewhere) as answer:
            assert answer.status == 401
            assert answer.headers["www-authenticate"] == f'Bearer error="invalid_token", {where}'


async def sign_in_with_python(url: str, client_id: str | None = None) -> str:
    """Return who the OAuth client of the Python SDK is at a hub; without an id it registers."""
    result: dict[str, str] = {}

    async def redirect(address: str) -> None:
        result.update((k, v[0]) for k, v in parse_qs(urlsplit(await browse(address)).query).items())

    async def callback() -> AuthorizationCodeResult:
        return AuthorizationCodeResult(**result)

    memory = Memory()
    if client_id is not None:
        memory.client = OAuthClientInformationFull(
            client_id=client_id,
            redirect_uris=[AnyUrl(CALLBACK)],
            token_endpoint_auth_method="none",
        )
    provider = OAuthClientProvider(
        url,
        OAuthClientMetadata(redirect_uris=[AnyUrl(CALLBACK)]),
        memory,
        redirect_handler=redirect,
        callback_handler=callback,
    )
    async with (
        httpx2.AsyncClient(auth=provider) as http,
        Client(streamable_http_client(url, http_client=http)) as client,
    ):
        names = [tool.name for tool in (await client.list_tools()).tools]
        mine = await client.call_tool(next(name for name in names if "mine" in name), {})
    return str(mine.content[0].text)  # type: ignore[union-attr]


async def test_the_official_python_client_signs_in_and_calls() -> None:
    async with protected_hub() as hub:
        assert await sign_in_with_python(hub.mcp) == "ann"
        assert hub.issuer.grants == ["authorization_code"]


@pytest.mark.slow
@pytest.mark.parametrize("scopes", [[], ["task:read"]], ids=["no scopes", "scopes"])
@pytest.mark.parametrize("registers", [True, False], ids=["registers", "known"])
@pytest.mark.parametrize("sdk", ["python", "typescript"])
async def test_official_clients_sign_in_through_a_certified_provider(
    sdk: str, registers: bool, scopes: list[str], tmp_path: Path
) -> None:
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("Node is not installed")
    try:
        for name in ("oidc-provider", "typescript-1"):
            await asyncio.to_thread(prepare, name)
    except MatrixError as error:
        pytest.skip(f"npm cannot install the packages here: {error}")
    port = free_port()
    client = () if registers else ("known",)
    (tmp_path / "tasks.py").write_text(MINE.replace('["task:read"]', json.dumps(scopes)))
    with oidc_provider(f"http://127.0.0.1:{port}/mcp", registers=registers) as issuer:
        (tmp_path / "operations.toml").write_text(
            CONFIG.format(port=port, issuer=issuer, scopes=json.dumps(scopes))
        )
        async with (
            open_hub(tmp_path / "operations.toml") as hub,
            running(hub.app, port=port) as url,
        ):
            if sdk == "python":
                assert await sign_in_with_python(f"{url}/mcp", *client) == "ann"
            else:
                seen = await asyncio.to_thread(sign_in_with_typescript, f"{url}/mcp", *client)
                assert seen["first"] == "ann"


async def test_the_metadata_has_no_empty_members() -> None:
    config = ServerConfig(public_url="http://hub", authorization_servers=["http://id"])
    metadata = Front(OperationRegistry(), config).challenge.metadata()

    assert metadata == {
        "resource": "http://hub",
        "authorization_servers": ["http://id"],
        "bearer_methods_supported": ["header"],
    }


@pytest.mark.requirement("R08")
async def test_a_token_for_the_mcp_endpoint_is_accepted_there_only() -> None:
    async with protected_hub() as hub, aiohttp.ClientSession(hub.url) as session:

        async def status(audience: str, path: str) -> int:
            token = hub.issuer.access_token(audience)
            headers = {"authorization": f"Bearer {token}", "mcp-protocol-version": "2026-07-28"}
            listed = {**MESSAGE, "method": "tools/list", "params": {}}
            async with session.post(path, headers=headers, json=listed) as answer:
                return answer.status

        assert await status(hub.mcp, "/mcp") != 401
        assert await status(hub.url, "/mcp") != 401
        assert await status(hub.mcp, "/task/count") == 401
        assert await status(f"{hub.mcp}2", "/mcp") == 401
        assert await status(f"{hub.url}.example/mcp", "/mcp") == 401


async def test_a_wrong_audience_or_issuer_is_logged_with_what_was_expected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with protected_hub() as hub, aiohttp.ClientSession(hub.url) as session:
        wrong = [
            hub.issuer.access_token("http://other"),
            hub.issuer.access_token(hub.url, iss="http://forged\n"),
            # Signed by no known key.
            jwt.encode({"iss": "http://third", "aud": hub.url}, "secret" * 8, headers={"kid": "9"}),
        ]
        for token in wrong[:2]:
            headers = {"authorization": f"Bearer {token}"}
            async with session.post("/task/count", headers=headers) as answer:
                assert answer.status == 401
                assert "other" not in await answer.text()
        lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        expected = f"'{hub.url}' or '{hub.url}/'"
        assert f"a token was rejected: its aud is 'http://other', expected {expected}" in lines
        expected = f"expected '{hub.issuer.url}'"
        assert f"a token was rejected: its iss is 'http://forged\\n', {expected}" in lines

        # Callers cannot fill the log.
        caplog.clear()
        for token in wrong:
            async with session.post("/task/count", headers={"authorization": f"Bearer {token}"}):
                pass
        assert [each for each in caplog.records if each.levelname == "WARNING"] == []


async def test_doctor_explains_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    issuer, port = AuthorizationServer(scopes="task:read"), free_port()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.py").write_text(MINE)

    async def explained(token: str) -> tuple[int, dict[str, list[str]]]:
        monkeypatch.setattr("sys.stdin", io.StringIO(token + "\n"))
        code = await asyncio.to_thread(main, ["doctor", "--token", "--json"])
        output = capfd.readouterr().out
        assert not token or token not in output
        findings = json.loads(output)["findings"]
        return code, {each["what"]: [each["state"], each["words"]] for each in findings}

    async with serving(issuer.app) as issuer.url:
        config = CONFIG.format(port=port, issuer=issuer.url, scopes='["task:read"]')
        (tmp_path / "operations.toml").write_text(config)
        audience = f"http://127.0.0.1:{port}/mcp"
        code, parts = await explained(issuer.access_token(audience, "task:read"))
        assert (code, parts["aud"], parts["iss"]) == (0, ["ok", audience], ["ok", issuer.url])
        assert parts["token"] == ["ok", "is accepted: ann, scopes task:read"]

        code, parts = await explained(issuer.access_token("http://other"))
        assert (code, parts["aud"][0], parts["token"][0]) == (1, "failed", "failed")
        assert parts["aud"][1].startswith("its aud is 'http://other', expected 'http://127")

        code, parts = await explained(issuer.access_token(audience, exp=1_000_000_000))
        assert (code, parts["exp"][0], parts["iss"][0]) == (1, "failed", "ok")
        assert parts["exp"][1].startswith("ended ")

        assert await explained("no token") == (
            1,
            {"token": ["failed", "is neither a known key nor a JSON Web Token"]},
        )
        assert (await explained(""))[0] == 1


MINE = """
from operations import OperationContext, operation

@operation("task.mine", scopes=["task:read"])
async def mine(context: OperationContext) -> str:
    return context.identity.id if context.identity else "nobody"
"""

CONFIG = """
modules = ["tasks.py"]
[serve]
public_url = "http://127.0.0.1:{port}"
advanced.scopes_supported = {scopes}
[access.jwt]
issuer = "{issuer}"
audience = "http://127.0.0.1:{port}"
jwks_url = "{issuer}/jwks"
[record.trace]
enabled = false
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
            CONFIG.format(port=port, issuer=issuer.url, scopes='["task:read"]')
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
