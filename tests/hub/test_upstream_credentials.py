"""Sources that are called with a credential of the caller: one per user, a function, or an exchanged token."""

import copy
import json
import logging
import pickle
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import httpx2
import msgspec
import pytest
from anyio.abc import SocketAttribute, SocketStream
from mcp import Client as MCPClient
from mcp.client.streamable_http import streamable_http_client
from tests.authorization_server import AuthorizationServer
from tests.limits import time_limit
from tests.mcp_serving.support import serving
from tests.servers import free_port

from operations import CallError, Identity, OperationContext, OperationRegistry
from operations.calls import from_calls
from operations.config import ConfigError, load_config
from operations.contract.context import NO_CALL
from operations.hub import open_hub
from operations.hub.place import HubPlace
from operations.mcp import MCPClientConfig
from operations.mcp.kind import client_config
from operations.mcp.shared.failures import redactor_for
from operations.openapi import to_openapi
from operations.pubsub.websocket import connect_websocket
from operations.server import APIKeys, create_app, hash_key
from operations.server.http11.running import running
from operations.server.signin.identity import any_of
from operations.server.signin.tokens import JWTs
from operations.sources.credentials import CallerToken, TokenExchange, hold_token

pytestmark = pytest.mark.anyio

HUB = "https://hub.example"
"""The audience of the hub."""


class Upstream:
    """An API and MCP server that requires tokens for its own audience, and knows keys of two users."""

    def __init__(self, issuer: AuthorizationServer) -> None:
        self.seen = list[str]()
        """Every credential that it was sent."""

        registry = OperationRegistry()

        @registry.operation("crm.whoami", type="query")
        async def whoami(context: OperationContext) -> str:
            return context.identity.id if context.identity else "nobody"

        keys = APIKeys({hash_key(f"key-of-{name}"): Identity(name) for name in ("ann", "own")})
        tokens = JWTs(issuer=issuer.url, audience="crm", jwks_url=f"{issuer.url}/jwks")
        self.document = to_openapi(registry)
        self._app = create_app(registry, identity=any_of(keys, tokens), anonymous=False, mcp=True)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        for name, value in scope.get("headers", ()):
            if name == b"authorization":
                self.seen.append(value.decode().partition(" ")[2])
        await self._app(scope, receive, send)


class World:
    """An authorization server, an upstream and a hub in front of it."""

    def __init__(self, issuer: AuthorizationServer, upstream: Upstream, url: str, hub: Any) -> None:
        self.issuer, self.upstream, self.url, self.hub = issuer, upstream, url, hub

    def token(self, user: str, **claims: Any) -> str:
        return self.issuer.access_token(HUB, sub=user, **claims)

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        async with aiohttp.ClientSession() as session:
            reply = await session.get(f"{self.url}{path}", headers=headers)
            return reply.status, await reply.json()

    async def call(self, path: str, **headers: str) -> tuple[int, Any]:
        async with aiohttp.ClientSession() as session:
            reply = await session.post(f"{self.url}{path}", json={}, headers=headers)
            return reply.status, await reply.json()

    async def as_user(self, user: str, path: str) -> Any:
        return (await self.call(path, Authorization=f"Bearer {self.token(user)}"))[1]


@asynccontextmanager
async def world(folder: Path, openapi: str, mcp: str = "", **options: Any) -> AsyncGenerator[World]:
    issuer = AuthorizationServer(**options)
    async with serving(issuer.app) as issuer.url:
        upstream = Upstream(issuer)
        async with serving(upstream) as address:
            (folder / "crm.json").write_text(json.dumps(upstream.document))
            exchange = (
                f'token_url = "{issuer.url}/token"\nclient_id = "hub"\naudience = "crm"\n'
                'client_secret = { env = "HUB_SECRET" }\n'
            )
            text = f"""
[record.trace]
enabled = false
[access]
anonymous = true
[access.jwt]
issuer = "{issuer.url}"
audience = "{HUB}"
jwks_url = "{issuer.url}/jwks"
[access.keys.kim]
key = {{ env = "KIM_KEY" }}
[openapi.crm]
document = "crm.json"
base_url = "{address}"
advanced.restore = true
{openapi.replace("EXCHANGE", exchange)}
"""
            if mcp:
                text += f'[mcp.far]\nurl = "{address}/mcp"\n{mcp.replace("EXCHANGE", exchange)}\n'
            (folder / "operations.toml").write_text(text.replace("ISSUER", issuer.url))
            async with open_hub(folder / "operations.toml") as hub, running(hub.app) as url:
                yield World(issuer, upstream, url, hub)


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "HUB_SECRET": "hub-secret",
        "KIM_KEY": "key-of-kim",
        "ANN_TOKEN": "key-of-ann",
        "OWN_TOKEN": "key-of-own",
    }.items():
        monkeypatch.setenv(name, value)


EXCHANGE = '[openapi.crm.auth]\ntype = "bearer"\n[openapi.crm.auth.token.exchange]\nEXCHANGE'


@pytest.mark.requirement("R23")
async def test_a_callers_token_is_exchanged_for_every_source_at_every_entry_point(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    mcp = "per_caller = true\n[mcp.far.auth.exchange]\nEXCHANGE"
    with time_limit(150):
        async with world(tmp_path, EXCHANGE, mcp) as it:
            shown = {user: it.token(user) for user in ("ann", "ben")}
            for user, token in shown.items():
                bearer = {"Authorization": f"Bearer {token}"}
                for _ in range(2):
                    assert await it.get("/crm/whoami", **bearer) == (200, user)
                async with (
                    httpx2.AsyncClient(headers=bearer) as client,
                    MCPClient(streamable_http_client(f"{it.url}/mcp", http_client=client)) as agent,
                ):
                    tools = [tool.name for tool in (await agent.list_tools()).tools]
                    assert len(tools) == 2
                    for name in tools:
                        result = await agent.call_tool(name, {})
                        assert user in str(result.content), result
                address = it.url.replace("http", "ws", 1) + "/ws"
                async with (
                    connect_websocket(address, headers=bearer) as target,
                    from_calls(target) as remote,
                ):
                    far = OperationRegistry(remote)
                    assert (await far.execute("crm.whoami")).data == user
            # One exchange for each source and token.
            assert len(it.issuer.exchanged) == 4
            assert {each["audience"] for each in it.issuer.exchanged} == {"crm"}
            assert not set(it.upstream.seen) & set(shown.values())
            text = caplog.text + repr(it.hub.file) + repr(it.hub.sources)
            assert not any(each in text for each in (*shown.values(), *it.upstream.seen))


async def test_a_caller_without_a_token_gets_a_clear_error_and_sends_nothing(
    tmp_path: Path,
) -> None:
    with time_limit(150):
        async with world(tmp_path, EXCHANGE, "[mcp.far.auth.exchange]\nEXCHANGE") as it:
            before = list(it.upstream.seen)
            kim = {"X-API-Key": "key-of-kim"}
            far = next(each for each in it.hub.registry.specs() if each.namespace == "far")
            for path in ("/crm/whoami", f"/far/{far.name}"):
                status, error = await it.call(path, **kim)
                assert (status, error["code"]) == (403, "ACCESS_DENIED")
                assert "API key" in error["message"]
                assert (await it.call(path))[0] == 401
            assert it.issuer.exchanged == []
            assert it.upstream.seen == before
            # The connection of the source still works.
            assert await it.as_user("ann", f"/far/{far.name}") == "ann"


USERS = """[openapi.crm.auth]
type = "bearer"
token.users = { "ann@ISSUER" = { env = "ANN_TOKEN" } }
"""
FUNCTION = """[openapi.crm.auth]
type = "bearer"
token = { function = "chosen:token_for" }
"""


async def test_each_user_has_a_token_of_its_own_in_the_file(tmp_path: Path) -> None:
    mcp = (
        'per_caller = true\nauth.users = { "ann@ISSUER" = { env = "ANN_TOKEN" } }\n'
        'auth.own = { env = "OWN_TOKEN" }'
    )
    with time_limit(150):
        async with world(tmp_path, USERS, mcp) as it:
            far = next(each for each in it.hub.registry.specs() if each.namespace == "far")
            for path in ("/crm/whoami", f"/far/{far.name}"):
                assert await it.as_user("ann", path) == "ann"
                assert (await it.as_user("ben", path))["code"] == "ACCESS_DENIED"
            assert set(it.upstream.seen) == {"key-of-ann", "key-of-own"}


async def test_a_function_beside_the_file_finds_the_token(tmp_path: Path) -> None:
    (tmp_path / "chosen.py").write_text(
        "async def token_for(context):\n"
        "    return f'key-of-{context.identity.id}' if context.identity else 'key-of-own'\n"
    )
    mcp = 'per_caller = true\nauth = { function = "chosen:token_for" }'
    with time_limit(150):
        async with world(tmp_path, FUNCTION, mcp) as it:
            far = next(each for each in it.hub.registry.specs() if each.namespace == "far")
            for path in ("/crm/whoami", f"/far/{far.name}"):
                assert await it.as_user("ann", path) == "ann"
            assert set(it.upstream.seen) == {"key-of-ann", "key-of-own"}


async def test_a_missing_function_fails_only_its_source(tmp_path: Path) -> None:
    async with world(tmp_path, FUNCTION.replace("chosen:token_for", "json:tokn_for")) as it:
        [source] = it.hub.sources
        assert "json:tokn_for cannot be imported" in (source.problem or "")


@pytest.mark.parametrize(
    ("table", "fault"),
    [
        ('token = { users = { ann = "written" } }', "token.users.ann"),
        ('token = { function = "token_for" }', "token.function"),
        ('token = { function = "a:b", users = { ann = { env = "X" } } }', "one of users, function"),
        ('token = { exchange = { token_url = "x", client_id = "a" } }', "token_url"),
        ('token = { exchange = { client_id = "a" } }', "token_url"),
        ('auth = "app:token_for"', 'must be "oauth", or { env = "NAME" }'),
        ('auth = { functon = "a:b" }', 'Did you mean "function"'),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path: Path, table: str, fault: str) -> None:
    path = tmp_path / "operations.toml"
    if table.startswith("auth"):
        path.write_text(f'[mcp.a]\nurl = "https://a.example/mcp"\n{table}\n')
    else:
        path.write_text(
            f'[openapi.a]\ndocument = "a.json"\n[openapi.a.auth]\ntype = "bearer"\n{table}\n'
        )
    with pytest.raises(ConfigError, match=fault):
        load_config(path)


def test_the_token_beside_an_identity_is_not_shown_encoded_or_copied() -> None:
    identity = hold_token(Identity("ann", ["use"]), "SECRET")
    context = OperationContext(identity=identity)

    assert identity == Identity("ann", ["use"])
    copies = [copy.copy(identity), copy.deepcopy(identity), msgspec.structs.replace(identity)]
    assert all(vars(each) == {} for each in copies)
    shown = [repr(identity), repr(context), msgspec.json.encode(identity), pickle.dumps(identity)]
    assert all("SECRET" not in str(each) for each in shown)


class Endpoint:
    """A token endpoint with configured responses."""

    def __init__(self) -> None:
        self.forms = list[bytes]()
        self.status = 200
        self.answer: dict[str, Any] = {}
        self.headers: list[tuple[bytes, bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        self.forms.append((await receive())["body"])
        made = {"access_token": f"new-{len(self.forms)}", "token_type": "Bearer", **self.answer}
        head = [(b"content-type", b"application/json"), *self.headers]
        await send({"type": "http.response.start", "status": self.status, "headers": head})
        await send({"type": "http.response.body", "body": msgspec.json.encode(made)})


async def test_exchanged_tokens_are_kept_for_a_while_and_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("operations.sources.credentials.MAX_TOKENS", 2)
    endpoint = Endpoint()

    def call(token: str, **fields: Any) -> OperationContext:
        return OperationContext(identity=hold_token(Identity("ann", **fields), token))

    async with serving(endpoint) as url:
        exchange = TokenExchange(token_url=url, client_id="hub", scopes=("a", "b"))
        ann = call("one")
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(exchange, ann)
        assert await exchange(ann) == "new-1"
        assert b"subject_token=one" in endpoint.forms[0]
        assert b"scope=a+b" in endpoint.forms[0]
        # A token that a service rejects is not used again.
        exchange.refuse("Bearer new-1")
        assert await exchange(ann) == "new-2"
        # Another token of the same caller is exchanged again, and the oldest tokens are removed.
        found = [await exchange(call(each)) for each in ("two", "three", "one")]
        assert found == ["new-3", "new-4", "new-5"]
        # It is kept at most for the lifetime of the caller's own token and that of the response.
        late = call("four", expires_at=0.0)
        assert await exchange(late) != await exchange(late)
        endpoint.answer = {"expires_in": 0}
        assert await exchange(call("five")) != await exchange(call("five"))
        assert await exchange(NO_CALL)
        assert b"grant_type=client_credentials" in endpoint.forms[-1]


@pytest.mark.requirement("R23")
async def test_callers_that_share_an_identity_keep_their_own_tokens() -> None:
    endpoint, shared = Endpoint(), Identity("ann")
    one, two = (OperationContext(identity=hold_token(shared, token)) for token in ("one", "two"))
    async with serving(endpoint) as url:
        exchange = TokenExchange(token_url=url, client_id="hub")
        assert [await exchange(each) for each in (one, two, one)] == ["new-1", "new-2", "new-1"]
    assert [form.count(b"subject_token=one") for form in endpoint.forms] == [1, 0]
    assert vars(shared) == {}


@pytest.mark.requirement("R23")
@pytest.mark.parametrize(
    ("status", "answer", "code", "text"),
    [
        (200, {"access_token": "SECRET"}, "EXECUTION_ERROR", "own token"),
        (200, {"access_token": ""}, "EXECUTION_ERROR", "no bearer token"),
        (200, {"token_type": "DPoP"}, "EXECUTION_ERROR", "no bearer token"),
        (400, {"error": "invalid_target"}, "EXECUTION_ERROR", "invalid_target"),
        (400, {"error": "SECRET is wrong"}, "EXECUTION_ERROR", "status 400"),
        (307, {}, "EXECUTION_ERROR", "status 307"),
        (503, {}, "UNAVAILABLE", "503"),
    ],
)
async def test_a_failed_exchange_is_an_error_without_secrets(
    status: int, answer: dict[str, str], code: str, text: str
) -> None:
    endpoint = Endpoint()
    endpoint.status, endpoint.answer = status, answer
    context = OperationContext(identity=hold_token(Identity("ann"), "SECRET"))
    async with serving(endpoint) as url:
        endpoint.headers = [(b"location", url.encode() + b"/elsewhere")]
        with pytest.raises(CallError, match=text) as caught:
            await TokenExchange(token_url=url, client_id="hub")(context)
    assert caught.value.code == code
    assert "SECRET" not in str(caught.value)
    assert len(endpoint.forms) == 1


async def test_an_unreachable_token_endpoint_is_unavailable() -> None:
    exchange = TokenExchange(token_url="http://127.0.0.1:9", client_id="hub")
    context = OperationContext(identity=hold_token(Identity("ann"), "SECRET"))
    with pytest.raises(CallError) as caught:
        await CallerToken(exchange=exchange)(context)
    assert (caught.value.code, caught.value.retryable) == ("UNAVAILABLE", True)


async def test_a_proxy_on_the_way_to_a_token_endpoint_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    monkeypatch.setenv("https_proxy", f"http://me:SECRET@127.0.0.1:{port}")
    exchange = TokenExchange(token_url="https://id.example.com/token", client_id="hub")
    context = OperationContext(identity=hold_token(Identity("ann"), "SECRET"))
    with pytest.raises(CallError, match=f"through the proxy http://127.0.0.1:{port}: ") as caught:
        await exchange(context)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("response", "code"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n10\r\nabc", "UNAVAILABLE"),
        (b"no HTTP\r\n\r\n", "UNAVAILABLE"),
        (
            b"HTTP/1.1 400 Bad\r\nTransfer-Encoding: chunked\r\n\r\n10\r\nabc",
            "EXECUTION_ERROR",
        ),
    ],
)
async def test_a_token_response_that_is_cut_off_is_an_error_for_the_caller(
    response: bytes, code: str
) -> None:
    async def respond(stream: SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(response)

    context = OperationContext(identity=hold_token(Identity("ann"), "SECRET"))
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port: int = listener.extra(SocketAttribute.local_port)  # noqa: S610 - not Django
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, respond)
        exchange = TokenExchange(token_url=f"http://127.0.0.1:{port}", client_id="hub")
        with pytest.raises(CallError) as caught:
            await exchange(context)
        tasks.cancel_scope.cancel()
    assert (caught.value.code, caught.value.unexpected) == (code, False)


def test_two_tables_with_the_same_address_do_not_share_tokens(tmp_path: Path) -> None:
    path = tmp_path / "operations.toml"
    table = 'url = "https://a.example/mcp"\nauth = "oauth"\n'
    path.write_text(
        f"[mcp.ann]\n{table}[mcp.ben]\n{table}[mcp.eve]\n"
        'url = "https://a.example/mcp"\nlogin = { store = "eve.json" }\n'
    )
    file = load_config(path)
    logins = [
        client_config(name, entry, HubPlace(file)).login
        for name, entry in file.config.tables("mcp").items()
    ]
    stores = [login.store for login in logins if login is not None]

    assert len(set(stores)) == 3
    assert stores[2] == tmp_path / "eve.json"


@pytest.mark.requirement("R16")
@pytest.mark.parametrize("enabled", ["true", "false"])
def test_only_headers_with_credentials_are_redacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enabled: str
) -> None:
    monkeypatch.setenv("ROOM", "blue")
    text = f"""
[mcp.far]
enabled = {enabled}
url = "http://127.0.0.1:1/mcp"
headers.X-Tenant = "acme"
headers.X-Long = "a-text-of-23-characters"
headers.X-Room = {{env = "ROOM"}}
"""
    (tmp_path / "operations.toml").write_text(text)
    file = load_config(tmp_path / "operations.toml")
    redactor = redactor_for(client_config("far", file.config.tables("mcp")["far"], HubPlace(file)))

    assert redactor.redact("acme a-text-of-23-characters blue") == "acme *** ***"
    key = MCPClientConfig(url="http://127.0.0.1:1/mcp", headers={"X-Api-Key": "k3y4"})
    assert redactor_for(key).redact("k3y4") == "***"
